//! Caches of keys and values: `candle_nn::kv_cache`.
//!
//! Candle's caches copy or detach what is appended. Gradients stop there, and attention trains its queries alone. The
//! caches here return the keys and values of the latest call with their gradient. Earlier positions are constants, so
//! a cache never keeps the graph of more than one call. To train, reset the caches before each sequence.

use candle_core::{Device, Result, Tensor};
use candle_nn::kv_cache;

pub use candle_nn::kv_cache::{
    IndicesAndMask, RawInterleavedKvCache, ScatteredCacheBuilder, ScatteredKvCache, rope_i_inplace,
};

/// A tensor that grows along one dimension, as [`candle_nn::kv_cache::Cache`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::kv_cache::Cache;
///
/// let mut cache = Cache::new(0, 8);
/// cache.append(&Tensor::new(&[1f32, 2.], &Device::Cpu)?)?;
/// cache.append(&Tensor::new(&[3f32], &Device::Cpu)?)?;
/// assert_eq!(cache.current_data()?.unwrap().to_vec1::<f32>()?, [1., 2., 3.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cache {
    values: kv_cache::Cache,
    /// All data. The elements of the last call are in the graph.
    live: Option<Tensor>,
}

impl Cache {
    /// Returns a cache along `dim` with a capacity of `max_seq_len` elements. It grows in steps of that size.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { values: kv_cache::Cache::new(dim, max_seq_len), live: None }
    }

    /// Returns the dimension that grows.
    pub fn dim(&self) -> usize {
        self.values.dim()
    }

    /// Returns the number of elements.
    pub fn current_seq_len(&self) -> usize {
        self.values.current_seq_len()
    }

    /// Returns the capacity.
    pub fn max_seq_len(&self) -> usize {
        self.values.max_seq_len()
    }

    /// Returns the buffer, which is longer than the data.
    pub fn all_data(&self) -> &Option<Tensor> {
        self.values.all_data()
    }

    /// Returns the data. The elements of the last call are in the graph.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        match &self.live {
            Some(live) => Ok(Some(live.clone())),
            None => self.values.current_data(),
        }
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.values.reset();
        self.live = None;
    }

    /// Appends to the data.
    pub fn append(&mut self, src: &Tensor) -> Result<()> {
        self.live = None;
        let past = self.values.current_data()?.filter(|_| self.values.current_seq_len() > 0);
        // The graph needs a copy, because the buffer changes.
        if src.track_op() {
            self.live = Some(match past {
                None => src.clone(),
                Some(past) => Tensor::cat(&[&past, src], self.values.dim())?,
            });
        }
        self.values.append(&src.detach().contiguous()?)
    }
}

/// A cache of keys and one of values.
#[derive(Debug, Clone)]
pub struct KvPair<C> {
    k: C,
    v: C,
}

impl<C> KvPair<C> {
    /// Returns the keys' cache.
    pub fn k_cache(&self) -> &C {
        &self.k
    }

    /// Returns the values' cache.
    pub fn v_cache(&self) -> &C {
        &self.v
    }

    /// Returns the keys' cache.
    pub fn k_cache_mut(&mut self) -> &mut C {
        &mut self.k
    }

    /// Returns the values' cache.
    pub fn v_cache_mut(&mut self) -> &mut C {
        &mut self.v
    }
}

/// The cache of an attention layer, as [`candle_nn::kv_cache::KvCache`].
pub type KvCache = KvPair<Cache>;

impl KvCache {
    /// Returns a cache along `dim` with a capacity of `max_seq_len` positions. It grows in steps of that size.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: Cache::new(dim, max_seq_len), v: Cache::new(dim, max_seq_len) }
    }

    /// Returns the keys.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// Returns the values.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Appends keys and values, and returns all cached keys and values. The gradient goes to the arguments.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let all = |cache: &mut Cache, new: &Tensor| {
            cache.append(new)?;
            Ok::<_, candle_core::Error>(cache.current_data()?.unwrap_or_else(|| new.clone()))
        };
        Ok((all(&mut self.k, k)?, all(&mut self.v, v)?))
    }

    /// Returns the number of cached positions.
    pub fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}

/// The last elements along one dimension, as [`candle_nn::kv_cache::RotatingCache`], in the order of the ring.
#[derive(Debug, Clone)]
pub struct RotatingCache {
    values: kv_cache::RotatingCache,
    /// All data. The elements of the last call are in the graph.
    live: Option<Tensor>,
}

impl RotatingCache {
    /// Returns a ring along `dim` of `max_seq_len` elements.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { values: kv_cache::RotatingCache::new(dim, max_seq_len), live: None }
    }

    /// Returns the index of the next element.
    pub fn offset(&self) -> usize {
        self.values.offset()
    }

    /// Returns the dimension of the ring.
    pub fn dim(&self) -> usize {
        self.values.dim()
    }

    /// Returns the number of appended elements, which may exceed the ring's size.
    pub fn current_seq_len(&self) -> usize {
        self.values.current_seq_len()
    }

    /// Returns the size of the ring.
    pub fn max_seq_len(&self) -> usize {
        self.values.max_seq_len()
    }

    /// Returns the ring, including unused elements.
    pub fn all_data(&self) -> &Option<Tensor> {
        self.values.all_data()
    }

    /// Returns the data. The elements of the last call are in the graph.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        match &self.live {
            Some(live) => Ok(Some(live.clone())),
            None => self.values.current_data(),
        }
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.values.reset();
        self.live = None;
    }

    /// Appends to the ring, and returns its data, or `src` itself if `src` is longer. The gradient goes to `src`.
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
        // The elements beyond the ring's end wrap to its beginning.
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

    /// Returns the positions of the tensor that [`RotatingCache::append`] will return for `seq_len` elements.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.values.positions(seq_len)
    }

    /// Returns the mask of the tensor that [`RotatingCache::append`] will return for `seq_len` elements: 1 where a key
    /// is hidden.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.values.attn_mask(seq_len, device)
    }
}

