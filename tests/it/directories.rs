//! Directories that other people filled: with one file missing, renamed, cut, a link, or of another format. Each is read
//! as transformers reads it, or refused with an error that names the file. `tests/golden/record_directories.py` recorded
//! transformers' losses.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, copy_golden, edit_file, golden, json_lines, merge_flags, program, run};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::{Value, json};

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const BIN: &str = "pytorch_model.bin";
const LFS: &str =
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 9\n";
const HTML: &str = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n";

/// Data of a run.
#[derive(Clone, Copy)]
enum Data {
    Tokens,
    Text,
    Chat,
}
use Data::{Chat, Text, Tokens};

/// Expected result of a run.
enum Expected {
    /// Have the loss that was recorded under this name.
    Loss(&'static str),
    /// Fail with a message that contains all of these.
    Refused(Vec<String>),
}

type Change = Box<dyn Fn(&Path)>;

/// A changed directory.
struct Case {
    name: String,
    data: Data,
    flags: &'static str,
    change: Change,
    expected: Expected,
}

/// The cases of a test.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn add(&mut self, name: impl Into<String>, data: Data, expected: Expected, change: impl Fn(&Path) + 'static) {
        self.0.push(Case { name: name.into(), data, flags: "", change: Box::new(change), expected });
    }

    /// Adds a directory that has the loss of the unchanged one.
    fn same(&mut self, name: impl Into<String>, data: Data, change: impl Fn(&Path) + 'static) {
        let loss = if matches!(data, Tokens) { "tokens" } else { "text" };
        self.add(name, data, Expected::Loss(loss), change);
    }

    fn refused(&mut self, name: impl Into<String>, data: Data, parts: &[&str], change: impl Fn(&Path) + 'static) {
        let parts = parts.iter().map(|part| part.to_string()).collect();
        self.add(name, data, Expected::Refused(parts), change);
    }

    /// Runs every case on one rank, and returns the number of cases.
    fn run(self) -> usize {
        let recorded: Value = serde_json::from_slice(&fs::read(recorded("recorded.json")).unwrap()).unwrap();
        let mut wrong = Vec::new();
        for case in &self.0 {
            let root = tempfile::tempdir().unwrap();
            let model = root.path().join("model");
            prepare(&model);
            (case.change)(&model);
            let run = train(root.path(), case.data, case.flags);
            let found = match (&case.expected, loss(root.path(), &run)) {
                (Expected::Loss(name), Ok(loss)) => {
                    let wanted = recorded["losses"][name].as_f64().unwrap();
                    ((loss - wanted).abs() > 1e-5 * wanted).then(|| format!("loss {loss}, expected {wanted}"))
                }
                (Expected::Refused(parts), Err(message)) => {
                    let missing = parts.iter().find(|part| !message.contains(*part));
                    // Panics, and flags that other programs have.
                    let unwanted = ["panicked", "--skip-unreadable"].into_iter().find(|part| message.contains(part));
                    missing.map(|part| format!("no {part:?} in {message}")).or(unwanted.map(String::from))
                }
                (Expected::Loss(_), Err(message)) => Some(format!("refused: {message}")),
                (Expected::Refused(parts), Ok(loss)) => Some(format!("loss {loss}, expected an error with {parts:?}")),
            };
            wrong.extend(found.map(|found| format!("{}: {found}", case.name)));
        }
        assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), self.0.len(), wrong.join("\n"));
        self.0.len()
    }
}

fn recorded(name: &str) -> PathBuf {
    golden("directories").join(name)
}

/// Copies the recorded model without its other file of weights, and data beside it.
fn prepare(model: &Path) {
    fs::create_dir(model).unwrap();
    for name in ["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(recorded("model").join(name), model.join(name)).unwrap();
    }
    let root = model.parent().unwrap();
    for name in ["tokens.bin", "text.txt"] {
        fs::copy(recorded("model").join(name), root.join(name)).unwrap();
    }
    let chat =
        json!({ "messages": [{ "role": "user", "content": "hello" }, { "role": "assistant", "content": "there" }] });
    fs::write(root.join("chat.jsonl"), format!("{chat}\n").repeat(4)).unwrap();
}

