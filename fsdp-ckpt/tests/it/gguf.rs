//! GGUF files, read back by Candle.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value as Gguf};
use fsdp_ckpt::gguf::Quantization;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::cli::{fails, fsdp_ckpt, json as parse, succeeds, text};

/// Sizes of a test's model.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    width: usize,
    inner: usize,
    layers: usize,
}

pub(crate) const SMALL: Sizes = Sizes { width: 32, inner: 40, layers: 2 };
const VOCABULARY: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Returns numbers between -0.1 and 0.1 that depend on the name.
fn numbers(name: &str, count: usize) -> Vec<f32> {
    let mut state = name.bytes().fold(1u32, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 * 0.2 - 0.1
    };
    (0..count).map(|_| next()).collect()
}

/// Writes safetensors of `numbers`.
fn write_tensors(path: &Path, shapes: &[(String, Vec<usize>)]) {
    let bytes = shapes.iter().map(|(name, shape)| {
        numbers(name, shape.iter().product()).iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()
    });
    let bytes: Vec<Vec<u8>> = bytes.collect();
    let views = shapes
        .iter()
        .zip(&bytes)
        .map(|((name, shape), bytes)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

fn llama_shapes(sizes: Sizes) -> Vec<(String, Vec<usize>)> {
    let Sizes { width, inner, layers } = sizes;
    let keys = width / HEADS * KV_HEADS;
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![VOCABULARY, width]),
        ("model.norm.weight".to_string(), vec![width]),
        ("lm_head.weight".to_string(), vec![VOCABULARY, width]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("input_layernorm", vec![width]),
            ("post_attention_layernorm", vec![width]),
            ("self_attn.q_proj", vec![width, width]),
            ("self_attn.k_proj", vec![keys, width]),
            ("self_attn.v_proj", vec![keys, width]),
            ("self_attn.o_proj", vec![width, width]),
            ("mlp.gate_proj", vec![inner, width]),
            ("mlp.up_proj", vec![inner, width]),
            ("mlp.down_proj", vec![width, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    shapes
}

fn llama_config(sizes: Sizes) -> Value {
    json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": sizes.width, "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    })
}

/// Writes a Llama to a directory.
pub(crate) fn llama(dir: &Path, sizes: Sizes) {
    fs::create_dir_all(dir).unwrap();
    write_tensors(&dir.join("model.safetensors"), &llama_shapes(sizes));
    write_json(dir, "config.json", &llama_config(sizes));
}

/// Writes adapters of a small Llama.
pub(crate) fn llama_adapters(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let name = |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight");
    write_tensors(
        &dir.join("adapter_model.safetensors"),
        &[(name("A"), vec![2, SMALL.width]), (name("B"), vec![SMALL.width, 2])],
    );
    write_json(dir, "adapter_config.json", &json!({"peft_type": "LORA", "r": 2, "lora_alpha": 64}));
}

fn write_json(dir: &Path, name: &str, value: &Value) {
    fs::write(dir.join(name), value.to_string()).unwrap();
}

/// A GGUF file, opened by Candle.
struct Opened {
    content: Content,
    file: File,
}

impl Opened {
    fn new(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        Opened { content: Content::read(&mut file).unwrap(), file }
    }

    fn numbers(&mut self, name: &str) -> Vec<f32> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn types(&self) -> BTreeMap<String, String> {
        let infos = self.content.tensor_infos.iter();
        infos.map(|(name, info)| (name.clone(), format!("{:?}", info.ggml_dtype))).collect()
    }

    fn value(&self, key: &str) -> &Gguf {
        self.content.metadata.get(key).unwrap_or_else(|| panic!("{key} is missing"))
    }

    fn texts(&self, key: &str) -> Vec<String> {
        self.value(key).to_vec().unwrap().iter().map(|text| text.to_string().unwrap().clone()).collect()
    }

    fn flag(&self, key: &str) -> bool {
        self.value(key).to_bool().unwrap()
    }
}

fn convert(dir: &Path, out: &Path, more: &[&str]) -> Opened {
    succeeds(&[&["convert", text(dir), text(out), "--to", "gguf"], more].concat());
    Opened::new(out)
}

#[test]
fn names_and_values_are_those_of_llama_cpp() {
    let root = tempfile::tempdir().unwrap();
    let (dir, out) = (root.path().join("model"), root.path().join("tiny.gguf"));
    llama(&dir, SMALL);
    let mut file = convert(&dir, &out, &[]);

    let names: Vec<String> = file.types().into_keys().collect();
    assert_eq!(names.len(), 3 + 2 * 9, "{names:?}");
    assert!(file.types().values().all(|dtype| dtype == "F32"));
    assert_eq!(file.content.tensor_infos["blk.1.ffn_down.weight"].shape.dims(), [32, 40]);
    for (from, to) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight"),
        ("model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
    ] {
        let found = file.numbers(to);
        assert_eq!(found, numbers(from, found.len()), "{to}");
    }
    // Row 2 i + j of a head is row i of its half j.
    for (from, to, heads) in [("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)] {
        let found = file.numbers(&format!("blk.1.{to}.weight"));
        let theirs = numbers(&format!("model.layers.1.self_attn.{from}.weight"), found.len());
        let (width, head) = (32, 8);
        for row in 0..heads * head {
            let (start, within) = (row / head * head, row % head);
            let source = start + within % 2 * (head / 2) + within / 2;
            assert_eq!(found[row * width..][..width], theirs[source * width..][..width], "{to}, row {row}");
        }
    }
    for (key, expected) in [
        ("llama.vocab_size", 64),
        ("llama.context_length", 128),
        ("llama.embedding_length", 32),
        ("llama.block_count", 2),
        ("llama.feed_forward_length", 40),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
        ("llama.rope.dimension_count", 8),
        ("general.file_type", 0),
    ] {
        assert_eq!(file.value(key).to_u32().unwrap(), expected, "{key}");
    }
    assert_eq!(file.value("llama.rope.freq_base").to_f32().unwrap(), 500.);
    assert_eq!(file.value("general.architecture").to_string().unwrap(), "llama");
    assert_eq!(file.value("general.name").to_string().unwrap(), "tiny");
    assert_eq!(file.value("tokenizer.ggml.model").to_string().unwrap(), "no_vocab");
}

#[test]
fn quantized_tensors_are_near_the_weights() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let sizes = Sizes { width: 256, inner: 512, layers: 8 };
    llama(&dir, sizes);
    for quantization in Quantization::ALL {
        let name = quantization.name();
        // The largest error of numbers up to 0.1.
        let most = match quantization {
            Quantization::F32 => 0.,
            Quantization::F16 => 0.1 / 2048.,
            Quantization::BF16 => 0.1 / 256.,
            Quantization::Q8_0 => 0.1 / 127.,
            Quantization::Q6K => 0.1 / 24.,
            Quantization::Q4KM | Quantization::Q4_0 => 0.1 / 7.,
        };
        let mut file = convert(&dir, &root.path().join(name), &["--quantize", name]);
        for (from, to) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
            ("model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight"),
        ] {
            let found = file.numbers(to);
            let error = found.iter().zip(numbers(from, found.len())).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
            assert!(error <= most, "{name}, {to}: {error}");
        }
        assert_eq!(file.types()["output_norm.weight"], "F32");
    }

    let types = Opened::new(&root.path().join("q4_k_m")).types();
    let layers = |part: &str| (0..8).map(|layer| &types[&format!("blk.{layer}.{part}.weight")][..]).collect::<Vec<_>>();
    // The first and last of eight layers, and every third between them.
    let mixed = ["Q6K", "Q4K", "Q4K", "Q6K", "Q4K", "Q4K", "Q6K", "Q6K"];
    assert_eq!((layers("attn_v"), layers("ffn_down")), (mixed.to_vec(), mixed.to_vec()));
    assert_eq!((layers("attn_q"), layers("ffn_up")), (vec!["Q4K"; 8], vec!["Q4K"; 8]));
    assert_eq!([&types["output.weight"], &types["token_embd.weight"]], ["Q6K", "Q4K"]);
    let types = Opened::new(&root.path().join("q4_0")).types();
    assert_eq!([&types["output.weight"], &types["token_embd.weight"]], ["Q6K", "Q4_0"]);
}

#[test]
fn rows_that_no_block_divides_get_other_types() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, Sizes { width: 96, inner: 40, layers: 2 });
    for (name, wide, narrow) in
        [("q4_k_m", "Q5_0", "F16"), ("q6_k", "Q8_0", "F16"), ("q8_0", "Q8_0", "F16"), ("q4_0", "Q4_0", "F16")]
    {
        let out = root.path().join(name);
        let summary = succeeds(&["convert", text(&dir), text(&out), "--to", "gguf", "--quantize", name, "--json"]);
        let types = Opened::new(&out).types();
        assert_eq!([&types["blk.0.attn_q.weight"], &types["blk.0.ffn_down.weight"]], [wide, narrow], "{name}");
        assert_eq!(types["output.weight"], "Q8_0".to_string(), "{name}");
        let summary = parse(&summary);
        assert_eq!(summary["types"]["f32"], 5);
        assert_eq!(summary["bytes"], fs::metadata(&out).unwrap().len());
        assert_eq!(summary["quantization"], name);
    }
}

