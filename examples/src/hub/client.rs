//! Requests to the hub. Those that fail for a time are repeated.

use std::fmt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use hf_hub::Cache;
use iri_string::types::{UriReferenceStr, UriStr};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::name::{Kind, Name};
use super::progress::Activity;

const ENDPOINT: &str = "https://huggingface.co";
/// Failures in a row, without a byte between them, after which a request is given up.
const MAX_FAILURES: u32 = 5;
/// Pause after the first failure. It doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait that a server may ask for. The hub counts requests over five minutes.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(330);
const MAX_REDIRECTS: usize = 10;
/// Seconds without a byte after which a connection counts as cut (`HF_HUB_DOWNLOAD_TIMEOUT`).
const READ_TIMEOUT: f64 = 10.;
/// Longest text of a server's answer in an error.
const MAX_QUOTE: u64 = 300;

/// Characters that stay as they are within one step of a URL's path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Connection to a hub, with the settings of all Hugging Face libraries.
pub struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pub(super) cache: Cache,
    /// The variable that forbids the network, if one does.
    pub(super) offline: Option<&'static str>,
    first_pause: Duration,
}

impl Client {
    /// Reads the environment: `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`,
    /// `HF_HUB_DOWNLOAD_TIMEOUT` and `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// Returns an error that names the variable with a wrong value.
    pub fn from_env() -> Result<Self> {
        Self::new(|name| std::env::var(name).ok())
    }

