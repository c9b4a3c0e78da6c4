//! A server on this host that answers as the Hugging Face hub does, with faults that a test chooses.
//!
//! Weights are behind a redirect to a second server (the CDN), with their SHA-256 as `X-Linked-Etag`. Other files are
//! sent directly. `huggingface_hub` 2.4 downloads from it, too.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

/// Commit of all repositories.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Names that revisions of all repositories have.
const REVISIONS: [&str; 3] = ["main", "v1.0", COMMIT];
/// Time for which a stalled answer keeps the connection open.
const STALL: Duration = Duration::from_secs(60);

/// Request of a client.
#[derive(Clone, Debug)]
pub struct Request {
    /// `GET` or `HEAD`.
    pub method: String,
    /// Path with the query.
    pub path: String,
    /// Headers by their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// Whether the client asks the CDN.
    pub is_cdn: bool,
}

/// Answer of the server to a request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Answers as the hub does.
    Normal,
    /// Answers with a status and headers.
    Status(u16, Vec<(&'static str, String)>),
    /// Cuts the connection after so many bytes of the body.
    Cut(usize),
    /// Sends so many bytes of the body, and then nothing.
    Stall(usize),
    /// Sends the right number of wrong bytes.
    Corrupt,
    /// Sends the whole file, whatever range was asked for.
    IgnoreRange,
    /// The same, but cuts the connection after so many bytes.
    CutWhole(usize),
    /// Closes the connection without an answer.
    Close,
}

type Script = Box<dyn FnMut(&Request) -> Answer + Send>;

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    script: Mutex<Script>,
    requests: Mutex<Vec<Request>>,
    cdn: SocketAddr,
}

/// Running server. It ends with the test's process.
pub struct Hub {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Hub {
    /// Serves files under names such as `org/name/config.json` and `datasets/org/texts/data/train.txt`.
    ///
    /// # Panics
    /// If the host has no free port.
    #[allow(clippy::unwrap_used)]
    pub fn start<'a>(files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> Self {
        let [hub, cdn] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let shared = Arc::new(Shared {
            files: files.into_iter().map(|(path, bytes)| (path.to_owned(), bytes)).collect(),
            script: Mutex::new(Box::new(|_| Answer::Normal)),
            requests: Mutex::default(),
            cdn: cdn.local_addr().unwrap(),
        });
        let address = hub.local_addr().unwrap();
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let shared = shared.clone();
            thread::spawn(move || {
                for connection in listener.incoming().flatten() {
                    let shared = shared.clone();
                    // A client may leave at any time.
                    thread::spawn(move || _ = shared.serve(connection, is_cdn));
                }
            });
        }
        Hub { address, shared }
    }

    /// Chooses the answer to each further request.
    pub fn script(&self, script: impl FnMut(&Request) -> Answer + Send + 'static) {
        *self.shared.script.lock() = Box::new(script);
    }

    /// Returns the URL of the hub.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns host and port.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Returns the requests so far, and forgets them.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut *self.shared.requests.lock())
    }
}

