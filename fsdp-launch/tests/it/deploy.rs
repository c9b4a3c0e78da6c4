//! The examples of `examples/deploy`, without the schedulers that they are for.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use clap::Parser;
use fsdp_launch::{Args, LaunchSpec};
use fsdp_test_support::agent::free_port;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{TIMEOUT, executable, finish, hear_signals, sorted, wait_until};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/deploy").join(name)
}

/// Parses a command line of the examples. Checks that `train` knows its flags and resumes.
fn understood(words: &[&str]) -> (Args, LaunchSpec) {
    let parse = || Args::try_parse_from(words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
    let mut args = parse();
    let program = args.command[0].to_str().unwrap();
    assert!(program.ends_with("train") || program == "script.py", "{words:?}");
    if program.ends_with("train") {
        let known = fs::read_to_string(example("../src/bin/train/args.rs")).unwrap();
        for flag in args.command.iter().filter_map(|word| word.to_str()?.strip_prefix("--")) {
            let field = flag.split('=').next().unwrap().replace('-', "_");
            assert!(known.contains(&format!("pub(crate) {field}:")), "train has no --{flag}");
        }
        for flag in ["--resume", "--data"] {
            assert!(args.command.iter().any(|word| word.to_str().unwrap().starts_with(flag)), "{words:?}");
        }
    }
    args.command[0] = OsString::from("/bin/true");
    (parse(), args.into_spec().unwrap())
}

/// Returns a directory with the launcher, and programs that print their rank and arguments: `train`, and a Python for
/// `script.py`.
fn programs() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let launcher = assert_cmd::cargo::cargo_bin!("fsdp-launch");
    // A symbolic link would make the launcher look beside its target, where another `train` may be.
    if fs::hard_link(launcher, dir.path().join("fsdp-launch")).is_err() {
        // By another process, for the same reason as in `executable`.
        assert!(Command::new("cp").arg(launcher).arg(dir.path().join("fsdp-launch")).status().unwrap().success());
    }
    let say = "#!/bin/sh\necho \"rank $RANK of $WORLD_SIZE: $(basename \"$0\") $*\"\n";
    fs::write(dir.path().join("script.py"), "").unwrap();
    for name in ["train", "python"] {
        executable(dir.path().join(name), say);
    }
    dir
}

/// Runs the batch script with fake `srun` and `scontrol`, which log their arguments. The directory holds the programs
/// and `data`.
struct Batch {
    dir: tempfile::TempDir,
}

/// A fake `srun` that starts one launcher per host of the job.
const LAUNCHERS: &str = "while [ \"$1\" != fsdp-launch ]; do shift; done
for host in $(seq \"$SLURM_NNODES\"); do \"$@\" & hosts=\"$hosts $!\"; done
code=0; for host in $hosts; do wait \"$host\" || code=$?; done; exit \"$code\"";

impl Batch {
    fn new(srun: &str) -> Self {
        let dir = programs();
        fs::write(dir.path().join("data"), "some text").unwrap();
        let log = "printf '%s\\n' \"$@\" > \"$SLURM_SUBMIT_DIR/srun.log\"\n";
        executable(dir.path().join("srun"), format!("#!/bin/sh\n{log}{srun}\n"));
        let scontrol = "echo \"$@\" >> \"$SLURM_SUBMIT_DIR/scontrol.log\"\n[ \"$1\" = show ] && printf \
            '%s\\nnode08\\n' \"${FIRST:-localhost}\"\nexit 0";
        executable(dir.path().join("scontrol"), format!("#!/bin/sh\n{scontrol}\n"));
        // `srun` records its pid as the step.
        let scancel = "echo \"$@\" > \"$SLURM_SUBMIT_DIR/scancel.log\"\nkill -TERM $(cat \"$SLURM_SUBMIT_DIR/up\")";
        executable(dir.path().join("scancel"), format!("#!/bin/sh\n{scancel}\n"));
        Batch { dir }
    }

    /// Returns `sbatch --nodes NODES slurm.sbatch ARGS`; `None` is the default number of nodes.
    fn command(&self, nodes: Option<&str>, args: &[&str]) -> Command {
        hear_signals();
        let text = fs::read_to_string(example("slurm.sbatch")).unwrap();
        let of_file = text.lines().find_map(|line| line.strip_prefix("#SBATCH --nodes=")).unwrap();
        let mut command = Command::new("bash");
        let path = [self.dir.path(), Path::new("/usr/bin"), Path::new("/bin")];
        command.arg(example("slurm.sbatch")).args(args).env("PATH", std::env::join_paths(path).unwrap());
        let nodes = nodes.unwrap_or(of_file);
        let set =
            [("JOB_ID", &*Self::job()), ("JOB_NODELIST", "node[07-08]"), ("NNODES", nodes), ("CPUS_PER_TASK", "16")];
        command.envs(set.map(|(name, value)| (format!("SLURM_{name}"), value)));
        command.env("SLURM_SUBMIT_DIR", self.dir.path()).env("NPROC_PER_NODE", "1").env("DATA", "data");
        command.env("PYTHON_EXEC", self.dir.path().join("python")).current_dir(self.dir.path());
        command
    }

    /// Returns a job id, from which ports are derived, unique to the test process.
    fn job() -> String {
        std::process::id().to_string()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(name)).unwrap()
    }
}

