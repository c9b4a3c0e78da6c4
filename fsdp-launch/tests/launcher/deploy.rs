//! The examples of `examples/deploy`, as far as they can be tried without what they are for.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use clap::Parser;
use fsdp_launch::{Args, LaunchSpec};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{TIMEOUT, executable, finish, hear_signals};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/deploy").join(name)
}

/// What a command line of the examples means. Its program is `train`, and that knows the flags it is given.
fn understood(words: &[&str]) -> (Args, LaunchSpec) {
    let parse = || Args::try_parse_from(words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
    let mut args = parse();
    assert!(args.command[0].to_str().unwrap().ends_with("train"), "{words:?}");
    let known = fs::read_to_string(example("../src/bin/train/args.rs")).unwrap();
    for flag in args.command.iter().filter_map(|word| word.to_str()?.strip_prefix("--")) {
        let field = flag.split('=').next().unwrap().replace('-', "_");
        assert!(known.contains(&format!("pub(crate) {field}:")), "train has no --{flag}");
    }
    assert!(args.command.iter().any(|word| word == "--resume" || word == "--resume=auto"));
    args.command[0] = OsString::from("/bin/true");
    (parse(), args.into_spec().unwrap())
}

/// The batch script, with `srun` and `scontrol` that write down what they are told and do `srun`.
struct Batch {
    dir: tempfile::TempDir,
}

impl Batch {
    fn new(srun: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = "printf '%s\\n' \"$@\" > \"$SLURM_SUBMIT_DIR/srun.log\"\n";
        executable(dir.path().join("srun"), &format!("#!/bin/sh\n{log}{srun}\n"));
        let scontrol = "echo \"$@\" >> \"$SLURM_SUBMIT_DIR/scontrol.log\"\n[ \"$1\" = show ] && printf 'node07\\nnode08\\n'\nexit 0";
        executable(dir.path().join("scontrol"), &format!("#!/bin/sh\n{scontrol}\n"));
        Batch { dir }
    }

    fn command(&self, args: &[&str]) -> Command {
        hear_signals();
        let mut command = Command::new("bash");
        let path = [self.dir.path(), Path::new("/usr/bin"), Path::new("/bin")];
        command.arg(example("slurm.sbatch")).args(args).env("PATH", std::env::join_paths(path).unwrap());
        let set = [("JOB_ID", "77"), ("JOB_NODELIST", "node[07-08]"), ("NNODES", "2"), ("CPUS_PER_TASK", "16")];
        command.envs(set.map(|(name, value)| (format!("SLURM_{name}"), value)));
        command.env("SLURM_SUBMIT_DIR", self.dir.path());
        command
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(name)).unwrap()
    }
}

#[test]
fn the_batch_script_starts_one_launcher_a_host() {
    let batch = Batch::new("stat -c %a \"$SLURM_SUBMIT_DIR/run-77/rdzv-token\" > \"$SLURM_SUBMIT_DIR/mode\"; exit 0");
    let mut syntax = assert_cmd::Command::new("bash");
    assert_eq!(finish(syntax.timeout(TIMEOUT).arg("-n").arg(example("slurm.sbatch"))).0, Some(0));
    let mut command = assert_cmd::Command::from_std(batch.command(&[]));
    let (code, _, stderr) = finish(command.timeout(TIMEOUT));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));

    let recorded = batch.read("srun.log");
    let words: Vec<&str> = recorded.lines().collect();
    let start = words.iter().position(|word| *word == "fsdp-launch").unwrap();
    for word in ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=1"] {
        assert!(words[..start].contains(&word), "{words:?}");
    }
    let (args, spec) = understood(&words[start..]);
    assert_eq!((args.nnodes, args.rdzv_id.as_deref(), args.rdzv_backend.as_str()), ((2, 2), Some("77"), "c10d"));
    let meeting = spec.rendezvous.unwrap();
    assert_eq!((meeting.endpoint.host.as_str(), meeting.endpoint.port), ("node07", Some(20077)));
    assert_eq!(meeting.join_timeout, Duration::from_secs(600));
    assert_eq!(meeting.token_file, Some(batch.dir.path().join("run-77/rdzv-token")));
    // The token was there for the launchers, for nobody else, and it is gone.
    assert_eq!(batch.read("mode").trim(), "600");
    assert!(!meeting.token_file.unwrap().exists());
    assert!(!batch.read("scontrol.log").contains("requeue"));
}

#[test]
fn the_batch_script_takes_another_program_and_keeps_the_exit_code() {
    let batch = Batch::new("exit 3");
    let mut command = assert_cmd::Command::from_std(batch.command(&["script.py", "--epochs", "3"]));
    assert_eq!(finish(command.timeout(TIMEOUT)).0, Some(3));
    assert!(batch.read("srun.log").ends_with("script.py\n--epochs\n3\n"));
}

/// Waits, but not forever.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TIMEOUT, "{what}");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn near_the_end_of_its_time_the_batch_job_ends_its_step_and_goes_into_the_queue_again() {
    for (signal, requeued) in [(Signal::USR1, true), (Signal::TERM, false)] {
        let batch = Batch::new(
            "trap 'echo ended > \"$SLURM_SUBMIT_DIR/ended\"; exit 143' TERM; touch \"$SLURM_SUBMIT_DIR/up\"; while :; do sleep 0.05; done",
        );
        let mut child: Child = batch.command(&[]).stdin(Stdio::null()).spawn().unwrap();
        wait_until("srun was not started", || batch.dir.path().join("up").exists());
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut status = None;
        wait_until("the script did not end", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(143));
        assert_eq!(batch.read("ended"), "ended\n");
        assert_eq!(batch.read("scontrol.log").contains("requeue 77"), requeued);
    }
}

