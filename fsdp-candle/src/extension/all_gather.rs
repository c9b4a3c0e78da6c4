//! The trait of extensions.

use candle_core::{Result, Tensor};
use fsdp_core::Buffer;

/// Changes what travels in the all-gather of a parameter: quantised weights, other encodings.
///
/// Each rank encodes its shard into one or more buffers; each buffer is gathered; every rank decodes the gathered
/// buffers into the concatenation of all shards. The number of buffers, their dtypes and lengths must follow from the
/// shard's length alone, because every rank works out those of the others.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_candle::{AllGatherExtension, Float8, Int8Blocks};
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let x = Tensor::ones((3, 64), DType::F32, world.device())?;
///
/// // QLoRA: frozen weights travel as 8-bit blocks, adapters as they are.
/// vars.freeze(|fqn| !nn::is_adapter(fqn));
/// let blocks: Arc<dyn AllGatherExtension> = Arc::new(Int8Blocks::new(64));
/// let opts = FullyShard::new(&vars).all_gather_extension(move |fqn| (!nn::is_adapter(fqn)).then(|| blocks.clone()));
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///     nn::lora(nn::linear_no_bias(64, 8, vb.clone())?, 64, 8, nn::LoraConfig { rank: 2, alpha: 4. }, vb)
/// })?;
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// assert!(vars.params().iter().all(|param| grads.get(param.var()).is_some() == param.trainable()));
///
/// // What an extension does to a shard, and what comes out on every rank.
/// let shard = Tensor::new(&[1f32, -0.5, 0.3], world.device())?;
/// for extension in [&Int8Blocks::new(64) as &dyn AllGatherExtension, &Float8] {
///     let travels = extension.pre_all_gather(&shard)?;
///     assert_eq!(travels.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), extension.lengths(3));
///     let mut full = fsdp_core::Buffer::F32(vec![0.; 3]);
///     extension.post_all_gather(&travels, &[3], &mut full)?;
///     let fsdp_core::Buffer::F32(full) = full else { unreachable!() };
///     assert!((full[2] - 0.3).abs() < 0.3 / 16.);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AllGatherExtension: Send + Sync {
    /// The lengths of the buffers that encode a shard of `elements` elements.
    fn lengths(&self, elements: usize) -> Vec<usize>;

    /// Encodes a contiguous shard (in the compute dtype), one buffer for each of [`AllGatherExtension::lengths`].
    ///
    /// # Errors
    /// When the shard can't be encoded.
    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>>;

    /// Decodes into `full`, the concatenation of shards of `counts` elements; `gathered` holds each buffer's
    /// concatenation over the ranks.
    ///
    /// # Errors
    /// When the buffers can't be decoded.
    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()>;
}
