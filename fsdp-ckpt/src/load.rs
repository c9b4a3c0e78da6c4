//! Loading into existing memory.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, Writable};

use crate::cast::cast;
use crate::model_prefix::ModelPrefix;
use crate::region::{check_request, checked_bytes, fits};
use crate::source::stream;
use crate::{Error, Result, TensorSource};

/// Memory to fill with one rank's shard of a global tensor.
#[derive(Clone)]
pub struct LoadTensor {
    /// Fully qualified name, such as `model.layers.0.weight`.
    pub fqn: String,
    /// Shape of the global tensor.
    pub shape: Vec<usize>,
    /// Region of the global tensor that this rank holds; may be empty.
    pub region: Region,
    /// Memory for the elements of the region, row-major. It determines the dtype.
    pub data: Arc<dyn Writable>,
}

/// Names that must match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strict {
    /// The checkpoint has exactly the tensors to load, like `strict=True` of PyTorch's `load_state_dict`.
    Both,
    /// The checkpoint has at least the tensors to load, like PyTorch's `dcp.load`.
    #[default]
    Missing,
    /// Loads the tensors that both have.
    Neither,
}

/// Options of a load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Names that must match.
    pub strict: Strict,
    /// Patterns of names to load, such as `model.layers.0.*`; empty for all. `*` matches any characters, `?` one.
    pub include: Vec<String>,
    /// Patterns of names to leave out.
    pub exclude: Vec<String>,
    /// Whether to convert floating point elements to the dtype of the memory.
    pub convert: bool,
}

impl Default for LoadOptions {
    /// Requires every tensor to load and converts dtypes.
    fn default() -> Self {
        LoadOptions { strict: Strict::default(), include: Vec::new(), exclude: Vec::new(), convert: true }
    }
}

/// Summary of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Number of tensors that were filled.
    pub loaded: usize,
    /// Bytes of this rank's shards in memory.
    pub bytes: u64,
    /// Requested names that the checkpoint lacks.
    pub missing: Vec<String>,
    /// Names in the checkpoint that were not requested.
    pub unexpected: Vec<String>,
    /// Names of converted tensors, with the dtypes in the checkpoint and in memory.
    pub converted: Vec<(String, DType, DType)>,
}

/// Fills `tensors` from a checkpoint or model of any format, saved by any mesh. Each rank reads only the byte ranges of
/// its own shards. Does not communicate.
///
/// Finds out whether the source's names have the prefix `model.`, see [`ModelPrefix`]. Checks all names, shapes and
/// dtypes before writing to memory.
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
/// [`Error::Argument`] for a pattern that is invalid or matches no name; [`Error::NameMismatch`];
/// [`Error::TensorMismatch`] for another shape, or for another dtype that is not converted;
/// errors of reading.
pub fn load(source: &dyn TensorSource, tensors: &[LoadTensor], options: &LoadOptions) -> Result<LoadReport> {
    let _span = fsdp_core::heartbeat::span("checkpoint load", "");
    let patterns = Patterns::new(options)?;
    let names = ModelPrefix::of(source, tensors.iter().map(|tensor| tensor.fqn.as_str()));
    let stored = source.tensors().keys().chain(source.unreadable().keys()).map(|name| names.state_name(name));
    patterns.check(stored.chain(tensors.iter().map(|tensor| tensor.fqn.as_str().into())), source)?;
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

/// Checks that a tensor fits its memory, and returns its dtype in the source.
fn check(source: &dyn TensorSource, stored: &str, tensor: &LoadTensor, options: &LoadOptions) -> Result<DType> {
    let entry = source.tensor(stored)?;
    let misfit = |reason: String| {
        Err(Error::TensorMismatch { path: source.path().to_path_buf(), tensor: stored.to_string(), reason })
    };
    let (from, to) = (entry.dtype, tensor.data.dtype());
    if entry.shape != tensor.shape {
        return misfit(format!("shape {:?}, expected {:?}", entry.shape, tensor.shape));
    }
    if from != to && !(options.convert && from.is_float() && to.is_float()) {
        let why = if options.convert { "only floating point types are converted" } else { "conversion is off" };
        return misfit(format!("dtype {from}, expected {to}, and {why}"));
    }
    let has_room = checked_bytes(&tensor.region.sizes, 1) == Some(tensor.data.len());
    if !fits(&tensor.region, &tensor.shape) || !has_room {
        let reason = format!("its memory has {} elements, but its region is {:?}", tensor.data.len(), tensor.region);
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

/// Reads a region of a tensor into `into`, row-major, and converts floating point elements to `to` with one rounding.
///
/// # Errors
/// The errors of [`TensorSource::read`]; [`Error::InvalidRead`] if `into` has another size, or the dtypes differ and
/// one of them is not floating point.
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

/// Compiled name patterns of [`LoadOptions`].
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
                        .map_err(|error| Error::Argument(format!("{text:?} is not a valid name pattern: {error}")))
                })
                .collect::<Result<Vec<_>>>()
        };
        Ok(Patterns { include: compile(&options.include)?, exclude: compile(&options.exclude)? })
    }

    /// Fails if a pattern matches none of the names.
    fn check<'a>(&self, names: impl Iterator<Item = Cow<'a, str>> + Clone, source: &dyn TensorSource) -> Result<()> {
        for (option, patterns) in [("include", &self.include), ("exclude", &self.exclude)] {
            if let Some(idle) = patterns.iter().find(|pattern| !names.clone().any(|name| pattern.matches(&name))) {
                let (path, idle) = (source.path().display(), idle.as_str());
                let reason = format!(
                    "LoadOptions::{option}: {idle:?} matches no tensor of {path} and none to load. The names in a \
                     training state are model.<fqn>"
                );
                return Err(Error::Argument(reason));
            }
        }
        Ok(())
    }

    fn accept(&self, name: &str) -> bool {
        let is_in = |patterns: &[glob::Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        (self.include.is_empty() || is_in(&self.include)) && !is_in(&self.exclude)
    }
}