#[test]
fn the_manifest_agrees_with_itself_and_with_the_launcher() {
    let text = fs::read_to_string(example("kubernetes.yaml")).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let of_kind: BTreeMap<&str, &Value> =
        documents.iter().map(|document| (document["kind"].as_str().unwrap(), document)).collect();
    let (service, claim, job) = (of_kind["Service"], of_kind["PersistentVolumeClaim"], of_kind["Job"]);
    let template = &job["spec"]["template"];
    let (pod, container) = (&template["spec"], &template["spec"]["containers"][0]);

    // Names: the Service is headless, selects the pods, and gives them its own as their domain.
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["publishNotReadyAddresses"]),
        (&"None".into(), &true.into())
    );
    assert_eq!(service["spec"]["selector"], template["metadata"]["labels"]);
    assert_eq!(pod["subdomain"], service["metadata"]["name"]);
    assert_eq!(job["spec"]["completionMode"], "Indexed");
    assert_eq!(job["spec"]["completions"], job["spec"]["parallelism"]);

    let strings = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut words = [strings(&container["command"]), strings(&container["args"])].concat();
    let env = container["env"].as_array().unwrap();
    for (name, field, value) in [
        ("NODE_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']", "1"),
        ("RUN_ID", "metadata.labels['batch.kubernetes.io/controller-uid']", "uid"),
    ] {
        let set = env.iter().find(|set| set["name"] == name).unwrap();
        assert_eq!(set["valueFrom"]["fieldRef"]["fieldPath"], field);
        words.iter_mut().for_each(|word| *word = word.replace(&format!("$({name})"), value));
    }
    assert!(!words.iter().any(|word| word.contains('$')), "{words:?}");
    let (args, spec) = understood(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((args.node_rank, args.rdzv_id.as_deref()), (Some(1), Some("uid")));
    assert_eq!(Some(u64::from(args.nnodes.1)), job["spec"]["completions"].as_u64());
    let meeting = spec.rendezvous.unwrap();
    let first = format!("{}-0.{}", job["metadata"]["name"].as_str().unwrap(), pod["subdomain"].as_str().unwrap());
    assert_eq!(meeting.endpoint.host, first);
    let port = meeting.endpoint.port.map(u64::from);
    assert_eq!(port, service["spec"]["ports"][0]["port"].as_u64());
    assert_eq!(port, container["ports"][0]["containerPort"].as_u64());
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > spec.shutdown_timeout.as_secs());

    // Volumes: the token is read-only, the checkpoints are the claim.
    let volume = |name: &str| pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == name).unwrap();
    let mount = |path: &str| {
        container["volumeMounts"].as_array().unwrap().iter().find(|mount| mount["mountPath"] == path).unwrap()
    };
    let token = meeting.token_file.unwrap();
    let token_mount = mount(token.parent().unwrap().to_str().unwrap());
    assert_eq!(token_mount["readOnly"], true);
    let secret = volume(token_mount["name"].as_str().unwrap())["secret"]["secretName"].as_str().unwrap();
    let made = format!("kubectl create secret generic {secret} --from-file={}", token.file_name().unwrap().display());
    assert!(text.contains(&made), "{made}");
    let checkpoints = spec.args.iter().find_map(|arg| arg.to_str()?.strip_prefix("--checkpoint-dir=")).unwrap();
    let claimed = &volume(mount(checkpoints)["name"].as_str().unwrap())["persistentVolumeClaim"]["claimName"];
    assert_eq!(*claimed, claim["metadata"]["name"]);
    assert_eq!(claim["spec"]["accessModes"][0], "ReadWriteMany");
}

#[test]
fn the_unit_runs_the_launcher_and_leaves_it_time_to_end() {
    let text = fs::read_to_string(example("systemd/fsdp-launch.service")).unwrap();
    let joined = text.replace("\\\n", " ");
    let value = |key: &str| joined.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap();
    let words: Vec<&str> = value("ExecStart").split_whitespace().collect();
    assert!(words[0].starts_with('/') && words[0].ends_with("/fsdp-launch"));
    let (args, spec) = understood(&words);
    assert!(args.standalone && spec.max_restarts > 0);
    let seconds = |key: &str| value(key).parse::<u64>().unwrap();
    assert!(seconds("TimeoutStopSec") > spec.shutdown_timeout.as_secs());
    assert_eq!((value("KillMode"), value("Restart"), value("OOMPolicy")), ("mixed", "on-failure", "continue"));
    assert_eq!(value("WorkingDirectory"), format!("/var/lib/{}", value("StateDirectory")));
    // A wrong command line is 2, an end by SIGTERM 128 + 15.
    assert_eq!((seconds("RestartPreventExitStatus"), seconds("SuccessExitStatus")), (2, 143));

    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("systemd-analyze is not here: the unit was not verified");
        return;
    }
    // It wants to see the program and the user.
    let dir = tempfile::tempdir().unwrap();
    let unit = dir.path().join("fsdp-launch.service");
    fs::write(&unit, text.replace(words[0], "/bin/true").replace("User=train", "User=root")).unwrap();
    let mut verify = assert_cmd::Command::new("systemd-analyze");
    let (code, _, stderr) = finish(verify.timeout(TIMEOUT).arg("verify").arg(&unit));
    let told: Vec<&str> = stderr.lines().filter(|line| line.contains("fsdp-launch.service")).collect();
    assert!(code == Some(0) && told.is_empty(), "{stderr}");
}
