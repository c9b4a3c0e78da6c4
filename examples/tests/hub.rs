//! Downloads from a server that answers as the Hugging Face hub does, with its errors and with cut connections.
#![cfg(feature = "hub")]
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fsdp_core::ProcessGroup;
use fsdp_core::process_group::local;
use fsdp_test_support::hub::{Answer, COMMIT, Hub};
use fsdp_train::hub::{Client, Fetched, Kind, Name, Request, Wanted, fetch};
use serde_json::json;

const MODEL: Wanted = Wanted::Model { weights: true };

/// Bytes without a pattern.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..count).map(|_| next()).collect()
}

/// A hub with a model in one file, a model in shards, one in another format, and a dataset.
fn hub() -> Hub {
    let index = json!({ "weight_map": { "a": "model-1.safetensors", "b": "model-2.safetensors" } }).to_string();
    let outside = json!({ "weight_map": { "a": "../../../a.safetensors" } }).to_string();
    Hub::start([
        ("org/name/config.json", b"{}".to_vec()),
        ("org/name/tokenizer.json", b"{\"a\": 1}".to_vec()),
        ("org/name/chat_template.jinja", b"template".to_vec()),
        ("org/name/modules.json", b"[]".to_vec()),
        ("org/name/1_Pooling/config.json", b"{ }".to_vec()),
        ("org/name/model.safetensors", noise(300_000)),
        ("org/name/model.fp16.safetensors", noise(100)),
        ("org/name/pytorch_model.bin", noise(100)),
        ("org/name/model.gguf", noise(100)),
        ("org/name/README.md", b"read me".to_vec()),
        ("org/name/onnx/model.onnx", noise(100)),
        ("org/shards/config.json", b"{}".to_vec()),
        ("org/shards/model.safetensors.index.json", index.into_bytes()),
        ("org/shards/model-1.safetensors", noise(1000)),
        ("org/shards/model-2.safetensors", noise(2000)),
        ("org/shards/model-3.safetensors", noise(3000)),
        ("org/pickled/config.json", b"{}".to_vec()),
        ("org/pickled/pytorch_model.bin", noise(100)),
        ("org/outside/config.json", b"{}".to_vec()),
        ("org/outside/model.safetensors.index.json", outside.into_bytes()),
        ("org/lists/README.md", b"no model".to_vec()),
        ("org/adapter/adapter_config.json", b"{}".to_vec()),
        ("org/adapter/adapter_model.safetensors", noise(500)),
        ("datasets/org/texts/data/train 1.jsonl", b"{}\n".to_vec()),
        ("datasets/org/texts/data/train 2.jsonl", b"{ }\n".to_vec()),
        ("datasets/org/texts/data/more/train 3.jsonl", b"{  }\n".to_vec()),
    ])
}

fn client(hub: &Hub, home: &Path, more: &[(&str, &str)]) -> Client {
    let endpoint = hub.endpoint();
    let home = home.display().to_string();
    let own = [("HF_ENDPOINT", endpoint.as_str()), ("HF_HOME", home.as_str()), ("HF_HUB_DOWNLOAD_TIMEOUT", "5")];
    let of =
        |name: &str| more.iter().chain(&own).find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    Client::new(of).unwrap().first_pause(Duration::from_millis(10))
}

fn request(text: &str, wanted: Wanted) -> Request {
    let kind = if wanted == Wanted::File { Kind::Dataset } else { Kind::Model };
    Request { name: Name::parse(text, kind).unwrap(), wanted }
}

/// Fetches on a single rank.
fn get(client: Client, text: &str, wanted: Wanted) -> Result<Fetched, String> {
    let group = ProcessGroup::single_rank(Duration::from_secs(60)).unwrap();
    let fetched = fetch(client, &group, true, vec![request(text, wanted)]);
    fetched.map(|mut all| all.remove(0)).map_err(|error| format!("{error:#}"))
}

/// Returns the files of a model as the hub was asked for them, without repetitions.
fn asked(hub: &Hub) -> BTreeSet<String> {
    let files = hub.requests().into_iter().filter(|request| !request.is_cdn);
    files.filter_map(|request| Some(request.path.split_once("/resolve/")?.1.split_once('/')?.1.to_owned())).collect()
}