impl Shared {
    fn serve(&self, mut connection: TcpStream, is_cdn: bool) -> std::io::Result<()> {
        let mut lines = BufReader::new(connection.try_clone()?).lines();
        let first = lines.next().unwrap_or(Ok(String::new()))?;
        let mut words = first.split(' ').map(String::from);
        let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let request = Request { method, path, headers, is_cdn };
        self.requests.lock().push(request.clone());
        let answer = (self.script.lock())(&request);
        let (mut status, mut headers, mut body) = match &answer {
            Answer::Close => return Ok(()),
            Answer::Status(status, headers) => (*status, headers.clone(), b"refused".to_vec()),
            _ if is_cdn => self.blob(&request),
            _ => self.answer(&request),
        };
        let start = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        let start = start.and_then(|start| start.parse::<usize>().ok()).filter(|start| status == 200 && *start > 0);
        if let (Some(start), false) = (start, matches!(answer, Answer::IgnoreRange | Answer::CutWhole(_))) {
            let size = body.len();
            if start >= size {
                (status, body) = (416, vec![]);
            } else {
                headers.push(("Content-Range", format!("bytes {start}-{}/{size}", size - 1)));
                (status, body) = (206, body.split_off(start));
            }
        }
        if let Answer::Corrupt = answer {
            body.iter_mut().for_each(|byte| *byte ^= 1);
        }
        let mut head = format!("HTTP/1.1 {status} Answer\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        connection.write_all(format!("{head}\r\n").as_bytes())?;
        if request.method == "HEAD" {
            return Ok(());
        }
        match answer {
            Answer::Cut(count) | Answer::CutWhole(count) => connection.write_all(&body[..count.min(body.len())]),
            Answer::Stall(count) => {
                connection.write_all(&body[..count.min(body.len())])?;
                connection.flush()?;
                thread::sleep(STALL);
                Ok(())
            }
            _ => connection.write_all(&body),
        }
    }

    /// Answers a request to the hub.
    fn answer(&self, request: &Request) -> (u16, Vec<(&'static str, String)>, Vec<u8>) {
        let missing = |code: &str| (404, vec![("X-Error-Code", code.to_owned())], vec![]);
        let path = request
            .path
            .split('?')
            .next()
            .unwrap_or_default()
            .trim_start_matches('/')
            .replace("%2F", "/")
            .replace("%20", " ");
        if let Some(repo) = path.strip_prefix("api/models/").or_else(|| path.strip_prefix("api/")) {
            let Some((repo, revision)) = repo.split_once("/revision/") else { return missing("RepoNotFound") };
            let prefix = format!("{repo}/");
            let files = self.files.keys().filter_map(|path| path.strip_prefix(&prefix));
            let siblings: Vec<_> = files.map(|file| serde_json::json!({ "rfilename": file })).collect();
            if siblings.is_empty() {
                return missing("RepoNotFound");
            }
            if !REVISIONS.contains(&revision) {
                return missing("RevisionNotFound");
            }
            let info = serde_json::json!({ "id": repo, "sha": COMMIT, "siblings": siblings, "private": false });
            return (200, vec![("Content-Type", "application/json".into())], info.to_string().into_bytes());
        }
        let Some((repo, rest)) = path.split_once("/resolve/") else { return missing("RepoNotFound") };
        if let Some(name) = repo.strip_prefix("old/") {
            // A renamed repository.
            let location = format!("/org/{name}/resolve/{rest}");
            return (307, vec![("Location", location)], vec![]);
        }
        if !self.files.keys().any(|path| path.starts_with(&format!("{repo}/"))) {
            return missing("RepoNotFound");
        }
        let revision = REVISIONS.iter().find(|revision| rest.starts_with(&format!("{revision}/")));
        let Some(revision) = revision else { return missing("RevisionNotFound") };
        let Some(bytes) = self.files.get(&format!("{repo}/{}", &rest[revision.len() + 1..])) else {
            return missing("EntryNotFound");
        };
        let hash = sha256(bytes);
        let commit = ("X-Repo-Commit", COMMIT.to_owned());
        if !path.ends_with(".safetensors") {
            return (200, vec![commit, ("ETag", format!("\"{}\"", &hash[..40]))], bytes.clone());
        }
        let headers = vec![
            commit,
            ("X-Linked-Etag", format!("\"{hash}\"")),
            ("X-Linked-Size", bytes.len().to_string()),
            ("Location", format!("http://{}/{hash}?signature=1", self.cdn)),
        ];
        (302, headers, vec![])
    }

    /// Answers a request to the CDN.
    fn blob(&self, request: &Request) -> (u16, Vec<(&'static str, String)>, Vec<u8>) {
        let found = self.files.values().find(|bytes| request.path.contains(&sha256(bytes)));
        found.map_or((404, vec![], vec![]), |bytes| (200, vec![], bytes.clone()))
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
