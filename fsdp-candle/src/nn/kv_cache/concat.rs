//! Caches that are made anew by each call.

use candle_core::{Result, Tensor};

/// What is cached with what is new: in the graph, and as the cache keeps it.
fn grown(cached: &Option<Tensor>, new: &Tensor, dim: usize) -> Result<(Tensor, Tensor)> {
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
/// assert!(k.sum_all()?.backward()?.get(&new).is_some()); // Candle's detaches
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
    /// An empty cache along `dim`.
    pub fn new(dim: usize) -> Self {
        Self { k: None, v: None, dim }
    }

    /// How many positions there are.
    pub fn current_seq_len(&self) -> usize {
        self.k.as_ref().and_then(|k| k.dims().get(self.dim).copied()).unwrap_or(0)
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.k.is_none()
    }

    /// The dimension that grows.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Adds keys and values, and returns all there are. The gradient goes to those of this call.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (all_k, kept_k) = grown(&self.k, k, self.dim)?;
        let (all_v, kept_v) = grown(&self.v, v, self.dim)?;
        (self.k, self.v) = (Some(kept_k), Some(kept_v));
        Ok((all_k, all_v))
    }

    /// Forgets the data.
    pub fn reset(&mut self) {
        (self.k, self.v) = (None, None);
    }

    /// The keys, as constants.
    pub fn k(&self) -> Option<&Tensor> {
        self.k.as_ref()
    }

    /// The values, as constants.
    pub fn v(&self) -> Option<&Tensor> {
        self.v.as_ref()
    }

    /// The keys, as constants.
    pub fn k_mut(&mut self) -> Option<&mut Tensor> {
        self.k.as_mut()
    }

    /// The values, as constants.
    pub fn v_mut(&mut self) -> Option<&mut Tensor> {
        self.v.as_mut()
    }

    /// Keys and values, as constants.
    pub fn into_inner(self) -> Option<(Tensor, Tensor)> {
        self.k.zip(self.v)
    }
}

/// Keys and values side by side, of one sequence, as [`candle_nn::kv_cache::InterleavedKvCache`].
#[derive(Debug, Clone)]
pub struct InterleavedKvCache {
    kv: Option<Tensor>,
    head_dim: usize,
}

impl InterleavedKvCache {
    /// An empty cache for heads of `head_dim` elements.
    pub fn new(head_dim: usize) -> Self {
        Self { kv: None, head_dim }
    }

    /// How many positions there are.
    pub fn current_seq_len(&self) -> usize {
        self.kv.as_ref().and_then(|kv| kv.dims().first().copied()).unwrap_or(0)
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.kv.is_none()
    }

    /// Adds keys and values `[1, heads, T, D]`, and returns all there are, `[S, heads, 2 * D]`. The gradient goes to
    /// those of this call.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let rows = |x: &Tensor| x.squeeze(0)?.transpose(0, 1)?.contiguous();
        let (all, kept) = grown(&self.kv, &Tensor::cat(&[rows(k)?, rows(v)?], 2)?, 0)?;
        self.kv = Some(kept);
        Ok(all)
    }

    /// What is cached, `[S, heads, 2 * D]`, as constants.
    pub fn kv(&self) -> Option<&Tensor> {
        self.kv.as_ref()
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Forgets the data.
    pub fn reset(&mut self) {
        self.kv = None;
    }
}
