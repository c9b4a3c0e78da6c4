//! Every command of docs/launching.md works as it stands there, and --help and the document name every option.

use std::{fs, path::Path};

use crate::{TIMEOUT, executable, finish, launcher};

fn document() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/launching.md")).unwrap()
}

#[test]
fn every_command_of_the_document_runs() {
    let document = document();
    let blocks = document.split("```").skip(1).step_by(2);
    let commands: Vec<&str> = blocks.flat_map(|block| block.strip_prefix("sh\n").unwrap().lines()).collect();
    assert!(commands.len() > 10);
    // Beside the launcher that was built there may be a `train` that was built, and that would be found first.
    let alone = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::hard_link(assert_cmd::cargo::cargo_bin!("fsdp-launch"), alone.path().join("fsdp-launch")).unwrap();
    for line in commands {
        let dir = tempfile::tempdir().unwrap();
        executable(dir.path().join("train"), "#!/bin/sh\necho trained \"$@\"\n");
        executable(dir.path().join("script.py"), "#!/bin/sh\necho itself\n");
        executable(dir.path().join("python3"), "#!/bin/sh\necho python \"$@\"\n");
        let path = [dir.path(), alone.path(), Path::new("/usr/bin"), Path::new("/bin")];
        let mut command = assert_cmd::Command::new("sh");
        command.timeout(TIMEOUT).args(["-c", line]).current_dir(dir.path());
        command.env("PATH", std::env::join_paths(path).unwrap()).env_remove("PYTHON_EXEC");
        let (code, stdout, stderr) = finish(&mut command);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{line}");
        // What is redirected into files is not on the console.
        let silent = line.contains(" > ");
        assert!(silent || ["trained", "python", "itself"].iter().any(|word| stdout.contains(word)), "{line}: {stdout}");
    }
}

#[test]
fn the_document_knows_no_other_options_than_the_command() {
    let (_, help, _) = finish(&mut launcher(&["--help"]));
    let document = document();
    let ours = document.split(['`', ' ', '\n', '(', ')', ':', ';', ',']).filter(|word| word.starts_with("--"));
    for option in
        ours.filter(|option| !["--steps", "--epochs", "--checkpoint-dir", "--save-every", "--resume"].contains(option))
    {
        assert!(help.contains(option), "{option}");
    }
}
