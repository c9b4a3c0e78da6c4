//! The files of a repository that a run needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use fsdp_corpus::files::matching;
use serde::{Deserialize, Serialize};

use super::client::{Client, Failure, Item};
use super::name::{Name, is_commit, is_path};
use super::progress::Activity;

const CONFIG: &str = "config.json";
/// Small files that models may have besides `config.json`: the tokenizer, the chat template, the settings of
/// generation, and the pooling of sentence-transformers.
const OPTIONAL: [&str; 13] = [
    "1_Pooling/config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files of adapters in PEFT's format.
const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// Ends of names of weights in other formats.
const OTHER_WEIGHTS: [&str; 7] = [".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"];
/// Names of other weights that an error lists.
const MAX_LISTED: usize = 4;
/// Largest description of a repository, or index of weights.
const MAX_JSON: u64 = 256 << 20;

/// Part of a repository that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Configuration, tokenizer, and weights if `weights` is true.
    Model {
        /// Whether the run starts from the model's weights.
        weights: bool,
    },
    /// Adapters in PEFT's format.
    Adapter,
    /// The file of the name, or the files of its pattern.
    File,
}

/// Repository, and the part of it that a run needs.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the repository or file.
    pub name: Name,
    /// Part that is needed.
    pub wanted: Wanted,
}

/// Files to download, the same on all hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) name: Name,
    pub(super) commit: String,
    pub(super) files: Vec<String>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Client {
    /// Chooses the commit and the files. Asks the hub, unless the cache has all files of a commit.
    pub(super) fn plan(&self, request: &Request, activity: &Activity) -> Result<Plan> {
        if self.offline.is_some() {
            return self.cached_plan(request);
        }
        match self.cached_plan(request) {
            Ok(plan) if request.name.is_commit() => Ok(plan),
            _ => self.online_plan(request, activity),
        }
    }

    /// Plans with the files in the cache, or names those that are missing.
    fn cached_plan(&self, request: &Request) -> Result<Plan> {
        let name = &request.name;
        let missing = |what: &str| self.offline_error(format_args!("{what} of {} {name}", name.kind));
        let commit = self.cached_commit(name).ok_or_else(|| missing("commit"))?;
        let dir = self.snapshot(name, &commit);
        let has = |file: &&str| dir.join(file).exists();
        let all = match request.wanted {
            Wanted::File => match name.pattern() {
                Some(pattern) => {
                    let list = self.cached_list(name, &commit).ok_or_else(|| missing("list of files"))?;
                    matched(pattern, &list, name)?
                }
                None => vec![name.file.clone().unwrap_or_default()],
            },
            Wanted::Adapter => ADAPTER.map(String::from).to_vec(),
            Wanted::Model { weights } => {
                let optional = OPTIONAL.iter().copied().filter(has);
                let mut files: Vec<String> = [CONFIG].into_iter().chain(optional).map(String::from).collect();
                if weights && !has(&SINGLE) && has(&INDEX) {
                    files.push(INDEX.into());
                    files.extend(shards(&dir.join(INDEX))?);
                } else if weights {
                    files.push(SINGLE.into());
                }
                files
            }
        };
        let absent: Vec<&str> = all.iter().map(String::as_str).filter(|file| !has(file)).collect();
        if !absent.is_empty() {
            return Err(missing(&absent.join(", ")));
        }
        Ok(Plan { name: name.clone(), commit, files: all })
    }

    fn online_plan(&self, request: &Request, activity: &Activity) -> Result<Plan> {
        let name = request.name.clone();
        if request.wanted == Wanted::File && name.pattern().is_none() {
            let file = name.file.clone().unwrap_or_default();
            let commit = self.describe(&name, &name.revision, &file, activity)?.commit;
            return Ok(Plan { name, commit, files: vec![file] });
        }
        let item = Item { name: &name, file: None };
        let info: Info = self.json(&self.info_url(&name), &item, activity)?;
        ensure!(is_commit(&info.sha), "{} gives {item} no commit: is it a hub?", self.host());
        let commit = info.sha;
        let all: BTreeSet<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        if let Some(pattern) = name.pattern() {
            let files = matched(pattern, &all, format_args!("{item} at {}", self.host()))?;
            self.record_list(&name, &commit, &all)?;
            return Ok(Plan { name, commit, files });
        }
        let has = |file: &&str| all.contains(*file);
        let Wanted::Model { weights } = request.wanted else {
            if let Some(file) = ADAPTER.iter().find(|file| !has(file)) {
                bail!("{item} at {} has no {file}: expected adapters in PEFT's format", self.host());
            }
            return Ok(Plan { name, commit, files: ADAPTER.map(String::from).to_vec() });
        };
        ensure!(
            has(&CONFIG),
            "{item} at {} has no {CONFIG}: expected a model for transformers, found {}",
            self.host(),
            listed(all.iter())
        );
        let mut files = vec![CONFIG.to_owned()];
        files.extend(OPTIONAL.iter().copied().filter(has).map(String::from));
        if weights && has(&SINGLE) {
            files.push(SINGLE.into());
        } else if weights && has(&INDEX) {
            let entry = self.describe(&name, &commit, INDEX, activity)?;
            self.download(&name, &entry, activity)?;
            files.push(INDEX.into());
            for shard in shards(&self.snapshot(&name, &commit).join(INDEX))? {
                ensure!(all.contains(&shard), "{INDEX} of {name} lists {shard:?}, which {} lacks", self.host());
                files.push(shard);
            }
        } else if weights {
            let others = all.iter().filter(|file| OTHER_WEIGHTS.iter().any(|end| file.ends_with(end)));
            ensure!(
                others.clone().next().is_none(),
                "{item} at {} has no weights in safetensors, only {}: choose a repository with {SINGLE}, convert it by \
                 transformers (`AutoModel.from_pretrained(...).save_pretrained(DIR)`) and pass DIR, or --init random",
                self.host(),
                listed(others)
            );
        }
        Ok(Plan { name, commit, files })
    }

    /// Requests a JSON document.
    fn json<T: for<'de> Deserialize<'de>>(&self, url: &str, item: &Item, activity: &Activity) -> Result<T> {
        let host = self.host();
        let text = self.retrying(activity, |_| {
            let body = self.get(url, 0, item)?.into_body();
            let text = body.into_with_config().limit(MAX_JSON).read_to_vec();
            text.map_err(|error| Failure::Transient(anyhow!("{host} did not send {item} completely: {error}"), None))
        })?;
        serde_json::from_slice(&text).with_context(|| format!("{host} does not describe {item} as a hub does"))
    }
}

