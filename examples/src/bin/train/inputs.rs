//! Inputs that are names on the hub: `--model org/name`, `--data org/dataset:file`, and lists of such sources with
//! weights. They are downloaded, and replaced by the paths of the downloaded files.

use std::path::{Path, PathBuf};

use anyhow::Context;
use fsdp_candle::World;
use fsdp_corpus::files::is_pattern;
use fsdp_corpus::mixture::{self, Weighted};
use fsdp_train::hub::{Kind, Name};

use crate::agreement::{self, Fields};
use crate::args::Args;

/// A source of an input.
enum Source {
    Path(#[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "only a download reads it"))] String),
    Hub(Name),
}

/// An input with at least one name on the hub.
struct Named {
    flag: &'static str,
    /// Sources with their weights. Only a corpus has several.
    sources: Vec<(Source, f64)>,
}

/// Returns the arguments with paths in place of names. A path that exists is never taken for a name. Collective.
///
/// # Errors
/// Fails if an input is neither a path nor a name, if the ranks disagree about that, or if a download fails.
pub(crate) fn fetch(args: &Args, world: &World) -> anyhow::Result<Args> {
    let mut args = args.clone();
    let mut named = vec![];
    let mut sources = Fields::new();
    for (flag, kind, path) in inputs(&mut args) {
        let Some(given) = path else { continue };
        let found = names(flag, given, kind)?;
        let source = if found.is_some() { format!("the hub: {}", given.display()) } else { "a path".into() };
        sources.insert(format!("the source of {flag}"), source);
        named.extend(found);
    }
    agreement::check_sources(sources, world)?;
    match named.is_empty() {
        true => Ok(args),
        false => download(args, named, world),
    }
}

/// Lists the inputs with their flags.
fn inputs(args: &mut Args) -> [(&'static str, Kind, &mut Option<PathBuf>); 6] {
    [
        ("--model", Kind::Model, &mut args.model),
        ("--lora-from", Kind::Model, &mut args.lora_from),
        ("--data", Kind::Dataset, &mut args.data),
        ("--sft", Kind::Dataset, &mut args.sft),
        ("--dpo", Kind::Dataset, &mut args.dpo),
        ("--eval", Kind::Dataset, &mut args.eval),
    ]
}

/// Returns the sources that a flag gives, or `None` if all are paths.
fn names(flag: &'static str, given: &Path, kind: Kind) -> anyhow::Result<Option<Named>> {
    // A path that can't be examined fails later, with its own error.
    if !matches!(given.try_exists(), Ok(false)) {
        return Ok(None);
    }
    let is_corpus = ["--data", "--eval"].contains(&flag);
    let parts = match given.to_str() {
        Some(text) if is_corpus => mixture::parse(text).with_context(|| flag.to_owned())?,
        _ => vec![Weighted { name: given.display().to_string(), weight: 1. }],
    };
    let mut sources = vec![];
    for Weighted { name, weight } in parts {
        let is_pattern = is_corpus && is_pattern(&name);
        let source = match Name::parse(&name, kind) {
            _ if is_corpus && (exists(&name) || is_pattern && Path::new(directory(&name)).is_dir()) => {
                Source::Path(name)
            }
            Some(name) => Source::Hub(name),
            None if is_pattern => Source::Path(name),
            None => anyhow::bail!(
                "{flag}: cannot read {name}: No such file or directory on this host, and it is not a name on the \
                 Hugging Face hub either, which has the form {}",
                kind.form()
            ),
        };
        if let Source::Hub(name) = &source
            && let (Some(pattern), false) = (name.pattern(), is_corpus)
        {
            anyhow::bail!("{flag} reads one file, but {pattern} is a pattern: name the file")
        }
        sources.push((source, weight));
    }
    let has_name = sources.iter().any(|(source, _)| matches!(source, Source::Hub(_)));
    Ok(has_name.then_some(Named { flag, sources }))
}

/// Returns whether a source of a corpus exists, by its name or by the common name of Megatron-LM's two files.
fn exists(name: &str) -> bool {
    Path::new(name).exists() || Path::new(&format!("{name}.idx")).exists()
}

/// Returns the directory before the first special character of a pattern.
fn directory(pattern: &str) -> &str {
    let before = pattern.split(['*', '?', '[']).next().unwrap_or_default();
    before.rfind('/').map_or(".", |slash| &before[..slash.max(1)])
}

#[cfg(feature = "hub")]
fn download(mut args: Args, named: Vec<Named>, world: &World) -> anyhow::Result<Args> {
    use fsdp_train::hub::{self, Client, Request, Wanted};

    use crate::flag_types::InitChoice;

    let weights = args.init != InitChoice::Random;
    let wanted = |flag: &str| match flag {
        "--model" => Wanted::Model { weights },
        "--lora-from" => Wanted::Adapter,
        _ => Wanted::File,
    };
    let mut requests = vec![];
    for Named { flag, sources } in &named {
        requests.extend(sources.iter().filter_map(|(source, _)| match source {
            Source::Hub(name) => Some(Request { name: name.clone(), wanted: wanted(flag) }),
            Source::Path(_) => None,
        }));
    }
    let is_first_of_host = world.env().local_rank == 0;
    let fetched = tracing::debug_span!("download")
        .in_scope(|| hub::fetch(Client::from_env()?, world.group(), is_first_of_host, requests))?;
    let mut fetched = fetched.into_iter();
    for Named { flag, sources } in named {
        let mut paths = vec![];
        for (source, weight) in sources {
            let path = match source {
                Source::Path(path) => path.into(),
                Source::Hub(_) => {
                    let fetched = fetched.next().context("a download has no path")?;
                    if flag == "--model" {
                        args.model_name = Some(fetched.name.repo.into());
                    }
                    fetched.path
                }
            };
            paths.push((path, weight));
        }
        let path = listed(paths)?;
        for (other, _, input) in inputs(&mut args) {
            if flag == other {
                *input = Some(path.clone());
            }
        }
    }
    Ok(args)
}

/// Returns the argument of a flag with these sources.
#[cfg(feature = "hub")]
fn listed(paths: Vec<(PathBuf, f64)>) -> anyhow::Result<PathBuf> {
    if let [(path, _)] = &paths[..] {
        return Ok(path.clone());
    }
    let mut parts = vec![];
    for (path, weight) in paths {
        let text = path.to_str().filter(|text| !text.contains(','));
        let text = text.with_context(|| {
            format!("{} can't be in a list: set HF_HOME to a path of UTF-8 without commas", path.display())
        })?;
        parts.push(format!("{text}:{weight}"));
    }
    Ok(parts.join(",").into())
}

#[cfg(not(feature = "hub"))]
fn download(args: Args, named: Vec<Named>, _world: &World) -> anyhow::Result<Args> {
    let of_hub = named.iter().flat_map(|named| named.sources.iter().map(|(source, _)| (named.flag, source)));
    for (flag, source) in of_hub {
        if let Source::Hub(name) = source {
            anyhow::bail!(
                "{flag}: no file or directory on this host has the name {}, and this program was built without the \
                 feature `hub`, which downloads {name} from the Hugging Face hub: build it with the feature, or pass a \
                 path",
                name.repo
            )
        }
    }
    Ok(args)
}
