//! What an earlier export has left, and which run may replace it.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use crc_fast::CrcAlgorithm;
use fsdp_ckpt::SafetensorsFile;

use crate::peft;
use crate::values::is_url;

/// What the header of an exported file says of where it comes from.
pub(crate) const RUN: &str = "candle_fsdp.run";
pub(crate) const STEP: &str = "candle_fsdp.step";

/// The names under which a directory may hold weights; the first and the last are those that an export writes.
const WEIGHTS: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", peft::WEIGHTS];

/// Whether a run that goes on from a checkpoint in `checkpoints`, if it does, and ends at step `last` may replace what
/// is in `dir`: it may when the run itself has exported that, before it was started again. Weights of anybody else are
/// an error.
pub(crate) fn may_replace(dir: &Path, checkpoints: Option<&Path>, last: usize) -> anyhow::Result<bool> {
    let there: Vec<PathBuf> =
        WEIGHTS.iter().map(|name| dir.join(name)).filter(|path| path.symlink_metadata().is_ok()).collect();
    for path in &there {
        let header = SafetensorsFile::open(path).ok();
        let said = |key: &str| header.as_ref().and_then(|file| file.metadata().get(key));
        let is_own = match (said(RUN), checkpoints) {
            (Some(run), Some(checkpoints)) => *run == run_of(checkpoints)?,
            _ => false,
        };
        let step = said(STEP).and_then(|step| step.parse::<usize>().ok());
        if is_own && step.is_some_and(|step| step <= last) {
            continue;
        }
        let whose = match step {
            Some(step) if is_own => format!("which this run exported at step {step}, and it is to end at step {last}"),
            Some(step) => format!("which another run exported at step {step}"),
            None => "which this program did not export".into(),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        bail!(
            "--export-hf {}: it holds weights already, in {name}, {whose}; remove them, or pass another directory",
            dir.display()
        );
    }
    Ok(!there.is_empty())
}

/// Tells the runs of one directory of checkpoints from those of others, and says nothing else of it.
pub(crate) fn run_of(checkpoints: &Path) -> anyhow::Result<String> {
    let path = match is_url(checkpoints) {
        true => checkpoints.components().collect(),
        false => checkpoints.canonicalize().with_context(|| format!("can't open {}", checkpoints.display()))?,
    };
    Ok(format!("{:016x}", crc_fast::checksum(CrcAlgorithm::Crc64Nvme, path.as_os_str().as_encoded_bytes())))
}
