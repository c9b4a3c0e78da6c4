//! `fsdp-ckpt merge`, against a plain computation.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use fsdp_ckpt::{SafetensorsFile, TensorSource, hf::HfModel, merge::Merged};
use fsdp_core::layout::Region;
use half::bf16;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::cli::{fails, fsdp_ckpt, json as parse, succeeds, text};

const ROWS: usize = 5;
const COLUMNS: usize = 7;
const RANK: usize = 2;

/// Returns small multiples of 1/8, whose sums of products are exact in f32.
fn eighths(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 37 + seed * 11) % 29) as f32 / 8. - 1.75).collect()
}

fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<f32>)]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, _, numbers)| match dtype {
            Dtype::BF16 => numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect(),
            _ => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, dtype, shape, _), bytes)| (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

fn config() -> Value {
    json!({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "c_fc"]})
}

/// Writes a base with a bf16 matrix, a transposed f32 matrix and a bias, and adapters of both matrices.
fn base_and_adapters(root: &Path) {
    let (base, adapter) = (root.join("base"), root.join("adapter"));
    fs::create_dir_all(&base).unwrap();
    fs::create_dir_all(&adapter).unwrap();
    fs::write(base.join("config.json"), "{}").unwrap();
    write(
        &base.join("model.safetensors"),
        &[
            ("layers.0.q_proj.weight", Dtype::BF16, &[ROWS, COLUMNS], eighths(1, ROWS * COLUMNS)),
            ("h.0.c_fc.weight", Dtype::F32, &[COLUMNS, ROWS], eighths(2, ROWS * COLUMNS)),
            ("h.0.c_fc.bias", Dtype::F32, &[ROWS], eighths(3, ROWS)),
            ("norm.weight", Dtype::F32, &[COLUMNS], eighths(4, COLUMNS)),
        ],
    );
    write(
        &adapter.join("adapter_model.safetensors"),
        &[
            (
                "base_model.model.layers.0.q_proj.lora_A.weight",
                Dtype::F32,
                &[RANK, COLUMNS],
                eighths(5, RANK * COLUMNS),
            ),
            ("base_model.model.layers.0.q_proj.lora_B.weight", Dtype::F32, &[ROWS, RANK], eighths(6, ROWS * RANK)),
            (
                "base_model.model.transformer.h.0.c_fc.lora_A.weight",
                Dtype::F32,
                &[RANK, COLUMNS],
                eighths(7, RANK * COLUMNS),
            ),
            ("base_model.model.transformer.h.0.c_fc.lora_B.weight", Dtype::F32, &[ROWS, RANK], eighths(8, ROWS * RANK)),
            // A module of `modules_to_save`.
            ("base_model.model.transformer.h.0.c_fc.bias", Dtype::F32, &[ROWS], eighths(9, ROWS)),
        ],
    );
    fs::write(adapter.join("adapter_config.json"), config().to_string()).unwrap();
}

/// Returns a product of the matrices of `eighths(down)` and `eighths(up)`, as [out, in].
fn product(down: usize, up: usize) -> Vec<f32> {
    let (down, up) = (eighths(down, RANK * COLUMNS), eighths(up, ROWS * RANK));
    let element = |at: usize| (0..RANK).map(|k| up[at / COLUMNS * RANK + k] * down[k * COLUMNS + at % COLUMNS]).sum();
    (0..ROWS * COLUMNS).map(element).collect()
}

fn read(dir: &Path, name: &str) -> Vec<u8> {
    let model = HfModel::open(dir).unwrap();
    let tensor = model.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.bytes() as usize];
    model.read(name, &Region::whole(&tensor.shape), &mut bytes).unwrap();
    bytes
}

