//! TODO

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, Writable};

use crate::cast::cast;
use crate::region::{check_request, checked_bytes, fits};
use crate::source::stream;
use crate::{Error, Format, Result, TensorSource};

/// Memory of one rank's part of a global tensor, to be filled.
#[derive(Clone)]
pub struct LoadTensor {
    /// The fully qualified name, as in `model.layers.0.weight`.
    pub fqn: String,
    /// The shape of the global tensor.
    pub shape: Vec<usize>,
    /// The box of the global tensor that this rank holds; may be empty.
    pub region: Region,
    /// Where the elements of the box go, row-major. The dtype is this memory's.
    pub data: Arc<dyn Writable>,
}

/// Which names a load insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strict {
    /// The checkpoint has every tensor that is to be loaded, and no other: `strict=True` of PyTorch's
    /// `load_state_dict`.
    Both,
    /// The checkpoint has every tensor that is to be loaded, and may have others: PyTorch's `dcp.load`.
    #[default]
    Missing,
    /// What both have is loaded.
    Neither,
}

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Which names must match.
    pub strict: Strict,
    /// Loads only names that one of these patterns matches; all, if there are none. `*` stands for any characters, `?`
    /// for one: `model.layers.0.*`.
    pub include: Vec<String>,
    /// Leaves names out that one of these patterns matches.
    pub exclude: Vec<String>,
    /// Whether floating point elements may be converted to the dtype of the memory.
    pub convert: bool,
}

impl Default for LoadOptions {
    /// Every tensor must be there; dtypes are converted.
    fn default() -> Self {
        LoadOptions { strict: Strict::default(), include: Vec::new(), exclude: Vec::new(), convert: true }
    }
}

/// What a load has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The number of tensors that were filled.
    pub loaded: usize,
    /// The bytes that this rank's parts of them take in memory.
    pub bytes: u64,
    /// Names that were to be loaded and are not in the checkpoint.
    pub missing: Vec<String>,
    /// Names in the checkpoint that nothing was to be loaded from.
    pub unexpected: Vec<String>,
    /// Names whose elements were converted, with the dtypes in the checkpoint and in memory.
    pub converted: Vec<(String, DType, DType)>,
}

/// Fills `tensors` from a checkpoint or model of any format, whatever mesh wrote it; each rank reads the byte ranges of
/// its own boxes only. No communication.
///
/// A model that was saved without its optimizer has its names without the prefix `model.`; that is found out.
/// Everything is checked before anything is written: names, shapes and dtypes.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use fsdp_ckpt::{LoadOptions, LoadTensor, TensorShard, hf, load, open};
/// use fsdp_core::{Buffer, layout::Region, process_group::local};
///
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = Arc::new(Buffer::F32(vec![1.0, 2.0, 3.0, 4.0]));
/// #     hf::export(&dir, &group, &[TensorShard::whole("lm_head.weight", &[2, 2], data)], &[]).unwrap();
/// # });
/// // The second row, in half the precision.
/// let memory = Arc::new(Mutex::new(Buffer::BF16(vec![Default::default(); 2])));
/// let region = Region { offsets: vec![1, 0], sizes: vec![1, 2] };
/// let row = LoadTensor { fqn: "model.lm_head.weight".into(), shape: vec![2, 2], region, data: memory.clone() };
/// let report = load(&*open(&dir)?, &[row], &LoadOptions::default())?;
/// assert_eq!(report.loaded, 1);
/// assert_eq!(memory.lock().unwrap().bytes(), [3.0f32, 4.0].map(|v| half::bf16::from_f32(v).to_ne_bytes()).concat());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::NameMismatch`] when names don't match as strictly as asked; [`Error::TensorMismatch`] when a tensor has another shape, or
/// a dtype that is not to be, or can't be, converted; those of reading.
pub fn load(source: &dyn TensorSource, tensors: &[LoadTensor], options: &LoadOptions) -> Result<LoadReport> {
    let _span = fsdp_core::heartbeat::span("checkpoint load", "");
    let patterns = Patterns::new(options)?;
    let names = ModelPrefix::of(source, tensors.iter().map(|tensor| tensor.fqn.as_str()));
    let mut report = LoadReport::default();
    let mut wanted = BTreeSet::new();
    let mut found = Vec::new();
    for tensor in tensors.iter().filter(|tensor| patterns.accept(&tensor.fqn)) {
        let stored = names.stored_name(&tensor.fqn);
        if source.tensors().contains_key(stored) || source.unreadable().contains_key(stored) {
            found.push((tensor, stored, check(source, stored, tensor, options)?));
        } else {
            report.missing.push(tensor.fqn.clone());
        }
        wanted.insert(stored);
    }
    let stored = source.tensors().keys().chain(source.unreadable().keys());
    report.unexpected = stored
        .filter(|name| !wanted.contains(name.as_str()) && patterns.accept(&names.state_name(name)))
        .cloned()
        .collect();
    let is_bad = match options.strict {
        Strict::Both => !report.missing.is_empty() || !report.unexpected.is_empty(),
        Strict::Missing => !report.missing.is_empty(),
        Strict::Neither => false,
    };
    if is_bad {
        let LoadReport { missing, unexpected, .. } = report;
        let unexpected = if options.strict == Strict::Both { unexpected } else { Vec::new() };
        return Err(Error::NameMismatch { path: source.path().to_path_buf(), missing, unexpected });
    }
    for (tensor, stored, from) in found {
        fill(source, stored, tensor)?;
        report.loaded += 1;
        report.bytes += (tensor.region.elements() * tensor.data.dtype().size()) as u64;
        if from != tensor.data.dtype() {
            report.converted.push((tensor.fqn.clone(), from, tensor.data.dtype()));
        }
    }
    Ok(report)
}