/// Returns the files that match a pattern.
fn matched(pattern: &str, all: &BTreeSet<String>, place: impl Display) -> Result<Vec<String>> {
    let files = matching(pattern, all.iter().map(String::as_str))?;
    ensure!(!files.is_empty(), "no file of {place} matches {pattern}: found {}", listed(all.iter()));
    let unsafe_name = files.iter().find(|file| !is_path(file));
    ensure!(unsafe_name.is_none(), "{place} has a file named {unsafe_name:?}, which is not a path within it");
    Ok(files.into_iter().map(String::from).collect())
}

/// Returns the files that an index of weights lists.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let read = || -> Result<Index> {
        let size = fs::metadata(index)?.len();
        ensure!(size <= MAX_JSON, "it has {size} bytes");
        Ok(serde_json::from_slice(&fs::read(index)?)?)
    };
    let Index { weight_map } = read().with_context(|| format!("can't read {}", index.display()))?;
    let shards: BTreeSet<String> = weight_map.into_values().collect();
    let is_shard = |file: &&String| file.ends_with(".safetensors") && !file.contains(['/', '\\']);
    if let Some(file) = shards.iter().find(|file| !is_shard(file)) {
        bail!("{} lists {file:?}: expected names of safetensors files", index.display());
    }
    Ok(shards)
}

/// Lists some names.
fn listed<'a>(files: impl Iterator<Item = &'a String> + Clone) -> String {
    let mut names: Vec<String> = files.clone().take(MAX_LISTED).map(|file| file.escape_debug().to_string()).collect();
    let more = files.count().saturating_sub(MAX_LISTED);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    if names.is_empty() { "no files".into() } else { names.join(", ") }
}
