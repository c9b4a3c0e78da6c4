//! Value types of `train`'s flags: parsing, and serialisation for the comparison between ranks.

use std::ffi::OsString;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use candle_core::DType;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fsdp_candle::activation_checkpoint::{CheckpointPolicy, Operation};
use fsdp_candle::{AllGatherExtension, Float8, OffloadPolicy};
use fsdp_ckpt::gguf::Quantization;
use fsdp_corpus::sequence::Pack;
use fsdp_corpus::tokens::Width;
use fsdp_train::flags::number;
use fsdp_train::models::{Dropout, ModelConfig, is_block_matrix};
use serde::{Serialize, Serializer};

/// Source of the initial weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum InitChoice {
    /// The model directory's weights if there are any, else random
    Auto,
    /// The model directory's weights; fails without weights
    Pretrained,
    /// Random, from --seed
    Random,
}

/// Floating point dtype.
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

/// Dropout probabilities while training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DropoutChoice {
    /// The probabilities in config.json
    Config,
    /// One probability for all dropout layers
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

/// Format in which the blocks' matrices are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AllGather {
    /// --param-dtype
    Full,
    /// 8-bit floats (E4M3) with one scale per process and matrix
    Float8,
}

impl AllGather {
    /// Returns the all-gather extension for the parameter `name`, if it has one.
    pub(crate) fn extension(self, name: &str) -> Option<Arc<dyn AllGatherExtension>> {
        (self == AllGather::Float8 && is_block_matrix(name)).then(|| Arc::new(Float8) as Arc<dyn AllGatherExtension>)
    }
}

/// Whether the optimizer steps in backward, and how it clips gradients then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum InBackward {
    /// It steps after backward
    Off,
    /// Gradients are not clipped
    Unclipped,
    /// Gradients are clipped to --clip-grad-norm by the norm of the step before
    LastNorm,
}

/// Micro-batches after which gradients are summed over processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum GradSync {
    Every,
    Last,
}

/// Serialises the lower-case name of a variant.
pub(crate) fn debug_name<T: Debug, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    format!("{value:?}").to_lowercase().serialize(serializer)
}

/// Storage of shards, gradients and optimizer state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Offload {
    /// All on the compute device.
    None,
    /// All in host memory.
    Cpu,
    /// Optimizer state in this directory, the rest in host memory.
    Disk(PathBuf),
    /// Optimizer state and shards in this directory.
    DiskWithShards(PathBuf),
}

impl Offload {
    pub(crate) fn policy(&self) -> OffloadPolicy {
        match self {
            Offload::None => OffloadPolicy::None,
            Offload::Cpu | Offload::Disk(_) | Offload::DiskWithShards(_) => OffloadPolicy::Cpu { pin_memory: true },
        }
    }

    /// Returns the directory for optimizer state.
    pub(crate) fn disk(&self) -> Option<&Path> {
        match self {
            Offload::None | Offload::Cpu => None,
            Offload::Disk(dir) | Offload::DiskWithShards(dir) => Some(dir),
        }
    }

    /// Returns the directory for shards.
    pub(crate) fn disk_of_shards(&self) -> Option<&Path> {
        if let Offload::DiskWithShards(dir) = self { Some(dir) } else { None }
    }
}

impl Serialize for Offload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Offload::None => "none".serialize(serializer),
            Offload::Cpu => "cpu".serialize(serializer),
            // Each host may have its own directory.
            Offload::Disk(_) => "disk".serialize(serializer),
            Offload::DiskWithShards(_) => "disk+shards".serialize(serializer),
        }
    }
}

impl FromStr for Offload {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.split_once(':')) {
            ("none", _) => Ok(Offload::None),
            ("cpu", _) => Ok(Offload::Cpu),
            (_, Some(("disk", dir))) if !dir.is_empty() => Ok(Offload::Disk(dir.into())),
            (_, Some(("disk+shards", dir))) if !dir.is_empty() => Ok(Offload::DiskWithShards(dir.into())),
            _ => Err("it must be none, cpu, disk:DIR with a directory for optimizer state, such as disk:/nvme, or \
                      disk+shards:DIR for shards as well"),
        }
    }
}

/// Blocks that recompute their activations in backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ActivationCheckpoint {
    /// No block
    None,
    /// All blocks
    Full,
    /// Every K-th block, from the first
    #[serde(untagged)]
    Every(usize),
    /// Blocks whose names match
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
            false => policy.keep(move |call| keeps.iter().any(|keeps| keeps.keeps(call.operation))),
        })
    }
}

