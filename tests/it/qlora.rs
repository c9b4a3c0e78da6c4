//! `train --base` reproduces recorded QLoRA runs, resumes at other world sizes, converts, and refuses bad input.

use std::fs;
use std::path::Path;

use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_core::layout::Region;
use fsdp_core::{BLOCK, BlockFormat};
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, convert, golden, merge_flags, tolerance};

const MODELS: [&str; 2] = ["llama", "gpt2"];
const STEPS: usize = 20;

/// Trains as the recorded runs did, on six sequences a step.
fn run(model: &str, ranks: usize, flags: &str, dir: &Path) -> Run {
    let of_model = golden("qlora").join(model);
    let defaults = format!(
        "--model {} --lora-from {} --data {} --seq-len 32 --steps {STEPS} --batch-size {} --shuffle off --lr 5e-3 \
         --weight-decay 0.1 --lr-schedule constant --warmup-steps 0 --metrics metrics.jsonl",
        of_model.display(),
        of_model.join("adapters").display(),
        golden("tokens.bin").display(),
        6 / ranks
    );
    fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir)
}

fn trajectory(model: &str, ranks: usize, flags: &str, dir: &Path) -> Trajectory {
    run(model, ranks, flags, dir).ok();
    Trajectory::of_metrics(&dir.join("metrics.jsonl"))
}

fn recorded(model: &str, base: &str) -> Trajectory {
    Trajectory::recorded(&format!("qlora/{model}"), &format!("run_{base}"))
}