/// The dtype of a tensor in the source, whose elements can go to memory.
fn check(source: &dyn TensorSource, stored: &str, tensor: &LoadTensor, options: &LoadOptions) -> Result<DType> {
    let entry = source.tensor(stored)?;
    let misfit = |reason: String| {
        Err(Error::TensorMismatch { path: source.path().to_path_buf(), tensor: stored.to_string(), reason })
    };
    let (from, to) = (entry.dtype, tensor.data.dtype());
    if entry.shape != tensor.shape {
        return misfit(format!("shape {:?}, shape {:?} is to be loaded", entry.shape, tensor.shape));
    }
    if from != to && !(options.convert && from.is_float() && to.is_float()) {
        let why =
            if options.convert { "only floating point types are converted" } else { "nothing is to be converted" };
        return misfit(format!("dtype {from}, {to} is to be loaded, and {why}"));
    }
    let has_room = checked_bytes(&tensor.region.sizes, 1) == Some(tensor.data.len());
    if !fits(&tensor.region, &tensor.shape) || !has_room {
        let reason = format!("its memory of {} elements is not that of {:?}", tensor.data.len(), tensor.region);
        return Err(Error::InvalidRead { tensor: tensor.fqn.clone(), reason });
    }
    Ok(from)
}

fn fill(source: &dyn TensorSource, stored: &str, tensor: &LoadTensor) -> Result<()> {
    let to = tensor.data.dtype();
    let mut outcome = Ok(());
    let written = tensor.data.write(&mut |bytes| outcome = read_as(source, stored, &tensor.region, to, bytes));
    written.map_err(|reason| Error::ShardMemory { tensor: tensor.fqn.clone(), reason })?;
    outcome
}

/// Reads a box of a tensor into `into`, row-major, as elements of dtype `to`: floating point elements of another are
/// converted, rounded once, some MiB at a time.
///
/// # Errors
/// As [`TensorSource::read`]; [`Error::InvalidRead`] when `into` has not the size of the box, or one of the dtypes is no
/// floating point type and they differ.
pub fn read_as(source: &dyn TensorSource, fqn: &str, region: &Region, to: DType, into: &mut [u8]) -> Result<()> {
    let tensor = source.tensor(fqn)?;
    let from = tensor.dtype;
    if from == to {
        return source.read(fqn, region, into);
    }
    check_request(fqn, &tensor.shape, to.size(), region, into.len())?;
    let mut rest = into;
    stream(source, fqn, region, &mut |bytes| {
        let (block, more) = std::mem::take(&mut rest).split_at_mut(bytes.len() / from.size() * to.size());
        rest = more;
        cast(bytes, from, block, to).ok_or_else(|| {
            let reason = format!("{from} can't be converted to {to}");
            Error::InvalidRead { tensor: fqn.to_string(), reason }
        })
    })
}

/// Which names are asked for.
struct Patterns {
    include: Vec<glob::Pattern>,
    exclude: Vec<glob::Pattern>,
}

impl Patterns {
    fn new(options: &LoadOptions) -> Result<Self> {
        let compile = |patterns: &[String]| {
            patterns
                .iter()
                .map(|text| {
                    glob::Pattern::new(text)
                        .map_err(|error| Error::Argument(format!("{text:?} is not a pattern of names: {error}")))
                })
                .collect::<Result<Vec<_>>>()
        };
        Ok(Patterns { include: compile(&options.include)?, exclude: compile(&options.exclude)? })
    }