/// Runs a command that succeeds, and returns the ranks' lines.
fn rank_lines(command: Command) -> Vec<String> {
    let (code, stdout, stderr) = finish(assert_cmd::Command::from_std(command).timeout(TIMEOUT));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    let lines = sorted(&stdout).into_iter().filter_map(|line| Some(line.split_once("] rank ")?.1.to_owned()));
    lines.collect()
}

#[test]
fn the_batch_script_runs_train_and_scripts_on_one_host_and_on_two() {
    let batch = Batch::new(LAUNCHERS);
    let checkpoints = batch.dir.path().join(format!("run-{}/checkpoints", Batch::job()));
    let train = format!(
        "train --data data --steps 10000 --checkpoint-dir {} --save-every 500 --keep 3 --resume auto",
        checkpoints.display()
    );
    let mut one = batch.command(None, &[]);
    // A single host needs no name.
    one.env("FIRST", "no-such-host.invalid");
    assert_eq!(rank_lines(one), [format!("0 of 1: {train}")]);
    let of_two = |program: &str| [0, 1].map(|rank| format!("{rank} of 2: {program}"));
    assert_eq!(rank_lines(batch.command(Some("2"), &[])), of_two(&train));
    let script = rank_lines(batch.command(Some("2"), &["script.py", "--epochs", "3"]));
    assert_eq!(script, of_two("python -u script.py --epochs 3"));
}

#[test]
fn the_batch_script_fails_early_without_data() {
    let batch = Batch::new("exit 0");
    for (nodes, data, said) in [(None, "", "DATA=''"), (Some("2"), "gone", "DATA='gone'")] {
        let mut command = batch.command(nodes, &[]);
        command.env("DATA", data);
        let (code, _, stderr) = finish(assert_cmd::Command::from_std(command).timeout(TIMEOUT));
        assert!(code == Some(2) && stderr.lines().count() == 1 && stderr.contains(said), "{stderr}");
    }
    assert!(!batch.dir.path().join("srun.log").exists());
}

#[test]
fn the_batch_script_starts_one_launcher_a_host() {
    let mut syntax = assert_cmd::Command::new("bash");
    assert_eq!(finish(syntax.timeout(TIMEOUT).arg("-n").arg(example("slurm.sbatch"))).0, Some(0));
    for (nodes, command) in [(1, &[][..]), (2, &[]), (2, &["script.py"])] {
        let token = format!("run-{}/rdzv-token", Batch::job());
        let batch =
            Batch::new(&format!("stat -c %a \"$SLURM_SUBMIT_DIR/{token}\" > \"$SLURM_SUBMIT_DIR/mode\"; exit 0"));
        let command = batch.command((nodes == 2).then_some("2"), command);
        let (code, _, stderr) = finish(assert_cmd::Command::from_std(command).timeout(TIMEOUT));
        assert_eq!((code, stderr.as_str()), (Some(0), ""));

        let recorded = batch.read("srun.log");
        let words: Vec<&str> = recorded.lines().collect();
        let start = words.iter().position(|word| *word == "fsdp-launch").unwrap();
        let of_nodes = [format!("--nodes={nodes}"), format!("--ntasks={nodes}")];
        let others = ["--mpi=none", "--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=1"];
        for word in of_nodes.iter().map(String::as_str).chain(others) {
            assert!(words[..start].contains(&word), "{words:?}");
        }
        let (args, spec) = understood(&words[start..]);
        let job = Batch::job();
        assert_eq!((args.nnodes, args.rdzv_id.as_deref()), ((nodes, nodes), Some(&*job)));
        assert_eq!(spec.rendezvous.is_some(), nodes > 1);
        if let Some(meeting) = spec.rendezvous {
            assert_eq!(args.rdzv_backend.as_str(), "c10d");
            let port = 20_000 + u16::try_from(job.parse::<u32>().unwrap() % 10_000).unwrap();
            assert_eq!((meeting.endpoint.host.as_str(), meeting.endpoint.port), ("localhost", Some(port)));
            assert_eq!(meeting.join_timeout, Duration::from_secs(600));
            assert_eq!(meeting.token_file, Some(batch.dir.path().join(&token)));
        }
        // The token file was private to the launchers and is removed.
        assert_eq!(batch.read("mode").trim(), "600");
        assert!(!batch.dir.path().join(&token).exists());
        assert!(!batch.read("scontrol.log").contains("requeue"));
    }
}

