//! The steps of a run: the checkpoints in a directory.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bytesize::ByteSize;
use fsdp_ckpt::{Error, TensorSource, escape};
use serde_json::{Value, json};

use crate::print_json;

/// A directory in the directory of a run.
pub(super) struct Step {
    name: String,
    number: u64,
    state: State,
}

enum State {
    Whole(Box<dyn TensorSource>),
    /// Has no manifest: the save is running or was interrupted.
    Unfinished,
    Damaged(String),
    /// One host's part, with the missing files.
    Part(String),
    /// A link that is an alias of another checkpoint.
    Link(PathBuf),
    /// Quarantined by a run that resumed from an older checkpoint.
    Quarantined,
}

/// Lists the checkpoints in a directory by number, including unfinished ones; empty if it is not the directory of a
/// run.
pub(super) fn list(dir: &Path) -> Vec<Step> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut steps = Vec::new();
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !entry.path().is_dir() {
            continue;
        }
        // A save in progress is `.step-00000010.tmp-...`.
        let growing = name.strip_prefix('.').and_then(|rest| rest.split_once(".tmp-")).map(|(target, _)| target);
        let quarantined = fsdp_ckpt::name_before_quarantine(&name);
        let Some(number) = number_of(quarantined.or(growing).unwrap_or(&name)) else { continue };
        let state = match (fsdp_ckpt::alias_target(entry.path()), fsdp_ckpt::open(entry.path())) {
            _ if quarantined.is_some() => State::Quarantined,
            (Some(target), _) => State::Link(target),
            _ if growing.is_some() => State::Unfinished,
            (_, Err(Error::Incomplete { .. } | Error::NotFound { .. })) => State::Unfinished,
            (_, Ok(source)) => State::Whole(source),
            (_, Err(error @ Error::MissingParts { .. })) => State::Part(error.to_string()),
            (_, Err(error)) => State::Damaged(format!("{:#}", anyhow::Error::from(error))),
        };
        steps.push(Step { name, number, state });
    }
    steps.sort_by(|a, b| (a.number, &a.name).cmp(&(b.number, &b.name)));
    steps
}

/// Returns the name of the newest whole step.
pub(crate) fn newest(dir: &Path) -> Option<String> {
    let whole = |step: &Step| matches!(step.state, State::Whole(_));
    list(dir).into_iter().rev().find(whole).map(|step| step.name)
}

/// Returns the number at the end of a step's name.
fn number_of(name: &str) -> Option<u64> {
    let (_, digits) = name.rsplit_once(|c: char| !c.is_ascii_digit()).unwrap_or(("", name));
    digits.parse().ok()
}

pub(super) fn show(dir: &Path, steps: &[Step], as_json: bool) -> Result<()> {
    if as_json {
        let steps: Vec<Value> = steps.iter().map(describe).collect();
        return print_json(&json!({ "path": dir, "steps": steps }));
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", escape(dir.display()))?;
    writeln!(out, "\nSTEPS")?;
    let width = steps.iter().map(|step| escape(&step.name).to_string().chars().count()).max().unwrap_or(0);
    let newest = steps.iter().rposition(|step| matches!(step.state, State::Whole(_)));
    for (at, Step { name, state, .. }) in steps.iter().enumerate() {
        let about = match state {
            State::Whole(source) => {
                let mesh = source.mesh().map_or(String::new(), |mesh| format!(", mesh {}", escape(mesh)));
                let newest = if newest == Some(at) { "  <- the newest" } else { "" };
                let (tensors, format) = (source.tensors().len(), source.format());
                format!(
                    "whole       {:>10}  {tensors} tensors, {format}{mesh}{newest}",
                    ByteSize(source.bytes()).to_string()
                )
            }
            State::Unfinished => "unfinished  the save is running or was interrupted".to_string(),
            State::Damaged(error) => format!("damaged     {}", escape(error)),
            State::Part(error) => format!("part        {}", escape(error)),
            State::Link(target) => format!("link        to {}; not used by runs", escape(target.display())),
            State::Quarantined => "set aside   damaged; not used by runs".to_string(),
        };
        writeln!(out, "  {:<width$}  {about}", escape(name).to_string())?;
    }
    Ok(())
}

fn describe(step: &Step) -> Value {
    let (name, number) = (&step.name, step.number);
    match &step.state {
        State::Whole(source) => json!({
            "name": name, "step": number, "state": "whole", "format": source.format().to_string(),
            "mesh": source.mesh(), "tensors": source.tensors().len(), "bytes": source.bytes(),
        }),
        State::Link(target) => json!({ "name": name, "step": number, "state": "link", "target": target }),
        State::Unfinished => json!({ "name": name, "step": number, "state": "unfinished" }),
        State::Quarantined => json!({ "name": name, "step": number, "state": "set aside" }),
        State::Part(error) => json!({ "name": name, "step": number, "state": "part", "error": error }),
        State::Damaged(error) => json!({ "name": name, "step": number, "state": "damaged", "error": error }),
    }
}
