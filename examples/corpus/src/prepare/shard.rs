//! Writing one shard.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::checked::{BLOCK, checksum};
use crate::shards::{Shard, shard_path};

/// Writes ids and the ends of documents.
pub(super) struct ShardWriter {
    ids: Blocks,
    ends: Blocks,
    width: u64,
    tokens: u64,
    documents: u64,
}

/// A file that is written by blocks, with their checksums.
struct Blocks {
    path: PathBuf,
    file: File,
    block: Vec<u8>,
    checksums: Vec<u32>,
}

impl ShardWriter {
    pub(super) fn create(directory: &Path, number: usize, width: u64) -> Result<Self> {
        Ok(ShardWriter {
            ids: Blocks::create(shard_path(directory, number, "bin"))?,
            ends: Blocks::create(shard_path(directory, number, "idx"))?,
            width,
            tokens: 0,
            documents: 0,
        })
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn push(&mut self, ids: &[u32]) -> Result<()> {
        self.tokens += ids.len() as u64;
        let mut rest = ids;
        while !rest.is_empty() {
            let room = (BLOCK - self.ids.block.len()) / self.width as usize;
            let (now, later) = rest.split_at(room.min(rest.len()));
            match self.width {
                2 => self.ids.block.extend(now.iter().flat_map(|&id| (id as u16).to_le_bytes())),
                _ => self.ids.block.extend(now.iter().flat_map(|id| id.to_le_bytes())),
            }
            self.ids.write_if_full()?;
            rest = later;
        }
        Ok(())
    }

    pub(super) fn end_document(&mut self) -> Result<()> {
        self.documents += 1;
        self.ends.block.extend(self.tokens.to_le_bytes());
        self.ends.write_if_full()
    }

    /// Writes the rest to disk.
    pub(super) fn finish(self) -> Result<Shard> {
        let (tokens, documents) = (self.tokens, self.documents);
        Ok(Shard { tokens, documents, checksums: self.ids.finish()?, index_checksums: self.ends.finish()? })
    }
}

impl Blocks {
    fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Blocks { path, file, block: Vec::with_capacity(BLOCK), checksums: Vec::new() })
    }

    /// Writes the block if it is full. Its size is a multiple of the sizes of ids and document ends.
    fn write_if_full(&mut self) -> Result<()> {
        if self.block.len() >= BLOCK { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<()> {
        self.checksums.push(checksum(&self.block));
        let written = self.file.write_all(&self.block);
        written.with_context(|| format!("cannot write {}; prepare again to continue", self.path.display()))?;
        self.block.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<u32>> {
        if !self.block.is_empty() {
            self.write()?;
        }
        self.file.sync_all().with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(self.checksums)
    }
}