#[test]
fn the_batch_script_keeps_the_exit_code() {
    let batch = Batch::new("exit 3");
    let mut command = assert_cmd::Command::from_std(batch.command(None, &["script.py", "--epochs", "3"]));
    assert_eq!(finish(command.timeout(TIMEOUT)).0, Some(3));
    assert!(batch.read("srun.log").ends_with("script.py\n--epochs\n3\n"));
}

#[test]
fn the_batch_job_requeues_itself_before_its_time_limit() {
    for (signal, requeued) in [(Signal::USR1, true), (Signal::TERM, false)] {
        let batch = Batch::new(
            "trap 'echo ended > \"$SLURM_SUBMIT_DIR/ended\"; exit 143' TERM; echo $$ > \"$SLURM_SUBMIT_DIR/up\"; while \
                :; do sleep 0.05; done",
        );
        let mut child: Child = batch.command(None, &[]).stdin(Stdio::null()).spawn().unwrap();
        wait_until("srun was not started", || {
            fs::read_to_string(batch.dir.path().join("up")).is_ok_and(|process| process.ends_with('\n'))
        });
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut status = None;
        wait_until("the script did not end", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(143));
        assert_eq!(batch.read("ended"), "ended\n");
        assert_eq!(batch.read("scancel.log"), format!("--signal=TERM {}.0\n", Batch::job()));
        assert_eq!(batch.read("scontrol.log").contains(&format!("requeue {}", Batch::job())), requeued);
    }
}

/// Returns the manifest as shipped (two pods), and changed by the `sed` lines at its top: one pod, and a script.
fn manifests() -> [String; 3] {
    let text = fs::read_to_string(example("kubernetes.yaml")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kubernetes.yaml"), &text).unwrap();
    for line in text.lines().filter_map(|line| line.strip_prefix("#   sed ")) {
        let mut sed = Command::new("sh");
        sed.arg("-c").arg(format!("sed {line}")).current_dir(dir.path());
        assert!(sed.status().unwrap().success());
    }
    let made = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    [text, made("one.yaml"), made("script.yaml")]
}

fn documents(text: &str) -> BTreeMap<String, Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    documents.into_iter().map(|document| (document["kind"].as_str().unwrap().to_owned(), document)).collect()
}

/// Returns the command line of the pod with this index.
fn pod_words(job: &Value, index: u64) -> Vec<String> {
    let container = &job["spec"]["template"]["spec"]["containers"][0];
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut words = [strings(&container["command"]), strings(&container["args"])].concat();
    for set in container["env"].as_array().unwrap() {
        let value = match set["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("metadata.annotations['batch.kubernetes.io/job-completion-index']") => index.to_string(),
            Some("metadata.labels['batch.kubernetes.io/controller-uid']") => "uid".to_owned(),
            Some(other) => panic!("{other}"),
            None => set["value"].as_str().unwrap().to_owned(),
        };
        let name = format!("$({})", set["name"].as_str().unwrap());
        words.iter_mut().for_each(|word| *word = word.replace(&name, &value));
    }
    assert!(!words.iter().any(|word| word.contains('$')), "{words:?}");
    words
}

#[test]
fn the_manifest_runs_train_or_a_script() {
    let port = free_port();
    let train = "train --data=/data/texts --steps=10000 --checkpoint-dir=/checkpoints --save-every=500 --keep=3 \
        --resume=auto";
    let ranks = |count: u32, program: &str| -> Vec<String> {
        (0..count).map(|rank| format!("{rank} of {count}: {program}")).collect()
    };
    let script = "python -u script.py --data=/data/texts --checkpoint-dir=/checkpoints";
    let wanted = [ranks(2, train), ranks(1, train), ranks(2, script)];
    for (text, want) in manifests().iter().zip(wanted) {
        let job = &documents(text)["Job"];
        let dir = programs();
        let token = dir.path().join("token");
        fs::write(&token, "a secret for this test alone").unwrap();
        fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let pods = (0..job["spec"]["completions"].as_u64().unwrap()).map(|index| {
            let here = |word: String| match word.split_once('=').map_or(&*word, |(name, _)| name) {
                "--nproc-per-node" => "--nproc-per-node=1".into(),
                "--rdzv-endpoint" => format!("--rdzv-endpoint=localhost:{port}"),
                "--rdzv-token-file" => format!("--rdzv-token-file={}", token.display()),
                _ => word,
            };
            let words: Vec<String> = pod_words(job, index).into_iter().map(here).collect();
            let mut command = Command::new(dir.path().join(&words[0]));
            command.args(&words[1..]).current_dir(dir.path()).env("PYTHON_EXEC", dir.path().join("python"));
            std::thread::spawn(move || rank_lines(command))
        });
        let pods: Vec<_> = pods.collect();
        let lines: Vec<String> = pods.into_iter().flat_map(|pod| pod.join().unwrap()).collect();
        assert_eq!(lines, want);
    }
}