    /// Reads the same settings by `var`.
    ///
    /// # Errors
    /// Returns an error that names the variable with a wrong value.
    pub fn new(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let is_on = |name: &str| {
            var(name).is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
        };
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        ensure!(
            ["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)),
            "HF_ENDPOINT={endpoint}: expected a URL such as {ENDPOINT}"
        );
        let home = var("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(var("XDG_CACHE_HOME")?).join("huggingface")))
            .or_else(|| Some(PathBuf::from(var("HOME")?).join(".cache/huggingface")));
        let cache = var("HF_HUB_CACHE").or_else(|| var("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from);
        let cache = cache
            .or_else(|| Some(home.as_ref()?.join("hub")))
            .context("no directory for downloads: set HF_HOME, because HOME is not set")?;
        let token_file = var("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home?.join("token")));
        let token = match is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            true => None,
            false => var("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file?).ok()),
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        ensure!(
            token.iter().flat_map(|token| token.bytes()).all(|byte| byte.is_ascii_graphic()),
            "HF_TOKEN, or the token file, holds characters that no token has: expected one line such as hf_..."
        );
        let seconds = match var("HF_HUB_DOWNLOAD_TIMEOUT") {
            Some(text) => {
                text.trim().parse().ok().filter(|seconds| (0.1..=86400.).contains(seconds)).with_context(|| {
                    format!("HF_HUB_DOWNLOAD_TIMEOUT={text}: expected a number of seconds, such as {READ_TIMEOUT}")
                })?
            }
            None => READ_TIMEOUT,
        };
        let timeout = Some(Duration::from_secs_f64(seconds));
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("candle-fsdp/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(timeout)
            .timeout_connect(timeout)
            .timeout_per_read(timeout)
            .timeout_per_write(timeout);
        if let Some(file) = var("SSL_CERT_FILE") {
            let roots = certificates(&file).with_context(|| format!("can't read SSL_CERT_FILE {file}"))?;
            let roots = RootCerts::Specific(roots.into());
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        let offline = if var("HF_HUB_OFFLINE").is_some() { "HF_HUB_OFFLINE" } else { "TRANSFORMERS_OFFLINE" };
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint,
            token,
            cache: Cache::new(cache),
            offline: Some(offline).filter(|name| is_on(name)),
            first_pause: FIRST_PAUSE,
        })
    }

    /// Makes the error for something that is not in the cache while the network is forbidden.
    pub(super) fn offline_error(&self, missing: impl std::fmt::Display) -> Error {
        anyhow!(
            "{} is set, and the cache {} has no {missing}: run once without it, or copy the cache from a host with a network",
            self.offline.unwrap_or("HF_HUB_OFFLINE"),
            self.cache.path().display()
        )
    }

    /// Sets the pause after the first failure, for tests.
    #[must_use]
    pub fn first_pause(mut self, pause: Duration) -> Self {
        self.first_pause = pause;
        self
    }

    /// Returns the hub's host, for messages.
    pub(super) fn host(&self) -> &str {
        origin(&self.endpoint).split_once("://").map_or("", |(_, host)| host)
    }

    /// Returns the address of a file.
    pub(super) fn file_url(&self, name: &Name, revision: &str, file: &str) -> String {
        let folder = match name.kind {
            Kind::Model => "",
            Kind::Dataset => "datasets/",
        };
        let steps: Vec<String> = file.split('/').map(encoded).collect();
        format!("{}/{folder}{}/resolve/{}/{}", self.endpoint, name.repo, encoded(revision), steps.join("/"))
    }

    /// Returns the address of the description of a repository's revision.
    pub(super) fn info_url(&self, name: &Name) -> String {
        format!("{}/api/{}s/{}/revision/{}", self.endpoint, name.kind, name.repo, encoded(&name.revision))
    }

    /// Repeats `attempt` until it succeeds, fails for good, or fails too often. An attempt that sets its argument has
    /// received something, and the count starts again.
    pub(super) fn retrying<T>(
        &self,
        activity: &Activity,
        mut attempt: impl FnMut(&mut bool) -> Result<T, Failure>,
    ) -> Result<T> {
        let mut failures = 0;
        let mut pause = self.first_pause;
        loop {
            let mut has_received = false;
            let (error, retry_after) = match attempt(&mut has_received) {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient(error, retry_after)) => (error, retry_after),
            };
            if has_received {
                (failures, pause) = (0, self.first_pause);
            }
            failures += 1;
            if failures >= MAX_FAILURES {
                return Err(error.context(format!("failed {MAX_FAILURES} times in a row")));
            }
            let asked = retry_after.unwrap_or_default();
            if asked > MAX_RETRY_AFTER {
                return Err(error.context(format!("the server asks for a pause of {} s", asked.as_secs())));
            }
            activity.note(format!("{error:#}"));
            thread::sleep(asked.max(pause + jitter(pause)));
            pause *= 2;
        }
    }

    /// Requests the headers of a file. Follows redirects only within the hub, whose answer describes the file.
    pub(super) fn head(&self, url: &str, item: &Item) -> Result<Response<Body>, Failure> {
        self.send(true, url, 0, item)
    }

    /// Requests a file or a description, from byte `start`.
    pub(super) fn get(&self, url: &str, start: u64, item: &Item) -> Result<Response<Body>, Failure> {
        self.send(false, url, start, item)
    }

    fn send(&self, head: bool, url: &str, start: u64, item: &Item) -> Result<Response<Body>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut request = if head { self.agent.head(&url) } else { self.agent.get(&url) };
            if let Some(token) = self.token.as_ref().filter(|_| origin(&url) == origin(&self.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header("range", format!("bytes={start}-"));
            }
            let answer = request.call().map_err(|error| self.unreachable(&url, &error, item))?;
            let location = header(answer.headers(), "location").filter(|_| answer.status().is_redirection());
            let Some(location) = location else { return self.checked(answer, &url, item) };
            let next = redirected(&url, location).ok_or_else(|| {
                let host = origin(&url);
                Failure::Final(anyhow!("{host} redirects {item} to {location:?}, expected an address of http or https"))
            })?;
            if head && origin(&next) != origin(&url) {
                return Ok(answer);
            }
            url = next;
        }
        Err(Failure::Final(anyhow!("{} redirects {item} more than {MAX_REDIRECTS} times", self.host())))
    }

    /// Explains a connection that failed.
    fn unreachable(&self, url: &str, error: &ureq::Error, item: &Item) -> Failure {
        let host = origin(url);
        let advice = "check the network and HTTPS_PROXY, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use only \
                      files that were downloaded before";
        let explained = anyhow!("can't get {item} from {host}: {error}; {advice}");
        match error {
            ureq::Error::Io(_)
            | ureq::Error::Timeout(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::Protocol(_) => Failure::Transient(explained, None),
            _ => Failure::Final(explained),
        }
    }

    /// Returns the answer, or an error that explains its status.
    fn checked(&self, answer: Response<Body>, url: &str, item: &Item) -> Result<Response<Body>, Failure> {
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            return Ok(answer);
        }
        let (host, kind, repo) = (origin(url), item.name.kind, &item.name.repo);
        let revision = &item.name.revision;
        let page = match kind {
            Kind::Model => format!("{}/{repo}", self.endpoint),
            Kind::Dataset => format!("{}/datasets/{repo}", self.endpoint),
        };
        let code = header(answer.headers(), "x-error-code").unwrap_or_default().to_owned();
        let sent = match self.token {
            Some(_) => "The token in HF_TOKEN or in the token file was sent",
            None => "No token was sent: set HF_TOKEN to one of the account",
        };
        let error = match (status, code.as_str()) {
            (401 | 403, "GatedRepo") => anyhow!(
                "{host} refuses {item} ({status}): the repository is gated. Accept its licence at {page} with your \
                 account, and set HF_TOKEN to a token of it. {sent}"
            ),
            (401, _) => anyhow!(
                "{host} refuses {item} (401): the {kind} does not exist, or is private, or the token is invalid. Check \
                 the name; nothing on this host has it. {sent}"
            ),
            (403, _) => anyhow!(
                "{host} refuses {item} (403): the account may not read it. Ask for access at {page}, accept its \
                 licence, and give the token the right to read it. {sent}"
            ),
            (404, "RevisionNotFound") => anyhow!(
                "{host} has no revision `{revision}` of {repo} (404): pass a branch, a tag or a commit after `@`; \
                 {page} lists them"
            ),
            (404, "RepoNotFound") => anyhow!(
                "{host} has no {kind} {repo} (404), and neither does this host: check the name. If it is private, set \
                 HF_TOKEN. {sent}"
            ),
            (404, _) => match item.file {
                Some(file) => anyhow!("{host} has no file `{file}` in {} (404): see {page}", item.name),
                None => anyhow!("{host} has no {kind} {} (404): check the name and the revision", item.name),
            },
            (429, _) => {
                let error = anyhow!(
                    "{host} limits requests, and refuses {item} (429): try again later, or set HF_TOKEN for more"
                );
                return Err(Failure::Transient(error, retry_after(answer.headers())));
            }
            (408 | 500..=599, _) => {
                let error = anyhow!(
                    "{host} answers {status} for {item}: try again later, or set HF_ENDPOINT to a mirror{}",
                    said(answer.headers())
                );
                return Err(Failure::Transient(error, retry_after(answer.headers())));
            }
            _ => {
                let said = said(answer.headers());
                let body = answer.into_body().into_with_config().limit(MAX_QUOTE).read_to_string().unwrap_or_default();
                anyhow!("{host} answers {status} for {item}: {}{said}", body.trim().escape_debug())
            }
        };
        Err(Failure::Final(error))
    }
}

/// Requested object, for messages.
pub(super) struct Item<'a> {
    pub(super) name: &'a Name,
    pub(super) file: Option<&'a str>,
}

impl fmt::Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.file {
            Some(file) => write!(f, "`{file}` of {}", self.name),
            None => write!(f, "{} {}", self.name.kind, self.name),
        }
    }
}

/// Failed attempt.
#[derive(Debug)]
pub(super) enum Failure {
    /// Another attempt may succeed, after the time that the server asks for.
    Transient(Error, Option<Duration>),
    /// Another attempt would fail, too.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Final(error)
    }
}