/// The cache of an attention layer with a window, as [`candle_nn::kv_cache::RotatingKvCache`].
pub type RotatingKvCache = KvPair<RotatingCache>;

impl RotatingKvCache {
    /// Returns a ring along `dim` of `max_seq_len` positions.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: RotatingCache::new(dim, max_seq_len), v: RotatingCache::new(dim, max_seq_len) }
    }

    /// Returns the keys.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// Returns the values.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Appends keys and values, and returns all keys and values in the ring. The gradient goes to the arguments.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.k.append(k)?, self.v.append(v)?))
    }

    /// Returns the index of the next position.
    pub fn offset(&self) -> usize {
        self.k.offset()
    }

    /// Returns the number of appended positions.
    pub fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// See [`RotatingCache::attn_mask`].
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.k.attn_mask(seq_len, device)
    }

    /// See [`RotatingCache::positions`].
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.k.positions(seq_len)
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}

/// Returns the cached and the new elements together: in the graph, and detached for the cache.
fn concat(cached: &Option<Tensor>, new: &Tensor, dim: usize) -> Result<(Tensor, Tensor)> {
    let all = match cached {
        None => new.contiguous()?,
        Some(cached) => Tensor::cat(&[cached, new], dim)?.contiguous()?,
    };
    let kept = all.detach();
    Ok((all, kept))
}

/// The cache of an attention layer, as [`candle_nn::kv_cache::ConcatKvCache`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::nn::kv_cache::ConcatKvCache;
///
/// let new = Var::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let mut cache = ConcatKvCache::new(0);
/// let (k, _) = cache.append(&new, &new)?;
/// assert!(k.sum_all()?.backward()?.get(&new).is_some()); // Candle's cache detaches
/// assert_eq!(cache.current_seq_len(), 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ConcatKvCache {
    k: Option<Tensor>,
    v: Option<Tensor>,
    dim: usize,
}

impl ConcatKvCache {
    /// Returns an empty cache along `dim`.
    pub fn new(dim: usize) -> Self {
        Self { k: None, v: None, dim }
    }

    /// Returns the number of cached positions.
    pub fn current_seq_len(&self) -> usize {
        self.k.as_ref().and_then(|k| k.dims().get(self.dim).copied()).unwrap_or(0)
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.k.is_none()
    }

    /// Returns the dimension that grows.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Appends keys and values, and returns all cached keys and values. The gradient goes to the arguments.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (all_k, kept_k) = concat(&self.k, k, self.dim)?;
        let (all_v, kept_v) = concat(&self.v, v, self.dim)?;
        (self.k, self.v) = (Some(kept_k), Some(kept_v));
        Ok((all_k, all_v))
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        (self.k, self.v) = (None, None);
    }

    /// Returns the keys, as constants.
    pub fn k(&self) -> Option<&Tensor> {
        self.k.as_ref()
    }

    /// Returns the values, as constants.
    pub fn v(&self) -> Option<&Tensor> {
        self.v.as_ref()
    }

    /// Returns the keys, as constants.
    pub fn k_mut(&mut self) -> Option<&mut Tensor> {
        self.k.as_mut()
    }

    /// Returns the values, as constants.
    pub fn v_mut(&mut self) -> Option<&mut Tensor> {
        self.v.as_mut()
    }

    /// Returns keys and values, as constants.
    pub fn into_inner(self) -> Option<(Tensor, Tensor)> {
        self.k.zip(self.v)
    }
}

/// Keys and values side by side, for one sequence, as [`candle_nn::kv_cache::InterleavedKvCache`].
#[derive(Debug, Clone)]
pub struct InterleavedKvCache {
    kv: Option<Tensor>,
    head_dim: usize,
}

impl InterleavedKvCache {
    /// Returns an empty cache for heads of `head_dim` elements.
    pub fn new(head_dim: usize) -> Self {
        Self { kv: None, head_dim }
    }

    /// Returns the number of cached positions.
    pub fn current_seq_len(&self) -> usize {
        self.kv.as_ref().and_then(|kv| kv.dims().first().copied()).unwrap_or(0)
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.kv.is_none()
    }

    /// Appends keys and values `[1, heads, T, D]`, and returns all keys and values, `[S, heads, 2 * D]`. The gradient
    /// goes to the arguments.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let rows = |x: &Tensor| x.squeeze(0)?.transpose(0, 1)?.contiguous();
        let (all, kept) = concat(&self.kv, &Tensor::cat(&[rows(k)?, rows(v)?], 2)?, 0)?;
        self.kv = Some(kept);
        Ok(all)
    }

    /// Returns the cached keys and values, `[S, heads, 2 * D]`, as constants.
    pub fn kv(&self) -> Option<&Tensor> {
        self.kv.as_ref()
    }

    /// Returns the elements of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.kv = None;
    }
}
