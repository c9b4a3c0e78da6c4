//! Checkpoints go from any mesh to any other, to PyTorch's files and back.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_ckpt::TensorSource;
use fsdp_core::layout::Region;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{golden, program};

use super::{DP2_TP2, REPLICATE2_TP2, SEQUENCE, TP4, assert_near, train, train_on};

const MODEL: &str = "llama_tp_tiny";
const STEP_10: &str = "step-00000010";

fn bytes(source: &dyn TensorSource, name: &str) -> Vec<u8> {
    let tensor = &source.tensors()[name];
    let region = Region::whole(&tensor.shape);
    let mut bytes = vec![0; region.elements() * tensor.dtype.size()];
    source.read(name, &region, &mut bytes).unwrap();
    bytes
}

/// Fails unless model and optimizer are the same in both, to the bit.
fn assert_same(found: &Path, want: &Path) {
    // 21 parameters, each with two moments and a count of steps.
    assert_part(found, "", want, "", 84);
}

/// Fails unless what begins with `of` in `found` is what begins with `in_want` in `want`.
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

fn convert(from: &Path, to: &Path, format: &str, ranks: &str) {
    let mut convert = Command::new(program("fsdp-ckpt"));
    convert.arg("convert").args([from, to]).args(["--to", format, "--world-size", ranks]);
    fsdp_test_support::run(convert, Duration::from_secs(120)).ok();
}

/// What PyTorch saved on (dp 2, tp 2) comes to every mesh, and is saved there as it was.
#[test]
fn a_checkpoint_of_pytorch_comes_to_every_mesh_and_goes_back() {
    let theirs = golden(MODEL).join("dcp_step10");
    let recorded = Trajectory::recorded(MODEL, DP2_TP2.record);
    let dir = tempfile::tempdir().unwrap();
    let mut from = theirs.clone();
    for (mesh, more) in [(&TP4, &[SEQUENCE][..]), (&REPLICATE2_TP2, &[]), (&DP2_TP2, &[])] {
        // From one to the next, without a step in between.
        let saved = dir.path().join(mesh.record);
        let to = ["--resume", from.to_str().unwrap(), "--checkpoint-dir", saved.to_str().unwrap(), "--steps", "10"];
        let own = tempfile::tempdir().unwrap();
        let args = [mesh.flags, more, &to].concat();
        let run = launch_without_steps(&args, mesh.readers, own.path());
        assert!(run.contains("nothing to train: step 10 is done already"), "{run}");
        from = saved.join(STEP_10);
        assert_same(&from, &theirs);
    }
    // And the weights alone, in PyTorch's other layout.
    assert_part(&from, "model.", &golden(MODEL).join("dcp_step10_hf"), "", 21);
    // To PyTorch's format, by one that has our mesh no more, and on from there.
    let back = dir.path().join("back");
    convert(&from, &back, "torch-dcp", "3");
    assert_same(&back, &theirs);
    let own = tempfile::tempdir().unwrap();
    let resume = ["--resume", back.to_str().unwrap(), "--checkpoint-dir", "saved"];
    let (ours, _) = train(MODEL, &DP2_TP2, &[&[SEQUENCE][..], &resume].concat(), own.path());
    assert_near(&ours, &recorded.after(10), "on from PyTorch's files");
}

/// A run that has nothing left to train; what it said.
fn launch_without_steps(flags: &[&str], readers: usize, dir: &Path) -> String {
    let model = golden(MODEL).display().to_string();
    let tokens = golden("tokens.bin").display().to_string();
    let batch_size = (6 / readers).to_string();
    let own = ["--model", &model, "--data", &tokens, "--seq-len", "32", "--batch-size", &batch_size];
    fsdp_test_support::launch(4, "train", &[&own, flags].concat(), dir).ok().stderr
}

#[test]
fn a_run_goes_on_at_another_mesh() {
    let recorded = Trajectory::recorded(MODEL, DP2_TP2.record);
    let dir = tempfile::tempdir().unwrap();
    let saves = ["--save-every", "10", "--checkpoint-dir", "saved", SEQUENCE];
    let (undisturbed, _) = train(MODEL, &DP2_TP2, &saves, dir.path());
    let saved = dir.path().join("saved").join(STEP_10);
    let resume = ["--resume", saved.to_str().unwrap(), "--checkpoint-dir", "resumed"];
    let sequence = [&resume[..], &[SEQUENCE]].concat();
    let resumed = |ranks: usize, readers: usize, flags: &[&str]| {
        let own = tempfile::tempdir().unwrap();
        train_on(ranks, MODEL, readers, flags, own.path()).0
    };
    // The same mesh: the same bits.
    let same = resumed(4, 2, &[DP2_TP2.flags, &sequence].concat());
    assert_eq!(same, undisturbed.after(10));
    for (ranks, readers, flags) in [
        (4, 1, [TP4.flags, &resume].concat()),
        (4, 2, [REPLICATE2_TP2.flags, &sequence].concat()),
        (2, 1, [DP2_TP2.flags, &sequence].concat()),
        (3, 3, resume.to_vec()),
    ] {
        assert_near(&resumed(ranks, readers, &flags), &recorded.after(10), &format!("{ranks} ranks {flags:?}"));
    }
    // And from none.
    let dir = tempfile::tempdir().unwrap();
    let saves = ["--save-every", "10", "--checkpoint-dir", "saved"];
    train_on(3, MODEL, 3, &saves, dir.path());
    let saved = dir.path().join("saved").join(STEP_10);
    let resume = ["--resume", saved.to_str().unwrap(), "--checkpoint-dir", "resumed"];
    assert_near(&resumed(4, 1, &[TP4.flags, &resume].concat()), &recorded.after(10), "tp 4 after 3 ranks");
}