/// Returns a header as text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Returns the address of a redirect, which may be relative to `url` (RFC 3986).
fn redirected(url: &str, location: &str) -> Option<String> {
    let is_http = |address: &str| {
        let is = |scheme: &str| address.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
        is("http://") || is("https://")
    };
    // Real addresses may have characters that the RFC excludes, such as `|`.
    if is_http(location) {
        return Some(location.to_owned());
    }
    let base = UriStr::new(url).ok()?.to_absolute();
    let next = UriReferenceStr::new(location).ok()?.resolve_against(base).to_string();
    Some(next).filter(|next| is_http(next))
}

/// Returns scheme, host and port of a URL.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find(['/', '?', '#']).map_or(url, |end| &url[..host + end])
}

fn encoded(step: &str) -> String {
    utf8_percent_encode(step, PLAIN).to_string()
}

/// Returns the pause that the server asks for, in seconds or until a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = header(headers, "retry-after")?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    SystemTime::from(date).duration_since(SystemTime::now()).ok()
}

/// Quotes the hub's own explanation.
fn said(headers: &HeaderMap) -> String {
    header(headers, "x-error-message").map_or(String::new(), |text| format!(" (\"{}\")", text.escape_debug()))
}

/// Returns up to half of `pause`, so that hosts do not repeat their requests all at once.
fn jitter(pause: Duration) -> Duration {
    let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    pause / 2 * (nanos / 1000 % 100) / 100
}