#[test]
fn weights_are_sums_rounded_once() {
    let root = tempfile::tempdir().unwrap();
    base_and_adapters(root.path());
    let at = |name: &str| root.path().join(name);
    let out = succeeds(&["merge", text(&at("base")), text(&at("adapter")), text(&at("merged")), "--json"]);
    let summary = parse(&out);
    assert_eq!([&summary["merged"], &summary["replaced"], &summary["tensors"]], [2, 1, 4]);

    let scale = 8. / RANK as f32;
    let expected = eighths(1, ROWS * COLUMNS).into_iter().zip(product(5, 6));
    let expected: Vec<u8> = expected.flat_map(|(w, sum)| bf16::from_f32(w + scale * sum).to_le_bytes()).collect();
    assert_eq!(read(&at("merged"), "layers.0.q_proj.weight"), expected);
    let sums = product(7, 8);
    let expected = eighths(2, ROWS * COLUMNS).into_iter().enumerate();
    let expected = expected.flat_map(|(at, w)| (w + scale * sums[at % ROWS * COLUMNS + at / ROWS]).to_le_bytes());
    assert_eq!(read(&at("merged"), "h.0.c_fc.weight"), expected.collect::<Vec<u8>>());
    let numbers =
        |seed, count| eighths(seed, count).iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    assert_eq!(read(&at("merged"), "h.0.c_fc.bias"), numbers(9, ROWS));
    assert_eq!(read(&at("merged"), "norm.weight"), numbers(4, COLUMNS));
    assert!(at("merged/config.json").is_file());
    assert!(SafetensorsFile::open(at("merged/model.safetensors")).is_ok());
}

#[test]
fn converting_a_checkpoint_with_adapters_merges_or_refuses() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("run")).unwrap();
    let weight = "layers.0.q_proj.weight";
    let tensors: [(&str, Dtype, &[usize], Vec<f32>); 3] = [
        (weight, Dtype::F32, &[ROWS, COLUMNS], eighths(1, ROWS * COLUMNS)),
        ("layers.0.q_proj.lora_A.weight", Dtype::F32, &[RANK, COLUMNS], eighths(5, RANK * COLUMNS)),
        ("layers.0.q_proj.lora_B.weight", Dtype::F32, &[ROWS, RANK], eighths(6, ROWS * RANK)),
    ];
    write(&at("run/model.safetensors"), &tensors);
    for to in ["hf", "gguf"] {
        let error = fails(&["convert", text(&at("run")), text(&at("out")), "--to", to]);
        let expected = format!("adapters of 1 weights, of rank {RANK}");
        assert!(error.contains(&expected) && error.contains("--lora-alpha"), "{error}");
        assert!(!at("out").exists());
    }
    let alpha = (4 * RANK).to_string();
    succeeds(&["convert", text(&at("run")), text(&at("merged")), "--to", "hf", "--lora-alpha", &alpha]);
    let expected = eighths(1, ROWS * COLUMNS).into_iter().zip(product(5, 6));
    let expected: Vec<u8> = expected.flat_map(|(w, sum)| (w + 4. * sum).to_le_bytes()).collect();
    assert_eq!(read(&at("merged"), weight), expected);
    assert_eq!(HfModel::open(at("merged")).unwrap().tensors().keys().collect::<Vec<_>>(), [weight]);

    let error = fails(&["convert", text(&at("merged")), text(&at("out")), "--to", "hf", "--lora-alpha", "8"]);
    assert!(error.contains("has no LoRA adapters"), "{error}");
    let (code, _, error) =
        fsdp_ckpt(&["convert", text(&at("run")), text(&at("out")), "--to", "fsdp", "--lora-alpha", "8"]);
    assert!(code == 2 && error.contains("--lora-alpha can't be used with --to fsdp"), "{error}");
}

