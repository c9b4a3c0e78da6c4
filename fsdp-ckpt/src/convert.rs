//! Writing a source in another format, with little memory.
//!
//! [`check`] verifies the source, a [`View`] selects, renames and casts its tensors, and [`write_fsdp`],
//! [`crate::hf::write`] and [`crate::torch::write_dcp`] write the view.
//!
//! The source is never changed. The destination must not exist, and appears when it is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Formatter};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fsdp_core::layout::{Region, local_region};
use fsdp_core::{BLOCK, BlockFormat, DType, MeshLayout, Placement};

use crate::cast::cast;
use crate::checkpoint::hosts::Hosts;
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::plan::{Claims, OwnChunk, Plan, TensorInfo, own_chunks, plan, write_chunks};
use crate::file_names::{MANIFEST, file_name};
use crate::finite::count_non_finite;
use crate::region::check_request;
use crate::source::{ChunkEntry, FileEntry, SourceIndex, TensorEntry, WriteSummary, stream};
use crate::store::{Store, location};
use crate::{Error, ModelPrefix, Result, TensorSource};

/// Verifies all checksums of `source`, and checks that writing `dst` would not change it. Calls `seen` with the bytes
/// of each read. Does not read chunks without checksums.
///
/// # Errors
/// [`Error::UnsupportedDTypes`] if there are any, unless `skip_unreadable`; [`Error::AlreadyExists`] if `dst` exists;
/// [`Error::Argument`] if `dst` is within the source; the errors of [`TensorSource::verify`].
pub fn check(
    source: &dyn TensorSource,
    dst: impl AsRef<Path>,
    skip_unreadable: bool,
    seen: &mut dyn FnMut(u64),
) -> Result<()> {
    let dst = dst.as_ref();
    if !skip_unreadable && !source.unreadable().is_empty() {
        return Err(Error::UnsupportedDTypes {
            path: source.path().to_path_buf(),
            tensors: source.unreadable().clone(),
        });
    }
    if dst.symlink_metadata().is_ok() {
        return Err(Error::AlreadyExists { path: dst.to_path_buf() });
    }
    if let (Ok(within), Some(parent)) = (source.path().canonicalize(), existing_parent(dst))
        && parent.starts_with(&within)
    {
        return Err(Error::Argument(format!(
            "{} is within the source {}; choose another destination",
            dst.display(),
            source.path().display()
        )));
    }
    for (fqn, tensor) in source.tensors() {
        for (at, _) in tensor.chunks.iter().enumerate().filter(|(_, chunk)| source.has_checksum(chunk)) {
            source.verify_chunk(fqn, at, seen)?;
        }
    }
    Ok(())
}

/// Resolves the nearest existing parent of `path`.
fn existing_parent(path: &Path) -> Option<PathBuf> {
    path.ancestors().skip(1).find_map(|dir| {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        dir.canonicalize().ok()
    })
}

/// Selected tensors of a source, with other names and dtypes. Reads convert the elements, so writers need not.
///
/// ```
/// use fsdp_ckpt::{TensorSource, convert::View};
/// # use fsdp_ckpt::TensorShard;
/// # use fsdp_core::{Buffer, DType, layout::Region, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32(vec![0.5; 6]));
/// #     fsdp_ckpt::hf::export(&dir, &group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let model = fsdp_ckpt::open(&dir)?;
/// let view = View::training(&*model).dtype(DType::BF16)?;
/// let weight = view.tensor("model.lm_head.weight")?;
/// assert_eq!((weight.dtype, &weight.shape[..]), (DType::BF16, &[3, 2][..]));
/// let mut bytes = vec![0; 12];
/// view.read("model.lm_head.weight", &Region::whole(&[3, 2]), &mut bytes)?;
/// assert_eq!(bytes, [0x00, 0x3f].repeat(6));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct View<'a> {
    source: &'a dyn TensorSource,
    prefix: ModelPrefix,
    index: SourceIndex,
    /// The source's name of each tensor.
    from: BTreeMap<String, String>,
    /// Formats of the tensors that reads decode.
    blocks: BTreeMap<String, BlockFormat>,
    seen: Option<&'a (dyn Fn(u64) + Send + Sync)>,
    overflowed: AtomicU64,
}

