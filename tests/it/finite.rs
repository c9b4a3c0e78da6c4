//! Infinite values and NaN are not saved or exported, and runs do not resume from them while a healthy checkpoint
//! exists.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fsdp_ckpt::{SaveState, TensorShard};
use fsdp_core::layout::Region;
use fsdp_core::process_group::local;
use fsdp_core::{Buffer, MeshLayout};
use fsdp_test_support::{Run, copy_golden, file_names, files, golden, merge_flags};

/// Trains the recorded Llama on two ranks.
fn train(dir: &Path, flags: &str) -> Run {
    let model = golden("llama_tiny").display().to_string();
    let defaults = format!("--data {model}/tokens.bin --model {model} --seq-len 32 --batch-size 2 --warmup-steps 0");
    fsdp_test_support::train(2, &merge_flags(&defaults, flags), dir)
}

/// Flags of a run whose weights overflow f32 in one step.
const OVERFLOW: &str = "--lr 3e38 --clip-grad-norm 0";

/// Writes a checkpoint again with one NaN and correct checksums, as a version without the check wrote it.
fn insert_nan(step: &Path, tensor: &str) {
    let source = fsdp_ckpt::open(step).unwrap();
    let mut tensors = vec![];
    for (fqn, entry) in source.tensors() {
        let mut data = Buffer::zeros(entry.dtype, entry.shape.iter().product());
        source.read(fqn, &Region::whole(&entry.shape), data.bytes_mut()).unwrap();
        if fqn == tensor {
            let Buffer::F32(values) = &mut data else { panic!("{fqn} is {}", entry.dtype) };
            values[3] = f32::NAN;
        }
        tensors.push(TensorShard::whole(fqn, &entry.shape, Arc::new(data)));
    }
    let values = source.values().clone();
    fs::remove_dir_all(step).unwrap();
    let state = SaveState { mesh: MeshLayout::new(&[("dp_shard", 1)]).unwrap(), tensors, values };
    local::run(1, |group| fsdp_ckpt::save(step, &group, &state).unwrap());
}

#[test]
fn overflowed_weights_are_not_saved_or_exported() {
    let dir = tempfile::tempdir().unwrap();
    for more in ["", "--async-save", "--save-every 1"] {
        let run = train(dir.path(), &format!("--steps 1 {OVERFLOW} --checkpoint-dir saved --export-hf qh {more}"));
        run.refused(
            2,
            &[
                "saved/step-00000001 was not saved: after step 1, ",
                "values are infinite or NaN (on rank 0, 1)",
                "in `model.layers.0.input_layernorm.weight`",
                "They were finite after step 0",
                "has no checkpoint yet",
                "Lower --lr",
            ],
        );
        assert_eq!(file_names(dir.path()), [""; 0], "{more}");
    }
}

#[test]
fn resumes_from_the_last_healthy_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved");
    let keep = "--checkpoint-dir saved --save-every 1 --resume auto";
    train(dir.path(), &format!("--steps 2 --lr 1e-3 {keep} --keep 1")).ok();
    let healthy = files(&saved.join("step-00000002"));
    for more in ["--keep 1", "--keep 2 --async-save"] {
        let run = train(dir.path(), &format!("--steps 4 {OVERFLOW} {keep} {more}"));
        run.refused(2, &["step-00000003 was not saved", "The newest good checkpoint is saved/step-00000002"]);
        assert_eq!(file_names(&saved), ["step-00000002"]);
        assert!(files(&saved.join("step-00000002")) == healthy);
    }
    // If only the last step is saved, the next step finds the NaN.
    let run = train(dir.path(), &format!("--steps 5 {OVERFLOW} --checkpoint-dir saved --resume auto"));
    run.refused(
        2,
        &[
            "step 4 was not taken: the loss is NaN (on every rank)",
            "The weights became non-finite after step 2: ",
            "in `model.layers.0.input_layernorm.weight`",
            "The newest good checkpoint is saved/step-00000002",
        ],
    );
    train(dir.path(), &format!("--steps 4 --lr 1e-3 {keep} --keep 1")).ok();
    assert_eq!(file_names(&saved), ["step-00000004"]);
}

#[test]
fn quarantines_checkpoints_with_nan() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved");
    let keep = "--checkpoint-dir saved --save-every 1 --resume auto --lr 1e-3";
    train(dir.path(), &format!("--steps 3 {keep}")).ok();
    let undisturbed = files(&saved.join("step-00000003"));
    insert_nan(&saved.join("step-00000002"), "model.model.norm.weight");
    insert_nan(&saved.join("step-00000003"), "optim.state.model.norm.weight.exp_avg");
    // A named checkpoint with NaN is refused.
    let run = train(dir.path(), &format!("--steps 4 --lr 1e-3 --resume {}", saved.join("step-00000003").display()));
    let found = "1 values are infinite or NaN (on rank 0): 1 of 32 in the exp_avg of `model.norm.weight`";
    run.refused(2, &["can't resume from", found, "pass an older checkpoint"]);

    let run = train(dir.path(), &format!("--steps 3 {keep} --keep 1")).ok();
    let aside =
        format!("saved/step-00000003 can't be resumed from and was renamed to saved/step-00000003.damaged: {found}");
    assert!(run.stderr.contains(&aside), "{}", run.stderr);
    let aside = "saved/step-00000002 can't be resumed from and was renamed to saved/step-00000002.damaged: 1 values";
    assert!(run.stderr.contains(aside), "{}", run.stderr);
    assert!(run.stderr.contains("resumed from saved/step-00000001 at step 1"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("] resumed from").count(), 1, "{}", run.stderr);
    assert_eq!(file_names(&saved), ["step-00000002.damaged", "step-00000003", "step-00000003.damaged"]);
    assert!(files(&saved.join("step-00000003")) == undisturbed);

    // Without a healthy checkpoint, a run does not start from scratch.
    insert_nan(&saved.join("step-00000003"), "model.model.norm.weight");
    for _ in 0..2 {
        let run = train(dir.path(), &format!("--steps 5 {keep} --keep 1"));
        run.refused(2, &["no checkpoint in saved can be used", "saved/step-00000003.damaged: damaged"]);
    }
}