#[test]
fn adapters_in_a_checkpoint_are_merged() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.safetensors");
    let (weight, down, up) =
        ("layers.0.q_proj.weight", "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight");
    let tensors: [(&str, Dtype, &[usize], Vec<f32>); 3] = [
        (weight, Dtype::F32, &[ROWS, COLUMNS], eighths(1, ROWS * COLUMNS)),
        (down, Dtype::F32, &[RANK, COLUMNS], eighths(5, RANK * COLUMNS)),
        (up, Dtype::F32, &[ROWS, RANK], eighths(6, ROWS * RANK)),
    ];
    write(&path, &tensors);
    let base = HfModel::open_file(&path).unwrap();
    let merged = Merged::in_checkpoint(&base, 4.).unwrap();
    assert_eq!(merged.changed(), [1, 0]);
    assert_eq!(merged.tensors().keys().collect::<Vec<_>>(), [weight]);
    let mut bytes = vec![0; 4 * ROWS * COLUMNS];
    merged.read(weight, &Region::whole(&[ROWS, COLUMNS]), &mut bytes).unwrap();
    let expected = eighths(1, ROWS * COLUMNS).into_iter().zip(product(5, 6));
    assert_eq!(bytes, expected.flat_map(|(w, sum)| (w + 4. * sum).to_le_bytes()).collect::<Vec<u8>>());

    for (missing, part) in [(0, weight), (1, down), (2, up)] {
        let mut tensors = tensors.to_vec();
        tensors.remove(missing);
        write(&path, &tensors);
        let base = HfModel::open_file(&path).unwrap();
        let error = Merged::in_checkpoint(&base, 4.).unwrap_err().to_string();
        assert!(error.contains("has no tensor") && error.contains(part), "{error}");
    }
}

#[test]
fn factors_follow_the_patterns() {
    let root = tempfile::tempdir().unwrap();
    base_and_adapters(root.path());
    let at = |name: &str| root.path().join(name);
    for (key, value, scale) in
        [("use_rslora", json!(true), (8. / 2f64.sqrt()) as f32), ("alpha_pattern", json!({"h.0.c_fc": 2}), 1.)]
    {
        let mut config = config();
        config[key] = value;
        fs::write(at("adapter/adapter_config.json"), config.to_string()).unwrap();
        succeeds(&["merge", text(&at("base")), text(&at("adapter")), text(&at(key))]);
        let sums = product(7, 8);
        let expected = eighths(2, ROWS * COLUMNS).into_iter().enumerate();
        let expected = expected.flat_map(|(at, w)| (w + scale * sums[at % ROWS * COLUMNS + at / ROWS]).to_le_bytes());
        assert_eq!(read(&at(key), "h.0.c_fc.weight"), expected.collect::<Vec<u8>>(), "{key}");
    }
}

