//! An S3 server process that logs every request.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::Body;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

use crate::ROLE;

/// A running server. Dropping it stops the server.
pub(crate) struct Server {
    process: Child,
    root: PathBuf,
    endpoint: String,
}

impl Server {
    /// Starts a server with a bucket `bucket`. It never answers the first request that contains `stall`.
    pub(crate) fn start(root: &Path, stall: &str) -> Self {
        std::fs::create_dir_all(root.join("objects/bucket")).unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, "server")
            .env("SERVER_ROOT", root)
            .env("SERVER_STALL", stall)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let endpoint = format!("http://127.0.0.1:{}", port.trim().parse::<u16>().unwrap());
        Server { process, root: root.to_path_buf(), endpoint }
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sets the environment with which a program finds the server.
    pub(crate) fn address_for<'a>(&self, program: &'a mut Command) -> &'a mut Command {
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
            program.env_remove(name);
        }
        let settings = [("ENDPOINT", &*self.endpoint), ("ALLOW_HTTP", "true"), ("REGION", "us-east-1")];
        program
            .envs(settings.map(|(name, value)| (format!("AWS_{name}"), value)))
            .env("AWS_ACCESS_KEY_ID", "key")
            .env("AWS_SECRET_ACCESS_KEY", "secret")
            .env("NO_PROXY", "*")
    }

    pub(crate) fn wait_for_request(&self, part: &str) {
        wait_for_request(&self.root, part);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the requests so far that contain `part`: method, path with query, range.
pub(crate) fn requests(root: &Path, part: &str) -> Vec<String> {
    let all = std::fs::read_to_string(root.join("requests")).unwrap_or_default();
    all.lines().filter(|line| line.contains(part)).map(str::to_string).collect()
}

pub(crate) fn wait_for_request(root: &Path, part: &str) {
    let started = Instant::now();
    while requests(root, part).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(60), "nobody asked for {part}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Prints the port and serves until the parent process ends.
pub(crate) fn serve() -> ! {
    let root = crate::server_root();
    let stall = std::env::var("SERVER_STALL").unwrap();
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let log = std::fs::File::options().create(true).append(true).open(root.join("requests")).unwrap();
    let log = Arc::new(Mutex::new(log));
    let stalled = Arc::new(AtomicBool::new(false));
    let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.join("objects")).unwrap());
    service.set_auth(SimpleAuth::from_single("key", "secret"));
    let service = service.build();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap().port());
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let (service, log, stall, stalled) =
                (service.clone(), Arc::clone(&log), stall.clone(), Arc::clone(&stalled));
            let answer = service_fn(move |request: hyper::Request<Incoming>| {
                let range = request.headers().get("range").map_or("", |range| range.to_str().unwrap());
                let line = format!("{} {} {range}\n", request.method(), request.uri());
                log.lock().unwrap().write_all(line.as_bytes()).unwrap();
                let stalls = line.contains(&stall) && !stalled.swap(true, Ordering::SeqCst);
                let service = service.clone();
                async move {
                    if stalls {
                        std::future::pending::<()>().await;
                    }
                    service.call(request.map(Body::from)).await
                }
            });
            tokio::spawn(async move {
                let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), answer).await;
            });
        }
    })
}