impl<'a> View<'a> {
    /// Selects all tensors under their own names.
    pub fn all(source: &'a dyn TensorSource) -> Self {
        Self::new(source, |_, name| Some(name.to_string()))
    }

    /// Selects all tensors under the names of a training state: `model.<fqn>` for parameters.
    pub fn training(source: &'a dyn TensorSource) -> Self {
        Self::new(source, |prefix, name| Some(prefix.state_name(name).into_owned()))
    }

    /// Selects the parameters under their FQNs, [decoded](View::decoded).
    pub fn model(source: &'a dyn TensorSource) -> Self {
        Self::new(source, |prefix, name| prefix.fqn(name).map(str::to_string)).decoded()
    }

    /// Decodes weights in blocks, for programs that do not know them: `<fqn>.nf4` of U8 becomes `<fqn>` of F32.
    pub fn decoded(mut self) -> Self {
        let names: Vec<String> = self.index.tensors.keys().cloned().collect();
        for name in names {
            let Some((format, floats)) = BlockFormat::of_name(&name) else { continue };
            let tensor = &self.index.tensors[&name];
            let shape = format.decoded_shape(&tensor.shape).filter(|_| tensor.dtype == DType::U8);
            let Some(shape) = shape.filter(|_| !self.index.tensors.contains_key(floats)) else { continue };
            let chunk = |chunk: &ChunkEntry| {
                let decoded = |sizes: &[usize]| format.decoded_shape(sizes);
                let (offsets, sizes) = (decoded(&chunk.offsets)?, decoded(&chunk.sizes)?);
                Some(ChunkEntry { crc32c: None, offsets, sizes, ..chunk.clone() })
            };
            let Some(chunks) = tensor.chunks.iter().map(chunk).collect() else { continue };
            self.index.tensors.insert(floats.to_string(), TensorEntry { dtype: DType::F32, shape, chunks });
            self.blocks.insert(floats.to_string(), format);
            self.index.tensors.remove(&name);
            if let Some(old) = self.from.remove(&name) {
                self.from.insert(floats.to_string(), old);
            }
        }
        self
    }

    fn new(source: &'a dyn TensorSource, name: impl Fn(ModelPrefix, &str) -> Option<String>) -> Self {
        let prefix = ModelPrefix::guess(source);
        let (mut tensors, mut from) = (BTreeMap::new(), BTreeMap::new());
        for (old, tensor) in source.tensors() {
            if let Some(new) = name(prefix, old) {
                tensors.insert(new.clone(), tensor.clone());
                from.insert(new, old.clone());
            }
        }
        let SourceIndex { path, format, mesh, files, values, .. } = source.index();
        let (mesh, files, values) = (mesh.clone(), files.clone(), values.clone());
        let index = SourceIndex { mesh, tensors, files, values, ..SourceIndex::new(path, *format) };
        View { source, prefix, index, from, blocks: BTreeMap::new(), seen: None, overflowed: AtomicU64::new(0) }
    }

    /// Converts floating point parameters to `dtype`. Optimizer state and integers keep their dtypes.
    ///
    /// # Errors
    /// [`Error::Argument`] unless `dtype` is BF16, F16, F32 or F64.
    pub fn dtype(mut self, dtype: DType) -> Result<Self> {
        if !dtype.is_float() {
            return Err(Error::Argument(format!("can't convert parameters to {dtype}; choose bf16, f16 or f32")));
        }
        for (name, tensor) in &mut self.index.tensors {
            if tensor.dtype.is_float() && self.prefix.fqn(&self.from[name]).is_some() {
                tensor.dtype = dtype;
                // The checksums are of the unconverted bytes.
                tensor.chunks.iter_mut().for_each(|chunk| chunk.crc32c = None);
            }
        }
        Ok(self)
    }

