//! What is asked of a source of initial values.

use candle_core::DType;
use candle_nn::Init;
use fsdp_core::layout::Region;
use half::{bf16, f16};

use crate::error::{Error, Result};

/// What an initializer is asked for: one rank's part of one parameter.
#[derive(Debug)]
pub struct ShardRequest<'a> {
    /// The parameter's FQN.
    pub name: &'a str,
    /// Its global shape.
    pub shape: &'a [usize],
    /// Its dtype (F32, F64, BF16 or F16).
    pub dtype: DType,
    /// The box that this rank holds.
    pub region: &'a Region,
    /// How the layer asks for it to be drawn.
    pub init: Init,
}

/// Where initial values come from. The values of an element must not depend on how the parameter is sharded.
///
/// ```
/// use fsdp_candle::initializer::{Fallback, Initializer, Philox, ShardRequest};
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
///
/// /// Weights whose elements are their own indices.
/// struct Count;
///
/// impl Initializer for Count {
///     fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
///         // Of a matrix that is cut by rows: this rank's begin here.
///         let first = request.region.offsets[0] * request.shape[1..].iter().product::<usize>();
///         for (i, element) in shard.as_chunks_mut::<4>().0.iter_mut().enumerate() {
///             *element = ((first + i) as f32).to_ne_bytes();
///         }
///         Ok(())
///     }
///
///     fn contains(&self, fqn: &str) -> bool {
///         fqn.ends_with("weight")
///     }
/// }
///
/// // What `Count` does not have is drawn.
/// vars.init_with(Fallback::new(Count, Philox::new(0), |_| true));
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(2, 2, vb))?;
/// assert_eq!(vars.get("weight").unwrap().var().to_vec2::<f32>()?, [[0., 1.], [2., 3.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Initializer: Send + Sync {
    /// Writes the region's elements, row-major and in native byte order, into `shard`.
    ///
    /// # Errors
    /// When there are no such values; the message names the parameter and the file.
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()>;

    /// Whether there will be values, asked before memory is taken for them.
    ///
    /// # Errors
    /// As [`Initializer::fill`].
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let _ = request;
        Ok(())
    }

    /// Whether there are values of this name in particular, so that a model can ask
    /// ([`candle_nn::VarBuilder::contains_tensor`]) what it was saved with.
    fn contains(&self, name: &str) -> bool {
        let _ = name;
        false
    }
}

/// Writes values in the dtype that is asked for, rounded once.
pub(super) fn write_floats(
    request: &ShardRequest<'_>,
    values: impl Iterator<Item = f64>,
    shard: &mut [u8],
) -> Result<()> {
    fn write<const N: usize>(shard: &mut [u8], values: impl Iterator<Item = f64>, bytes: impl Fn(f64) -> [u8; N]) {
        for (element, value) in shard.as_chunks_mut::<N>().0.iter_mut().zip(values) {
            *element = bytes(value);
        }
    }
    match request.dtype {
        DType::F32 => write(shard, values, |v| (v as f32).to_ne_bytes()),
        DType::F64 => write(shard, values, f64::to_ne_bytes),
        DType::BF16 => write(shard, values, |v| bf16::from_f64(v).to_ne_bytes()),
        DType::F16 => write(shard, values, |v| f16::from_f64(v).to_ne_bytes()),
        other => {
            return Err(Error::Parameter {
                name: request.name.into(),
                message: format!("initial values of {other:?} can't be made; use F32, F64, BF16 or F16"),
            });
        }
    }
    Ok(())
}
