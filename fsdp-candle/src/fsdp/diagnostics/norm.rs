//! Detection, by the values of a few rows, of tensors made by normalizing another.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::param::FsdpParam;

/// Numbers of compared rows and of compared elements of a product.
const ROWS: usize = 4;
const OUTPUTS: usize = 64;

/// A norm that the unit's parameters may belong to.
pub(super) struct Norm {
    pub(super) layer: String,
    weight: Vec<f32>,
    /// Bias of a layer norm.
    bias: Option<Vec<f32>>,
}

impl Norm {
    /// Returns the possible norms: a vector of this width may be the weight of an RMS norm, and of a layer norm with
    /// its sibling `bias`.
    pub(super) fn of_width(width: usize, params: &[Arc<FsdpParam>]) -> Result<Vec<Norm>> {
        let vectors = || params.iter().filter(|param| param.unsharded_shape().dims() == [width]);
        let mut norms = vec![];
        for param in vectors() {
            let (layer, name) = param.name().rsplit_once('.').unwrap_or(("", param.name()));
            let weight = values(&param.full.tensor)?;
            let bias = match name {
                "weight" => Some("bias"),
                "gamma" => Some("beta"),
                _ => None,
            };
            let sibling = bias.map(|bias| if layer.is_empty() { bias.into() } else { format!("{layer}.{bias}") });
            let bias = vectors().find(|other| sibling.as_deref() == Some(other.name()));
            let bias = bias.map(|bias| values(&bias.full.tensor)).transpose()?;
            let layer = if layer.is_empty() { param.name() } else { layer };
            norms.push(Norm { layer: layer.into(), weight: weight.clone(), bias: None });
            if bias.is_some() {
                norms.push(Norm { layer: layer.into(), weight, bias });
            }
        }
        Ok(norms)
    }

    pub(super) fn kind(&self) -> &'static str {
        if self.bias.is_some() { "LayerNorm" } else { "RmsNorm" }
    }

    /// Returns whether `result` is this norm of `of`, or the matrix applied to it. Both have the same number of rows.
    pub(super) fn made(&self, result: &Tensor, of: &Tensor, matrix: Option<&Matrix>) -> bool {
        let tolerance = tolerance(result);
        let mut compared = 0;
        for (mut result, row) in pairs(result, of) {
            let n = row.len() as f32;
            let mean = if self.bias.is_some() { row.iter().sum::<f32>() / n } else { 0. };
            let size = (row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n).sqrt();
            let scaled: Vec<f32> = row.iter().zip(&self.weight).map(|(x, w)| (x - mean) * w).collect();
            let shape = applied(matrix, &scaled);
            let offset = self.bias.as_ref().map(|bias| applied(matrix, bias));
            result.truncate(shape.len());
            for (i, value) in result.iter_mut().enumerate() {
                *value -= matrix.map_or(0., |matrix| matrix.bias.get(i).copied().unwrap_or(0.));
                *value -= offset.as_ref().map_or(0., |offset| offset[i]);
            }
            let square = dot(&shape, &shape);
            if square == 0. || size == 0. {
                continue;
            }
            // A row of a norm is `scaled` divided by its size, which epsilon makes slightly larger.
            let factor = dot(&result, &shape) / square;
            let rest: Vec<f32> = result.iter().zip(&shape).map(|(y, x)| y - factor * x).collect();
            let exact = dot(&rest, &rest).sqrt() <= tolerance * dot(&result, &result).sqrt();
            let least = if shape.len() < 3 { 0.95 } else { 0.05 };
            if !(exact && (least..1. + tolerance).contains(&(factor * size))) {
                return false;
            }
            compared += 1;
        }
        compared > 0
    }
}

/// A matrix with a bias, as in a linear layer.
pub(super) struct Matrix {
    /// Weights of the first outputs.
    rows: Vec<Vec<f32>>,
    bias: Vec<f32>,
}

impl Matrix {
    /// Reads a matrix stored as `[out, in]` or `[in, out]`.
    pub(super) fn of(param: &FsdpParam, bias: Option<&FsdpParam>, in_out: bool) -> Result<Self> {
        let full = param.full.tensor.detach();
        let full = if in_out { full.t()? } else { full };
        let outputs = full.dim(0)?.min(OUTPUTS);
        let rows = full.narrow(0, 0, outputs)?.to_dtype(DType::F32)?.to_vec2()?;
        Ok(Matrix { rows, bias: bias.map_or(Ok(vec![]), |bias| values(&bias.full.tensor))? })
    }
}

/// Returns whether `result` is `of`, or the matrix applied to it.
pub(super) fn is_itself(result: &Tensor, of: &Tensor, matrix: Option<&Matrix>) -> bool {
    let tolerance = tolerance(result);
    let pairs = pairs(result, of);
    let same = |(result, row): &(Vec<f32>, Vec<f32>)| {
        let want = applied(matrix, row);
        let bias = |i: usize| matrix.map_or(0., |matrix| matrix.bias.get(i).copied().unwrap_or(0.));
        let rest: Vec<f32> = result.iter().zip(&want).enumerate().map(|(i, (a, b))| a - bias(i) - b).collect();
        let size = dot(&want, &want).sqrt();
        size > 0. && dot(&rest, &rest).sqrt() <= tolerance * size
    };
    !pairs.is_empty() && pairs.iter().all(same)
}

/// Returns a few rows of both tensors, or none if a tensor cannot be read, such as a view of a resharded parameter.
fn pairs(result: &Tensor, of: &Tensor) -> Vec<(Vec<f32>, Vec<f32>)> {
    match (sample(result), sample(of)) {
        (Ok(results), Ok(rows)) => results.into_iter().zip(rows).collect(),
        _ => vec![],
    }
}

fn tolerance(tensor: &Tensor) -> f32 {
    if matches!(tensor.dtype(), DType::BF16 | DType::F16) { 5e-2 } else { 2e-3 }
}

fn applied(matrix: Option<&Matrix>, row: &[f32]) -> Vec<f32> {
    match matrix {
        Some(matrix) => matrix.rows.iter().map(|weights| dot(weights, row)).collect(),
        None => row.to_vec(),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.detach().to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Returns a few rows along the last dimension.
fn sample(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    let width = tensor.dims().last().copied().unwrap_or(1).max(1);
    let rows = tensor.elem_count() / width;
    let flat = tensor.detach().flatten_all()?;
    let mut at: Vec<usize> = (0..ROWS).map(|i| i * rows.saturating_sub(1) / (ROWS - 1)).collect();
    at.dedup();
    at.into_iter().filter(|&row| row < rows).map(|row| values(&flat.narrow(0, row * width, width)?)).collect()
}