/// A byte-level tokenizer of 262 tokens does not fit the small model, so that this one has few.
fn byte_level() -> Value {
    json!({
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4},
            "merges": [["a", "b"], ["Ġ", "ab"]],
        },
        "added_tokens": [
            {"id": 5, "content": "<|begin|>", "special": true}, {"id": 6, "content": "<|end|>", "special": true},
            {"id": 7, "content": "plain", "special": false},
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin|>"}}, {"Sequence": {"id": "A"}}]},
        ]},
    })
}

#[test]
fn byte_level_tokenizer_is_complete() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    write_json(&dir, "tokenizer.json", &byte_level());
    let config = json!({
        "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "add_bos_token": false,
        "chat_template": [{"name": "default", "template": "{{ a }}"}, {"name": "Tool use", "template": "{{ b }}"}],
    });
    write_json(&dir, "tokenizer_config.json", &config);
    let file = convert(&dir, &root.path().join("a.gguf"), &[]);
    let tokens = file.texts("tokenizer.ggml.tokens");
    assert_eq!(tokens[..9], ["a", "b", "Ġ", "ab", "Ġab", "<|begin|>", "<|end|>", "plain", "[PAD8]"]);
    assert_eq!(tokens.len(), VOCABULARY);
    let kinds = file.value("tokenizer.ggml.token_type").to_vec().unwrap();
    let kinds: Vec<i32> = kinds.iter().map(|kind| kind.to_i32().unwrap()).collect();
    assert_eq!(kinds[..9], [1, 1, 1, 1, 1, 3, 3, 4, 5]);
    assert_eq!(file.texts("tokenizer.ggml.merges"), ["a b", "Ġ ab"]);
    assert_eq!(file.value("tokenizer.ggml.pre").to_string().unwrap(), "gpt-2");
    for (key, id) in [("bos_token_id", 5), ("eos_token_id", 6)] {
        assert_eq!(file.value(&format!("tokenizer.ggml.{key}")).to_u32().unwrap(), id);
    }
    let adds = ["bos", "eos", "sep"].map(|name| file.flag(&format!("tokenizer.ggml.add_{name}_token")));
    assert_eq!(adds, [true, false, false]);
    assert_eq!(file.value("tokenizer.chat_template").to_string().unwrap(), "{{ a }}");
    assert_eq!(file.value("tokenizer.chat_template.tool_use").to_string().unwrap(), "{{ b }}");
    assert_eq!(file.texts("tokenizer.chat_templates"), ["tool_use"]);

    // The file of the template wins, as in transformers.
    fs::write(dir.join("chat_template.jinja"), "{{ c }}").unwrap();
    let file = convert(&dir, &root.path().join("b.gguf"), &["--pre-tokenizer", "tekken"]);
    assert_eq!(file.value("tokenizer.chat_template").to_string().unwrap(), "{{ c }}");
    assert_eq!(file.value("tokenizer.ggml.pre").to_string().unwrap(), "tekken");
}