    fn accept(&self, name: &str) -> bool {
        let is_in = |patterns: &[glob::Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        (self.include.is_empty() || is_in(&self.include)) && !is_in(&self.exclude)
    }
}

/// What a model's names begin with in a training state.
pub const MODEL: &str = "model.";

/// What an optimizer's names begin with there.
const OPTIM: &str = "optim.";

/// How a source calls what a training state calls `model.<fqn>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPrefix {
    has_prefix: bool,
}

impl ModelPrefix {
    /// Finds out by which of the two more of the `wanted` names, as a training state has them, are in `source`.
    pub fn of<'a>(source: &dyn TensorSource, wanted: impl Iterator<Item = &'a str>) -> Self {
        let is_there = |name: &str| source.tensors().contains_key(name) || source.unreadable().contains_key(name);
        let (mut with, mut without) = (0, 0);
        for name in wanted {
            let Some(fqn) = name.strip_prefix(MODEL) else { continue };
            with += usize::from(is_there(name));
            without += usize::from(is_there(fqn));
        }
        ModelPrefix { has_prefix: with >= without }
    }

    /// Finds out by the source's own names, where none are wanted.
    ///
    /// `model.` may be the FQNs' own: in files of a model by itself, it is the prefix where the optimizer is there too,
    /// or `model.model.` is.
    pub fn guess(source: &dyn TensorSource) -> Self {
        let names = || source.tensors().keys().chain(source.unreadable().keys());
        let any = |prefix: &str| names().any(|name| name.starts_with(prefix));
        let all = || names().all(|name| name.starts_with(MODEL) || name.starts_with(OPTIM));
        let has_prefix = match source.format() {
            Format::Fsdp => any(MODEL) || any(OPTIM),
            // Of what is saved so, a model is a part: `{"model": ..., "optim": ...}`.
            Format::TorchDcp => all(),
            _ => all() && (any(OPTIM) || any("model.model.")),
        };
        ModelPrefix { has_prefix }
    }

    /// The FQN of the parameter or buffer that the source calls `name`; nothing for what is not the model's.
    pub fn fqn<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.has_prefix { name.strip_prefix(MODEL) } else { Some(name) }
    }

    /// What the source calls the state's `name`.
    pub fn stored_name<'a>(&self, name: &'a str) -> &'a str {
        if self.has_prefix { name } else { name.strip_prefix(MODEL).unwrap_or(name) }
    }

    /// What the state calls the source's `name`.
    pub fn state_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.has_prefix { Cow::Borrowed(name) } else { Cow::Owned(format!("{MODEL}{name}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::path::Path;

    use crate::hf::HfModel;

    /// A safetensors file of scalars with these names.
    fn file(path: &Path, names: &[&str]) -> HfModel {
        let entries: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(i, name)| format!(r#""{name}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{}]}}"#, i + 1))
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.resize(bytes.len() + names.len(), 0);
        std::fs::write(path, bytes).unwrap();
        HfModel::open_file(path).unwrap()
    }

    #[test]
    fn the_naming_that_finds_more_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("m.safetensors");
        let (with, without) = (ModelPrefix { has_prefix: true }, ModelPrefix { has_prefix: false });
        let wanted = ["model.model.embed.weight", "model.lm_head.weight", "optim.state.lm_head.weight.step"];
        let of = |source: &HfModel| ModelPrefix::of(source, wanted.into_iter());

        let plain = file(&path, &["model.embed.weight", "lm_head.weight"]);
        assert_eq!((of(&plain), ModelPrefix::guess(&plain)), (without, without));
        assert_eq!((without.fqn("model.embed.weight"), with.fqn("model.a")), (Some("model.embed.weight"), Some("a")));
        assert_eq!(with.fqn("optim.state.lm_head.weight.step"), None);
        let prefixed = file(&path, &["model.model.embed.weight", "model.lm_head.weight"]);
        assert_eq!((of(&prefixed), ModelPrefix::guess(&prefixed)), (with, with));
        // A Llama with tied weights: every parameter's own name begins so.
        let tied = file(&path, &["model.embed.weight", "model.norm.weight"]);
        assert_eq!((of(&tied), ModelPrefix::guess(&tied)), (without, without));
        assert_eq!(ModelPrefix::guess(&file(&path, &["model.wte.weight", "optim.state.wte.weight.step"])), with);
        assert_eq!(ModelPrefix::guess(&file(&path, &["wte.weight", "optim.weight"])), without);
    }
}
