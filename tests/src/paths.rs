//! Where the workspace and the recorded runs are.

use std::path::{Path, PathBuf};

/// The workspace.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// A recorded run of PyTorch FSDP2.
pub fn golden(name: &str) -> PathBuf {
    workspace().join("tests/golden").join(name)
}

/// The flags with which `train` repeats a recorded run, but for the batch size: sequences a rank and step make four
/// over all ranks, or six where the model has no `tokens.bin` of its own.
pub fn golden_flags(name: &str) -> Vec<String> {
    golden_flags_of(name, 20)
}

/// The same for another number of steps.
pub fn golden_flags_of(name: &str, steps: usize) -> Vec<String> {
    let model = golden(name).display().to_string();
    let own = golden(name).join("tokens.bin");
    let tokens = if own.exists() { own } else { golden("tokens.bin") };
    let settings = "--seq-len 32 --lr 1e-3 --weight-decay 0.1 --clip-grad-norm 1.0 \
        --lr-schedule constant --warmup-steps 0";
    let mut flags = vec!["--data".to_string(), tokens.display().to_string(), "--model".into(), model];
    flags.extend(settings.split(' ').map(String::from));
    flags.extend(["--steps".into(), steps.to_string()]);
    if name == "bert_tiny" {
        // `MASK` of tests/golden/record.py.
        flags.extend(["--mask-token", "131"].map(String::from));
    }
    flags
}
