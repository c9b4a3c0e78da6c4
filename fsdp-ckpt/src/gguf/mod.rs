//! Writing GGUF files, which llama.cpp and the programs built on it read.
//!
//! [`write()`] converts a model with its tokenizer into one file. `config` reads `config.json`, `names` lists the
//! tensors of each architecture, `metadata` describes the model and `vocab` its tokenizer. `quantize` chooses the types
//! of tensors and encodes them, and `file` lays out the bytes. Tensors are read, changed and quantized a few MiB at a
//! time, so memory does not grow with the model.
//!
//! Names, shapes and metadata are those of llama.cpp's own converter, and types of tensors are those of its quantizer.

mod chat_template;
mod config;
mod file;
mod k_quants;
mod metadata;
mod names;
mod pre_tokenizer;
mod quantize;
mod rope;
mod special_tokens;
mod tensors;
mod vocab;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use quantize::Quantization;

#[cfg(doc)]
use crate::Error;
use crate::gguf::config::Config;
use crate::gguf::file::{Header, TensorInfo, create};
use crate::gguf::metadata::Metadata;
use crate::gguf::tensors::Tensors;
use crate::gguf::vocab::Vocabulary;
use crate::hf::{Renamed, unfused};
use crate::{Result, TensorSource};

/// Options of [`write()`].
#[derive(Clone, Debug, Default)]
pub struct GgufOptions {
    /// Types of the matrices. `None` keeps 16-bit matrices and writes others in f32.
    pub quantization: Option<Quantization>,
    /// llama.cpp's name of the pre-tokenizer, if it is not to be derived from `tokenizer.json`.
    pub pre_tokenizer: Option<String>,
    /// Name of the model. `None` takes the name of the file.
    pub name: Option<String>,
}

/// Summary of [`write()`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufSummary {
    /// Path of the file.
    pub path: PathBuf,
    /// llama.cpp's name of the architecture.
    pub architecture: &'static str,
    /// Types of the matrices.
    pub quantization: Quantization,
    /// Number of tensors of each type.
    pub types: BTreeMap<&'static str, usize>,
    /// Size of the file.
    pub bytes: u64,
    /// Kind of the tokenizer: `gpt2`, `llama` or `bert`, or `no_vocab` without one.
    pub tokenizer: &'static str,
    /// Finite numbers that became infinite in f16.
    pub overflowed: u64,
    /// Differences between the model and what llama.cpp computes.
    pub notes: Vec<String>,
}

/// Writes the model `source`, with parameters under their own names, as the GGUF file `dst`. Reads `config.json` and
/// the tokenizer's files in `config_dir`. A directory without a tokenizer gives a file without one.
///
/// ```no_run
/// use std::path::Path;
///
/// use fsdp_ckpt::convert::View;
/// use fsdp_ckpt::gguf::{self, GgufOptions, Quantization};
///
/// let dir = Path::new("model");
/// let model = fsdp_ckpt::open(dir)?;
/// let options = GgufOptions { quantization: Some(Quantization::Q4KM), ..GgufOptions::default() };
/// gguf::write(Path::new("model.gguf"), &View::model(&*model), dir, &options)?;
/// # Ok::<_, fsdp_ckpt::Error>(())
/// ```
///
/// # Errors
/// [`Error::AlreadyExists`] if `dst` exists; [`Error::NotFound`] without a `config.json`; [`Error::Malformed`] for a
/// model or tokenizer that is damaged or that llama.cpp does not know; [`Error::MissingTensor`] and
/// [`Error::NameMismatch`] if the tensors are not those of the architecture; [`Error::Io`]; the errors of
/// [`TensorSource::read`].
pub fn write(
    dst: impl AsRef<Path>,
    source: &dyn TensorSource,
    config_dir: impl AsRef<Path>,
    options: &GgufOptions,
) -> Result<GgufSummary> {
    let (dst, config_dir) = (dst.as_ref(), config_dir.as_ref());
    let config = Config::read(config_dir)?;
    let unfused = |count| Renamed::new(source, unfused(source, config.expert_names(), count)?);
    let unfused = config.experts.map(|experts| unfused(experts.count)).transpose()?;
    let source = unfused.as_ref().map_or(source, |unfused| unfused as &dyn TensorSource);
    let tensors = Tensors::new(source, &config)?;
    let vocabulary = Vocabulary::read(config_dir, &config, options.pre_tokenizer.as_deref())?;
    let quantization = options.quantization.unwrap_or_else(|| tensors.own_quantization(source));
    let mut infos = Vec::with_capacity(tensors.list.len());
    let mut types = BTreeMap::new();
    for tensor in &tensors.list {
        let dtype = quantization.of_tensor(&tensor.name, &tensor.shape, &config, tensors.has_output());
        *types.entry(quantize::name(dtype)).or_default() += 1;
        infos.push(TensorInfo { name: tensor.name.clone(), shape: tensor.shape.clone(), dtype });
    }
    let name = match &options.name {
        Some(name) => name.clone(),
        None => dst.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
    };
    let is_accepted = vocabulary.as_ref().is_none_or(|vocabulary| vocabulary.accepts_name(&name));
    let mut metadata = Metadata::default();
    metadata.describe(&config, quantization, is_accepted.then_some(&*name));
    let tokenizer = match &vocabulary {
        Some(vocabulary) => vocabulary.add_to(&mut metadata),
        None => metadata.without_vocabulary(),
    };
    let header = Header::new(&metadata.entries, &infos)?;

    let mut file = create(dst, &header)?;
    let mut overflowed = 0;
    for (tensor, info) in tensors.list.iter().zip(&infos) {
        tensors.stream(source, tensor, &mut |values, columns| {
            let bytes = quantize::encode(&tensor.name, source.path(), values, columns, info.dtype, &mut overflowed)?;
            file.append(&bytes)
        })?;
        file.pad()?;
    }
    let bytes = file.finish()?;
    Ok(GgufSummary {
        path: dst.to_path_buf(),
        architecture: config.architecture.name(),
        quantization,
        types,
        bytes,
        tokenizer,
        overflowed,
        notes: config.notes(),
    })
}

/// Checks that [`write()`] can write a model with the `config.json` and the tokenizer in `config_dir`. Does not read
/// tensors, so that a program can call it before the model is trained.
///
/// # Errors
/// [`Error::NotFound`] without a `config.json`; [`Error::Malformed`] for a model or tokenizer that is damaged or that
/// llama.cpp does not know; [`Error::Io`].
pub fn check(config_dir: impl AsRef<Path>, options: &GgufOptions) -> Result<()> {
    let config_dir = config_dir.as_ref();
    let config = Config::read(config_dir)?;
    Vocabulary::read(config_dir, &config, options.pre_tokenizer.as_deref()).map(|_| ())
}