#[test]
fn tokens_only_in_the_configuration_are_added() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    write_json(&dir, "tokenizer.json", &byte_level());
    let config = json!({
        "eos_token": "<|stop|>",
        "added_tokens_decoder": {"9": {"content": "<|user|>", "special": true}, "10": {"content": "word"}},
    });
    write_json(&dir, "tokenizer_config.json", &config);
    let file = convert(&dir, &root.path().join("a.gguf"), &[]);
    // As the tokenizers library does, new tokens get the next ids.
    assert_eq!(file.texts("tokenizer.ggml.tokens")[7..12], ["plain", "<|user|>", "word", "<|stop|>", "[PAD11]"]);
    let kinds = file.value("tokenizer.ggml.token_type").to_vec().unwrap();
    let kinds: Vec<i32> = kinds[7..12].iter().map(|kind| kind.to_i32().unwrap()).collect();
    assert_eq!(kinds, [4, 3, 4, 3, 5]);
    assert_eq!(file.value("tokenizer.ggml.eos_token_id").to_u32().unwrap(), 10);
}

#[test]
fn tied_heads_are_those_of_the_file() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    let mut config = llama_config(SMALL);
    config["tie_word_embeddings"] = true.into();
    write_json(&dir, "config.json", &config);
    // Another head, as transformers keeps it.
    let mut file = convert(&dir, &root.path().join("other.gguf"), &[]);
    for (from, to) in [("model.embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")] {
        assert_eq!(file.numbers(to), numbers(from, VOCABULARY * SMALL.width), "{to}");
    }
    let without = |left_out: &str| {
        let shapes: Vec<_> = llama_shapes(SMALL).into_iter().filter(|(name, _)| name != left_out).collect();
        write_tensors(&dir.join("model.safetensors"), &shapes);
        let mut file = convert(&dir, &root.path().join(format!("without-{left_out}.gguf")), &[]);
        assert!(!file.types().contains_key("output.weight"), "{left_out}");
        file.numbers("token_embd.weight")
    };
    assert_eq!(without("lm_head.weight"), numbers("model.embed_tokens.weight", VOCABULARY * SMALL.width));
    assert_eq!(without("model.embed_tokens.weight"), numbers("lm_head.weight", VOCABULARY * SMALL.width));
}

