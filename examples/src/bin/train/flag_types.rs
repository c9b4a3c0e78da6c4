//! What the flags of `train` take, how it is read, and how ranks tell each other of it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use clap::ValueEnum;
use fsdp_candle::activation_checkpoint::{CheckpointPolicy, Operation};
use fsdp_candle::{AllGatherExtension, Float8, OffloadPolicy, ReshardAfterForward};
use fsdp_examples::models::{Dropout, ModelConfig, is_block_matrix};
use serde::{Serialize, Serializer};

/// Where the first weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum InitChoice {
    /// The model directory's weights if it has any, else random
    Auto,
    /// The model directory's weights; it is an error if it has none
    Pretrained,
    /// Random, from --seed
    Random,
}

/// A floating point dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    F32,
    Bf16,
    F16,
}

impl Precision {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// What is dropped while the model trains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DropoutChoice {
    /// What the model's configuration says
    Config,
    /// The same probability everywhere
    #[serde(untagged)]
    Everywhere(f64),
}

impl DropoutChoice {
    pub(crate) fn of(self, config: &ModelConfig) -> Dropout {
        match self {
            DropoutChoice::Config => config.dropout(),
            DropoutChoice::Everywhere(probability) => Dropout::everywhere(probability),
        }
    }
}

pub(crate) fn dropout(text: &str) -> Result<DropoutChoice, String> {
    match text {
        "config" => Ok(DropoutChoice::Config),
        _ => number(text, "`config`, or a number of at least 0 and below 1, such as 0.1", |x| (0.0..1.0).contains(&x))
            .map(DropoutChoice::Everywhere),
    }
}

/// What the blocks' matrices travel as when they are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AllGather {
    /// As they are computed with
    Full,
    /// As 8-bit floats (E4M3), with one scale for each process's shard of a matrix
    Float8,
}

impl AllGather {
    /// What the parameter of this name travels as, if not as it is.
    pub(crate) fn extension(self, name: &str) -> Option<Arc<dyn AllGatherExtension>> {
        (self == AllGather::Float8 && is_block_matrix(name)).then(|| Arc::new(Float8) as Arc<dyn AllGatherExtension>)
    }
}

/// When gradients are summed over processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum GradSync {
    Every,
    Last,
}

pub(crate) fn reshard(text: &str) -> Result<ReshardAfterForward, String> {
    match text {
        "default" => Ok(ReshardAfterForward::Default),
        "always" => Ok(ReshardAfterForward::Always),
        "never" => Ok(ReshardAfterForward::Never),
        number => match number.parse() {
            Ok(ranks) => Ok(ReshardAfterForward::To(ranks)),
            Err(_) => Err("it must be default, always, never, or a number of processes".into()),
        },
    }
}

pub(crate) fn reshard_word<S: Serializer>(value: &ReshardAfterForward, serializer: S) -> Result<S::Ok, S::Error> {
    format!("{value:?}").to_lowercase().serialize(serializer)
}

/// Where shards, their gradients and the optimizer's state live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Offload {
    /// On the device that computes
    None,
    /// In the host's memory
    Cpu,
}

impl Offload {
    pub(crate) fn policy(self) -> OffloadPolicy {
        match self {
            Offload::None => OffloadPolicy::None,
            Offload::Cpu => OffloadPolicy::Cpu { pin_memory: true },
        }
    }
}

/// The blocks that run again in backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ActivationCheckpoint {
    /// None: all activations are kept
    None,
    /// All
    Full,
    /// The first of every so many
    #[serde(untagged)]
    Every(usize),
    /// Those whose names match
    #[serde(untagged)]
    Named(Vec<String>),
}

impl ActivationCheckpoint {
    pub(crate) fn policy(&self, keeps: Vec<CheckpointKeep>) -> anyhow::Result<CheckpointPolicy> {
        let policy = match self {
            ActivationCheckpoint::None => CheckpointPolicy::none(),
            ActivationCheckpoint::Full => CheckpointPolicy::all(),
            ActivationCheckpoint::Every(count) => CheckpointPolicy::every(*count),
            ActivationCheckpoint::Named(patterns) => CheckpointPolicy::named(patterns)?,
        };
        Ok(match keeps.is_empty() {
            true => policy,
            false => policy.keep(move |call| keeps.iter().any(|keeps| keeps.operation() == call.operation)),
        })
    }
}