fn names(path: &Path) -> BTreeSet<String> {
    fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn only_needed_files_are_downloaded_and_only_once() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let new = |more: &[(&str, &str)]| client(&hub, home.path(), more);
    let found = get(new(&[]), "org/name", MODEL).unwrap();
    let of_root = ["config.json", "tokenizer.json", "chat_template.jinja", "modules.json", "model.safetensors"];
    assert_eq!(asked(&hub), set(&[&of_root[..], &["1_Pooling/config.json"]].concat()));
    assert_eq!(names(&found.path), set(&[&of_root[..], &["1_Pooling"]].concat()));
    assert_eq!(fs::read_to_string(found.path.join("1_Pooling/config.json")).unwrap(), "{ }");
    let repo = home.path().join("hub/models--org--name");
    assert_eq!((&found.path, found.commit.as_str()), (&repo.join("snapshots").join(COMMIT), COMMIT));
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), noise(300_000));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    // A relative link, as in the cache of huggingface_hub.
    let target = fs::read_link(found.path.join("model.safetensors")).unwrap();
    assert!(target.starts_with("../../blobs") && target.file_name().unwrap().len() == 64, "{target:?}");
    assert_eq!(names(&repo.join("blobs")).len(), 6);

    // The branch may have moved, a commit can't.
    assert_eq!(get(new(&[]), "org/name", MODEL).unwrap(), found);
    assert_eq!(hub.requests().len(), 1);
    assert_eq!(get(new(&[]), &format!("org/name@{COMMIT}"), MODEL).unwrap().path, found.path);
    assert_eq!(get(new(&[("HF_HUB_OFFLINE", "1")]), "org/name", MODEL).unwrap(), found);
    assert!(hub.requests().is_empty());

    let random = tempfile::tempdir().unwrap();
    get(client(&hub, random.path(), &[]), "org/name", Wanted::Model { weights: false }).unwrap();
    assert!(!asked(&hub).contains("model.safetensors"));
}

#[test]
fn shards_are_those_of_the_index() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let found = get(client(&hub, home.path(), &[]), "org/shards@v1.0", MODEL).unwrap();
    let index = "model.safetensors.index.json";
    assert_eq!(names(&found.path), set(&["config.json", index, "model-1.safetensors", "model-2.safetensors"]));
    assert!(home.path().join("hub/models--org--shards/refs/v1.0").exists());
    // Without a network, all shards must be there.
    let offline = || client(&hub, home.path(), &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(get(offline(), "org/shards@v1.0", MODEL).unwrap(), found);
    fs::remove_file(found.path.join("model-2.safetensors")).unwrap();
    let error = get(offline(), "org/shards@v1.0", MODEL).unwrap_err();
    assert!(error.contains("has no model-2.safetensors of model org/shards@v1.0"), "{error}");
}

#[test]
fn datasets_and_adapters_have_their_files() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let found = get(client(&hub, home.path(), &[]), "org/texts@main:data/train 1.jsonl", Wanted::File).unwrap();
    assert_eq!(fs::read_to_string(&found.path).unwrap(), "{}\n");
    assert!(found.path.ends_with(format!("datasets--org--texts/snapshots/{COMMIT}/data/train 1.jsonl")));
    let found = get(client(&hub, home.path(), &[]), "org/adapter", Wanted::Adapter).unwrap();
    assert_eq!(names(&found.path), set(&["adapter_config.json", "adapter_model.safetensors"]));
    let error = get(client(&hub, home.path(), &[]), "org/name", Wanted::Adapter).unwrap_err();
    assert!(error.contains("has no adapter_config.json"), "{error}");
}

#[test]
fn a_pattern_names_all_its_files() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let new = |more: &[(&str, &str)]| client(&hub, home.path(), more);
    let text = "org/texts:data/train*.jsonl";
    get(new(&[]), "org/texts:data/train 1.jsonl", Wanted::File).unwrap();
    // A cache with one of the files does not know whether there are more.
    let error = get(new(&[("HF_HUB_OFFLINE", "1")]), text, Wanted::File).unwrap_err();
    assert!(error.contains("has no list of files of dataset org/texts@main"), "{error}");
    let found = get(new(&[]), text, Wanted::File).unwrap();
    let dir = found.path.parent().unwrap();
    assert_eq!(found.path, dir.join("train*.jsonl"));
    assert_eq!(names(dir), set(&["train 1.jsonl", "train 2.jsonl"]));
    assert_eq!(get(new(&[("HF_HUB_OFFLINE", "1")]), text, Wanted::File).unwrap(), found);
    hub.requests();
    assert_eq!(get(new(&[]), &text.replace(':', &format!("@{COMMIT}:")), Wanted::File).unwrap().path, found.path);
    assert!(hub.requests().is_empty(), "a commit that the cache has was asked for");
    fs::remove_file(dir.join("train 2.jsonl")).unwrap();
    let error = get(new(&[("HF_HUB_OFFLINE", "1")]), text, Wanted::File).unwrap_err();
    assert!(error.contains("has no data/train 2.jsonl of dataset org/texts@main"), "{error}");
    let error = get(new(&[]), "org/texts:data/*.parquet", Wanted::File).unwrap_err();
    assert!(error.contains("matches data/*.parquet: found data/more/train 3.jsonl, data/train 1.jsonl"), "{error}");
    let error = get(new(&[]), "org/texts:data/[.jsonl", Wanted::File).unwrap_err();
    assert!(error.contains("data/[.jsonl is not a valid pattern"), "{error}");
}