pub(crate) fn activation_checkpoint(text: &str) -> Result<ActivationCheckpoint, String> {
    match (text, text.parse::<usize>()) {
        ("none", _) => Ok(ActivationCheckpoint::None),
        ("full", _) => Ok(ActivationCheckpoint::Full),
        (_, Ok(count)) if count > 0 => Ok(ActivationCheckpoint::Every(count)),
        // Block names contain dots or patterns. Any other word is a typing error.
        _ if text.contains(['.', '*']) => Ok(ActivationCheckpoint::Named(text.split(',').map(Into::into).collect())),
        _ => Err("it must be none, full, a number K for every K-th block, or names of blocks, such as \
                  model.layers.0,model.layers.[4-7]"
            .into()),
    }
}

/// Activations that recomputed blocks keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckpointKeep {
    /// Outputs of products with weights, and what SwiGLU keeps of them
    Linear,
    /// Outputs of attention
    Attention,
}

impl CheckpointKeep {
    fn keeps(self, operation: Operation) -> bool {
        match self {
            CheckpointKeep::Linear => matches!(operation, Operation::Linear | Operation::SwiGlu),
            CheckpointKeep::Attention => operation == Operation::Attention,
        }
    }
}

/// Whether a feature is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Switch {
    On,
    Off,
}

/// Value of --pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PackChoice {
    /// Within documents
    Documents,
    /// Over the whole sequence
    Stream,
}

impl From<PackChoice> for Pack {
    fn from(choice: PackChoice) -> Self {
        match choice {
            PackChoice::Documents => Pack::Documents,
            PackChoice::Stream => Pack::Stream,
        }
    }
}

/// Value of --token-bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub(crate) enum TokenBits {
    #[serde(rename = "16")]
    #[value(name = "16")]
    U16,
    #[serde(rename = "32")]
    #[value(name = "32")]
    U32,
}

impl From<TokenBits> for Width {
    fn from(bits: TokenBits) -> Self {
        match bits {
            TokenBits::U16 => Width::U16,
            TokenBits::U32 => Width::U32,
        }
    }
}

/// Checkpoint to resume from.
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

/// Returns a parser for the values of --gguf-quantize.
pub(crate) fn quantization() -> impl TypedValueParser<Value = Quantization> {
    PossibleValuesParser::new(Quantization::ALL.map(Quantization::name))
        .try_map(|name| Quantization::from_name(&name).ok_or("it must be a type of GGUF files"))
}

pub(crate) fn optional_quantization<S: Serializer>(
    quantization: &Option<Quantization>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    quantization.map(Quantization::name).serialize(serializer)
}

/// Serialises an absolute path, because ranks may run in different directories. Escapes bytes that are not UTF-8.
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

/// Returns whether a path is a URL, such as `s3://bucket/run`.
pub(crate) fn is_url(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Returns the local path of `path`, or `None` in an object store.
pub(crate) fn on_this_host(path: &Path) -> Option<&Path> {
    match path.to_str().and_then(|text| text.strip_prefix("file://")) {
        Some(local) => Some(Path::new(local)),
        None => Some(path).filter(|path| !is_url(path)),
    }
}

pub(crate) fn optional_path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => absolute(path, serializer),
        None => serializer.serialize_none(),
    }
}

/// Serialises the directory below which a run without the flag creates its own.
pub(crate) fn checkpoint_path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    absolute(path.as_deref().unwrap_or(Path::new("checkpoints/run-NNN")), serializer)
}

pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "it must be a whole number of at least 1".into())
}

pub(crate) fn loss_scale(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 1 that f32 has room for, such as 65536", |x| {
        (1.0..=f64::from(f32::MAX)).contains(&x)
    })
}

pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and at most 1, such as 0.15", |x| x > 0.0 && x <= 1.0)
}

pub(crate) fn betas(text: &str) -> Result<(f64, f64), String> {
    let beta = |text| number(text, "a beta", |x| (0.0..1.0).contains(&x)).ok();
    let both = text.split_once(',').and_then(|(first, second)| Some((beta(first)?, beta(second)?)));
    both.ok_or_else(|| {
        "it must be two numbers of at least 0 and below 1 with a comma between them, such as 0.9,0.95".into()
    })
}
