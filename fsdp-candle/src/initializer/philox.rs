//! Counter-based random values: element `i` of a parameter is a function of the seed, the parameter's name and `i`
//! alone, so that each rank draws only its shard and the model is the same at every world size.
//!
//! Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

use std::hash::Hasher;

use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use fsdp_core::layout::Region;
use rand_philox::{philox4x32_10, u32_to_unit_f64};

use super::request::{Initializer, ShardRequest, write_floats};
use crate::error::Result;

/// Draws initial values by the layers' hints ([`candle_nn::Init`]).
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    seed: u64,
}

/// A distribution with its numbers worked out for a shape.
#[derive(Clone, Copy)]
enum Distribution {
    Constant(f64),
    Uniform { lo: f64, up: f64 },
    Normal { mean: f64, std: f64 },
}

impl Distribution {
    fn of(init: Init, shape: &[usize]) -> Self {
        match init {
            Init::Const(value) => Distribution::Constant(value),
            Init::Uniform { lo, up } => Distribution::Uniform { lo, up },
            Init::Randn { mean, stdev } => Distribution::Normal { mean, std: stdev },
            Init::Kaiming { dist, fan, non_linearity } => {
                let fan = fan.for_shape(&candle_core::Shape::from(shape));
                let std = non_linearity.gain() / (fan as f64).sqrt();
                match dist {
                    NormalOrUniform::Uniform => Distribution::Uniform { lo: -3f64.sqrt() * std, up: 3f64.sqrt() * std },
                    NormalOrUniform::Normal => Distribution::Normal { mean: 0., std },
                }
            }
        }
    }
}

impl Philox {
    /// A generator of the values that belong to `seed`.
    pub fn new(seed: u64) -> Self {
        Philox { seed }
    }

    /// The stream of uniform words that belongs to a name: four words a counter.
    fn block(&self, stream: u64, counter: u64) -> [u32; 4] {
        philox4x32_10(
            [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32],
            [self.seed as u32, (self.seed >> 32) as u32],
        )
    }

    /// The value of the element with the global index `index`. Two neighbours share a block: two words each, a normal
    /// pair by Box and Muller.
    fn value(&self, distribution: Distribution, stream: u64, index: u64) -> f64 {
        match distribution {
            Distribution::Constant(value) => value,
            Distribution::Uniform { lo, up } => {
                let words = self.block(stream, index / 4);
                lo + (up - lo) * u32_to_unit_f64(words[(index % 4) as usize])
            }
            Distribution::Normal { mean, std } => {
                let words = self.block(stream, index / 4);
                let pair = if index % 4 < 2 { [words[0], words[1]] } else { [words[2], words[3]] };
                let radius = (-2. * u32_to_unit_f64(pair[0]).ln()).sqrt();
                let (sin, cos) = (2. * std::f64::consts::PI * u32_to_unit_f64(pair[1])).sin_cos();
                mean + std * radius * if index.is_multiple_of(2) { cos } else { sin }
            }
        }
    }
}

impl Initializer for Philox {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        let distribution = Distribution::of(request.init, request.shape);
        let mut hasher = fnv::FnvHasher::default();
        hasher.write(request.name.as_bytes());
        let stream = hasher.finish();
        let values = global_indices(request.shape, request.region).map(|index| self.value(distribution, stream, index));
        write_floats(request, values, shard)
    }
}

/// The row-major indices, in a tensor of `shape`, of a region's elements in the region's own row-major order.
fn global_indices<'a>(shape: &'a [usize], region: &'a Region) -> impl Iterator<Item = u64> + 'a {
    (0..region.elements()).map(move |local| {
        let (mut rest, mut index, mut stride) = (local, 0u64, 1u64);
        for dim in (0..shape.len()).rev() {
            index += stride * (region.offsets[dim] + rest % region.sizes[dim]) as u64;
            rest /= region.sizes[dim];
            stride *= shape[dim] as u64;
        }
        index
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use fsdp_core::layout::chunk_range;

    fn draw(shape: &[usize], region: &Region, init: Init) -> Vec<f32> {
        let mut bytes = vec![0; region.elements() * 4];
        Philox::new(7).fill(&ShardRequest { name: "w", shape, dtype: DType::F32, region, init }, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }

    #[test]
    fn shards_of_any_world_size_make_up_the_same_whole() {
        let shape = [7, 3];
        for init in [Init::Randn { mean: 0., stdev: 1. }, candle_nn::init::DEFAULT_KAIMING_UNIFORM] {
            let whole = draw(&shape, &Region::whole(&shape), init);
            for world in 1..9 {
                let parts: Vec<f32> = (0..world)
                    .flat_map(|rank| {
                        let rows = chunk_range(7, world, rank);
                        draw(&shape, &Region { offsets: vec![rows.start, 0], sizes: vec![rows.len(), 3] }, init)
                    })
                    .collect();
                assert_eq!(parts, whole);
            }
            for column in 0..3 {
                let part = draw(&shape, &Region { offsets: vec![0, column], sizes: vec![7, 1] }, init);
                assert!((0..7).all(|row| part[row] == whole[row * 3 + column]));
            }
        }
    }

    #[test]
    fn the_moments_are_those_asked_for() {
        let shape = [1000, 100];
        let moments = |values: Vec<f32>| {
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
            (mean, (values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt())
        };
        let (mean, std) = moments(draw(&shape, &Region::whole(&shape), Init::Randn { mean: 1., stdev: 0.5 }));
        assert!((mean - 1.).abs() < 5e-3 && (std - 0.5).abs() < 5e-3, "{mean} {std}");
        let (mean, std) = moments(draw(&shape, &Region::whole(&shape), Init::Uniform { lo: -1., up: 1. }));
        assert!(mean.abs() < 6e-3 && (std - 1. / 3f64.sqrt()).abs() < 5e-3, "{mean} {std}");
    }
}
