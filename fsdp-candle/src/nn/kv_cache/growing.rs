//! A cache in a buffer that grows.

use candle_core::{Result, Tensor};
use candle_nn::kv_cache;

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
    /// All data, of which the last call's is in the graph.
    live: Option<Tensor>,
}

impl Cache {
    /// A cache along `dim` that has room for `max_seq_len` elements, and grows by as many.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { values: kv_cache::Cache::new(dim, max_seq_len), live: None }
    }

    /// The dimension that grows.
    pub fn dim(&self) -> usize {
        self.values.dim()
    }

    /// How long it is.
    pub fn current_seq_len(&self) -> usize {
        self.values.current_seq_len()
    }

    /// For how many elements there is room.
    pub fn max_seq_len(&self) -> usize {
        self.values.max_seq_len()
    }

    /// The buffer, which is longer than the data.
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

    /// Adds to the data.
    pub fn append(&mut self, src: &Tensor) -> Result<()> {
        self.live = None;
        let past = self.values.current_data()?.filter(|_| self.values.current_seq_len() > 0);
        // A copy: the buffer changes while the graph is there.
        if src.track_op() {
            self.live = Some(match past {
                None => src.clone(),
                Some(past) => Tensor::cat(&[&past, src], self.values.dim())?,
            });
        }
        self.values.append(&src.detach().contiguous()?)
    }
}

/// The cache of an attention layer, as [`candle_nn::kv_cache::KvCache`].
#[derive(Debug, Clone)]
pub struct KvCache {
    k: Cache,
    v: Cache,
}

impl KvCache {
    /// A cache along `dim` that has room for `max_seq_len` positions, and grows by as many.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: Cache::new(dim, max_seq_len), v: Cache::new(dim, max_seq_len) }
    }

    /// The keys' cache.
    pub fn k_cache(&self) -> &Cache {
        &self.k
    }

    /// The values' cache.
    pub fn v_cache(&self) -> &Cache {
        &self.v
    }

    /// The keys' cache.
    pub fn k_cache_mut(&mut self) -> &mut Cache {
        &mut self.k
    }

    /// The values' cache.
    pub fn v_cache_mut(&mut self) -> &mut Cache {
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

    /// Adds keys and values, and returns all there are. The gradient goes to those of this call.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let all = |cache: &mut Cache, new: &Tensor| {
            cache.append(new)?;
            Ok::<_, candle_core::Error>(cache.current_data()?.unwrap_or_else(|| new.clone()))
        };
        Ok((all(&mut self.k, k)?, all(&mut self.v, v)?))
    }

    /// How many positions there are.
    pub fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// Forgets the data.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}