    /// Adds the tensor `of` under the name `alias`, too. PyTorch's state dicts hold a parameter that two layers share
    /// twice.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if `of` does not exist; [`Error::Argument`] if `alias` exists.
    pub fn alias(mut self, alias: &str, of: &str) -> Result<Self> {
        let tensor = self.tensor(of)?.clone();
        if self.tensors().contains_key(alias) {
            return Err(Error::Argument(format!("{} already has a tensor \"{alias}\"", self.path().display())));
        }
        self.index.tensors.insert(alias.to_string(), tensor);
        self.from.insert(alias.to_string(), self.from[of].clone());
        Ok(self)
    }

    /// Sets a callback that gets the bytes of each read from the source.
    pub fn on_read(mut self, seen: &'a (dyn Fn(u64) + Send + Sync)) -> Self {
        self.seen = Some(seen);
        self
    }

    /// Returns the number of the source's tensors that are not selected.
    pub fn left_out(&self) -> usize {
        let shown: BTreeSet<&String> = self.from.values().collect();
        self.source.tensors().len() - shown.len()
    }

    /// Returns the numbers of tensors that change from one dtype to another.
    pub fn converted(&self) -> Vec<([DType; 2], usize)> {
        let mut converted = Vec::<([DType; 2], usize)>::new();
        for (new, old) in &self.from {
            let dtypes = [self.source.tensors()[old].dtype, self.tensors()[new].dtype];
            match converted.iter_mut().find(|(known, _)| *known == dtypes) {
                Some((_, count)) => *count += 1,
                None if dtypes[0] != dtypes[1] => converted.push((dtypes, 1)),
                None => (),
            }
        }
        converted
    }

    /// Returns how many finite numbers became infinite in reads so far.
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }
}

impl Debug for View<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("source", &self.source).field("tensors", self.tensors()).finish_non_exhaustive()
    }
}

impl TensorSource for View<'_> {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let to = self.tensor(fqn)?.dtype;
        let old = &self.from[fqn];
        let format = self.blocks.get(fqn).copied();
        let from = format.map_or(self.source.tensor(old)?.dtype, |_| DType::F32);
        let read = |into: &mut [u8]| match format {
            Some(format) => {
                check_request(fqn, &self.tensor(fqn)?.shape, size_of::<f32>(), region, into.len())?;
                read_blocks(self.source, old, format, region, into)
            }
            None => self.source.read(old, region, into),
        };
        let bytes = if from == to {
            read(into)?;
            into.len()
        } else {
            let mut bytes = vec![0; into.len() / to.size() * from.size()];
            read(&mut bytes)?;
            if cast(&bytes, from, into, to).is_none() {
                let reason = format!("{from} can't be converted to {to}");
                return Err(Error::InvalidRead { tensor: fqn.to_string(), reason });
            }
            let infinite = |dtype, bytes: &[u8]| count_non_finite(dtype, bytes).map_or(0, |(_, [_, count])| count);
            self.overflowed.fetch_add(infinite(to, into) - infinite(from, &bytes), Ordering::Relaxed);
            bytes.len()
        };
        if let Some(seen) = self.seen {
            seen(bytes as u64);
        }
        Ok(())
    }
}

/// Reads a region of floats from their blocks. Reads the blocks that the region touches.
fn read_blocks(
    source: &dyn TensorSource,
    name: &str,
    format: BlockFormat,
    region: &Region,
    into: &mut [u8],
) -> Result<()> {
    let (mut touched, last) = (region.clone(), region.sizes.len() - 1);
    let (start, end) = (region.offsets[last], region.offsets[last] + region.sizes[last]);
    touched.offsets[last] = start / BLOCK * BLOCK;
    touched.sizes[last] = end.next_multiple_of(BLOCK) - touched.offsets[last];
    let Some(bytes) = format.encoded_region(&touched) else {
        let reason = format!("{touched:?} is not whole {} blocks", format.name());
        return Err(Error::InvalidRead { tensor: name.to_string(), reason });
    };
    let mut blocks = vec![0; bytes.elements()];
    source.read(name, &bytes, &mut blocks)?;
    let mut floats = vec![0f32; touched.elements()];
    format.decode(&blocks, &mut floats, |float| float);
    let (width, skipped) = (touched.sizes[last].max(1), start - touched.offsets[last]);
    let rows = into.as_chunks_mut().0.chunks_mut(region.sizes[last].max(1));
    for (row, floats) in rows.zip(floats.chunks(width)) {
        row.iter_mut().zip(&floats[skipped..]).for_each(|(bytes, float)| *bytes = float.to_ne_bytes());
    }
    Ok(())
}

