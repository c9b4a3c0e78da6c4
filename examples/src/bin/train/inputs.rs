//! Inputs that are names on the hub: `--model org/name` and `--data org/dataset:file`. They are downloaded, and
//! replaced by the paths of the downloaded files.

use std::path::{Path, PathBuf};

use anyhow::Context;
use fsdp_candle::World;
use fsdp_corpus::mixture;
use fsdp_train::hub::{Kind, Name};

use crate::agreement::{self, Fields};
use crate::args::Args;

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
        let name = name(flag, given, kind)?;
        let source = if name.is_some() { format!("the hub: {}", given.display()) } else { "a path".into() };
        sources.insert(format!("the source of {flag}"), source);
        named.extend(name.map(|name| (flag, name)));
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

/// Returns the name that a flag gives, or `None` for a path.
fn name(flag: &str, given: &Path, kind: Kind) -> anyhow::Result<Option<Name>> {
    // A path that can't be examined fails later, with its own error.
    if !matches!(given.try_exists(), Ok(false)) {
        return Ok(None);
    }
    if let Some(text) = given.to_str().filter(|_| ["--data", "--eval"].contains(&flag)) {
        let sources = mixture::parse(text).with_context(|| flag.to_owned())?;
        let hub = sources.iter().find(|source| !is_path(&source.name) && Name::parse(&source.name, kind).is_some());
        match (hub, &sources[..]) {
            (None, all) if all.len() > 1 || all.iter().any(|source| is_path(&source.name)) => return Ok(None),
            (Some(hub), [_, _, ..]) => anyhow::bail!(
                "{flag}: {} is a name on the Hugging Face hub, but a list has only paths: download it, such as by \
                 `hf download --repo-type dataset`, and pass its path",
                hub.name
            ),
            _ => {}
        }
    }
    let name = given.to_str().and_then(|text| Name::parse(text, kind));
    match name {
        Some(name) => Ok(Some(name)),
        None => anyhow::bail!(
            "{flag}: cannot read {}: No such file or directory on this host, and it is not a name on the Hugging Face \
             hub either, which has the form {}",
            given.display(),
            kind.form()
        ),
    }
}

/// Returns whether a source of a corpus is a path or a pattern, or the common name of Megatron-LM's two files.
fn is_path(name: &str) -> bool {
    Path::new(name).exists() || name.contains(['*', '?', '[']) || Path::new(&format!("{name}.idx")).exists()
}

#[cfg(feature = "hub")]
fn download(mut args: Args, named: Vec<(&'static str, Name)>, world: &World) -> anyhow::Result<Args> {
    use fsdp_train::hub::{self, Client, Request, Wanted};

    use crate::flag_types::InitChoice;

    let weights = args.init != InitChoice::Random;
    let (flags, requests): (Vec<_>, Vec<_>) = named
        .into_iter()
        .map(|(flag, name)| {
            let wanted = match flag {
                "--model" => Wanted::Model { weights },
                "--lora-from" => Wanted::Adapter,
                _ => Wanted::File,
            };
            (flag, Request { name, wanted })
        })
        .unzip();
    let is_first_of_host = world.env().local_rank == 0;
    let fetched = tracing::debug_span!("download")
        .in_scope(|| hub::fetch(Client::from_env()?, world.group(), is_first_of_host, requests))?;
    for (flag, fetched) in flags.into_iter().zip(fetched) {
        for (other, _, path) in inputs(&mut args) {
            if flag == other {
                *path = Some(fetched.path.clone());
            }
        }
        if flag == "--model" {
            args.model_name = Some(fetched.name.repo.into());
        }
    }
    Ok(args)
}

#[cfg(not(feature = "hub"))]
fn download(_args: Args, named: Vec<(&'static str, Name)>, _world: &World) -> anyhow::Result<Args> {
    let (flag, name) = &named[0];
    anyhow::bail!(
        "{flag}: no file or directory on this host has the name {}, and this program was built without the feature \
         `hub`, which downloads {name} from the Hugging Face hub: build it with the feature, or pass a path",
        name.repo
    )
}