fn certificates(file: &str) -> Result<Vec<Certificate<'static>>> {
    let text = std::fs::read(file)?;
    let mut roots = vec![];
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item? {
            roots.push(certificate);
        }
    }
    if roots.is_empty() {
        bail!("it holds no certificate: expected certificates in the PEM format");
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(vars: &[(&str, &str)]) -> Result<Client> {
        let of = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        Client::new(of)
    }

    #[test]
    fn settings_are_those_of_huggingface_hub() {
        let cache = |vars: &[(&str, &str)]| client(vars).unwrap().cache.path().display().to_string();
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/hf")]), "/hf/hub");
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), "/c");
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = ("HF_HOME", dir.path().to_str().unwrap());
        let token = |more: &[(&str, &str)]| client(&[&[home], more].concat()).unwrap().token;
        assert_eq!(token(&[]).unwrap(), "hf_file");
        assert_eq!(token(&[("HF_TOKEN", "hf_env")]).unwrap(), "hf_env");
        assert_eq!(token(&[("HF_TOKEN", "")]).unwrap(), "hf_file");
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HF_TOKEN_PATH", "/nowhere")]), None);
        assert!(client(&[home, ("HF_HUB_OFFLINE", "1")]).unwrap().offline == Some("HF_HUB_OFFLINE"));
        assert!(client(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().offline.is_none());
        // As in huggingface_hub, the older name counts without the newer one.
        assert!(client(&[home, ("TRANSFORMERS_OFFLINE", "1")]).unwrap().offline == Some("TRANSFORMERS_OFFLINE"));
        assert!(client(&[home, ("HF_HUB_OFFLINE", "0"), ("TRANSFORMERS_OFFLINE", "1")]).unwrap().offline.is_none());
    }

    #[test]
    fn wrong_settings_are_named() {
        let home = ("HF_HOME", "/nowhere");
        for (vars, part) in [
            (&[][..], "set HF_HOME"),
            (&[home, ("HF_ENDPOINT", "mirror.example")], "HF_ENDPOINT=mirror.example: expected a URL"),
            (&[home, ("HF_TOKEN", "hf_a\u{fc}b")], "HF_TOKEN"),
            (&[home, ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")], "HF_HUB_DOWNLOAD_TIMEOUT=soon"),
            (&[home, ("SSL_CERT_FILE", "/missing.pem")], "SSL_CERT_FILE /missing.pem"),
        ] {
            let error = format!("{:#}", client(vars).err().unwrap());
            assert!(error.contains(part) && !error.contains("hf_a"), "{error}");
        }
    }

    #[test]
    fn urls_are_encoded() {
        let client = client(&[("HF_HOME", "/h"), ("HF_ENDPOINT", "http://m:1/hf/")]).unwrap();
        let name = Name::parse("a/b@refs/pr/1:x y/#?.txt", Kind::Dataset).unwrap();
        let url = client.file_url(&name, &name.revision, name.file.as_deref().unwrap());
        assert_eq!(url, "http://m:1/hf/datasets/a/b/resolve/refs%2Fpr%2F1/x%20y/%23%3F.txt");
        assert_eq!(client.info_url(&name), "http://m:1/hf/api/datasets/a/b/revision/refs%2Fpr%2F1");
        assert_eq!((client.host(), origin("https://a.b?c")), ("m:1", "https://a.b"));
    }

    /// The examples of RFC 3986, section 5.4, with the scheme of the web.
    #[test]
    fn redirects_are_resolved_against_the_address() {
        for (location, expected) in [
            ("http://g/h", Some("http://g/h")),
            ("HTTPS://g/a|b", Some("HTTPS://g/a|b")),
            ("g", Some("http://a:1/b/c/g")),
            ("./g", Some("http://a:1/b/c/g")),
            ("g/", Some("http://a:1/b/c/g/")),
            ("/g", Some("http://a:1/g")),
            ("//g", Some("http://g")),
            ("//g:2/h?y", Some("http://g:2/h?y")),
            ("?y", Some("http://a:1/b/c/d;p?y")),
            ("g?y", Some("http://a:1/b/c/g?y")),
            (";x", Some("http://a:1/b/c/;x")),
            ("", Some("http://a:1/b/c/d;p?q")),
            (".", Some("http://a:1/b/c/")),
            ("..", Some("http://a:1/b/")),
            ("../g", Some("http://a:1/b/g")),
            ("../../g", Some("http://a:1/g")),
            ("../../../g", Some("http://a:1/g")),
            ("g;x=1/../y", Some("http://a:1/b/c/y")),
            ("g?y/./x", Some("http://a:1/b/c/g?y/./x")),
            ("a b", None),
            ("file:///etc/passwd", None),
            ("ftp://g/h", None),
        ] {
            assert_eq!(redirected("http://a:1/b/c/d;p?q", location).as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let of =
            |text: &str| retry_after(&HeaderMap::from_iter([("retry-after".parse().unwrap(), text.parse().unwrap())]));
        assert_eq!(of("7"), Some(Duration::from_secs(7)));
        assert_eq!(of("Wed, 21 Oct 2015 07:28:00 GMT"), None);
        assert!(of("Wed, 21 Oct 2099 07:28:00 GMT").unwrap() > MAX_RETRY_AFTER);
        assert_eq!(of("later"), None);
    }
}
