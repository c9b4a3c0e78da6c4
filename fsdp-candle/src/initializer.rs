//! Initial values of parameters, drawn or read from files, for one rank's shard.

use std::hash::Hasher;
use std::ops::Range;
use std::path::Path;

use candle_core::DType;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use fsdp_ckpt::{TensorSource, hf::HfModel};
use fsdp_core::layout::Region;
use half::{bf16, f16};
use rand_philox::{philox4x32_10, u32_to_unit_f64};
use rayon::prelude::*;

use crate::error::{Error, Result};

/// A request for one rank's part of one parameter.
#[derive(Debug)]
pub struct ShardRequest<'a> {
    /// The parameter's FQN.
    pub name: &'a str,
    /// Global shape.
    pub shape: &'a [usize],
    /// Dtype: F32, F64, BF16 or F16.
    pub dtype: DType,
    /// Box that this rank holds.
    pub region: &'a Region,
    /// The layer's initialization hint.
    pub init: Init,
}

/// A source of initial values. The value of an element must not depend on the sharding.
///
/// ```
/// use fsdp_candle::initializer::{Fallback, Initializer, Philox, ShardRequest};
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
///
/// /// Weights whose elements are their own indices.
/// struct Count;
///
/// impl Initializer for Count {
///     fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
///         // The first index of this rank's rows.
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
/// // Other parameters are drawn.
/// vars.init_with(Fallback::new(Count, Philox::new(0), |_| true))?;
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(2, 2, vb))?;
/// assert_eq!(vars.get("weight").unwrap().var().to_vec2::<f32>()?, [[0., 1.], [2., 3.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Initializer: Send + Sync {
    /// Writes the region's elements into `shard`, row-major and in native byte order. An error names the
    /// parameter and the file that lacks such values.
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()>;

    /// Checks that there are values, before memory is allocated for them.
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let _ = request;
        Ok(())
    }

    /// Returns whether there are values of this name, for [`candle_nn::VarBuilder::contains_tensor`].
    fn contains(&self, name: &str) -> bool {
        let _ = name;
        false
    }
}

/// Writes values in the requested dtype, rounded once.
fn write_floats(request: &ShardRequest<'_>, values: impl Iterator<Item = f64>, shard: &mut [u8]) -> Result<()> {
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
            let message = format!("cannot make initial values of {other:?}; use F32, F64, BF16 or F16");
            return Err(Error::parameter(request.name, message));
        }
    }
    Ok(())
}

/// An initializer that draws values by the layers' hints ([`candle_nn::Init`]).
///
/// An element is a function of the seed, the parameter's name and the element's index in the whole tensor, so that each
/// rank draws only its shard and the model is the same at every world size. rayon's threads share the work.
/// Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    seed: u64,
}

/// A distribution with the parameters for a shape.
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
    /// Makes a generator for a seed.
    pub fn new(seed: u64) -> Self {
        Philox { seed }
    }

    /// Returns four uniform words of a name's stream.
    fn block(&self, stream: u64, counter: u64) -> [u32; 4] {
        philox4x32_10(
            [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32],
            [self.seed as u32, (self.seed >> 32) as u32],
        )
    }

    /// Returns the values of the four elements from the global index `4 * counter`: a word each, or for each normal pair
    /// two words by Box and Muller.
    // `map` of an array is compiled apart from its loop in a build without LTO, so this has none.
    fn values(&self, distribution: Distribution, stream: u64, counter: u64) -> [f64; 4] {
        let uniform = || {
            let [a, b, c, d] = self.block(stream, counter);
            [u32_to_unit_f64(a), u32_to_unit_f64(b), u32_to_unit_f64(c), u32_to_unit_f64(d)]
        };
        match distribution {
            Distribution::Constant(value) => [value; 4],
            Distribution::Uniform { lo, up } => {
                let [a, b, c, d] = uniform();
                let within = |word| lo + (up - lo) * word;
                [within(a), within(b), within(c), within(d)]
            }
            Distribution::Normal { mean, std } => {
                let [a, b, c, d] = uniform();
                let pair = |first: f64, second: f64| {
                    let radius = (-2. * first.ln()).sqrt();
                    let (sin, cos) = (2. * std::f64::consts::PI * second).sin_cos();
                    [mean + std * radius * cos, mean + std * radius * sin]
                };
                let ([a, b], [c, d]) = (pair(a, b), pair(c, d));
                [a, b, c, d]
            }
        }
    }
}

/// Elements that one thread draws at a time.
const CHUNK: usize = 1 << 15;