/// Trains one step on one rank.
fn train(root: &Path, data: Data, flags: &str) -> Run {
    let data = match data {
        Tokens => "--data tokens.bin",
        Text => "--data text.txt",
        Chat => "--sft chat.jsonl",
    };
    let settings = "--model model --seq-len 32 --steps 1 --warmup-steps 0 --metrics metrics.jsonl";
    let mut command = Command::new(program("train"));
    command
        .args(data.split(' '))
        .args(settings.split(' '))
        .args(merge_flags("--batch-size 4", flags).split(' '))
        .current_dir(root);
    command.env("RAYON_NUM_THREADS", "1");
    run(command, Duration::from_secs(60))
}

/// Returns the loss of the first step, or the message of a run that failed.
fn loss(root: &Path, run: &Run) -> Result<f64, String> {
    if run.code != Some(0) {
        return Err(run.stderr.clone());
    }
    let rows = json_lines(&root.join("metrics.jsonl"));
    Ok(rows.iter().find_map(|row| row.get("loss")?.as_f64()).unwrap())
}

fn put(name: &'static str, content: impl AsRef<[u8]> + 'static) -> impl Fn(&Path) {
    move |model| fs::write(model.join(name), &content).unwrap()
}

fn remove(name: &'static str) -> impl Fn(&Path) {
    move |model| fs::remove_file(model.join(name)).unwrap()
}

fn rename(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    move |model| fs::rename(model.join(from), model.join(to)).unwrap()
}

/// Replaces the weights by another file.
fn instead(name: &'static str, content: impl AsRef<[u8]> + 'static) -> impl Fn(&Path) {
    move |model| {
        fs::remove_file(model.join(WEIGHTS)).unwrap();
        fs::write(model.join(name), &content).unwrap();
    }
}

/// Keeps the first bytes of a file; a negative number leaves out the last.
fn cut(name: &'static str, to: i64) -> impl Fn(&Path) {
    move |model| {
        let bytes = fs::read(model.join(name)).unwrap();
        let length = if to < 0 { bytes.len() as i64 + to } else { to };
        fs::write(model.join(name), &bytes[..length as usize]).unwrap();
    }
}

/// Replaces the weights by the recorded file of `torch.save`.
fn torch(name: &'static str) -> impl Fn(&Path) {
    move |model| {
        fs::remove_file(model.join(WEIGHTS)).unwrap();
        fs::copy(recorded("model").join(BIN), model.join(name)).unwrap();
    }
}

/// Links a file to a missing one.
fn broken(name: &'static str) -> impl Fn(&Path) {
    move |model| {
        let _ = fs::remove_file(model.join(name));
        symlink("/nowhere/blob", model.join(name)).unwrap();
    }
}

/// Moves a file elsewhere, and links it.
fn linked(name: &'static str) -> impl Fn(&Path) {
    move |model| {
        fs::rename(model.join(name), model.with_file_name("blob")).unwrap();
        symlink("../blob", model.join(name)).unwrap();
    }
}

/// A tensor with its bytes.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    fn zeros(shape: &[usize]) -> Self {
        Tensor { dtype: Dtype::F32, shape: shape.to_vec(), bytes: vec![0; 4 * shape.iter().product::<usize>()] }
    }
}

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor =
        |view: TensorView| Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
    file.tensors().into_iter().map(|(name, view)| (name, tensor(view))).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, tensor)| (name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap()))
        .collect();
    serialize_to_file(views, None, path).unwrap();
}

/// Changes the tensors of the weights.
fn edit(change: impl Fn(&mut Tensors)) -> impl Fn(&Path) {
    move |model| {
        let mut tensors = read(&model.join(WEIGHTS));
        change(&mut tensors);
        write(&model.join(WEIGHTS), &tensors);
    }
}