/// Makes the recorded Llama in `dir/model` and replaces the first values of some tensors: name, number, value.
fn model_with(dir: &Path, values: &[(&str, usize, f32)]) {
    copy_golden("llama_tiny", &dir.join("model"));
    let path = dir.join("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    for &(tensor, count, value) in values {
        let at = header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        bytes[at..at + 4 * count].as_chunks_mut().0.fill(value.to_le_bytes());
    }
    fs::write(&path, bytes).unwrap();
}

#[test]
fn names_the_source_of_bad_initial_weights() {
    let dir = tempfile::tempdir().unwrap();
    model_with(dir.path(), &[("model.norm.weight", 1, f32::NAN)]);
    let run = train(dir.path(), "--model model --steps 1 --lr 1e-3 --checkpoint-dir saved");
    assert!(!run.stderr.contains("--lr"), "{run:?}");
    run.refused(
        2,
        &[
            "the weights from model are not finite before the first step: ",
            "1 of 32 in `model.norm.weight`",
            "pass another --model, or --init random",
        ],
    );
    assert_eq!(file_names(dir.path()), ["model"]);

    let config = dir.path().join("model/config.json");
    let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    fields["initializer_range"] = 1e39.into();
    fs::write(&config, fields.to_string()).unwrap();
    let run = train(dir.path(), "--model model --init random --steps 1 --checkpoint-dir saved");
    run.refused(
        2,
        &["the weights drawn at random are not finite before the first step: ", "look at initializer_range"],
    );
}

/// The MLP's output is zero, but the gradient of its up projection overflows f16.
const TOO_LARGE_FOR_F16: [(&str, usize, f32); 3] = [
    ("model.layers.1.mlp.up_proj.weight", 87 * 32, 0.),
    ("model.layers.1.mlp.gate_proj.weight", 87 * 32, 300.),
    ("model.layers.1.mlp.down_proj.weight", 87 * 32, 60000.),
];

#[test]
fn gradients_too_large_for_f16_end_the_run() {
    let dir = tempfile::tempdir().unwrap();
    model_with(dir.path(), &TOO_LARGE_FOR_F16);
    let flags = "--model model --lr 1e-3 --checkpoint-dir saved";
    for (more, step) in [("--loss-scale 4", 3), ("", 17), ("--loss-scale 1 --clip-grad-norm 0", 1)] {
        let stderr = train(dir.path(), &format!("{flags} --param-dtype f16 --steps 20 {more}")).refused(
            2,
            &[
                &format!("step {step} was not taken: the loss is 4."),
                "and the gradients' norm is NaN at a loss scale of 1: ",
                "2784 of 2784 in the gradient of `model.layers.1.mlp.up_proj.weight`",
                "and finite",
                "f16 ends at 65504: pass --param-dtype bf16",
            ],
        );
        let skipped = "skipped, for its gradients overflow f16 at a loss scale of 2; the next one is 1";
        assert_eq!(stderr.matches(&format!("step {}: {skipped}", step - 1)).count(), usize::from(step > 1), "{stderr}");
        assert_eq!(stderr.matches("skipped, for its gradients").count(), step - 1, "{stderr}");
        assert_eq!(file_names(dir.path()), ["model"]);
    }
    train(dir.path(), &format!("{flags} --param-dtype bf16 --steps 2")).ok();
}

#[test]
fn a_loss_too_large_for_f16_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    model_with(dir.path(), &[("model.norm.weight", 32, 1e5)]);
    let run = train(dir.path(), "--model model --steps 2 --lr 1e-3 --checkpoint-dir saved --param-dtype f16");
    assert!(!run.stderr.contains("skipped"), "{run:?}");
    run.refused(2, &["step 1 was not taken: the loss is NaN (on every rank)", "pass --param-dtype bf16"]);
}

#[test]
fn a_step_with_infinite_gradients_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    // Zeros times large weights are zeros in forward. Backward overflows.
    let attention = "model.layers.0.self_attn";
    let (values, output) = (format!("{attention}.v_proj.weight"), format!("{attention}.o_proj.weight"));
    model_with(dir.path(), &[(&values, 512, 0.), (&output, 1024, 3.4e38)]);
    for clip in ["", "--clip-grad-norm 0"] {
        let run = train(dir.path(), &format!("--model model --steps 2 --lr 1e-3 --checkpoint-dir saved {clip}"));
        run.refused(
            2,
            &[
                "step 1 was not taken: the loss is 4.9",
                "and the gradients' norm is inf: ",
                " of 512 in the gradient of `model.layers.0.self_attn.v_proj.weight`. ",
                "The weights are those of step 0 and finite",
                "No step has been taken, so --lr is not the cause",
            ],
        );
        assert_eq!(file_names(dir.path()), ["model"]);
    }
}