impl Initializer for Philox {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        let distribution = Distribution::of(request.init, request.shape);
        let mut hasher = fnv::FnvHasher::default();
        hasher.write(request.name.as_bytes());
        let stream = hasher.finish();
        // Candle has dtypes of less than a byte, which `write_floats` refuses.
        let size = request.dtype.size_in_bytes().max(1);
        shard.par_chunks_mut(CHUNK * size).enumerate().try_for_each(|(chunk, shard)| {
            let first = chunk * CHUNK;
            // Neighbours share four values.
            let mut drawn = (u64::MAX, [0.; 4]);
            let values =
                global_indices(request.shape, request.region, first..first + shard.len() / size).map(|index| {
                    if drawn.0 != index / 4 {
                        drawn = (index / 4, self.values(distribution, stream, index / 4));
                    }
                    drawn.1[(index % 4) as usize]
                });
            write_floats(request, values, shard)
        })
    }
}

/// Returns the row-major indices, in a tensor of `shape`, of a region's elements `locals`, which count in the region's
/// row-major order.
fn global_indices(shape: &[usize], region: &Region, locals: Range<usize>) -> impl Iterator<Item = u64> {
    let (last, width) = (shape.last().copied().unwrap_or(1), region.sizes.last().copied().unwrap_or(1).max(1));
    let first_column = region.offsets.last().copied().unwrap_or(0);
    let first_of_row = move |row: usize| {
        let (mut rest, mut index, mut stride) = (row, first_column as u64, last as u64);
        for dim in (0..shape.len().saturating_sub(1)).rev() {
            index += stride * (region.offsets[dim] + rest % region.sizes[dim]) as u64;
            rest /= region.sizes[dim];
            stride *= shape[dim] as u64;
        }
        index
    };
    let rows = locals.start / width..locals.end.div_ceil(width);
    rows.flat_map(move |row| {
        let columns = locals.start.max(row * width) - row * width..locals.end.min((row + 1) * width) - row * width;
        let first = first_of_row(row);
        first + columns.start as u64..first + columns.end as u64
    })
}

/// An initializer that reads a model directory (`model.safetensors`, or `model.safetensors.index.json` and its files), a
/// single safetensors file or another [`TensorSource`]. Each rank reads the bytes of its shards. Floating-point weights
/// are converted to the parameter's dtype.
pub struct Pretrained {
    source: Box<dyn TensorSource>,
    names: Box<Names>,
}

type Names = dyn Fn(&str) -> String + Send + Sync;

impl Pretrained {
    /// Opens a directory, a safetensors file, or an index of several (`*.index.json`). Weights are read when parameters
    /// are built. Fails without weights, and for a file of another format: [`Pretrained::of`] takes what
    /// [`fsdp_ckpt::open`] returns for it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Pretrained::of(HfModel::open(path.as_ref())?, |name| name.into()))
    }

    /// Makes an initializer of a source, which names a parameter as `names` returns. A boxed source is one as well.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// use fsdp_candle::initializer::Pretrained;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let dir = tempfile::tempdir()?;
    /// # let file = dir.path().join("weights.safetensors");
    /// # let weight = Tensor::ones((2, 4), DType::F32, world.device())?;
    /// # candle_core::safetensors::save(&[("layer.weight".to_string(), weight)].into(), &file)?;
    /// let source = fsdp_ckpt::open(&file)?; // of any format
    /// vars.init_with(Pretrained::of(source, |name| format!("layer.{name}")))?;
    /// let model = fully_shard(&opts, vb, |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # assert_eq!(model.params()[0].var().to_vec2::<f32>()?, [[1.; 4]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(source: impl TensorSource + 'static, names: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        Pretrained { source: Box::new(source), names: Box::new(names) }
    }
}

/// Advice when weights do not fit.
const MISFIT: &str = "Build the model with the sizes and names of these weights (its config.json, or the arguments of its \
     `new`), or read other weights. To draw some parameters instead, such as a new head, see initializer::Fallback";

impl Initializer for Pretrained {
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let fail = |message: String| Error::parameter(request.name, message);
        let name = (self.names)(request.name);
        let info = self.source.tensor(&name).map_err(|error| fail(format!("{error}. {MISFIT}")))?;
        if info.shape != request.shape {
            return Err(fail(format!(
                "the model expects shape {:?}, and tensor `{name}` of {} has shape {:?}. {MISFIT}",
                request.shape,
                self.source.path().display(),
                info.shape
            )));
        }
        if !info.dtype.is_float() {
            return Err(fail(format!(
                "{} has it as {}, expected F32, F64, BF16 or F16",
                self.source.path().display(),
                info.dtype
            )));
        }
        Ok(())
    }

    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.check(request)?;
        let dtype = crate::storage::to_core_dtype(request.dtype)?;
        Ok(fsdp_ckpt::read_as(&*self.source, &(self.names)(request.name), request.region, dtype, shard)?)
    }

    fn contains(&self, name: &str) -> bool {
        self.source.tensors().contains_key(&(self.names)(name))
    }
}