#[test]
fn fused_experts_give_the_same_file() {
    let root = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let dir = root.path().join("fused");
    fs::create_dir(&dir).unwrap();
    fs::copy(golden.join("mixtral_tiny/config.json"), dir.join("config.json")).unwrap();
    fs::copy(golden.join("directories/mixtral_tiny_fused.safetensors"), dir.join("model.safetensors")).unwrap();
    let written = |from: &Path, to: &str| {
        fs::create_dir(root.path().join(to)).unwrap();
        let out = root.path().join(to).join("tiny.gguf");
        succeeds(&["convert", text(from), text(&out), "--to", "gguf", "--quantize", "f32"]);
        fs::read(out).unwrap()
    };
    assert!(written(&golden.join("mixtral_tiny"), "a") == written(&dir, "b"));
}

#[test]
fn memory_does_not_grow_with_the_model() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    fs::create_dir(&dir).unwrap();
    let (sizes, vocabulary) = (Sizes { width: 1024, inner: 1024, layers: 1 }, 1 << 16);
    let mut shapes = llama_shapes(sizes);
    let mut config = llama_config(sizes);
    config["vocab_size"] = vocabulary.into();
    shapes.iter_mut().filter(|(_, shape)| shape[0] == VOCABULARY).for_each(|(_, shape)| shape[0] = vocabulary);
    write_json(&dir, "config.json", &config);
    // A file of zeros without blocks on the disk.
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    let file = File::create(dir.join("model.safetensors")).unwrap();
    (&file).write_all(&bytes).unwrap();
    file.set_len((bytes.len() + end) as u64).unwrap();

    // Six blocks of 8 MiB: read, in f32 as bytes and as numbers, reordered, and two of encoded rows. The rest is for
    // stacks, and for what the allocator keeps.
    let most = 128 << 10;
    assert!(end > (4 * most) << 10);
    let script = format!("ulimit -d {most} && exec \"$0\" convert \"$1\" \"$2\" --to gguf --quantize q8_0");
    let output = Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_fsdp-ckpt"), text(&dir), text(&root.path().join("a.gguf"))])
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn names_that_llama_cpp_does_not_load_are_left_out() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    write_json(&dir, "tokenizer.json", &byte_level());
    for (name, has_name) in [("tuned", true), ("My-Phi-3", false), ("phi3", false)] {
        let file = convert(&dir, &root.path().join(format!("{name}.gguf")), &[]);
        assert_eq!(file.content.metadata.contains_key("general.name"), has_name, "{name}");
    }
}