#[test]
fn errors_say_what_to_do() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let code = |code: &str| vec![("X-Error-Code", code.to_owned())];
    let of_weights = |request: &fsdp_test_support::hub::Request| request.path.ends_with("/model.safetensors");
    let page = format!("{}/org/name", hub.endpoint());
    let cases: [(&str, Option<Answer>, &[&str]); 11] = [
        ("org/nothing", None, &["has no model org/nothing (404)", "neither does this host"]),
        ("org/name@v9", None, &["has no revision `v9` of org/name (404)", "branch, a tag or a commit"]),
        ("org/lists", None, &["has no config.json", "found README.md"]),
        (
            "org/pickled",
            None,
            &["has no weights in safetensors, only pytorch_model.bin", "save_pretrained", "--init random"],
        ),
        ("org/outside", None, &["lists \"../../../a.safetensors\"", "names of safetensors files"]),
        ("org/name", Some(Answer::Status(401, vec![])), &["(401)", "does not exist, or is private", "set HF_TOKEN"]),
        (
            "org/name",
            Some(Answer::Status(401, code("GatedRepo"))),
            &["gated. Accept its licence at", &page, "HF_TOKEN"],
        ),
        ("org/name", Some(Answer::Status(403, code("GatedRepo"))), &["(403)", "gated. Accept its licence at", &page]),
        ("org/name", Some(Answer::Status(403, vec![])), &["(403)", "may not read it", "Ask for access at", &page]),
        (
            "org/name",
            Some(Answer::Status(404, code("EntryNotFound"))),
            &["has no file `model.safetensors` in org/name@main (404)"],
        ),
        ("org/name", Some(Answer::Status(418, vec![])), &["answers 418", "`model.safetensors` of org/name@main"]),
    ];
    for (name, answer, parts) in cases {
        let of_hub = format!("http://{}", hub.host());
        hub.script(move |request| match &answer {
            Some(answer) if of_weights(request) => answer.clone(),
            _ => Answer::Normal,
        });
        let error = get(client(&hub, home.path(), &[]), name, MODEL).unwrap_err();
        let has_host = error.contains(&hub.host()) || error.contains(&of_hub) || name == "org/outside";
        assert!(has_host && parts.iter().all(|part| error.contains(part)), "{name}: {parts:?} in\n{error}");
        let asked = hub.requests().into_iter().filter(of_weights).count();
        assert!(asked <= 1, "{name}: an error that stays was repeated {asked} times");
    }
    let error = get(client(&hub, home.path(), &[]), "org/texts:none.jsonl", Wanted::File).unwrap_err();
    assert!(error.contains("has no file `none.jsonl` in org/texts@main"), "{error}");
    let token = [("HF_TOKEN", "hf_secret")];
    hub.script(|_| Answer::Status(401, vec![]));
    let error = get(client(&hub, home.path(), &token), "org/name", MODEL).unwrap_err();
    assert!(
        error.contains("The token in HF_TOKEN or in the token file was sent") && !error.contains("hf_s"),
        "{error}"
    );
}

