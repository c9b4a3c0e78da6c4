//! torchrun's options, and what `--dry-run` and `--print-completion` print.

use std::process::Command;

use rustix::process::Signal;

use crate::{Running, executable, finish, launcher, ranks, sorted};

#[test]
fn a_wrong_value_is_one_line_and_exit_code_2() {
    for (args, parts) in [
        (vec!["--nnodes", "2", "true"], ["--nnodes 2 needs", "--rdzv-endpoint HOST:PORT", "the same on all hosts"]),
        (
            vec!["--nnodes", "2", "--rdzv-endpoint", "a:5", "true"],
            ["--nnodes 2 needs", "--rdzv-token-file FILE", "keeps other users out"],
        ),
        (vec!["--nnodes", "2", "--standalone", "true"], ["--standalone means one host", "--nnodes is 2", ""]),
        (vec!["--nproc-per-node", "-1", "true"], ["'-1' for '--nproc-per-node", "expected a number from 1", ""]),
        (vec!["--max-restarts", "-1", "true"], ["'-1' for '--max-restarts", "expected a number of restarts", ""]),
        (vec!["--shutdown-timeout", "-3", "true"], ["'-3' for '--shutdown-timeout", "0 or more", ""]),
        (vec!["--node-rank", "-1", "true"], ["'-1' for '--node-rank", "0 for the first host", ""]),
        (vec!["--rdzv-backend", "etcd", "true"], ["'etcd' for '--rdzv-backend", "static, c10d", "use c10d instead"]),
        (
            vec!["--rdzv-conf", "keep_alive_max_attempt=1", "true"],
            ["--rdzv-conf", "\"keep_alive_max_attempt=1\"", "expected 2 or more"],
        ),
        (vec!["--start-method", "thread", "true"], ["'thread' for '--start-method", "spawn, fork, forkserver", ""]),
        (vec!["--logs-specs", "mine", "true"], ["'mine' for '--logs-specs", "--log-dir", "--tee"]),
        (
            vec!["--duplicate-stdout-filters=a", "true"],
            ["'a' for '--duplicate-stdout-filters", "--local-ranks-filter", "--log-dir"],
        ),
        (vec!["--duplicate_stderr_filters", "a", "true"], ["'a' for '--duplicate-stderr-filters", "--log-dir", ""]),
        (vec!["--nnodes", "3:2", "true"], ["--nnodes", "'3:2'", "MIN <= MAX"]),
        (vec!["--nproc_per_node", "some", "true"], ["--nproc-per-node", "'some'", "expected a number from 1 to 65535"]),
        (
            vec!["--rdzv-endpoint", "192.0.2.1:5", "true"],
            ["--rdzv-endpoint", "192.0.2.1", "expected an address of this host"],
        ),
        (vec!["--signals-to-handle", "SIGKILL", "true"], ["--signals-to-handle", "SIGKILL", "SIGTERM, SIGINT"]),
        (vec!["--rdzv-id", "", "true"], ["run id", "\"\"", "must not be empty"]),
        (vec!["--nproc-per-nod", "2", "true"], ["--nproc-per-nod", "similar", "--nproc-per-node"]),
        (vec![], ["required", "PROGRAM", "--help"]),
    ] {
        let (code, stdout, stderr) = finish(&mut launcher(&args));
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(2), "", 1), "{args:?}: {stderr}");
        assert!(!stderr.contains("to pass '--"), "{stderr}");
        assert!(stderr.starts_with("fsdp-launch: ") && parts.iter().all(|part| stderr.contains(part)), "{stderr}");
    }
}

#[test]
fn reads_options_from_torchruns_variables() {
    let mut command = launcher(&["/bin/sh", "-c", "echo $ROLE_NAME $WORLD_SIZE"]);
    command.env("PET_NPROC_PER_NODE", "2").env("PET_ROLE", "trainer").env("PET_STANDALONE", "1");
    let (code, stdout, stderr) = finish(&mut command);
    assert_eq!((code, sorted(&stdout)), (Some(0), vec!["[rank 0] trainer 2", "[rank 1] trainer 2"]), "{stderr}");
    let (code, _, stderr) = finish(command.env("PET_NPROC_PER_NODE", "zwei"));
    let message = "'zwei' for '--nproc-per-node <N>' from PET_NPROC_PER_NODE: expected";
    assert!(code == Some(2) && stderr.contains(message), "{stderr}");
    let mut command = launcher(&["--nproc-per-node", "drei", "true"]);
    let (_, _, stderr) = finish(command.env("PET_NPROC_PER_NODE", "zwei"));
    assert!(stderr.contains("'drei' for '--nproc-per-node <N>': expected"), "{stderr}");
}