#[test]
fn sentencepiece_tokenizer_has_scores_in_the_order_of_merges() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    let tokenizer = json!({
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "▁": 4, "a": 5, "b": 6, "ab": 7, "▁ab": 8, "▁a": 9},
            "merges": ["a b", "▁ ab", "▁a b", "▁ a"],
        },
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
            {"id": 2, "content": "</s>", "special": true}, {"id": 10, "content": "▁▁", "special": false},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
    });
    write_json(&dir, "tokenizer.json", &tokenizer);
    let file = convert(&dir, &root.path().join("a.gguf"), &[]);
    assert_eq!(file.value("tokenizer.ggml.model").to_string().unwrap(), "llama");
    let kinds = file.value("tokenizer.ggml.token_type").to_vec().unwrap();
    let kinds: Vec<i32> = kinds[..12].iter().map(|kind| kind.to_i32().unwrap()).collect();
    assert_eq!(kinds, [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 4, 5]);
    assert_eq!(file.texts("tokenizer.ggml.tokens")[10], "  ");
    let scores = file.value("tokenizer.ggml.scores").to_vec().unwrap();
    let scores: Vec<f32> = scores[7..10].iter().map(|score| score.to_f32().unwrap()).collect();
    assert_eq!(scores, [0., -1., -3.]);
    assert!(file.flag("tokenizer.ggml.add_space_prefix") && !file.flag("tokenizer.ggml.add_bos_token"));
    assert_eq!(file.value("tokenizer.ggml.unknown_token_id").to_u32().unwrap(), 0);
}

#[test]
fn word_piece_tokenizer_marks_beginnings_of_words() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    llama(&dir, SMALL);
    let tokenizer = json!({
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "the": 4, "##re": 5}},
        "added_tokens": [
            {"id": 0, "content": "[PAD]", "special": true}, {"id": 1, "content": "[UNK]", "special": true},
            {"id": 2, "content": "[CLS]", "special": true}, {"id": 3, "content": "[SEP]", "special": true},
        ],
        "normalizer": {"type": "BertNormalizer", "lowercase": true, "strip_accents": null},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
    });
    write_json(&dir, "tokenizer.json", &tokenizer);
    write_json(&dir, "tokenizer_config.json", &json!({"cls_token": "[CLS]", "sep_token": "[SEP]"}));
    let file = convert(&dir, &root.path().join("a.gguf"), &[]);
    assert_eq!(file.texts("tokenizer.ggml.tokens")[..6], ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "re"]);
    let adds = ["bos", "eos", "sep"].map(|name| file.flag(&format!("tokenizer.ggml.add_{name}_token")));
    assert_eq!(adds, [true, false, true]);
    assert!(file.flag("tokenizer.ggml.normalizer.lowercase") && file.flag("tokenizer.ggml.normalizer.strip_accents"));
    assert_eq!(file.value("tokenizer.ggml.bos_token_id").to_u32().unwrap(), 2);
}

#[test]
fn checkpoint_of_ranks_gives_the_same_file() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    llama(&at("model"), SMALL);
    succeeds(&["convert", text(&at("model")), text(&at("saved")), "--to", "fsdp", "--world-size", "3"]);
    for (from, dir) in [("model", "a"), ("saved", "b")] {
        fs::create_dir(at(dir)).unwrap();
        let (from, out, config) = (at(from), at(dir).join("tiny.gguf"), at("model"));
        succeeds(&[
            "convert",
            text(&from),
            text(&out),
            "--to",
            "gguf",
            "--quantize",
            "q8_0",
            "--config-from",
            text(&config),
        ]);
    }
    assert!(fs::read(at("a/tiny.gguf")).unwrap() == fs::read(at("b/tiny.gguf")).unwrap());
    let (_, _, message) = fsdp_ckpt(&["convert", text(&at("saved")), text(&at("c.gguf")), "--to", "gguf"]);
    assert!(message.contains("--config-from names the directory"), "{message}");
}

/// Changes `config.json` and returns the error.
fn refused(root: &Path, change: impl Fn(&mut Value)) -> String {
    let mut config = llama_config(SMALL);
    change(&mut config);
    write_json(&root.join("model"), "config.json", &config);
    fails(&["convert", text(&root.join("model")), text(&root.join("out.gguf")), "--to", "gguf", "--quantize", "q8_0"])
}