#[test]
fn stored_bases_reproduce_pytorch() {
    for model in MODELS {
        for (base, ranks, more) in [
            ("bf16", 2, ""),
            ("int8", 2, "--activation-checkpoint full"),
            ("nf4", 1, ""),
            ("nf4", 2, "--reshard-after-forward never --grad-accum 3 --batch-size 1"),
            ("nf4", 3, ""),
            ("nf4", 2, "--replicate 2"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let found = trajectory(model, ranks, &format!("--base {base} {more}"), dir.path());
            assert_eq!(found.0.len(), STEPS);
            let difference = found.difference(&recorded(model, base));
            println!("{model} {base} {ranks} {more}: {difference:?}");
            assert!(difference.is_within(tolerance::SAME), "{model} {base} {ranks} {more}: {difference:?}");
        }
    }
    // The bases differ from each other by more.
    let difference = recorded("llama", "int8").difference(&recorded("llama", "nf4"));
    assert!(!difference.is_within(tolerance::SAME), "{difference:?}");
}

#[test]
fn tensor_parallel_ranks_cut_between_blocks() {
    let dir = tempfile::tempdir().unwrap();
    // Rows of 128 and of 64: the second are divided within a block.
    let error = run("llama", 2, "--base nf4 --tensor-parallel 2 --batch-size 6", dir.path()).failed();
    assert!(error.contains("o_proj.weight") && error.contains("fewer tensor-parallel ranks"), "{error}");
}

#[test]
fn checkpoints_have_blocks_and_resume_at_other_world_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let whole = trajectory("llama", 2, "--base nf4", dir.path());
    trajectory("llama", 2, "--base nf4 --steps 12 --checkpoint-dir half --export-hf peft", dir.path());
    for ranks in [1, 3] {
        let more = format!("--base nf4 --resume half/step-00000012 --checkpoint-dir on-{ranks}");
        let rest = trajectory("llama", ranks, &more, dir.path());
        let difference = rest.difference(&whole);
        assert!(difference.is_within(tolerance::SAME), "{ranks}: {difference:?}");
    }
    let refused = run("llama", 2, "--resume half/step-00000012 --base int8", dir.path()).failed();
    assert!(refused.contains("--base: it was nf4, and is int8"), "{refused}");

    let checkpoint = dir.path().join("half/step-00000012");
    let name = "model.model.layers.1.mlp.down_proj.weight.nf4";
    let saved = fsdp_ckpt::open(&checkpoint).unwrap();
    assert_eq!(saved.tensor(name).unwrap().shape, [64, 2 * 34]);
    // 4 bits a weight, and 2 bytes for the embedding and the head.
    let bytes: u64 =
        saved.tensors().iter().filter(|(name, _)| name.starts_with("model.")).map(|(_, tensor)| tensor.bytes()).sum();
    let matrices: usize = 2 * (64 * (64 + 64 + 32 + 32) + 3 * 64 * 128);
    assert!((bytes as f64) < 0.54 * matrices as f64 + 2. * 2. * 132. * 64. + 24e3, "{bytes}");

    convert(&checkpoint, &dir.path().join("hf"), "hf --lora-alpha 8", dir.path());
    convert(&checkpoint, &dir.path().join("dcp"), "torch-dcp", dir.path());
    convert(&checkpoint, &dir.path().join("three"), "fsdp", dir.path());
    let mut blocks = vec![0; 64 * 68];
    saved.read(name, &Region::whole(&[64, 68]), &mut blocks).unwrap();
    let mut decoded = vec![0f32; 64 * 128];
    BlockFormat::Nf4.decode(&blocks, &mut decoded, |value| value);
    let read = |source: &dyn TensorSource, name: &str, shape: [usize; 2]| {
        let mut values = vec![0f32; shape[0] * shape[1]];
        source.read(name, &Region::whole(&shape), bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    };
    let dcp = fsdp_ckpt::open(dir.path().join("dcp")).unwrap();
    assert!(read(&*dcp, "model.model.layers.1.mlp.down_proj.weight", [64, 128]) == decoded);
    // The adapters are merged: of rank 4, with alpha 8.
    let [down, up] = [("A", [4, 128]), ("B", [64, 4])]
        .map(|(part, shape)| read(&*saved, &format!("model.model.layers.1.mlp.down_proj.lora_{part}.weight"), shape));
    let hf = HfModel::open(dir.path().join("hf")).unwrap();
    let merged = read(&hf, "model.layers.1.mlp.down_proj.weight", [64, 128]);
    for (at, (merged, decoded)) in merged.iter().zip(&decoded).enumerate() {
        let product: f32 = (0..4).map(|rank| up[at / 128 * 4 + rank] * down[rank * 128 + at % 128]).sum();
        assert!((merged - (decoded + 2. * product)).abs() < 1e-5, "{at}: {merged}, {decoded}, {product}");
    }
    let three = fsdp_ckpt::open(dir.path().join("three")).unwrap();
    let mut again = vec![0; 64 * 68];
    three.read(name, &Region::whole(&[64, 68]), &mut again).unwrap();
    assert!(again == blocks);
    // PEFT's format has the adapters only.
    let peft = HfModel::open_file(dir.path().join("peft/adapter_model.safetensors")).unwrap();
    assert_eq!(peft.tensors().len(), 2 * 3 * 2);
}

#[test]
fn codes_are_those_of_bitsandbytes() {
    for model in MODELS {
        let dir = golden("qlora").join(model);
        let weights = HfModel::open(&dir).unwrap();
        let codes = HfModel::open_file(dir.join("codes.safetensors")).unwrap();
        let (name, entry) = codes.tensors().iter().next().unwrap();
        // GPT-2's names begin with `transformer.` in some files.
        let (stored, own) = weights.tensors().iter().find(|(stored, _)| stored.ends_with(name)).unwrap();
        let count: usize = own.shape.iter().product();
        let mut halves = vec![0; 2 * count];
        weights.read(stored, &Region::whole(&own.shape), &mut halves).unwrap();
        let wide = |half: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
        let values: Vec<f32> = halves.as_chunks().0.iter().map(wide).collect();
        let mut blocks = vec![0; BlockFormat::Nf4.bytes(count)];
        BlockFormat::Nf4.encode(&values, &mut blocks);
        let ours: Vec<u8> = blocks.chunks(34).flat_map(|block| block[2..].to_vec()).collect();
        let mut theirs = vec![0; count / 2];
        codes.read(name, &Region::whole(&entry.shape), &mut theirs).unwrap();
        assert_eq!(ours.len(), count / BLOCK * 32);
        assert!(ours == theirs, "{model}");
    }
}

#[test]
fn bases_without_adapters_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("qlora/llama").display().to_string();
    let error = fsdp_test_support::train(1, &format!("--model {model} --base nf4 --steps 1"), dir.path()).failed();
    assert!(error.contains("--base needs --lora-rank or --lora-from"), "{error}");
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
}