#[test]
fn reads_the_shutdown_timeout_from_torchruns_variable() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {}; if [ $RANK = 0 ]; then until [ -e ready ]; do sleep 0.01; done; rm ready; exit 3; fi; \
         trap 'echo asked' TERM; : > ready; while :; do sleep 0.01; done",
        dir.path().display()
    );
    let mut command = ranks(2, &script);
    let (code, stdout, stderr) = finish(command.env("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0.2"));
    assert_eq!((code, stdout.as_str()), (Some(3), "[rank 1] asked\n"), "{stderr}");
    assert!(stderr.contains("still running 200ms after it was asked to end"), "{stderr}");
    let (code, _, stderr) = finish(command.env("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"));
    assert!(code == Some(2) && stderr.contains("\"soon\" for TORCH_ELASTIC_SHUTDOWN_TIMEOUT"), "{stderr}");
    let (_, _, stderr) = finish(command.env("PET_SHUTDOWN_TIMEOUT", "0.1"));
    assert!(stderr.contains("still running 100ms after it was asked to end"), "{stderr}");
}

#[test]
fn a_bad_tmpdir_is_named() {
    let (code, _, stderr) = finish(launcher(&["/bin/true"]).env("TMPDIR", "/no/such/directory"));
    assert!(code == Some(1) && stderr.contains("TMPDIR") && stderr.contains("/no/such/directory"), "{stderr}");
}

#[test]
fn accepts_torchruns_forms_of_one_host() {
    for args in [
        vec!["--standalone"],
        vec![
            "--nnodes=1:1",
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0",
            "--rdzv_conf=timeout=5,read_timeout=60",
        ],
        vec!["--start_method=fork", "--event-log-handler", "null", "--monitor-interval=5"],
        vec!["--logs-specs=default", "--duplicate-stdout-filters", "", "--duplicate-stderr-filters="],
        vec!["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", "--local-addr=127.0.0.1"],
    ] {
        let (code, stdout, stderr) = finish(&mut launcher(&[&args[..], &["/bin/echo", "here"]].concat()));
        assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(0), "[rank 0] here\n", ""));
    }
}

#[test]
fn warns_of_an_unknown_rendezvous_key() {
    let warned = |conf: &str| finish(&mut launcher(&["--rdzv-conf", conf, "/bin/true"]));
    for (conf, message) in [
        ("join_timeot=3", "--rdzv-conf knows no key \"join_timeot\"; did you mean join_timeout?"),
        ("store_tpye=file,timeout=1", "\"store_tpye\"; did you mean store_type?"),
        ("zzz=1", "\"zzz\", only join_timeout, timeout, last_call_timeout"),
    ] {
        let (code, _, stderr) = warned(conf);
        assert!(code == Some(0) && stderr.contains(message) && stderr.lines().count() == 1, "{stderr}");
    }
    let known = "close_timeout=1,heartbeat_timeout=2,protocol=http,cacert=a,ca_cert=b,etcd_prefix=/c,is_host=1";
    assert_eq!(warned(known), (Some(0), String::new(), String::new()));
}

#[test]
fn a_virtual_local_rank_sees_one_gpu() {
    let args =
        ["--nproc-per-node=2", "--virtual-local-rank", "/bin/sh", "-c", "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES"];
    let mut command = launcher(&args);
    let (_, stdout, _) = finish(command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("HIP_VISIBLE_DEVICES"));
    assert_eq!(sorted(&stdout), ["[rank 0] 0 0 0", "[rank 1] 1 0 1"]);
    let (_, stdout, _) = finish(command.env("CUDA_VISIBLE_DEVICES", "5,3"));
    assert_eq!(sorted(&stdout), ["[rank 0] 0 0 5", "[rank 1] 1 0 3"]);
    let (code, stdout, stderr) = finish(command.env("CUDA_VISIBLE_DEVICES", "5"));
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert!(
        stderr.contains("local rank 1 needs a GPU of its own, but CUDA_VISIBLE_DEVICES=5 names only 1"),
        "{stderr}"
    );
}

#[test]
fn pinned_ranks_share_the_cores() {
    let script = "grep Cpus_allowed_list /proc/self/status | cut -f 2";
    let cores = std::thread::available_parallelism().unwrap().get();
    let args = ["--nproc-per-node", &cores.to_string(), "--pin-cores", "/bin/sh", "-c", script];
    let (code, stdout, stderr) = finish(&mut launcher(&args));
    assert_eq!(code, Some(0), "{stderr}");
    let mut pinned: Vec<usize> = stdout.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    pinned.sort_unstable();
    pinned.dedup();
    assert_eq!(pinned.len(), cores, "{stdout}");
}