#[test]
fn refusals_for_a_time_are_repeated() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let mut counts = BTreeMap::new();
    hub.script(move |request| {
        let count = counts.entry((request.method.clone(), request.path.clone())).or_insert(0);
        *count += 1;
        match count {
            1 => Answer::Status(503, vec![]),
            2 => Answer::Close,
            _ => Answer::Normal,
        }
    });
    get(client(&hub, home.path(), &[]), "org/shards", MODEL).unwrap();

    let mut waited = false;
    hub.script(move |_| match std::mem::replace(&mut waited, true) {
        false => Answer::Status(429, vec![("Retry-After", "1".into())]),
        true => Answer::Normal,
    });
    let start = Instant::now();
    get(client(&hub, home.path(), &[]), "org/shards", MODEL).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));

    hub.requests();
    for (answer, parts) in [
        (Answer::Status(503, vec![]), ["failed 5 times in a row", "answers 503", "mirror"]),
        (Answer::Status(429, vec![]), ["failed 5 times in a row", "limits requests", "(429)"]),
        (Answer::Close, ["failed 5 times in a row", "can't get model org/name@main from", "HF_HUB_OFFLINE=1"]),
    ] {
        hub.script(move |_| answer.clone());
        let error = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in\n{error}");
        assert_eq!(hub.requests().len(), 5);
    }
    hub.script(|_| Answer::Status(429, vec![("Retry-After", "4000".into())]));
    let error = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap_err();
    assert!(error.contains("asks for a pause of 4000 s"), "{error}");
}

#[test]
fn a_host_that_is_not_there_is_named() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let gone = ("HF_ENDPOINT", "http://127.0.0.1:9");
    let error = get(client(&hub, home.path(), &[gone]), "org/name", MODEL).unwrap_err();
    assert!(error.contains("model org/name@main from http://127.0.0.1:9") && error.contains("HF_ENDPOINT"), "{error}");
}

/// Returns the first bytes of the ranges that the CDN was asked for.
fn ranges(hub: &Hub) -> Vec<usize> {
    let ranges = hub.requests().into_iter().filter(|request| request.is_cdn);
    let start = |range: &String| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok();
    ranges.map(|request| request.headers.get("range").and_then(start).unwrap_or(0)).collect()
}

#[test]
fn cut_connections_are_resumed() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    // Seven cuts are more than the failures in a row that end a download.
    hub.script(|request| if request.is_cdn { Answer::Cut(40_000) } else { Answer::Normal });
    let found = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), noise(300_000));
    assert_eq!(ranges(&hub), (0..8).map(|i| i * 40_000).collect::<Vec<_>>());

    let home = tempfile::tempdir().unwrap();
    let mut first = true;
    hub.script(move |request| match request.is_cdn && std::mem::take(&mut first) {
        true => Answer::Stall(40_000),
        false => Answer::Normal,
    });
    let impatient = client(&hub, home.path(), &[("HF_HUB_DOWNLOAD_TIMEOUT", "0.5")]);
    get(impatient, "org/name", MODEL).unwrap();
    assert_eq!(ranges(&hub), [0, 40_000]);
}

#[test]
fn a_later_run_goes_on_with_the_file_of_an_earlier_one() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    hub.script(|request| match (request.is_cdn, request.headers.contains_key("range")) {
        (true, false) => Answer::Cut(100_000),
        (true, true) => Answer::Status(403, vec![]),
        _ => Answer::Normal,
    });
    let error = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap_err();
    assert!(error.contains("(403)"), "{error}");
    let snapshot = home.path().join("hub/models--org--name/snapshots").join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists() && snapshot.join("config.json").exists());
    assert!(!home.path().join("hub/models--org--name/refs/main").exists());
    hub.requests();
    hub.script(|_| Answer::Normal);
    let found = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap();
    assert_eq!(ranges(&hub), [100_000]);
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), noise(300_000));

    // A server that sends the whole file instead of a range.
    let blobs = home.path().join("hub/models--org--name/blobs");
    let blob = fs::canonicalize(found.path.join("model.safetensors")).unwrap();
    let partial = blobs.join(format!("{}.incomplete", blob.file_name().unwrap().to_str().unwrap()));
    let spoil = |bytes: &[u8]| {
        fs::remove_file(&blob).unwrap();
        fs::write(&partial, bytes).unwrap();
    };
    spoil(&noise(300_000)[..1000]);
    hub.script(|request| if request.is_cdn { Answer::IgnoreRange } else { Answer::Normal });
    get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap();
    // Bytes that are not those of the file, too many bytes, and all bytes.
    hub.script(|_| Answer::Normal);
    for (bytes, asked) in
        [(vec![7; 1000], &[1000, 0][..]), (vec![7; 300_001], &[0]), (vec![7; 300_000], &[0]), (noise(300_000), &[])]
    {
        spoil(&bytes);
        hub.requests();
        get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap();
        assert_eq!(fs::read(&blob).unwrap(), noise(300_000));
        assert_eq!(ranges(&hub), asked);
    }
}

