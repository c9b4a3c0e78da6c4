//! Writing our own format, as the ranks of a mesh that does not run would.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_core::layout::local_region;
use fsdp_core::{MeshLayout, Placement};

use crate::file_names::{MANIFEST, file_name};
use crate::hf::sharding;
use crate::hosts::Hosts;
use crate::manifest::{ChunkEntry, FileEntry, Manifest, TensorEntry};
use crate::plan::{Claim, Plan, plan};
use crate::safetensors::{Entry, write_file};
use crate::source::stream;
use crate::store::{Store, stage, staged};
use crate::written::Written;
use crate::{Result, TensorSource};

/// Writes what `source` holds as the checkpoint `dst`, as if the ranks of `mesh` had saved it: tensors are sharded on
/// dimension 0 over the last mesh dimension, as `fully_shard` cuts them, and replicated over the others; scalars are
/// replicated. The values are kept.
///
/// # Errors
/// [`crate::Error::Exists`] when `dst` is there already; [`crate::Error::Io`]; as [`TensorSource::read`].
pub fn write_fsdp(dst: &Path, source: &dyn TensorSource, mesh: &MeshLayout) -> Result<Written> {
    let plan = plan_for(source, mesh)?;
    let staging = stage(dst)?;
    let store = staged(dst, &staging.name())?;
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
        Written { path: dst.to_path_buf(), tensors: tensors.len(), files: files.len(), bytes: source.bytes() };
    for tensor in tensors.values_mut() {
        tensor.chunks.sort_by(|a, b| a.offsets.cmp(&b.offsets));
    }
    let manifest = Manifest::new(mesh, mesh.size(), false, source.values().clone(), files, tensors);
    staging.commit(MANIFEST, manifest.to_text()?.as_bytes())?;
    Ok(summary)
}

fn plan_for(source: &dyn TensorSource, mesh: &MeshLayout) -> Result<Plan> {
    let last = mesh.shape().len() - 1;
    let mut claims = Vec::with_capacity(mesh.size());
    for rank in 0..mesh.size() {
        let coordinate = mesh.coordinate_of(rank).unwrap_or_default();
        let mut of_rank = Vec::with_capacity(source.tensors().len());
        for (fqn, TensorEntry { dtype, shape, .. }) in source.tensors() {
            let mut placements = vec![Placement::Replicate; last + 1];
            if !shape.is_empty() {
                placements[last] = Placement::Shard(0);
            }
            let region = local_region(shape, mesh, &coordinate, &placements)?;
            of_rank.push(Claim {
                fqn: fqn.clone(),
                dtype: *dtype,
                shape: shape.clone(),
                offsets: region.offsets,
                sizes: region.sizes,
            });
        }
        claims.push(of_rank);
    }
    plan(&claims, &Hosts::one(mesh.size()))
}

/// Writes the file of a rank, nothing if the rank has none.
fn write_rank(
    store: &dyn Store,
    source: &dyn TensorSource,
    plan: &Plan,
    rank: usize,
    tensors: &mut BTreeMap<String, TensorEntry>,
) -> Result<Option<FileEntry>> {
    let mut own = Vec::new();
    let mut entries = Vec::new();
    for (fqn, tensor) in plan {
        if let Some(chunk) = tensor.chunks.iter().find(|chunk| chunk.writer == rank) {
            own.push((fqn, &chunk.region));
            let shape = chunk.region.sizes.clone();
            entries.push(Entry { name: fqn.clone(), dtype: tensor.dtype, shape });
        }
    }
    if own.is_empty() {
        return Ok(None);
    }
    let metadata = sharding::metadata(own.iter().map(|(fqn, region)| (fqn.as_str(), &region.offsets[..])))?;
    let file = file_name(rank);
    let written = write_file(store, &file, &entries, &metadata, &mut |index, sink| {
        let (fqn, region) = own[index];
        stream(source, fqn, region, sink)
    })?;
    for ((fqn, region), crc) in own.into_iter().zip(written.checksums) {
        if let Some(tensor) = tensors.get_mut(fqn) {
            let (offsets, sizes) = (region.offsets.clone(), region.sizes.clone());
            tensor.chunks.push(ChunkEntry {
                offsets,
                sizes,
                file: file.clone(),
                copies: Vec::new(),
                crc32c: Some(crc),
            });
        }
    }
    Ok(Some(FileEntry { bytes: written.bytes, header_crc32c: Some(written.header_crc32c), host: None }))
}