#[test]
fn adapters_that_can_not_be_merged_have_messages() {
    let root = tempfile::tempdir().unwrap();
    base_and_adapters(root.path());
    let at = |name: &str| root.path().join(name);
    let refused = || fails(&["merge", text(&at("base")), text(&at("adapter")), text(&at("out"))]);
    for (key, value, part) in [
        ("peft_type", json!("IA3"), "peft_type"),
        ("use_dora", json!(true), "\"use_dora\": it is true, which can't be merged here; merge it with PEFT"),
        ("init_lora_weights", json!("pissa"), "changed the base's weights"),
        ("alpha_pattern", json!({".*": 2}), "expected names of layers"),
        ("r", json!(0), "it is 0, expected at least 1"),
    ] {
        let mut config = config();
        config[key] = value;
        fs::write(at("adapter/adapter_config.json"), config.to_string()).unwrap();
        let message = refused();
        assert!(message.contains("adapter_config.json") && message.contains(part), "{message}");
    }
    fs::write(at("adapter/adapter_config.json"), config().to_string()).unwrap();
    let weights = at("adapter/adapter_model.safetensors");
    for (tensors, part) in [
        (vec![("other.weight", vec![2])], "does not begin with base_model.model."),
        (
            vec![("base_model.model.layers.0.q_proj.lora_A.weight", vec![2, 7])],
            "has no tensor \"base_model.model.layers.0.q_proj.lora_B",
        ),
        (
            vec![("base_model.model.layers.9.q_proj.weight", vec![2])],
            "no tensor \"layers.9.q_proj.weight\"; pass the base",
        ),
        (vec![("base_model.model.norm.weight", vec![2])], "shape [2], expected [7]"),
        (vec![("base_model.model.norm.lora_magnitude_vector", vec![2])], "it can't be merged"),
        (
            vec![
                ("base_model.model.layers.0.q_proj.lora_A.weight", vec![2, 6]),
                ("base_model.model.layers.0.q_proj.lora_B.weight", vec![5, 2]),
            ],
            "do not fit the weight's [5, 7]; pass the base of these adapters",
        ),
        (vec![], "it has no tensors"),
    ] {
        let tensors: Vec<(&str, Dtype, &[usize], Vec<f32>)> = tensors
            .iter()
            .map(|(name, shape)| (*name, Dtype::F32, &shape[..], vec![0.; shape.iter().product()]))
            .collect();
        write(&weights, &tensors);
        let message = refused();
        assert!(message.contains(part), "{message}");
    }
    fs::remove_file(&weights).unwrap();
    assert!(refused().contains("adapter_model.safetensors"));
    fs::remove_file(at("adapter/adapter_config.json")).unwrap();
    assert!(refused().contains("adapter_config.json; expected a directory that PEFT"));
    fs::remove_file(at("base/config.json")).unwrap();
    assert!(refused().contains("base has no config.json; --config-from names its directory"));
    assert!(!at("out").exists());
}