/// Writes the tensors and values of `source` as the checkpoint `dst`, as if the ranks of `mesh` had saved it. Tensors
/// are sharded on dimension 0 over the last mesh dimension and replicated over the others. Scalars are replicated.
///
/// # Errors
/// [`crate::Error::AlreadyExists`] if `dst` exists; [`crate::Error::Io`]; the errors of [`TensorSource::read`].
pub fn write_fsdp(dst: impl AsRef<Path>, source: &dyn TensorSource, mesh: &MeshLayout) -> Result<WriteSummary> {
    let dst = dst.as_ref();
    let plan = plan_for(source, mesh)?;
    let staging = location(dst)?.stage()?;
    let store = location(dst)?.open_staging(&staging.name())?;
    let (mut files, mut tensors) = (BTreeMap::new(), BTreeMap::new());
    for (fqn, tensor) in &plan {
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        tensors.insert(fqn.clone(), TensorEntry { dtype, shape, chunks: Vec::with_capacity(tensor.chunks.len()) });
    }
    for rank in 0..mesh.size() {
        if let Some(file) = write_rank(&*store, source, &plan, rank, &mut tensors)? {
            files.insert(file_name(rank), file);
        }
    }
    let summary =
        WriteSummary { path: dst.to_path_buf(), tensors: tensors.len(), files: files.len(), bytes: source.bytes() };
    for tensor in tensors.values_mut() {
        tensor.chunks.sort_by(|a, b| a.offsets.cmp(&b.offsets));
    }
    let manifest = Manifest::new(mesh, mesh.size(), false, source.values().clone(), files, tensors);
    staging.commit(MANIFEST, manifest.to_text()?.as_bytes())?;
    Ok(summary)
}

fn plan_for(source: &dyn TensorSource, mesh: &MeshLayout) -> Result<Plan> {
    let last = mesh.shape().len() - 1;
    let info = |(fqn, TensorEntry { dtype, shape, .. }): (&String, &TensorEntry)| TensorInfo {
        fqn: fqn.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    };
    let tensors: Arc<[TensorInfo]> = source.tensors().iter().map(info).collect();
    let mut claims = Vec::with_capacity(mesh.size());
    for rank in 0..mesh.size() {
        let coordinate = mesh.coordinate_of(rank).unwrap_or_default();
        let mut regions = Vec::with_capacity(tensors.len());
        for TensorInfo { shape, .. } in &*tensors {
            let mut placements = vec![Placement::Replicate; last + 1];
            if !shape.is_empty() {
                placements[last] = Placement::Shard(0);
            }
            let is_empty = shape.contains(&0);
            let region = local_region(shape, mesh, &coordinate, &placements)?;
            regions.push(if is_empty { Region::whole(shape) } else { region });
        }
        claims.push(Claims { tensors: Arc::clone(&tensors), regions });
    }
    plan(&claims, &Hosts::shared(mesh.size()))
}

/// Writes the file of a rank; `None` if it has no chunk.
fn write_rank(
    store: &dyn Store,
    source: &dyn TensorSource,
    plan: &Plan,
    rank: usize,
    tensors: &mut BTreeMap<String, TensorEntry>,
) -> Result<Option<FileEntry>> {
    let own = own_chunks(plan, rank);
    if own.is_empty() {
        return Ok(None);
    }
    let file = file_name(rank);
    let written = write_chunks(store, &file, &own, |own, sink| stream(source, own.fqn, &own.region, sink))?;
    for (OwnChunk { fqn, region, .. }, crc) in own.into_iter().zip(written.checksums) {
        if let Some(tensor) = tensors.get_mut(fqn) {
            tensor.chunks.push(ChunkEntry { crc32c: Some(crc), ..ChunkEntry::new(&file, region) });
        }
    }
    Ok(Some(FileEntry { bytes: written.bytes, header_crc32c: Some(written.header_crc32c), host: None }))
}
