//! Checkpoints load on any mesh, and convert to PyTorch's format and back.

use std::path::Path;

use fsdp_ckpt::TensorSource;
use fsdp_core::layout::Region;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{convert, golden, train_golden};

use super::{DP2_TP2, Mesh, REPLICATE2_TP2, SEQUENCE, TP4, assert_near, train, train_on};

const MODEL: &str = "llama_tp_tiny";
const STEP_10: &str = "step-00000010";

fn bytes(source: &dyn TensorSource, name: &str) -> Vec<u8> {
    let tensor = &source.tensors()[name];
    let region = Region::whole(&tensor.shape);
    let mut bytes = vec![0; region.elements() * tensor.dtype.size()];
    source.read(name, &region, &mut bytes).unwrap();
    bytes
}

/// Asserts that model and optimizer have the same bits in both checkpoints.
fn assert_same(found: &Path, want: &Path) {
    // 21 parameters, each with two moments and a count of steps.
    assert_part(found, "", want, "", 84);
}

/// Asserts that `found`'s tensors with the prefix `of` equal `want`'s with the prefix `in_want`.
fn assert_part(found: &Path, of: &str, want: &Path, in_want: &str, count: usize) {
    let [found_in, want_in] = [found, want].map(|path| fsdp_ckpt::open(path).unwrap());
    let names = |source: &dyn TensorSource, start: &str| -> Vec<String> {
        source.tensors().keys().filter_map(|name| name.strip_prefix(start)).map(str::to_owned).collect()
    };
    let all = names(&*want_in, in_want);
    assert_eq!(names(&*found_in, of), all, "{} and {}", found.display(), want.display());
    assert_eq!(all.len(), count);
    for name in all {
        let [ours, theirs] = [format!("{of}{name}"), format!("{in_want}{name}")];
        assert_eq!(found_in.tensors()[&ours].shape, want_in.tensors()[&theirs].shape, "{name}");
        assert!(bytes(&*found_in, &ours) == bytes(&*want_in, &theirs), "{}: {name} differs", found.display());
    }
}

#[test]
fn a_pytorch_checkpoint_goes_through_every_mesh_and_back() {
    let theirs = golden(MODEL).join("dcp_step10");
    let recorded = Trajectory::recorded(MODEL, DP2_TP2.record);
    let dir = tempfile::tempdir().unwrap();
    let mut from = theirs.clone();
    for (mesh, more) in [(&TP4, SEQUENCE), (&REPLICATE2_TP2, ""), (&DP2_TP2, "")] {
        // Loads and saves without a step.
        let saved = dir.path().join(mesh.record);
        let (from_dir, to_dir) = (from.display(), saved.display());
        let flags = format!("{} {more} --resume {from_dir} --checkpoint-dir {to_dir} --steps 10", mesh.flags);
        let own = tempfile::tempdir().unwrap();
        let batch = format!("--batch-size {} {flags}", 6 / mesh.readers);
        let stderr = train_golden(MODEL, 4, &batch, own.path()).ok().stderr;
        assert!(stderr.contains("nothing to train: the checkpoint is at step 10"), "{stderr}");
        from = saved.join(STEP_10);
        assert_same(&from, &theirs);
    }
    assert_part(&from, "model.", &golden(MODEL).join("dcp_step10_hf"), "", 21);
    let back = dir.path().join("back");
    convert(&from, &back, "torch-dcp", dir.path());
    assert_same(&back, &theirs);
    let own = tempfile::tempdir().unwrap();
    let resume = format!("{SEQUENCE} --resume {} --checkpoint-dir saved", back.display());
    let (ours, _) = train(MODEL, &DP2_TP2, &resume, own.path());
    assert_near(&ours, &recorded.after(10), "from PyTorch's files");
}

#[test]
fn resumes_at_another_mesh() {
    let recorded = Trajectory::recorded(MODEL, DP2_TP2.record);
    let dir = tempfile::tempdir().unwrap();
    let saves = "--save-every 10 --checkpoint-dir saved";
    let (undisturbed, _) = train(MODEL, &DP2_TP2, &format!("{saves} {SEQUENCE}"), dir.path());
    let resumed = |from: &Path, ranks: usize, readers: usize, flags: &str| {
        let own = tempfile::tempdir().unwrap();
        let resume = format!("--resume {} --checkpoint-dir resumed", from.join("saved").join(STEP_10).display());
        train_on(ranks, MODEL, readers, &format!("{flags} {resume}"), own.path()).0
    };
    let sequence = |mesh: &Mesh| format!("{} {SEQUENCE}", mesh.flags);
    // The same mesh gives the same bits.
    assert_eq!(resumed(dir.path(), 4, 2, &sequence(&DP2_TP2)), undisturbed.after(10));
    for (ranks, readers, flags) in [
        (4, 1, TP4.flags.to_owned()),
        (4, 2, sequence(&REPLICATE2_TP2)),
        (2, 1, sequence(&DP2_TP2)),
        (3, 3, String::new()),
    ] {
        let ours = resumed(dir.path(), ranks, readers, &flags);
        assert_near(&ours, &recorded.after(10), &format!("{ranks} ranks {flags}"));
    }
    // From FSDP alone to tensor parallelism.
    let dir = tempfile::tempdir().unwrap();
    train_on(3, MODEL, 3, saves, dir.path());
    assert_near(&resumed(dir.path(), 4, 1, TP4.flags), &recorded.after(10), "tp 4 after 3 ranks");
}
