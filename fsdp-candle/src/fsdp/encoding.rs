//! How a parameter travels in an all-gather: each rank encodes its shard, and decodes the gathered shards.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use fsdp_core::layout::Region;
use fsdp_core::{BlockFormat, Buffer, GatherPart};

use super::shard::SentShard;
use super::weight_format::{Blocks, WeightFormat};
use crate::error::Error;
use crate::extension::AllGatherExtension;
use crate::kernels;

/// How a parameter travels in an all-gather.
pub(crate) enum Encoding {
    /// In the compute dtype.
    Plain,
    /// In BF16, as a frozen parameter is stored. Each rank casts the values.
    Bf16,
    /// In blocks, as a frozen parameter is stored. Each rank decodes them.
    Blocks(Blocks),
    /// In the buffers of the user's extension.
    Extension(Arc<dyn AllGatherExtension>),
}

impl Encoding {
    /// Chooses the encoding of the parameter `name`, of a global shape and this rank's box of it. Fails if `stored` and
    /// the other options exclude each other, or if shards are not whole blocks.
    pub(super) fn of(
        name: &str,
        shape: &[usize],
        region: &Region,
        stored: Option<WeightFormat>,
        extension: Option<Arc<dyn AllGatherExtension>>,
        trainable: bool,
    ) -> crate::error::Result<Self> {
        if stored.is_some() && (trainable || extension.is_some()) {
            let why = if trainable { "it is trained: freeze it" } else { "it has an all-gather extension: choose one" };
            let message = format!("FullyShard::store is for frozen parameters, and {why}, or leave it out");
            return Err(Error::parameter(name, message));
        }
        match (stored, extension) {
            (None, None) => Ok(Encoding::Plain),
            (None, Some(extension)) => Ok(Encoding::Extension(extension)),
            (Some(format), _) => match format.blocks() {
                None => Ok(Encoding::Bf16),
                Some(blocks) => Ok(Encoding::Blocks(Blocks::of(name, blocks, shape, region)?)),
            },
        }
    }

    /// Returns how a frozen parameter is stored, if not in its own dtype.
    pub(crate) fn stored(&self) -> Option<WeightFormat> {
        match self {
            Encoding::Plain | Encoding::Extension(_) => None,
            Encoding::Bf16 => Some(WeightFormat::Bf16),
            Encoding::Blocks(blocks) => Some(match blocks.format {
                BlockFormat::Int8 => WeightFormat::Int8,
                BlockFormat::Nf4 => WeightFormat::Nf4,
            }),
        }
    }

    /// Returns the blocks, if the parameter is stored in blocks.
    pub(crate) fn blocks(&self) -> Option<&Blocks> {
        match self {
            Encoding::Blocks(blocks) => Some(blocks),
            Encoding::Plain | Encoding::Bf16 | Encoding::Extension(_) => None,
        }
    }

    /// Returns this rank's inputs for the all-gather of shards of `counts` elements.
    pub(super) fn encode(
        &self,
        shard: &SentShard<'_>,
        counts: Vec<usize>,
        compute_dtype: DType,
    ) -> Result<Vec<GatherPart>> {
        let one = |dtype, counts| Ok(vec![GatherPart { input: shard.input(dtype)?, counts }]);
        match self {
            Encoding::Plain => one(compute_dtype, counts),
            Encoding::Bf16 => one(DType::BF16, counts),
            Encoding::Blocks(blocks) => {
                one(DType::U8, counts.into_iter().map(|count| blocks.format.bytes(count)).collect())
            }
            Encoding::Extension(extension) => {
                let lengths: Vec<Vec<usize>> = counts.iter().map(|&count| extension.lengths(count)).collect();
                let encoded = extension.pre_all_gather(&shard.to_dtype(compute_dtype)?)?;
                let part = |(at, buffer)| {
                    let counts = lengths.iter().map(|of_rank| of_rank.get(at).copied().unwrap_or(0)).collect();
                    GatherPart { input: Arc::new(buffer), counts }
                };
                Ok(encoded.into_iter().enumerate().map(part).collect())
            }
        }
    }

    /// Returns whether gathered shards must be decoded to have values in the compute dtype.
    pub(super) fn needs_decoding(&self, compute_dtype: DType) -> bool {
        match self {
            Encoding::Plain => false,
            Encoding::Bf16 => compute_dtype != DType::BF16,
            Encoding::Blocks(_) | Encoding::Extension(_) => true,
        }
    }

    /// Decodes the gathered inputs of shards of `counts` elements into the concatenation of the shards.
    pub(super) fn decode(&self, gathered: &[Buffer], counts: &[usize], values: &mut Buffer) -> Result<()> {
        match (self, gathered) {
            (Encoding::Extension(extension), _) => extension.post_all_gather(gathered, counts, values),
            (Encoding::Blocks(blocks), [stored]) => {
                kernels::of_buffer(stored)?.decode_blocks(blocks.format, stored.into(), values.into())
            }
            (Encoding::Plain | Encoding::Bf16, [stored]) => {
                kernels::of_buffer(stored)?.cast(stored.into(), values.into())
            }
            _ => bail!("expected one gathered buffer to decode, found {}", gathered.len()),
        }
    }
}