#[test]
fn a_server_that_always_cuts_at_the_same_byte_is_given_up() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    // It ignores the range that it is asked for.
    hub.script(|request| if request.is_cdn { Answer::CutWhole(40_000) } else { Answer::Normal });
    let error = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap_err();
    let parts = ["failed 5 times in a row", "cut the connection after 40000 of 300000 bytes of `model.safetensors`"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    // Only the first attempt brings bytes.
    assert_eq!(ranges(&hub), [0, 40_000, 40_000, 40_000, 40_000]);

    // It gets further each time, so it is asked until the file is complete.
    let mut most = 40_000;
    hub.script(move |request| {
        let cut = if request.is_cdn { Answer::CutWhole(most) } else { Answer::Normal };
        most += if request.is_cdn { 40_000 } else { 0 };
        cut
    });
    let home = tempfile::tempdir().unwrap();
    let found = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), noise(300_000));

    // Repeated bytes do not put off the group's timeout either.
    let home = tempfile::tempdir().unwrap();
    let group = ProcessGroup::single_rank(Duration::from_secs(1)).unwrap();
    hub.script(|request| if request.is_cdn { Answer::CutWhole(40_000) } else { Answer::Normal });
    let patient = client(&hub, home.path(), &[]).first_pause(Duration::from_millis(700));
    let error = fetch(patient, &group, true, vec![request("org/name", MODEL)]).unwrap_err().to_string();
    assert!(error.contains("no byte came for 1 s (FSDP_TIMEOUT_S)"), "{error}");
}