pub(crate) fn activation_checkpoint(text: &str) -> Result<ActivationCheckpoint, String> {
    match (text, text.parse::<usize>()) {
        ("none", _) => Ok(ActivationCheckpoint::None),
        ("full", _) => Ok(ActivationCheckpoint::Full),
        (_, Ok(count)) if count > 0 => Ok(ActivationCheckpoint::Every(count)),
        // A word by itself is a slip: names of blocks have dots or are patterns.
        _ if text.contains(['.', '*']) => Ok(ActivationCheckpoint::Named(text.split(',').map(Into::into).collect())),
        _ => Err("it must be none, full, a number K for every K-th block, or names of blocks, such as \
                  model.layers.0,model.layers.[4-7]"
            .into()),
    }
}

/// What blocks that run again keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckpointKeep {
    /// What products with weights make
    Linear,
    /// What attention makes
    Attention,
}

impl CheckpointKeep {
    fn operation(self) -> Operation {
        match self {
            CheckpointKeep::Linear => Operation::Linear,
            CheckpointKeep::Attention => Operation::Attention,
        }
    }
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Switch {
    On,
    Off,
}

/// Which checkpoint to go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    None,
    Auto,
    Path(PathBuf),
}

impl Serialize for Resume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Resume::None => "none".serialize(serializer),
            Resume::Auto => "auto".serialize(serializer),
            Resume::Path(path) => absolute(path, serializer),
        }
    }
}

impl From<OsString> for Resume {
    fn from(value: OsString) -> Self {
        match value.to_str() {
            Some("none") => Resume::None,
            Some("auto") => Resume::Auto,
            _ => Resume::Path(value.into()),
        }
    }
}

/// Where a path leads from here: ranks may work in different directories. Of what is not UTF-8 the bytes are spelled
/// out.
fn absolute<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    let path = match is_url(path) {
        true => path.to_path_buf(),
        false => std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()),
    };
    match path.to_str() {
        Some(text) => text.serialize(serializer),
        None => path.as_os_str().as_encoded_bytes().escape_ascii().to_string().serialize(serializer),
    }
}

/// Whether a path says by itself where it leads, as `s3://bucket/run` does.
pub(crate) fn is_url(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// The path of this host that `path` is; none in an object store.
pub(crate) fn on_this_host(path: &Path) -> Option<&Path> {
    match path.to_str().and_then(|text| text.strip_prefix("file://")) {
        Some(local) => Some(Path::new(local)),
        None => Some(path).filter(|path| !is_url(path)),
    }
}

pub(crate) fn place<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => absolute(path, serializer),
        None => serializer.serialize_none(),
    }
}

/// Without the flag a directory is made below this one.
pub(crate) fn checkpoint_place<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    absolute(path.as_deref().unwrap_or(Path::new("checkpoints/run-NNN")), serializer)
}

pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "it must be a whole number of at least 1".into())
}

fn number(text: &str, what: &str, wanted: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.trim().parse().ok().filter(|&x: &f64| x.is_finite() && wanted(x)).ok_or_else(|| format!("it must be {what}"))
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0, such as 3e-4", |x| x > 0.0)
}

pub(crate) fn loss_scale(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 1 that f32 has room for, such as 65536", |x| {
        (1.0..=f64::from(f32::MAX)).contains(&x)
    })
}

pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0, such as 0.1", |x| x >= 0.0)
}

pub(crate) fn share(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and at most 1, such as 0.15", |x| x > 0.0 && x <= 1.0)
}

pub(crate) fn betas(text: &str) -> Result<(f64, f64), String> {
    let beta = |text| number(text, "a beta", |x| (0.0..1.0).contains(&x)).ok();
    let both = text.split_once(',').and_then(|(first, second)| Some((beta(first)?, beta(second)?)));
    both.ok_or_else(|| {
        "it must be two numbers of at least 0 and below 1 with a comma between them, such as 0.9,0.95".into()
    })
}
