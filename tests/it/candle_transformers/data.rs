//! Training data: the same rows at every world size.

use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;

/// A model's forward.
pub(crate) type Forward = Box<dyn FnMut(&Batch) -> Result<Tensor>>;
/// A model's builder.
pub(crate) type Load = fn(VarBuilder<'static>) -> Result<Forward>;

pub(crate) const VOCABULARY: usize = 32;
/// The maximum number of positions.
pub(crate) const MOST: usize = 16;
pub(crate) const PIXELS: usize = 8;
pub(crate) const MELS: usize = 6;
const ROWS: usize = 4;
const TIME: usize = 7;

/// Inputs for every kind of model, for some of the rows.
pub(crate) struct Batch {
    /// Tokens.
    pub(crate) ids: Tensor,
    /// The tokens of an encoder-decoder's decoder.
    pub(crate) others: Tensor,
    /// 1 for tokens and 0 for padding, u32.
    pub(crate) there: Tensor,
    pub(crate) images: Tensor,
    pub(crate) sounds: Tensor,
    pub(crate) first: usize,
}

/// Values between -1 and 1 for some rows, each of these dimensions.
pub(crate) fn floats(first: usize, rows: usize, dims: &[usize]) -> Result<Tensor> {
    let each: usize = dims.iter().product();
    let value = |i: usize| ((i * 37 + i * i * 5) % 61) as f32 / 30. - 1.;
    Tensor::from_iter((first * each..(first + rows) * each).map(value), &Device::Cpu)?.reshape([&[rows], dims].concat())
}

impl Batch {
    /// The rows of a rank.
    pub(crate) fn of(rank: usize, size: usize) -> Result<Self> {
        let (first, rows) = (rank * ROWS / size, ROWS / size);
        let ids = |salt: usize| {
            let id = |i: usize| ((i * i * 7 + i * 3 + salt) % VOCABULARY) as u32;
            Tensor::from_iter((first * TIME..(first + rows) * TIME).map(id), &Device::Cpu)?.reshape((rows, TIME))
        };
        let there = (0..rows * TIME).map(|i| u32::from(i % TIME + (first + i / TIME) < TIME + 1));
        Ok(Batch {
            ids: ids(0)?,
            others: ids(5)?,
            there: Tensor::from_iter(there, &Device::Cpu)?.reshape((rows, TIME))?,
            images: floats(first, rows, &[3, PIXELS, PIXELS])?,
            sounds: floats(first, rows, &[MELS, 2 * TIME])?,
            first,
        })
    }

    /// The target classes for an output [.., classes], and the output as a matrix.
    pub(crate) fn targets(&self, output: &Tensor) -> Result<(Tensor, Tensor)> {
        let output = output.flatten_to(output.rank() - 2)?;
        let (positions, classes) = output.dims2()?;
        let first = self.first * positions / self.ids.dim(0)?;
        let target = |i: usize| ((i * 11 + i * i * 3 + 1) % classes) as u32;
        Ok((output, Tensor::from_iter((first..first + positions).map(target), &Device::Cpu)?))
    }
}
