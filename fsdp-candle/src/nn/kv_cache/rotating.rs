//! A cache in a ring, for a window that slides.

use candle_core::{Device, Result, Tensor};
use candle_nn::kv_cache;

/// The last elements along one dimension, as [`candle_nn::kv_cache::RotatingCache`]: in the order of the ring.
#[derive(Debug, Clone)]
pub struct RotatingCache {
    values: kv_cache::RotatingCache,
    /// All data, of which the last call's is in the graph.
    live: Option<Tensor>,
}

impl RotatingCache {
    /// A ring along `dim` of `max_seq_len` elements.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { values: kv_cache::RotatingCache::new(dim, max_seq_len), live: None }
    }

    /// Where the next element goes.
    pub fn offset(&self) -> usize {
        self.values.offset()
    }

    /// The dimension of the ring.
    pub fn dim(&self) -> usize {
        self.values.dim()
    }

    /// How many elements have come, of which the ring holds the last.
    pub fn current_seq_len(&self) -> usize {
        self.values.current_seq_len()
    }

    /// How many elements the ring holds.
    pub fn max_seq_len(&self) -> usize {
        self.values.max_seq_len()
    }

    /// The ring, with places that are not yet taken.
    pub fn all_data(&self) -> &Option<Tensor> {
        self.values.all_data()
    }

    /// The data; what the last call appended is in the graph.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        match &self.live {
            Some(live) => Ok(Some(live.clone())),
            None => self.values.current_data(),
        }
    }

    /// Forgets the data.
    pub fn reset(&mut self) {
        self.values.reset();
        self.live = None;
    }

    /// Adds to the ring, and returns its data, or `src` itself where that is longer. The gradient goes to `src`.
    pub fn append(&mut self, src: &Tensor) -> Result<Tensor> {
        self.live = None;
        let (dim, offset, size) = (self.dim(), self.offset(), self.max_seq_len());
        let all = self.values.append(&src.detach().contiguous()?)?;
        if !src.track_op() {
            return Ok(all);
        }
        let count = src.dim(dim)?;
        if count >= size {
            self.live = Some(src.narrow(dim, count - size, size)?);
            return Ok(src.clone());
        }
        let filled = all.dim(dim)?;
        let to_end = count.min(size - offset);
        // What went past the ring's end stands at its beginning.
        let wrapped = count - to_end;
        let parts = [
            src.narrow(dim, to_end, wrapped)?,
            all.narrow(dim, wrapped, offset - wrapped)?,
            src.narrow(dim, 0, to_end)?,
            all.narrow(dim, offset + to_end, filled - offset - to_end)?,
        ];
        let parts: Vec<_> = parts.iter().filter(|part| part.elem_count() > 0).collect();
        let live = Tensor::cat(&parts, dim)?;
        self.live = Some(live.clone());
        Ok(live)
    }

    /// The positions of what [`RotatingCache::append`] will return for `seq_len` elements.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.values.positions(seq_len)
    }

    /// The mask of what [`RotatingCache::append`] will return for `seq_len` elements: 1 where a query does not see.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.values.attn_mask(seq_len, device)
    }
}

/// The cache of an attention layer with a window, as [`candle_nn::kv_cache::RotatingKvCache`].
#[derive(Debug, Clone)]
pub struct RotatingKvCache {
    k: RotatingCache,
    v: RotatingCache,
}

impl RotatingKvCache {
    /// A ring along `dim` of `max_seq_len` positions.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: RotatingCache::new(dim, max_seq_len), v: RotatingCache::new(dim, max_seq_len) }
    }

    /// The keys' cache.
    pub fn k_cache(&self) -> &RotatingCache {
        &self.k
    }

    /// The values' cache.
    pub fn v_cache(&self) -> &RotatingCache {
        &self.v
    }

    /// The keys' cache.
    pub fn k_cache_mut(&mut self) -> &mut RotatingCache {
        &mut self.k
    }

    /// The values' cache.
    pub fn v_cache_mut(&mut self) -> &mut RotatingCache {
        &mut self.v
    }

    /// The keys.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// The values.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Adds keys and values, and returns those there are. The gradient goes to those of this call.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.k.append(k)?, self.v.append(v)?))
    }

    /// Where the next position goes.
    pub fn offset(&self) -> usize {
        self.k.offset()
    }

    /// How many positions have come.
    pub fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// As [`RotatingCache::attn_mask`].
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.k.attn_mask(seq_len, device)
    }

    /// As [`RotatingCache::positions`].
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.k.positions(seq_len)
    }

    /// Forgets the data.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}
