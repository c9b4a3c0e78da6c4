//! The storage of frozen parameters in fewer bits than layers compute with.

use candle_core::{DType, Device, Tensor};
use fsdp_core::layout::Region;
use fsdp_core::{BLOCK, BLOCK_SCALE, BlockFormat};
use half::bf16;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::initializer::{Initializer, ShardRequest};
use crate::storage::to_host;

/// How a frozen parameter is stored, gathered and saved. Layers compute with its values in the compute dtype, which
/// exist while its unit is unsharded.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// use fsdp_candle::WeightFormat;
///
/// // QLoRA: a frozen base in 4 bits, and adapters in F32.
/// vars.freeze(|fqn| !nn::is_adapter(fqn))?;
/// let opts = FullyShard::new(&vars).store(|fqn, _| (!nn::is_adapter(fqn)).then_some(WeightFormat::Nf4));
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///     nn::lora(nn::linear_no_bias(64, 8, vb.clone())?, 64, 8, nn::LoraConfig { rank: 2, alpha: 4. }, vb)
/// })?;
/// let weight = vars.get("weight").unwrap();
/// assert_eq!((weight.shape().dims(), weight.var().dims()), (&[8, 64][..], &[8, 34][..])); // 34 bytes a row
/// let x = Tensor::ones((3, 64), DType::F32, world.device())?;
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// assert!(vars.params().iter().all(|param| grads.get(param.var()).is_some() == param.trainable()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// Two bytes a weight.
    Bf16,
    /// [`BlockFormat::Int8`]: 1.03 bytes a weight.
    Int8,
    /// [`BlockFormat::Nf4`]: 0.53 bytes a weight.
    Nf4,
}

impl WeightFormat {
    /// Returns the format of the blocks, if the weights are stored in blocks.
    pub const fn blocks(self) -> Option<BlockFormat> {
        match self {
            WeightFormat::Bf16 => None,
            WeightFormat::Int8 => Some(BlockFormat::Int8),
            WeightFormat::Nf4 => Some(BlockFormat::Nf4),
        }
    }
}

/// A parameter whose shards are blocks: a tensor of bytes, sharded as the parameter is.
pub(crate) struct Blocks {
    pub(crate) format: BlockFormat,
    /// Global shape of the bytes.
    pub(crate) shape: Vec<usize>,
    /// Box of the bytes that this rank holds.
    pub(crate) region: Region,
}

impl Blocks {
    /// Lays out the blocks of a parameter's shape and this rank's box of it. Fails where blocks would be cut.
    pub(super) fn of(name: &str, format: BlockFormat, shape: &[usize], region: &Region) -> Result<Self> {
        let stored = format!("FullyShard::store makes {} of it, blocks of {BLOCK} weights", format.name());
        let fail = |message: String| Error::parameter(name, format!("{stored}, and {message}"));
        if shape.len() < 2 {
            return Err(fail(format!("it has the shape {shape:?}: leave it out, or store it as BF16")));
        }
        let Some(encoded) = format.encoded_shape(shape) else {
            return Err(fail(format!(
                "its last dimension of {} is not a multiple: leave it out, or store it as BF16",
                shape[shape.len() - 1]
            )));
        };
        match format.encoded_region(region) {
            Some(region) => Ok(Blocks { format, shape: encoded, region }),
            None => Err(fail(format!(
                "its {} columns are divided over ranks within blocks: shard dimension 0, or use fewer tensor-parallel \
                 ranks",
                shape[shape.len() - 1]
            ))),
        }
    }

    /// Returns the scales of a shard, on the host.
    pub(super) fn scales(&self, shard: &Tensor) -> candle_core::Result<Tensor> {
        if self.region.is_empty() {
            return Tensor::new(0f32, &Device::Cpu);
        }
        let bytes = shard.reshape(((), self.format.block_bytes()))?.narrow(1, 0, BLOCK_SCALE)?;
        let scales = to_host(&bytes.contiguous()?)?;
        let scales = scales.bytes().as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes)).collect::<Vec<_>>();
        Tensor::new(scales, &Device::Cpu)
    }

    /// Writes the blocks of a region. Its floats exist a piece at a time.
    pub(super) fn fill(
        &self,
        initializer: &dyn Initializer,
        request: &ShardRequest<'_>,
        mut blocks: &mut [u8],
    ) -> Result<()> {
        let format = self.format;
        let mut floats: Vec<f32> = vec![];
        for region in request.region.pieces(PIECE) {
            floats.resize(region.elements(), 0.);
            let request = ShardRequest { dtype: DType::F32, region: &region, ..*request };
            initializer.fill(&request, bytemuck::cast_slice_mut(&mut floats))?;
            let (own, rest) = blocks.split_at_mut(format.bytes(floats.len()));
            let pieces = own.par_chunks_mut(format.bytes(THREAD_PIECE)).zip(floats.par_chunks(THREAD_PIECE));
            pieces.for_each(|(blocks, floats)| format.encode(floats, blocks));
            blocks = rest;
        }
        Ok(())
    }
}

/// Number of weights that are read before they are encoded.
const PIECE: usize = 1 << 20;
/// Number of weights that one thread encodes at a time.
const THREAD_PIECE: usize = 1 << 14;