#[test]
fn damaged_models_have_messages_and_leave_no_file() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    llama(&root.join("model"), SMALL);
    let set = |name: &'static str, value: Value| move |config: &mut Value| config[name] = value.clone();
    for (name, value, parts) in [
        (
            "model_type",
            json!("mamba"),
            &["model_type", "\"mamba\" can't be written as GGUF, expected one of llama"][..],
        ),
        ("model_type", Value::Null, &["model_type", "it is missing"]),
        ("hidden_size", json!(48), &["model.embed_tokens.weight", "shape [64, 32], expected [64, 48]"]),
        ("hidden_size", json!(0), &["hidden_size", "it is 0, expected 1 to"]),
        ("num_hidden_layers", json!(1), &["has unexpected \"model.layers.1."]),
        ("num_hidden_layers", json!(3), &["has no tensor \"model.layers.2.input_layernorm.weight\""]),
        ("num_hidden_layers", json!(9999), &["expected at most 512"]),
        ("hidden_act", json!("relu"), &["hidden_act", "llama.cpp's llama needs silu"]),
        ("vocab_size", json!(65), &["expected [65, 32] by config.json"]),
        ("head_dim", json!(7), &["head_dim", "expected an even number"]),
        ("rope_scaling", json!({"type": "magic"}), &["rope_parameters", "\"magic\" is not supported"]),
        ("rope_scaling", json!({"type": "llama3"}), &["needs factor above 0, it is missing"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "a divisor of"]),
        ("vocab_size", json!("many"), &["config.json", "can't be read"]),
    ] {
        let message = refused(root, set(name, value));
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    write_json(&root.join("model"), "config.json", &llama_config(SMALL));
    let convert = |more: &[&str]| {
        fails(&[&["convert", text(&root.join("model")), text(&root.join("out.gguf")), "--to", "gguf"], more].concat())
    };
    let tokenizer = |change: &dyn Fn(&mut Value)| {
        let mut json = byte_level();
        change(&mut json);
        write_json(&root.join("model"), "tokenizer.json", &json);
        convert(&[])
    };
    for (message, parts) in [
        (tokenizer(&|json| json["model"]["vocab"]["x"] = json!(64)), ["\"x\"", "its id is 64, expected less than 64"]),
        (tokenizer(&|json| json["model"]["vocab"]["x"] = json!("y")), ["\"x\"", "its id is not a number"]),
        (tokenizer(&|json| json["model"]["type"] = json!("Unigram")), ["it is Unigram", "expected BPE or WordPiece"]),
        (tokenizer(&|json| json["model"]["merges"] = json!(["ab"])), ["model.merges", "a space between"]),
        (tokenizer(&|json| json["pre_tokenizer"] = json!({"type": "Own"})), ["pre_tokenizer", "--pre-tokenizer names"]),
        (tokenizer(&|json| json["model"]["vocab"] = json!([])), ["model.vocab", "not an object"]),
        (tokenizer(&|json| json["added_tokens"][2]["content"] = json!("[PAD9]")), ["[PAD9]", "two tokens"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    fs::write(root.join("model/tokenizer.json"), "{\"model\": ").unwrap();
    assert!(convert(&[]).contains("tokenizer.json"));
    fs::remove_file(root.join("model/tokenizer.json")).unwrap();
    fs::write(root.join("model/tokenizer.model"), "").unwrap();
    assert!(convert(&[]).contains("has tokenizer.model, but no tokenizer.json: make it with transformers"));
    fs::remove_file(root.join("model/tokenizer.model")).unwrap();

    // A number that blocks can't hold.
    let path = root.join("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The first tensor, lm_head.weight, follows the header.
    let at = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let message = convert(&["--quantize", "q8_0"]);
    assert!(message.contains("it has the number NaN, which q8_0 can't hold"), "{message}");
    let left: Vec<_> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["model"]);
}

#[test]
fn options_of_other_formats_are_refused() {
    let root = tempfile::tempdir().unwrap();
    llama(&root.path().join("model"), SMALL);
    let (dir, out) = (root.path().join("model"), root.path().join("out"));
    for (to, option) in [
        ("gguf", ["--dtype", "bf16"]),
        ("gguf", ["--world-size", "2"]),
        ("gguf", ["--max-shard-size", "1GB"]),
        ("hf", ["--quantize", "q8_0"]),
        ("fsdp", ["--pre-tokenizer", "gpt-2"]),
    ] {
        let (code, _, message) = fsdp_ckpt(&[&["convert", text(&dir), text(&out), "--to", to], &option[..]].concat());
        assert!(code == 2 && message.contains(&format!("{} can't be used with --to {to}", option[0])), "{message}");
    }
    fs::write(&out, "mine").unwrap();
    assert!(fails(&["convert", text(&dir), text(&out), "--to", "gguf"]).contains("exists already"));
    assert_eq!(fs::read_to_string(&out).unwrap(), "mine");
}