/// An initializer with a fallback. Parameters that `first` does not [contain](Initializer::contains) and whose names
/// `accepts` matches come from `second`. Other missing parameters are an error.
///
/// For a pretrained model with new adapters: `Fallback::new(Pretrained::open(dir)?, Philox::new(seed),
/// nn::is_adapter)`.
pub struct Fallback<A, B> {
    first: A,
    second: B,
    accepts: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl<A, B> Fallback<A, B> {
    /// Makes an initializer of `first`, and of `second` for missing names that `accepts` matches.
    pub fn new(first: A, second: B, accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Fallback { first, second, accepts: Box::new(accepts) }
    }
}

impl<A: Initializer, B: Initializer> Fallback<A, B> {
    fn source(&self, name: &str) -> &dyn Initializer {
        if !self.first.contains(name) && (self.accepts)(name) { &self.second } else { &self.first }
    }
}

impl<A: Initializer, B: Initializer> Initializer for Fallback<A, B> {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.source(request.name).fill(request, shard)
    }

    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        self.source(request.name).check(request)
    }

    fn contains(&self, name: &str) -> bool {
        self.first.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use candle_core::DType;
    use fsdp_core::layout::Region;
    use fsdp_core::layout::chunk_range;

    fn draw(shape: &[usize], region: &Region, init: Init) -> Vec<f32> {
        let mut bytes = vec![0; region.elements() * 4];
        Philox::new(7).fill(&ShardRequest { name: "w", shape, dtype: DType::F32, region, init }, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }

    #[test]
    fn shards_of_any_world_size_form_the_same_tensor() {
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
    fn an_element_is_a_function_of_its_index() {
        let shape = [3, 5, 7];
        let region = Region { offsets: vec![1, 2, 3], sizes: vec![2, 3, 4] };
        let stream = {
            let mut hasher = fnv::FnvHasher::default();
            hasher.write(b"w");
            hasher.finish()
        };
        let index = |a: u64, b: u64, c: u64| ((1 + a) * 5 + 2 + b) * 7 + 3 + c;
        let indices = (0..2).flat_map(|a| (0..3).flat_map(move |b| (0..4).map(move |c| index(a, b, c))));
        let word = |index: u64, at: u64| {
            let counter = [(index / 4) as u32, 0, stream as u32, (stream >> 32) as u32];
            u32_to_unit_f64(philox4x32_10(counter, [7, 0])[at as usize])
        };
        let normal = |index: u64| {
            let (radius, angle) = (word(index, index % 4 / 2 * 2), word(index, index % 4 / 2 * 2 + 1));
            let turn = 2. * std::f64::consts::PI * angle;
            ((-2. * radius.ln()).sqrt() * if index.is_multiple_of(2) { turn.cos() } else { turn.sin() }) as f32
        };
        let uniform = |index: u64| word(index, index % 4) as f32;
        let found = draw(&shape, &region, Init::Randn { mean: 0., stdev: 1. });
        assert!(
            found.iter().zip(indices.clone()).all(|(&found, index)| (found - normal(index)).abs() < 1e-6),
            "{found:?}"
        );
        assert_eq!(draw(&shape, &region, Init::Uniform { lo: 0., up: 1. }), indices.map(uniform).collect::<Vec<_>>());
    }

    #[test]
    fn draws_have_the_requested_moments() {
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

    struct Ones;

    impl Initializer for Ones {
        fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
            if !self.contains(request.name) {
                return Err(Error::parameter(request.name, "not here"));
            }
            shard.fill(1);
            Ok(())
        }

        fn contains(&self, name: &str) -> bool {
            name.starts_with("old")
        }
    }

    struct Twos;

    impl Initializer for Twos {
        fn fill(&self, _: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
            shard.fill(2);
            Ok(())
        }
    }

    #[test]
    fn accepted_missing_names_fall_back() {
        let both = Fallback::new(Ones, Twos, |name| name.contains(".lora_"));
        let fill = |name: &str| {
            let (mut shard, region) = ([0], Region::whole(&[1]));
            let init = candle_nn::Init::Const(0.);
            let request = ShardRequest { name, shape: &[1], dtype: candle_core::DType::F32, region: &region, init };
            both.fill(&request, &mut shard).map(|()| shard[0])
        };
        assert_eq!(fill("old.weight").unwrap(), 1);
        assert_eq!(fill("old.lora_A.weight").unwrap(), 1, "a file that has adapters");
        assert_eq!(fill("new.lora_B.weight").unwrap(), 2);
        let error = fill("new.weight").unwrap_err().to_string();
        assert!(error.contains("`new.weight`") && error.contains("not here"), "{error}");
        assert!(both.contains("old.weight") && !both.contains("new.lora_A.weight"));
    }
}