/// Writes a base and its adapters in these f32 tensors, and merges them by the library.
fn merge(
    root: &Path,
    base: &[(&str, &[usize], usize)],
    adapter: &[(&str, &[usize], usize)],
    config: &Value,
) -> Result<HashMap<String, Vec<f32>>, String> {
    let write_all = |path: &Path, tensors: &[(&str, &[usize], usize)]| {
        let tensors: Vec<(&str, Dtype, &[usize], Vec<f32>)> = tensors
            .iter()
            .map(|(name, shape, seed)| (*name, Dtype::F32, *shape, eighths(*seed, shape.iter().product())))
            .collect();
        write(path, &tensors);
    };
    let named: Vec<(String, &[usize], usize)> =
        adapter.iter().map(|(name, shape, seed)| (format!("base_model.model.{name}"), *shape, *seed)).collect();
    write_all(&root.join("base.safetensors"), base);
    write_all(
        &root.join("adapter_model.safetensors"),
        &named.iter().map(|(name, shape, seed)| (&**name, *shape, *seed)).collect::<Vec<_>>(),
    );
    fs::write(root.join("adapter_config.json"), config.to_string()).unwrap();
    let base = HfModel::open_file(root.join("base.safetensors")).unwrap();
    let merged = Merged::new(&base, root).map_err(|error| error.to_string())?;
    let numbers = |(name, tensor): (&String, &fsdp_ckpt::TensorEntry)| {
        let mut bytes = vec![0; tensor.bytes() as usize];
        merged.read(name, &Region::whole(&tensor.shape), &mut bytes).unwrap();
        (name.clone(), bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    Ok(merged.tensors().iter().map(numbers).collect())
}

/// GPT-2's matrices are [in, out]. GPT-Neo and GPT-BigCode have linear layers with the same names. PEFT saves
/// `fan_in_fan_out` as the last layer had it.
#[test]
fn square_matrices_are_turned_as_in_the_base() {
    let root = tempfile::tempdir().unwrap();
    let square: &[usize] = &[4, 4];
    let (of_gpt2, of_bigcode): (&[usize], &[usize]) = (&[4, 12], &[6, 4]);
    for (layer, is_set, attention, is_turned) in [
        ("h.0.mlp.c_proj", true, None, true),
        ("h.0.mlp.c_proj", false, None, false),
        ("h.0.mlp.c_proj", false, Some(of_gpt2), true),
        ("h.0.attn.c_proj", true, Some(of_bigcode), false),
        ("layers.0.attn.q_proj", true, None, false),
    ] {
        let name = |end: &str| format!("{layer}.{end}");
        let (weight, down, up) = (name("weight"), name("lora_A.weight"), name("lora_B.weight"));
        let mut config = config();
        config["fan_in_fan_out"] = json!(is_set);
        let adapter: [(&str, &[usize], usize); 2] = [(&down, &[RANK, 4], 5), (&up, &[4, RANK], 6)];
        let mut base = vec![(weight.as_str(), square, 1)];
        base.extend(attention.map(|shape| ("h.0.attn.c_attn.weight", shape, 2)));
        let merged = merge(root.path(), &base, &adapter, &config).unwrap();
        let (down, up) = (eighths(5, RANK * 4), eighths(6, RANK * 4));
        let expected = eighths(1, 16).into_iter().enumerate().map(|(at, value)| {
            let (row, column) = if is_turned { (at % 4, at / 4) } else { (at / 4, at % 4) };
            value + 4. * (0..RANK).map(|k| up[row * RANK + k] * down[k * 4 + column]).sum::<f32>()
        });
        assert_eq!(merged[&weight], expected.collect::<Vec<_>>(), "{layer} {is_set} {attention:?}");
    }
}

#[test]
fn biases_and_the_weights_of_adapted_embeddings_are_replaced() {
    let root = tempfile::tempdir().unwrap();
    let base: [(&str, &[usize], usize); 4] = [
        ("model.embed_tokens.weight", &[6, 4], 1),
        ("lm_head.weight", &[6, 4], 2),
        ("model.layers.0.q_proj.bias", &[4], 3),
        ("model.norm.weight", &[4], 4),
    ];
    let adapter: [(&str, &[usize], usize); 4] = [
        ("lm_head.base_layer.weight", &[6, 4], 12),
        ("lm_head.lora_A.weight", &[RANK, 4], 5),
        ("lm_head.lora_B.weight", &[6, RANK], 6),
        ("model.layers.0.q_proj.base_layer.bias", &[4], 13),
    ];
    let merged = merge(root.path(), &base, &adapter, &config()).unwrap();
    let (down, up) = (eighths(5, RANK * 4), eighths(6, RANK * 6));
    let sum = |at: usize| (0..RANK).map(|k| up[at / 4 * RANK + k] * down[k * 4 + at % 4]).sum::<f32>();
    let expected = eighths(12, 24).into_iter().enumerate().map(|(at, value)| value + 4. * sum(at));
    assert_eq!(merged["lm_head.weight"], expected.collect::<Vec<_>>());
    assert_eq!(merged["model.layers.0.q_proj.bias"], eighths(13, 4));
    assert_eq!(merged["model.embed_tokens.weight"], eighths(1, 24));
}

/// In PEFT, the head keeps the base's weights.
#[test]
fn changes_of_a_tied_embedding_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let embedding: (&str, &[usize], usize) = ("model.embed_tokens.weight", &[6, 4], 1);
    let saved: (&str, &[usize], usize) = ("model.embed_tokens.weight", &[6, 4], 5);
    let of_head: (&str, &[usize], usize) = ("lm_head.weight", &[6, 4], 5);
    for adapter in [saved, of_head] {
        let error = merge(root.path(), &[embedding], &[adapter], &config()).unwrap_err();
        assert!(error.contains("is tied to the base's embedding") && error.contains("merge_and_unload"), "{error}");
    }
    // A head of its own, or a classifier, is not tied.
    for head in ["lm_head.weight", "score.weight"] {
        let merged = merge(root.path(), &[embedding, (head, &[6, 4], 2)], &[saved], &config()).unwrap();
        assert_eq!((&merged[embedding.0], &merged[head]), (&eighths(5, 24), &eighths(2, 24)));
    }
}
