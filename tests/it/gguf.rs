//! Candle's quantized Llama reads our GGUF files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use fsdp_test_support::{program, run};
use fsdp_tests_candle_transformers::original::models::llama::{Cache, Llama, LlamaConfig};
use fsdp_tests_candle_transformers::original::models::quantized_llama::ModelWeights;

const LENGTH: usize = 16;
const VOCABULARY: usize = 131;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Names in the GGUF file, and of transformers within a layer.
const NAMES: [(&str, &str); 12] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

fn convert(model: &Path, out: &Path, quantization: &str) {
    let mut command = Command::new(program("fsdp-ckpt"));
    command.arg("convert").arg(model).arg(out).args(["--to", "gguf", "--quantize", quantization]);
    run(command, Duration::from_secs(120)).ok();
}

/// Returns the logits after each of the tokens.
fn logits(tokens: &[u32], mut of: impl FnMut(&Tensor) -> Tensor) -> Vec<f32> {
    let prefixes = (1..=tokens.len()).map(|length| Tensor::new(&tokens[..length], &Device::Cpu).unwrap());
    prefixes.flat_map(|ids| of(&ids.unsqueeze(0).unwrap()).flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

/// Returns the logits of Candle's own Llama.
fn unquantized(config: &Path, tensors: HashMap<String, Tensor>, tokens: &[u32]) -> Vec<f32> {
    let config: LlamaConfig = serde_json::from_str(&fs::read_to_string(config).unwrap()).unwrap();
    let config = config.into_config(false);
    let model = Llama::load(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu), &config).unwrap();
    logits(tokens, |ids| {
        let mut cache = Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
        model.forward(ids, 0, &mut cache).unwrap()
    })
}

/// Reads the weights of a GGUF file in f32, under the names and in the order of rows of [`wide_llama`].
fn weights(path: &Path) -> HashMap<String, Tensor> {
    let mut file = File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let read = |theirs: &String| {
        let tensor = content.tensor(&mut &file, theirs, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
        let (place, name) = match theirs.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, name)) => (format!("model.layers.{layer}."), name),
            None => (String::new(), theirs.as_str()),
        };
        let (_, ours) = NAMES.iter().find(|(other, _)| format!("{other}.weight") == name).unwrap();
        let heads = match *ours {
            "self_attn.q_proj" => HEADS,
            "self_attn.k_proj" => KV_HEADS,
            _ => return (format!("{place}{ours}.weight"), tensor),
        };
        // llama.cpp rotates neighbouring rows of a head, transformers rows of its two halves.
        let (rows, columns) = tensor.dims2().unwrap();
        let tensor = tensor.reshape((heads, rows / heads / 2, 2, columns)).unwrap().transpose(1, 2).unwrap();
        (format!("{place}{ours}.weight"), tensor.contiguous().unwrap().reshape((rows, columns)).unwrap())
    };
    content.tensor_infos.keys().map(read).collect()
}

/// Returns the logits of Candle's quantized Llama.
fn quantized(path: &Path, tokens: &[u32]) -> Vec<f32> {
    let mut file = File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    logits(tokens, |ids| {
        model.clear_kv_cache();
        model.forward(ids, 0).unwrap()
    })
}

/// Returns the largest difference relative to the standard deviation of `expected`.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let count = expected.len() as f32;
    let mean = expected.iter().sum::<f32>() / count;
    let spread = (expected.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / count).sqrt();
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max) / spread
}

/// Writes a Llama with rows that K-quants divide.
fn wide_llama(dir: &Path) {
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 500.0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens".to_string(), vec![VOCABULARY, 256]),
        ("model.norm".to_string(), vec![256]),
        ("lm_head".to_string(), vec![VOCABULARY, 256]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![256]),
            ("post_attention_layernorm", vec![256]),
            ("self_attn.q_proj", vec![256, 256]),
            ("self_attn.k_proj", vec![128, 256]),
            ("self_attn.v_proj", vec![128, 256]),
            ("self_attn.o_proj", vec![256, 256]),
            ("mlp.gate_proj", vec![512, 256]),
            ("mlp.up_proj", vec![512, 256]),
            ("mlp.down_proj", vec![256, 512]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}"), shape));
        }
    }
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 * 0.4 - 0.2
    };
    let tensors = shapes.into_iter().map(|(name, shape)| {
        let shift = if shape.len() == 1 { 1. } else { 0. };
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| next() + shift).collect();
        (format!("{name}.weight"), Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&tensors.collect(), dir.join("model.safetensors")).unwrap();
}

#[test]
fn candle_reads_every_quantization() {
    let root = tempfile::tempdir().unwrap();
    let (model, files) = (root.path().join("model"), root.path().join("files"));
    for dir in [&model, &files] {
        fs::create_dir(dir).unwrap();
    }
    wide_llama(&model);
    let config = model.join("config.json");
    let tokens: Vec<u32> = (0..LENGTH as u32).map(|at| (11 * at + 5) % VOCABULARY as u32).collect();
    let original = candle_core::safetensors::load(model.join("model.safetensors"), &Device::Cpu).unwrap();
    let original = unquantized(&config, original, &tokens);

    let converted = |name: &str| {
        let out = files.join(name);
        convert(&model, &out, name);
        let exact = unquantized(&config, weights(&out), &tokens);
        [difference(&quantized(&out, &tokens), &exact), difference(&exact, &original)]
    };
    for name in ["f32", "f16", "bf16"] {
        // Candle computes with these weights in f32.
        let [found, _] = converted(name);
        assert!(found < 1e-5, "{name}: the logits differ by {found:e} of their spread");
    }
    let [of_activations, of_weights] = converted("q8_0");
    // With other types, Candle rounds activations to 8 bits in blocks: that changes products as much as weights of 8
    // bits do.
    assert!(of_activations < 2. * of_weights, "q8_0: {of_activations:e} of activations, {of_weights:e} of weights");
    for name in ["q6_k", "q4_k_m", "q4_0"] {
        // Larger blocks have larger steps.
        let [found, own] = converted(name);
        assert!(found < 4. * of_weights && own > of_weights, "{name}: {found:e} of activations, {own:e} of weights");
    }
}