#[test]
fn the_manifest_is_consistent() {
    for (text, pods) in manifests().iter().zip([2, 1, 2]) {
        agrees(text, pods);
    }
}

fn agrees(text: &str, pods: u64) {
    let documents = documents(text);
    let (service, claim, job) = (&documents["Service"], &documents["PersistentVolumeClaim"], &documents["Job"]);
    let template = &job["spec"]["template"];
    let (pod, container) = (&template["spec"], &template["spec"]["containers"][0]);

    // The headless Service selects the pods and is their domain.
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["publishNotReadyAddresses"]),
        (&"None".into(), &true.into())
    );
    assert_eq!(service["spec"]["selector"], template["metadata"]["labels"]);
    assert_eq!(pod["subdomain"], service["metadata"]["name"]);
    assert_eq!(job["spec"]["completionMode"], "Indexed");
    assert_eq!(job["spec"]["completions"], job["spec"]["parallelism"]);

    assert_eq!(job["spec"]["completions"], pods);

    let words = pod_words(job, pods - 1);
    let (args, spec) = understood(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((args.node_rank.map(u64::from), args.rdzv_id.as_deref()), (Some(pods - 1), Some("uid")));
    assert_eq!(u64::from(args.nnodes.1), pods);
    if let Some(meeting) = &spec.rendezvous {
        let first = format!("{}-0.{}", job["metadata"]["name"].as_str().unwrap(), pod["subdomain"].as_str().unwrap());
        assert_eq!(meeting.endpoint.host, first);
        let port = meeting.endpoint.port.map(u64::from);
        assert_eq!(port, service["spec"]["ports"][0]["port"].as_u64());
        assert_eq!(port, container["ports"][0]["containerPort"].as_u64());
    }
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > spec.shutdown_timeout.as_secs());

    // The token is read-only; the checkpoints are on the claim.
    let volume = |name: &str| pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == name).unwrap();
    let mount = |path: &str| {
        container["volumeMounts"].as_array().unwrap().iter().find(|mount| mount["mountPath"] == path).unwrap()
    };
    if let Some(token) = args.rdzv_token_file {
        let token_mount = mount(token.parent().unwrap().to_str().unwrap());
        assert_eq!(token_mount["readOnly"], true);
        let secret = volume(token_mount["name"].as_str().unwrap())["secret"]["secretName"].as_str().unwrap();
        let made =
            format!("kubectl create secret generic {secret} --from-file={}", token.file_name().unwrap().display());
        assert!(text.contains(&made), "{made}");
    }
    let data = spec.args.iter().find_map(|arg| arg.to_str()?.strip_prefix("--data=")).unwrap();
    let data_mount = mount(Path::new(data).parent().unwrap().to_str().unwrap());
    assert_eq!(data_mount["readOnly"], true);
    assert_eq!(volume(data_mount["name"].as_str().unwrap())["persistentVolumeClaim"]["claimName"], "train-data");
    let checkpoints = spec.args.iter().find_map(|arg| arg.to_str()?.strip_prefix("--checkpoint-dir=")).unwrap();
    let claimed = &volume(mount(checkpoints)["name"].as_str().unwrap())["persistentVolumeClaim"]["claimName"];
    assert_eq!(*claimed, claim["metadata"]["name"]);
    assert_eq!(claim["spec"]["accessModes"][0], "ReadWriteMany");
}

#[test]
fn the_unit_leaves_the_launcher_time_to_end() {
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
    // Exit code 2 is a wrong command line, and 143 an end by SIGTERM.
    assert_eq!((seconds("RestartPreventExitStatus"), seconds("SuccessExitStatus")), (2, 143));

    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("systemd-analyze is not here: the unit was not verified");
        return;
    }
    // systemd-analyze checks that program and user exist.
    let dir = tempfile::tempdir().unwrap();
    let unit = dir.path().join("fsdp-launch.service");
    fs::write(&unit, text.replace(words[0], "/bin/true").replace("User=train", "User=root")).unwrap();
    let mut verify = assert_cmd::Command::new("systemd-analyze");
    let (code, _, stderr) = finish(verify.timeout(TIMEOUT).arg("verify").arg(&unit));
    let message: Vec<&str> = stderr.lines().filter(|line| line.contains("fsdp-launch.service")).collect();
    assert!(code == Some(0) && message.is_empty(), "{stderr}");
}
