//! Ranks that make a mesh must mean the same one.

use std::sync::Arc;

use crate::{Buffer, Error, GatherPart, Heap, MeshLayout, ProcessGroup, Result, hash::Hash};

/// Checks that all ranks lay out the same mesh: groups of another shape or order would move the wrong shards.
pub(super) fn agree(layout: &MeshLayout, world: &Arc<dyn ProcessGroup>) -> Result<()> {
    let mut hash = Hash::default();
    layout.names().iter().for_each(|name| hash.bytes(name.as_bytes()));
    hash.counts(layout.shape().iter().copied());
    let own = hash.0 as i64;
    let part = GatherPart { input: Arc::new(Buffer::I64(vec![own])), counts: vec![1; world.size()] };
    let gathered = world.all_gather(vec![part], Heap::shared()).wait()?;
    let Some(Buffer::I64(hashes)) = gathered.first() else { return Ok(()) };
    let others: Vec<_> = (0..hashes.len()).filter(|&rank| hashes[rank] != own).collect();
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::Mesh(format!(
        "rank {} lays out the mesh {layout} but rank(s) {others:?} another one: pass the same names and sizes in the same order on every rank",
        world.rank()
    )))
}