#[test]
fn signals_to_handle_are_passed_on() {
    let script = "trap 'echo usr1; exit 0' USR1; echo $$; while :; do sleep 0.01; done";
    let args = ["--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1", "sh", "-c", script];
    let mut launcher = Running::start(&args);
    launcher.pids(2);
    launcher.signal(Signal::USR1);
    let mut rest = [launcher.line(), launcher.line()];
    rest.sort();
    assert_eq!(rest, ["[rank 0] usr1", "[rank 1] usr1"]);
    assert_eq!(launcher.wait().code(), Some(138));
}

#[test]
fn a_dry_run_prints_working_commands() {
    let args = [
        "--nproc-per-node=2",
        "--role=it",
        "--dry-run",
        "/bin/sh",
        "-c",
        "echo \"$RANK of $WORLD_SIZE\" $0 $ROLE_NAME",
        "it's",
    ];
    let (code, stdout, stderr) = finish(&mut launcher(&args));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.starts_with("# rank 0\nLOCAL_RANK=0 \\\nRANK=0 \\\n"), "{stdout}");
    let shell = Command::new("sh").args(["-c", &stdout]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&shell.stdout), "0 of 2 it's it\n1 of 2 it's it\n", "{stdout}");
}

#[test]
fn python_scripts_and_modules_get_the_interpreter() {
    let dir = tempfile::tempdir().unwrap();
    let python = executable(dir.path().join("python"), "#!/bin/sh\necho \"$@\"\n");
    executable(dir.path().join("script.py"), "#!/bin/sh\necho itself $1\n");
    let run = |args: &[&str]| finish(launcher(args).current_dir(dir.path()).env("PYTHON_EXEC", &python));
    let message = |text: &str| (Some(0), format!("[rank 0] {text}\n"), String::new());
    assert_eq!(run(&["script.py", "--epochs", "3"]), message("-u script.py --epochs 3"));
    assert_eq!(run(&["./script.py"]), message("-u ./script.py"));
    assert_eq!(run(&["-m", "package.train", "-x"]), message("-u -m package.train -x"));
    assert_eq!(run(&["--no-python", "./script.py", "x"]), message("itself x"));
    let (_, stdout, _) = run(&["--run-path", "--no-python", "script.py", "x"]);
    assert!(stdout.contains("-u -c import runpy") && stdout.ends_with("script.py x\n"), "{stdout}");

    let (code, _, stderr) = run(&["missing.py"]);
    assert!(code == Some(1) && stderr.contains("\"missing.py\" can't be run: No such file"), "{stderr}");
    let mut command = launcher(&["script.py"]);
    command.current_dir(dir.path()).env_remove("PYTHON_EXEC").env("PATH", "/no/such/directory");
    let (code, _, stderr) = finish(&mut command);
    assert!(code == Some(1) && stderr.contains("\"python3\" is not in PATH: set PYTHON_EXEC"), "{stderr}");
    let (code, _, stderr) = finish(command.env("PYTHON_EXEC", "/no/such/python"));
    assert!(
        code == Some(1)
            && stderr.contains("PYTHON_EXEC is not a Python interpreter: program \"/no/such/python\" can't be run"),
        "{stderr}"
    );
}

#[test]
fn completions_and_help() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, stdout, stderr) = finish(launcher(&["--print_completion", shell]).env("PET_ROLE", "trainer"));
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        assert!(stdout.contains("fsdp-launch") && stdout.contains("nproc-per-node"), "{shell}");
    }
    let (code, stdout, stderr) = finish(&mut launcher(&["--help"]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    for part in ["Ranks:", "Program:", "Rendezvous:", "Failure:", "Examples:", "script.py"] {
        assert!(stdout.contains(part), "{part} is not in {stdout}");
    }
    assert!(finish(&mut launcher(&["--version"])).1.starts_with("fsdp-launch "));
}

#[test]
fn bash_completes_a_subcommand_with_its_own_options() {
    let (_, script, _) = finish(&mut launcher(&["--print-completion", "bash"]));
    let complete =
        "COMP_WORDS=(fsdp-launch status --); COMP_CWORD=2; _fsdp__launch fsdp-launch -- status; echo ${COMPREPLY[@]}";
    let output = Command::new("bash").args(["-c", &format!("{script}\n{complete}")]).output().unwrap();
    let offered = String::from_utf8_lossy(&output.stdout);
    assert!(offered.contains("--json") && !offered.contains("--nproc-per-node"), "{output:?}");
}
