//! Absurd values of the environment, and a small limit of a file's size, are errors that name them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, copy_golden, program, run};

/// Runs `train` after a shell command, alone or under the launcher.
fn train_after(before: &str, ranks: Option<usize>, flags: &str, dir: &Path) -> Run {
    let mut command = Command::new("sh");
    command.current_dir(dir).args(["-c", &format!("{before}; exec \"$0\" \"$@\"")]);
    if let Some(ranks) = ranks {
        command.arg(program("fsdp-launch")).arg(format!("--nproc-per-node={ranks}"));
    }
    command.arg(program("train")).args("--data model/tokens.bin --model model --seq-len 32 --batch-size 1".split(' '));
    command.args(flags.split_whitespace());
    run(command, Duration::from_secs(120))
}

fn prepared() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_golden("llama_tiny", &dir.path().join("model"));
    dir
}

fn fails(run: Run, parts: &[&str]) {
    let text = run.failed();
    assert!(!text.contains("panicked") && parts.iter().all(|part| text.contains(part)), "{parts:?} not in\n{text}");
}

#[test]
fn absurd_variables_are_named() {
    let dir = prepared();
    for (variables, part) in [
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=0", "MASTER_PORT=\"0\" is not a port: set it to the same free port"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=65536", "MASTER_PORT=\"65536\" is not a port"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=", "MASTER_ADDR=\"\" is empty"),
        ("RANK= WORLD_SIZE=2", "RANK=\"\" is not a number"),
        ("RANK=-1 WORLD_SIZE=2", "RANK=\"-1\" is not a number"),
        ("RANK=$(printf '\\377') WORLD_SIZE=1", "is not a number in range"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 is outside the world of WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0 is not a number of ranks"),
        ("RANK=0 WORLD_SIZE=4000000000", "WORLD_SIZE=4000000000 is not a number of ranks: expected 1 to 1048576"),
        ("RANK=0 WORLD_SIZE=1000000", "at most 252 ranks"),
        ("RANK=0 WORLD_SIZE=1000000 FSDP_BACKEND=tcp", "at most 512 ranks"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE gives 0 processes"),
        ("RANK=0 WORLD_SIZE=2 FSDP_HOSTS=9", "FSDP_HOSTS=9: expected 1 to the number of ranks, which is 2"),
        ("RAYON_NUM_THREADS=100000", "RAYON_NUM_THREADS=\"100000\" is not a number of threads from 1 to"),
        ("RAYON_NUM_THREADS=-1", "RAYON_NUM_THREADS=\"-1\" is not a number of threads from 1 to"),
        ("CANDLE_NUM_THREADS=x", "CANDLE_NUM_THREADS=\"x\" is not a number of threads from 1 to"),
    ] {
        fails(train_after(&format!("export {variables}"), None, "--steps 1", dir.path()), &[part]);
    }
    let of_ranks = train_after("export RAYON_NUM_THREADS=100000", Some(2), "--steps 1", dir.path());
    of_ranks.refused(2, &["RAYON_NUM_THREADS=\"100000\" is not a number of threads"]);
}

/// On one rank, because the memory that ranks share is a file, too.
#[test]
fn a_file_beyond_the_limit_of_its_size_is_named() {
    for (flags, file) in [
        ("--steps 1 --checkpoint-dir checkpoints", "checkpoints"),
        ("--steps 1000 --metrics metrics.jsonl", "metrics.jsonl"),
        ("--steps 1 --offload disk:disk", "disk"),
    ] {
        let dir = prepared();
        std::fs::create_dir(dir.path().join("disk")).unwrap();
        let run = train_after("ulimit -f 64", None, flags, dir.path());
        let parts = [file, "File too large", " bytes (ulimit -f). Raise the limit with `ulimit -f unlimited`"];
        fails(run, &parts);
    }
}