fn with(name: &'static str, shape: &'static [usize]) -> impl Fn(&Path) {
    edit(move |tensors| drop(tensors.insert(name.into(), Tensor::zeros(shape))))
}

fn tied(change: impl Fn(&mut Tensors) + 'static) -> impl Fn(&Path) {
    let edit = edit(change);
    move |model| {
        edit(model);
        edit_file(&model.join("config.json"), "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    }
}

/// Splits the weights into two files with an index, which `change` may spoil.
fn sharded(change: impl Fn(&Path, &mut BTreeMap<String, String>)) -> impl Fn(&Path) {
    move |model| {
        let (mut first, mut second) = (read(&model.join(WEIGHTS)), Tensors::new());
        second.extend(["lm_head.weight", "model.norm.weight"].map(|name| (name.into(), first.remove(name).unwrap())));
        let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let mut map = BTreeMap::new();
        for (name, tensors) in names.into_iter().zip([&first, &second]) {
            write(&model.join(name), tensors);
            map.extend(tensors.keys().map(|tensor| (tensor.clone(), name.to_string())));
        }
        fs::remove_file(model.join(WEIGHTS)).unwrap();
        change(model, &mut map);
        fs::write(model.join(INDEX), json!({ "metadata": {}, "weight_map": map }).to_string()).unwrap();
    }
}

fn torch_index(model: &Path, file: &str) {
    let names = read(&recorded("model").join(WEIGHTS)).into_keys();
    let map: BTreeMap<String, &str> = names.map(|name| (name, file)).collect();
    fs::write(model.join("pytorch_model.bin.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
}

#[test]
fn weights_are_read_or_refused() {
    let mut cases = Cases::default();
    cases.same("unchanged", Tokens, |_| ());
    for name in [
        "model.fp16.safetensors",
        "model.bf16.safetensors",
        "model.non_ema.safetensors",
        "consolidated.safetensors",
        "Model.safetensors",
        "weights.safetensors",
        "model-00001-of-00001.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.safetensors",
        "adapter_model.safetensors",
        "model.safetensors.incomplete",
        "model.safetensors.part",
        "model.safetensors.crdownload",
        "model.safetensors.aria2",
        "model.safetensors.bak",
        "model.safetensors~",
        "model.safetensor",
        "model",
        "blob.txt",
        "model.safetensors.1",
    ] {
        cases.refused(
            format!("weights called {name}"),
            Tokens,
            &[&format!("model/{name}: "), "--init random"],
            move |model| {
                fs::rename(model.join(WEIGHTS), model.join(name)).unwrap();
            },
        );
    }
    for name in [
        "flax_model.msgpack",
        "tf_model.h5",
        "model.gguf",
        "model.onnx",
        "model.pt",
        "model.pth",
        "consolidated.00.pth",
        "model.ckpt",
        "model.ckpt.index",
        "model.ckpt.data-00000-of-00001",
        "rust_model.ot",
        "weights.npz",
        "model.keras",
        "model.nemo",
        "adapter_model.bin",
        "adapter_config.json",
        "pytorch_model.fp16.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.part",
        "pytorch_model.bin.bak",
        "model.bin",
        "ggml-model-q4_0.bin",
        "__0_0.distcp",
        ".metadata",
        "optimizer.pt",
    ] {
        cases.refused(
            format!("{name} instead of weights"),
            Tokens,
            &[&format!("model/{name}: ")],
            instead(name, "0123456789"),
        );
    }
    for name in ["state.bin", "state", "pytorch_model.fp16.bin"] {
        cases.refused("torch.save under another name", Tokens, &[&format!("model/{name}: ")], torch(name));
    }
    cases.refused(
        "unfinished download of the hub's client",
        Tokens,
        &["3f.incomplete", "unfinished download"],
        |model| {
            let downloads = model.join(".cache/huggingface/download");
            fs::create_dir_all(&downloads).unwrap();
            fs::rename(model.join(WEIGHTS), downloads.join("3f.incomplete")).unwrap();
        },
    );
    cases.refused("weights named by config.json", Tokens, &["transformers_weights", "other.safetensors"], |model| {
        edit_file(&model.join("config.json"), "{", "{\"transformers_weights\": \"other.safetensors\",");
    });
    cases.refused("a directory", Tokens, &["model/model.safetensors: it is not a file"], |model| {
        fs::remove_file(model.join(WEIGHTS)).unwrap();
        fs::create_dir(model.join(WEIGHTS)).unwrap();
    });
    for name in [WEIGHTS, INDEX, BIN, "model.fp16.safetensors"] {
        cases.refused(
            format!("{name} is a broken link"),
            Tokens,
            &[name, "/nowhere/blob, which does not exist"],
            move |model| {
                fs::remove_file(model.join(WEIGHTS)).unwrap();
                broken(name)(model);
            },
        );
    }
    cases.same("linked weights", Tokens, linked(WEIGHTS));
    cases.same("linked configuration", Tokens, linked("config.json"));
    cases.same("linked directory", Tokens, |model| {
        fs::rename(model, model.with_file_name("snapshot")).unwrap();
        symlink("snapshot", model).unwrap();
    });
    for to in [0, 4, 8, 100, -1] {
        cases.refused(format!("weights cut to {to}"), Tokens, &[WEIGHTS], cut(WEIGHTS, to));
    }
    cases.refused("longer weights", Tokens, &[WEIGHTS], |model| {
        let bytes = fs::read(model.join(WEIGHTS)).unwrap();
        fs::write(model.join(WEIGHTS), [&bytes[..], b"more"].concat()).unwrap();
    });
    cases.same("torch.save", Tokens, torch(BIN));
    cases.same("torch.save beside safetensors", Tokens, put(BIN, "not read"));
    for to in [0, 10, 20_000, -1] {
        cases.refused(format!("torch.save cut to {to}"), Tokens, &[BIN], move |model| {
            torch(BIN)(model);
            cut(BIN, to)(model);
        });
    }
    cases.same("one file of torch.save with an index", Tokens, |model| {
        torch("pytorch_model-00001-of-00001.bin")(model);
        torch_index(model, "pytorch_model-00001-of-00001.bin");
    });
    cases.refused("index without the file of torch.save", Tokens, &["pytorch_model-00001-of-00001.bin"], |model| {
        fs::remove_file(model.join(WEIGHTS)).unwrap();
        torch_index(model, "pytorch_model-00001-of-00001.bin");
    });
    for (what, content, finding) in
        [("pointer", LFS, "git lfs pull"), ("page", HTML, "HTML page"), ("empty file", "", "empty")]
    {
        for name in [WEIGHTS, INDEX, BIN, "pytorch_model.bin.index.json"] {
            let finding = if content.is_empty() && name.ends_with(".json") { "index" } else { finding };
            cases.refused(format!("{name} is a {what}"), Tokens, &[name, finding], instead(name, content));
        }
    }
    cases.refused("shard that is a pointer", Tokens, &["00002-of-00002", "git lfs pull"], |model| {
        sharded(|_, _| ())(model);
        fs::write(model.join("model-00002-of-00002.safetensors"), LFS).unwrap();
    });
    assert!(cases.run() >= 75);
}

#[test]
fn indexes_and_tensors_are_read_or_refused() {
    let mut cases = Cases::default();
    cases.same("two files", Tokens, sharded(|_, _| ()));
    cases.same("index without a tensor of its file", Tokens, sharded(|_, map| drop(map.remove("lm_head.weight"))));
    cases.refused("missing file", Tokens, &["00002-of-00002.safetensors"], |model| {
        sharded(|_, _| ())(model);
        remove("model-00002-of-00002.safetensors")(model);
    });
    cases.refused("missing index", Tokens, &["00001-of-00002.safetensors", INDEX], |model| {
        sharded(|_, _| ())(model);
        remove(INDEX)(model);
    });
    cases.refused("cut index", Tokens, &[INDEX], |model| {
        sharded(|_, _| ())(model);
        cut(INDEX, -9)(model);
    });
    cases.refused(
        "index with another tensor",
        Tokens,
        &[INDEX, "model.other.weight"],
        sharded(|_, map| {
            map.insert("model.other.weight".into(), "model-00001-of-00002.safetensors".into());
        }),
    );
    cases.refused("tensor in two files", Tokens, &["model.norm.weight", "overlap"], |model| {
        sharded(|_, _| ())(model);
        let path = model.join("model-00001-of-00002.safetensors");
        let mut tensors = read(&path);
        tensors.insert("model.norm.weight".into(), Tensor::zeros(&[8]));
        write(&path, &tensors);
    });
    for (name, shape) in [
        ("model.layers.0.self_attn.q_proj.bias", &[8][..]),
        ("model.layers.1.mlp.down_proj.bias", &[8]),
        ("model.layers.1.self_attn.q_norm.weight", &[4]),
        ("model.layers.2.input_layernorm.weight", &[8]),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", &[1, 1]),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", &[2, 8]),
        ("lm_head.bias", &[288]),
        ("vision_tower.weight", &[3]),
    ] {
        cases.refused(format!("with {name}"), Tokens, &[name, "does not announce"], with(name, shape));
    }
    cases.refused(
        "many other tensors",
        Tokens,
        &["\"model.layers.2.a\"", "and 6 others"],
        edit(|tensors| {
            tensors.extend("abcdefghij".chars().map(|end| (format!("model.layers.2.{end}"), Tensor::zeros(&[1]))));
        }),
    );
    cases.same("with a buffer of old files", Tokens, with("model.layers.0.self_attn.rotary_emb.inv_freq", &[2]));
    cases.refused("fewer layers in config.json", Tokens, &["model.layers.1.", "does not announce"], |model| {
        edit_file(&model.join("config.json"), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    });
    cases.refused("more layers in config.json", Tokens, &["model.layers.2."], |model| {
        edit_file(&model.join("config.json"), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    });
    cases.refused(
        "missing tensor",
        Tokens,
        &["model.norm.weight"],
        edit(|tensors| {
            tensors.remove("model.norm.weight");
        }),
    );
    cases.refused(
        "renamed tensor",
        Tokens,
        &["model.norm.weight"],
        edit(|tensors| {
            let norm = tensors.remove("model.norm.weight").unwrap();
            tensors.insert("model.final_norm.weight".into(), norm);
        }),
    );
    cases.refused("tensor of another shape", Tokens, &["model.norm.weight", "[9]"], with("model.norm.weight", &[9]));
    cases.refused(
        "tensor in 8 bits",
        Tokens,
        &["model.norm.weight", "(F8_E4M3); expected"],
        edit(|tensors| {
            let norm = Tensor { dtype: Dtype::F8_E4M3, shape: vec![8], bytes: vec![56; 8] };
            tensors.insert("model.norm.weight".into(), norm);
        }),
    );
    cases.same(
        "without the prefix of a model with a head",
        Tokens,
        edit(|tensors| {
            let named = std::mem::take(tensors).into_iter();
            *tensors = named.map(|(name, tensor)| (name.trim_start_matches("model.").into(), tensor)).collect();
        }),
    );
    let embedding = |tensors: &Tensors| tensors["model.embed_tokens.weight"].clone();
    cases.add("tied, with another head", Tokens, Expected::Loss("tied, with another head"), tied(|_| ()));
    cases.add(
        "tied, with the same head",
        Tokens,
        Expected::Loss("tied"),
        tied(move |tensors| {
            tensors.insert("lm_head.weight".into(), embedding(tensors));
        }),
    );
    cases.add(
        "tied, without a head",
        Tokens,
        Expected::Loss("tied"),
        tied(|tensors| {
            tensors.remove("lm_head.weight");
        }),
    );
    cases.add(
        "tied, with the head only",
        Tokens,
        Expected::Loss("tied, with the head only"),
        tied(|tensors| {
            tensors.remove("model.embed_tokens.weight");
        }),
    );
    cases.add("tied, and the index names the head", Tokens, Expected::Loss("tied"), |model| {
        sharded(|_, _| ())(model);
        let path = model.join("model-00002-of-00002.safetensors");
        let mut tensors = read(&path);
        tensors.remove("lm_head.weight");
        write(&path, &tensors);
        edit_file(&model.join("config.json"), "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    });
    cases.refused("not tied, and the index names a missing head", Tokens, &[INDEX, "lm_head.weight"], |model| {
        sharded(|_, _| ())(model);
        let path = model.join("model-00002-of-00002.safetensors");
        let mut tensors = read(&path);
        tensors.remove("lm_head.weight");
        write(&path, &tensors);
    });
    assert!(cases.run() >= 30);
}

#[test]
fn configurations_and_tokenizers_are_read_or_refused() {
    let mut cases = Cases::default();
    cases.same("unchanged", Text, |_| ());
    let config = "config.json";
    cases.refused("without config.json", Tokens, &["model/config.json"], remove(config));
    cases.refused("unfinished config.json", Tokens, &["model/config.json"], rename(config, "config.json.incomplete"));
    let tokenizer = "tokenizer.json";
    for (name, data) in [(config, Tokens), (tokenizer, Text), ("tokenizer_config.json", Text)] {
        cases.refused(format!("{name} cut in half"), data, &[&format!("model/{name}")], cut(name, 50));
        cases.refused(format!("empty {name}"), data, &[name, "empty"], cut(name, 0));
        cases.refused(format!("{name} is a pointer"), data, &[name, "git lfs pull"], put(name, LFS));
        cases.refused(format!("{name} is a page"), data, &[name, "HTML page"], put(name, HTML));
        cases.refused(format!("{name} is a broken link"), data, &[name], broken(name));
        cases.same(format!("{name} is a link"), Text, linked(name));
        cases.refused(format!("{name} is a directory"), data, &[name], move |model| {
            fs::remove_file(model.join(name)).unwrap();
            fs::create_dir(model.join(name)).unwrap();
        });
    }
    for name in
        ["vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json", "added_tokens.json"]
    {
        for data in [Text, Chat] {
            let parts = [&format!("model has {name}, but no tokenizer.json")[..]];
            cases.refused(format!("{name} instead of tokenizer.json"), data, &parts, move |model| {
                fs::remove_file(model.join("tokenizer.json")).unwrap();
                fs::remove_file(model.join("tokenizer_config.json")).unwrap();
                fs::write(model.join(name), "{}").unwrap();
            });
        }
    }
    let advice = "AutoTokenizer.from_pretrained(\"model\").save_pretrained(\"model\")";
    cases.refused("vocab.json has a way out", Text, &[advice], |model| {
        rename("tokenizer.json", "vocab.json")(model);
    });
    for data in [Text, Chat] {
        let parts = ["model has tokenizer_config.json, but no tokenizer.json"];
        cases.refused("without tokenizer.json", data, &parts, remove(tokenizer));
        let parts = ["tokenizer.json.incomplete, but no tokenizer.json"];
        cases.refused("unfinished tokenizer.json", data, &parts, rename(tokenizer, "tokenizer.json.incomplete"));
        cases.refused("without a tokenizer", data, &["model has no tokenizer.json", "288 ids"], |model| {
            remove("tokenizer.json")(model);
            remove("tokenizer_config.json")(model);
        });
    }
    cases.same("tokens need no tokenizer", Tokens, remove(tokenizer));
    cases.same("tokens need no vocab.json", Tokens, rename(tokenizer, "vocab.json"));
    for name in ["generation_config.json", "chat_template.jinja", "special_tokens_map.json"] {
        cases.refused(format!("{name} is a broken link"), Chat, &[name], broken(name));
        cases.refused(format!("{name} is a pointer"), Chat, &[name, "git lfs pull"], put(name, LFS));
    }
    for (name, data) in [("tokens.bin", Tokens), ("text.txt", Text), ("chat.jsonl", Chat)] {
        cases.refused(format!("{name} is a pointer"), data, &[name, "git lfs pull"], move |model| {
            fs::write(model.with_file_name(name), LFS).unwrap();
        });
    }
    assert!(cases.run() >= 50);
}

#[test]
fn adapters_are_not_trained_on_random_weights() {
    let mut cases = Cases::default();
    cases.same("torch.save", Tokens, torch(BIN));
    cases.refused("variant", Tokens, &["model.fp16.safetensors"], rename(WEIGHTS, "model.fp16.safetensors"));
    cases.refused("broken link", Tokens, &[WEIGHTS, "which does not exist"], broken(WEIGHTS));
    cases.refused("another tensor", Tokens, &["does not announce"], with("model.layers.0.self_attn.q_proj.bias", &[8]));
    cases.add("tied, with another head", Tokens, Expected::Loss("tied, with another head"), tied(|_| ()));
    cases.0.iter_mut().for_each(|case| case.flags = "--lora-rank 2");
    cases.run();
}

#[test]
fn exports_of_untied_heads_are_untied() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    prepare(&model);
    tied(|_| ())(&model);
    train(root.path(), Tokens, "--export-hf out").ok();
    let out = root.path().join("out");
    let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    let tensors = read(&out.join(WEIGHTS));
    assert!(tensors["lm_head.weight"].bytes != tensors["model.embed_tokens.weight"].bytes);
}

/// The experts of gpt-oss are codes of 4 bits, which transformers decodes where it can't compute with them.
#[test]
fn experts_in_mxfp4_are_read() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    prepare(&model);
    for (from, to) in [("gpt_oss_mxfp4.json", "config.json"), ("gpt_oss_mxfp4.safetensors", WEIGHTS)] {
        fs::copy(recorded(from), model.join(to)).unwrap();
    }
    let run = train(root.path(), Tokens, "--batch-size 4 --export-hf out");
    let loss = loss(root.path(), &run).unwrap();
    let losses: Value = serde_json::from_slice(&fs::read(recorded("recorded.json")).unwrap()).unwrap();
    let recorded = losses["losses"]["mxfp4"].as_f64().unwrap();
    assert!((loss - recorded).abs() < 5e-6 * recorded, "{loss}, expected {recorded}");
    // An export has numbers in place of codes.
    let config: Value = serde_json::from_slice(&fs::read(root.path().join("out/config.json")).unwrap()).unwrap();
    assert!(config.get("quantization_config").is_none() && config["model_type"] == "gpt_oss", "{config}");
    let names: Vec<String> = read(&root.path().join("out").join(WEIGHTS)).into_keys().collect();
    assert!(names.contains(&"model.layers.0.mlp.experts.gate_up_proj".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("_blocks") || name.contains("experts.0")), "{names:?}");
}

/// Transformers saves the experts of a layer in one tensor with `save_original_format=False`.
#[test]
fn fused_experts_are_read() {
    for name in ["mixtral_tiny", "qwen3_moe_tiny"] {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("model");
        copy_golden(name, &model);
        fs::copy(recorded(&format!("{name}_fused.safetensors")), model.join(WEIGHTS)).unwrap();
        fs::rename(model.join("tokens.bin"), root.path().join("tokens.bin")).unwrap();
        let run = train(root.path(), Tokens, "--batch-size 6");
        let loss = loss(root.path(), &run).unwrap();
        let recorded = Trajectory::recorded(name, "run_of_1").0[0].loss;
        assert!((loss - recorded).abs() < 5e-6 * recorded, "{name}: {loss}, expected {recorded}");
    }
}
