//! Writers and servers that die, and requests that fail.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fsdp_ckpt::{Checkpoint, Error, TensorSource, latest, save};
use fsdp_core::{DType, Placement};

use crate::saves::names;
use crate::server::{Server, wait_for_request};
use crate::world::{Global, line, save_all, state, world, zoo};
use crate::{ROLE, STALLED, server_root};

const PATIENCE: Duration = Duration::from_secs(90);

/// Saves a checkpoint from two ranks to the URL in the environment, and prints the outcomes.
pub(crate) fn saver() {
    let dir = std::env::var("SAVER_URL").unwrap();
    let large = Global::new("large", DType::U8, &[88 << 20], &[Placement::Shard(0)]);
    let globals = if dir.contains("large") { vec![large] } else { zoo() };
    let saved = world(2, |group| save(Path::new(&dir), group, &state(&globals, &line(2), group.rank())));
    for saved in saved {
        match saved {
            Ok(_) => println!("saved"),
            Err(error) => println!("{error}"),
        }
    }
}

fn start_saver(url: &str) -> Command {
    let mut saver = Command::new(std::env::current_exe().unwrap());
    saver.env(ROLE, "saver").env("SAVER_URL", url).stdout(Stdio::piped());
    saver
}

/// Returns the output of a process that ends within [`PATIENCE`].
fn output(mut process: Child) -> Output {
    let started = Instant::now();
    while process.try_wait().unwrap().is_none() {
        if started.elapsed() > PATIENCE {
            process.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    process.wait_with_output().unwrap()
}

pub(crate) fn killed_writer_leaves_an_unfinished_checkpoint() {
    let run = Path::new("s3://bucket/killed");
    let (first, second) = (run.join("step-00000001"), run.join("step-00000002"));
    save_all(&first, &zoo(), &line(2));
    let mut saver = start_saver(second.to_str().unwrap()).spawn().unwrap();
    wait_for_request(&server_root(), STALLED);
    saver.kill().unwrap();
    saver.wait().unwrap();

    let left = names("killed/step-00000002");
    assert_eq!(left.len(), 2, "{left:?}");
    let error = Checkpoint::open(&second).unwrap_err();
    assert!(matches!(&error, Error::Incomplete { path } if *path == second), "{error}");
    assert_eq!(latest(run).unwrap(), Some(first.clone()));
    Checkpoint::open(&first).unwrap().verify().unwrap();

    // The next save to the same path removes the files.
    save_all(&second, &zoo(), &line(3));
    Checkpoint::open(&second).unwrap().verify().unwrap();
    let now = names("killed/step-00000002");
    assert!(now.len() == 4 && !now.iter().any(|name| left.contains(name)), "{now:?}");
    assert_eq!(latest(run).unwrap(), Some(second));
}

pub(crate) fn server_dies_during_an_upload() {
    let root = tempfile::tempdir().unwrap();
    let mut server = Server::start(root.path(), "partNumber=3");
    let mut saver = start_saver("s3://bucket/large/step-1");
    let saver = server.address_for(&mut saver).env("FSDP_STORE_TIMEOUT_S", "3").spawn().unwrap();
    server.wait_for_request("partNumber=3");
    server.kill();
    let printed = String::from_utf8(output(saver).stdout).unwrap();
    assert_eq!(printed.lines().count(), 2, "{printed}");
    for line in printed.lines() {
        assert!(line.contains("failed to write its shards: can't write s3://bucket/large/step-1/shard-0000"), "{line}");
        assert!(line.contains("AWS_ENDPOINT") || line.contains("the connection broke off"), "{line}");
    }
}

/// Returns the error of `fsdp-ckpt inspect` with this environment.
fn inspect(url: &str, env: &[(&str, &str)]) -> String {
    let mut inspect = Command::new(env!("CARGO_BIN_EXE_fsdp-ckpt"));
    inspect.args(["inspect", url]).env("FSDP_STORE_TIMEOUT_S", "3").stdout(Stdio::null()).stderr(Stdio::piped());
    for (name, value) in env {
        match *value {
            "" => inspect.env_remove(name),
            value => inspect.env(name, value),
        };
    }
    let output = output(inspect.spawn().unwrap());
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    message
}

/// A URL, the environment, and parts of the message.
type Case = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

pub(crate) fn errors_name_the_fix() {
    const URL: &str = "s3://bucket/errors/step-1";
    save_all(Path::new(URL), &zoo(), &line(1));
    let cases: [Case; 7] = [
        (
            URL,
            &[("AWS_SECRET_ACCESS_KEY", "wrong")],
            &["can't list s3://bucket/errors/step-1: access denied", "access denied", "AWS_ACCESS_KEY_ID"],
        ),
        (URL, &[("AWS_ACCESS_KEY_ID", "nobody")], &["access denied"]),
        (URL, &[("AWS_ENDPOINT", "http://127.0.0.1:1")], &[URL, "AWS_ENDPOINT", "the network"]),
        (URL, &[("AWS_ALLOW_HTTP", "")], &["AWS_ALLOW_HTTP=true"]),
        (URL, &[("FSDP_STORE_TIMEOUT_S", "soon")], &["FSDP_STORE_TIMEOUT_S=\"soon\" is not a number"]),
        ("s3://no-such-bucket/step-1", &[], &["no-such-bucket", "there is no such bucket"]),
        ("s3://bucket/errors/step-2", &[], &["s3://bucket/errors/step-2 has no checkpoint"]),
    ];
    for (url, env, expected) in cases {
        let message = inspect(url, env);
        for part in expected {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    for url in ["s3://", "s3:///key", "ftp://host/run", "s3://bucket/a//b"] {
        let message = inspect(url, &[]);
        assert!(message.contains(url), "{message}");
    }
}

pub(crate) fn metadata_address_can_be_turned_off() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    for (url, variables, settings, theirs) in [
        (
            "s3://bucket/run/step-1",
            &["AWS_METADATA_ENDPOINT"][..],
            &[("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")][..],
            Some(("AWS_EC2_METADATA_DISABLED", "true")),
        ),
        (
            "gs://bucket/run/step-1",
            &["GCE_METADATA_HOST", "GCE_METADATA_IP"],
            &[("GOOGLE_APPLICATION_CREDENTIALS", "")],
            Some(("NO_GCE_CHECK", "true")),
        ),
        ("az://container/run/step-1", &["IDENTITY_ENDPOINT"], &[("AZURE_STORAGE_ACCOUNT_NAME", "account")], None),
    ] {
        let (address, asked) = deaf_server();
        let endpoint = if url.starts_with("gs") { address.clone() } else { format!("http://{address}") };
        let mut env: Vec<(&str, &str)> = variables.iter().map(|name| (*name, endpoint.as_str())).collect();
        env.extend(settings);
        env.push(("HOME", home));
        for off in [Some(("FSDP_STORE_METADATA", "off")), theirs].into_iter().flatten() {
            let message = inspect(url, &[&env[..], &[off]].concat());
            assert!(message.contains("no credentials") && message.contains("is turned off"), "{message}");
            assert_eq!(asked.load(Ordering::SeqCst), 0, "{url} {off:?}");
        }
        let message = inspect(url, &env);
        assert!(
            message.contains("no credentials") && message.contains("metadata address does not answer"),
            "{message}"
        );
        assert!(asked.load(Ordering::SeqCst) > 0, "{url}");
    }
}

/// Starts a server that closes all connections. Returns its address and a counter of connections.
fn deaf_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    std::thread::spawn(move || {
        for call in listener.incoming() {
            counted.fetch_add(1, Ordering::SeqCst);
            drop(call);
        }
    });
    (address, calls)
}

pub(crate) fn other_clouds_name_missing_settings() {
    // Neither case uses the network.
    let message = inspect("gs://bucket/run/step-1", &[("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")]);
    assert!(message.contains("gs://bucket") && message.contains("GOOGLE_APPLICATION_CREDENTIALS"), "{message}");
    let message = inspect("az://container/run/step-1", &[("AZURE_STORAGE_ACCOUNT_NAME", "")]);
    assert!(message.contains("az://container") && message.contains("AZURE_STORAGE_ACCOUNT_NAME"), "{message}");
}