#[test]
fn relative_redirects_are_followed() {
    let hub = hub();
    let host = hub.host();
    for location in [
        "/org/adapter/resolve/{c}/{f}?a",
        "//{h}/org/adapter/resolve/{c}/{f}?a",
        "{f}?a",
        "./{f}?a",
        "../{c}/{f}?a",
        "?a",
    ] {
        let (home, host) = (tempfile::tempdir().unwrap(), host.clone());
        hub.script(move |request| {
            let file = request.path.rsplit_once('/').unwrap().1;
            let location = location.replace("{h}", &host).replace("{c}", COMMIT).replace("{f}", file);
            match request.is_cdn || file.contains('?') || !request.path.contains("/resolve/") {
                true => Answer::Normal,
                false => Answer::Status(307, vec![("Location", location)]),
            }
        });
        let found = get(client(&hub, home.path(), &[]), &format!("org/adapter@{COMMIT}"), Wanted::Adapter).unwrap();
        assert_eq!(fs::read(found.path.join("adapter_model.safetensors")).unwrap(), noise(500), "{location}");
    }
    for (location, part) in [
        ("file:///etc/passwd", "to \"file:///etc/passwd\", expected an address of http or https"),
        // The first of several files that fails.
        ("?", "of org/name@main more than 10 times"),
    ] {
        hub.script(move |request| match request.path.contains("/resolve/") {
            true => Answer::Status(302, vec![("Location", location.into())]),
            false => Answer::Normal,
        });
        let home = tempfile::tempdir().unwrap();
        let error = get(client(&hub, home.path(), &[]), "org/name", Wanted::Model { weights: false }).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_wrong_hash_or_size_is_refused() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    hub.script(|request| if request.is_cdn { Answer::Corrupt } else { Answer::Normal });
    let error = get(client(&hub, home.path(), &[]), "org/name", MODEL).unwrap_err();
    let parts = ["sent `model.safetensors` of org/name@main with SHA-256 ", ", expected ", "check the proxy"];
    assert!(parts.iter().all(|part| error.contains(part)) && error.contains(&hub.host()), "{error}");
    let repo = home.path().join("hub/models--org--name");
    assert!(!repo.join("snapshots").join(COMMIT).join("model.safetensors").exists());
    assert!(names(&repo.join("blobs")).iter().filter(|name| name.len() == 64).count() == 0);

    for (header, value, part) in [
        ("X-Linked-Size", "1", "sends more than the 1 bytes of `"),
        ("ETag", "\"../../../etc\"", "does not tell the hash (ETag)"),
        ("X-Repo-Commit", "../..", "does not tell the commit"),
    ] {
        let mut headers = vec![("X-Repo-Commit", COMMIT.to_owned()), ("ETag", "\"abc\"".into())];
        headers.retain(|(name, _)| *name != header);
        headers.push((header, value.into()));
        hub.script(move |request| match request.method.as_str() {
            "HEAD" => Answer::Status(200, headers.clone()),
            _ => Answer::Normal,
        });
        let home = tempfile::tempdir().unwrap();
        let error = get(client(&hub, home.path(), &[]), "org/name", Wanted::Model { weights: false }).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    get(client(&hub, home.path(), &[("HF_TOKEN", "hf_secret")]), "org/name", MODEL).unwrap();
    let requests = hub.requests();
    assert!(requests.iter().any(|request| request.is_cdn));
    for request in requests {
        let token = request.headers.get("authorization").map(String::as_str);
        assert_eq!(token, (!request.is_cdn).then_some("Bearer hf_secret"), "{request:?}");
    }
}

#[test]
fn offline_names_what_is_missing() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let offline = || client(&hub, home.path(), &[("HF_HUB_OFFLINE", "1")]);
    let error = get(offline(), "org/name", MODEL).unwrap_err();
    assert!(
        error.contains("HF_HUB_OFFLINE is set") && error.contains("has no commit of model org/name@main"),
        "{error}"
    );
    get(client(&hub, home.path(), &[]), "org/name", Wanted::Model { weights: false }).unwrap();
    hub.requests();
    let error = get(offline(), "org/name", MODEL).unwrap_err();
    assert!(error.contains("has no model.safetensors of model org/name@main"), "{error}");
    assert!(error.contains(&home.path().display().to_string()) && hub.requests().is_empty());
}

/// Four ranks of two hosts, which have a cache each or share one.
#[test]
fn one_rank_of_each_host_downloads() {
    let hub = hub();
    let counts = |shared: bool| {
        let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        hub.requests();
        let outcomes = local::run(4, |group| {
            let rank = group.rank();
            let home = homes[if shared { 0 } else { rank / 2 }].path();
            let requests = vec![request("org/name", MODEL), request("org/texts:data/train 1.jsonl", Wanted::File)];
            let all = fetch(client(&hub, home, &[]), &group, rank % 2 == 0, requests).unwrap();
            assert!(all.iter().all(|one| one.path.starts_with(home) && one.path.exists() && one.commit == COMMIT));
        });
        assert_eq!(outcomes.len(), 4);
        hub.requests().iter().filter(|request| request.is_cdn).count()
    };
    assert_eq!((counts(false), counts(true)), (2, 1));
}

#[test]
fn a_failure_of_one_host_ends_all_ranks() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let file = home.path().join("file");
    fs::write(&file, "").unwrap();
    let start = Instant::now();
    let outcomes = local::run(4, |group| {
        let rank = group.rank();
        let home = if rank < 2 { home.path() } else { &file };
        let requests = vec![request("org/name", MODEL)];
        format!("{:#}", fetch(client(&hub, home, &[]), &group, rank % 2 == 0, requests).unwrap_err())
    });
    for error in outcomes {
        assert!(error.starts_with("rank 2 on host ") && error.contains("set HF_HOME"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// The group's timeout starts again with each byte, and ends a download without any.
#[test]
fn waits_end_when_no_byte_comes() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let group = ProcessGroup::single_rank(Duration::from_secs(3)).unwrap();
    let sent = AtomicUsize::new(0);
    hub.script(move |request| match request.is_cdn && sent.fetch_add(1, Ordering::Relaxed) < 5 {
        true => Answer::Stall(50_000),
        false => Answer::Normal,
    });
    let start = Instant::now();
    let patient = client(&hub, home.path(), &[("HF_HUB_DOWNLOAD_TIMEOUT", "1")]);
    fetch(patient, &group, true, vec![request("org/name", MODEL)]).unwrap();
    assert!(start.elapsed() > Duration::from_secs(4));

    let home = tempfile::tempdir().unwrap();
    hub.script(|request| if request.is_cdn { Answer::Stall(1000) } else { Answer::Normal });
    let patient = client(&hub, home.path(), &[("HF_HUB_DOWNLOAD_TIMEOUT", "100")]);
    let error = fetch(patient, &group, true, vec![request("org/name", MODEL)]).unwrap_err().to_string();
    assert!(error.contains("no byte came for 3 s (FSDP_TIMEOUT_S)"), "{error}");
}
