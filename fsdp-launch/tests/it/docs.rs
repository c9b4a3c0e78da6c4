//! Every command of docs/launching.md works, and `--help` names every option in it.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, thread};

use fsdp_test_support::agent::free_port;

use crate::{Running, TIMEOUT, executable, finish, launcher, wait_until};

fn document() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/launching.md")).unwrap()
}

/// Starts a run with its files in `temp`.
fn a_run(temp: &Path) -> Running {
    let (variable, command) = (format!("TMPDIR={}", temp.display()), assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    let started = "echo started; exec sleep 1000";
    let args = [&variable, command.to_str().unwrap(), "--rdzv-id", "job7", "sh", "-c", started];
    let mut run = Running::of("env", &args);
    run.line();
    // The launcher writes job.json once the ranks have started.
    let is_known = || fs::read_dir(temp).unwrap().any(|entry| entry.unwrap().path().join("job.json").exists());
    wait_until("the run is not known", is_known);
    run
}

#[test]
fn every_command_of_the_document_runs() {
    let document = document().replace("\\\n", "");
    let blocks = document.split("```").skip(1).step_by(2);
    let commands: Vec<&str> = blocks
        .filter(|block| !block.starts_with("text\n"))
        .flat_map(|block| block.strip_prefix("sh\n").unwrap().lines())
        .collect();
    assert!(commands.len() > 10);
    // Copy the launcher to another directory: beside the built one there may be a built `train`.
    let alone = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::hard_link(assert_cmd::cargo::cargo_bin!("fsdp-launch"), alone.path().join("fsdp-launch")).unwrap();
    for line in commands {
        let dir = tempfile::tempdir().unwrap();
        for program in ["train", "bench"] {
            executable(dir.path().join(program), "#!/bin/sh\necho trained \"$@\"\n");
        }
        executable(dir.path().join("script.py"), "#!/bin/sh\necho itself\n");
        executable(dir.path().join("python3"), "#!/bin/sh\necho python \"$@\"\n");
        fs::write(dir.path().join("token"), "0123456789abcdef").unwrap();
        fs::set_permissions(dir.path().join("token"), fs::Permissions::from_mode(0o600)).unwrap();
        // Use this host instead of the examples' hosts.
        let line = line.replace("node0", "localhost").replace("29400", &free_port().to_string());
        // `status` needs a run.
        let _run = line.starts_with("fsdp-launch status").then(|| a_run(dir.path()));
        let path = [dir.path(), alone.path(), Path::new("/usr/bin"), Path::new("/bin")];
        let path = std::env::join_paths(path).unwrap();
        let run = || {
            let mut command = assert_cmd::Command::new("sh");
            command.timeout(TIMEOUT).args(["-c", &line]).current_dir(dir.path());
            command.env("PATH", &path).env_remove("PYTHON_EXEC").env("TMPDIR", dir.path());
            finish(&mut command)
        };
        let launchers = if line.contains("--nnodes 2") { 2 } else { 1 };
        let ended = thread::scope(|scope| {
            let started: Vec<_> = (0..launchers).map(|_| scope.spawn(run)).collect();
            started.into_iter().map(|run| run.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(ended.iter().all(|(code, _, stderr)| *code == Some(0) && stderr.is_empty()), "{line}: {ended:?}");
        let stdout: String = ended.into_iter().map(|(_, stdout, _)| stdout).collect();
        // Redirected output is not on the console.
        let silent = line.contains(" > ");
        assert!(
            silent || ["trained", "python", "itself", "# rank 0", "job7"].iter().any(|word| stdout.contains(word)),
            "{line}: {stdout}"
        );
    }
}

#[test]
fn the_document_names_existing_options_only() {
    let (_, help, _) = finish(&mut launcher(&["--help"]));
    let document = document();
    let ours = document.split(['`', ' ', '\n', '(', ')', ':', ';', ',', '=']).filter(|word| word.starts_with("--"));
    // Options of `train`, of other launchers, and of `bench`.
    let of_train =
        ["--device", "--steps", "--epochs", "--checkpoint-dir", "--checkpoint-local", "--save-every", "--resume"];
    let of_others = ["--host", "--mpi", "--with-ft", "--nodes", "--signal", "--replicate"];
    for option in ours.filter(|option| !of_train.contains(option) && !of_others.contains(option)) {
        assert!(help.contains(option), "{option}");
    }
}
