//! Training reproduces what PyTorch FSDP2 recorded: losses, gradient norms and final weights, at every split of the batch over ranks.

use std::path::Path;

use fsdp_ckpt::{TensorSource, hf::HfModel};
use fsdp_core::layout::Region;
use fsdp_tests::{golden, golden_flags, launch};
use serde_json::Value;

/// Trains as the recorded run did; returns the metrics of each step and leaves the final model in `dir/export`.
fn train(name: &str, ranks: usize, batch_size: usize, dir: &Path) -> Vec<Value> {
    let (golden, batch_size) = (golden_flags(name), batch_size.to_string());
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--batch-size", &batch_size, "--metrics", "metrics.jsonl", "--export-hf", "export"]);
    launch(ranks, "train", &args, dir).ok();
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn values(model: &HfModel, name: &str) -> Vec<f32> {
    let info = model.tensor(name).unwrap();
    let region = Region::whole(&info.shape);
    let mut bytes = vec![0; region.elements() * 4];
    model.read(name, &region, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn reproduces(name: &str) {
    let record: Value = serde_json::from_str(&std::fs::read_to_string(golden(name).join("run.json")).unwrap()).unwrap();
    let steps = record["trajectory"].as_array().unwrap();
    assert_eq!(steps.len(), 20);
    for (ranks, batch_size) in [(1, 4), (2, 2), (4, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let metrics = train(name, ranks, batch_size, dir.path());
        assert_eq!(metrics.len(), steps.len());
        for (ours, theirs) in metrics.iter().zip(steps) {
            for key in ["loss", "grad_norm"] {
                let (ours, theirs) = (number(ours, key), number(theirs, key));
                let difference = (ours - theirs).abs() / theirs;
                assert!(
                    difference < 2e-5,
                    "{name}, {ranks} x {batch_size}: {key} {ours} instead of {theirs}: {difference:.1e}"
                );
            }
        }
        let theirs = fsdp_ckpt::SafetensorsFile::open(&golden(name).join("final.safetensors")).unwrap();
        let ours = HfModel::open(&dir.path().join("export")).unwrap();
        assert_eq!(ours.names().count(), theirs.names().count());
        for tensor in theirs.names() {
            let info = theirs.info(tensor).unwrap();
            let region = Region::whole(&info.shape);
            let mut bytes = vec![0; region.elements() * 4];
            theirs.read(tensor, &region, &mut bytes).unwrap();
            let want: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let got = values(&ours, tensor);
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let size = norm(&mut want.iter().map(|&x| f64::from(x)));
            let difference = norm(&mut want.iter().zip(&got).map(|(a, b)| f64::from(a - b)));
            assert!(
                difference <= 1e-3 * size,
                "{name}, {ranks} x {batch_size}: {tensor} differs by {difference:.1e} of {size:.1e}"
            );
        }
    }
}

#[test]
fn llama() {
    reproduces("llama_tiny");
}

#[test]
fn gpt2() {
    reproduces("gpt2_tiny");
}
