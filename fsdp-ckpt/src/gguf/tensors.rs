//! The tensors to write, and reading them in f32, changed as llama.cpp expects.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_core::DType;
use fsdp_core::layout::Region;

use crate::cast::cast;
use crate::gguf::config::Config;
use crate::gguf::names::{self, Change, Row};
use crate::gguf::quantize::Quantization;
use crate::hf::same_values;
use crate::text_file::malformed;
use crate::{Error, Result, TensorSource};

/// The head's weight in transformers.
const HEAD: &str = "lm_head.weight";
/// Bytes in f32 to read at once.
const BLOCK: usize = 8 << 20;

/// A tensor to write.
#[derive(Debug)]
pub(super) struct Tensor {
    /// Name in the file.
    pub(super) name: String,
    /// Shape in the file, row-major: the last dimension is contiguous.
    pub(super) shape: Vec<usize>,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    /// Tensors of the model; several are stacked. `heads` is the number of heads to permute, if any.
    Model {
        parts: Vec<String>,
        change: Change,
        heads: usize,
    },
    Values(Vec<f32>),
}

/// All tensors to write, in the order of the file.
#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) list: Vec<Tensor>,
}

impl Tensors {
    /// Lists the tensors of the model, and checks names and shapes.
    pub(super) fn new(source: &dyn TensorSource, config: &Config) -> Result<Self> {
        let mut rows = names::rows(config, config.tied);
        let prefix = names::prefix(config.architecture);
        // Models without a head have no prefix.
        let first = rows.first().map_or("", |row| row.from);
        let bare = !source.tensors().contains_key(first)
            && source.tensors().contains_key(first.strip_prefix(prefix).unwrap_or_default());
        let own_name = |name: &str| match name.strip_prefix(prefix) {
            Some(rest) if bare => rest.to_string(),
            _ => name.to_string(),
        };
        // The head shares the embedding's weights. As transformers, takes the one that is there, and keeps both if they
        // differ.
        let has = |name: &str| source.tensors().contains_key(name);
        let embedding = own_name(first);
        let is_tied = config.tied && !(has(HEAD) && has(&embedding) && !same_values(source, HEAD, &embedding)?);
        if !is_tied {
            rows = names::rows(config, false);
        }
        let is_head_only = is_tied && has(HEAD) && !has(&embedding);
        let own_name = |name: &str| if is_head_only && name == first { HEAD.to_string() } else { own_name(name) };
        let mut list = Vec::new();
        let mut used = BTreeSet::new();
        let (whole, layers): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| !row.to.contains("{}"));
        let of_layers = (0..config.layers).flat_map(|layer| layers.iter().map(move |row| (layer, row)));
        for (layer, row) in whole.iter().map(|row| (0, row)).chain(of_layers) {
            let from = own_name(&row.from.replace("{}", &layer.to_string()));
            let parts: Vec<String> = match config.experts {
                Some(experts) if from.contains("{x}") => {
                    (0..experts.count).map(|expert| from.replace("{x}", &expert.to_string())).collect()
                }
                _ => vec![from],
            };
            if row.optional && parts.iter().all(|part| !source.tensors().contains_key(part)) {
                continue;
            }
            let mut shape: Vec<usize> = row.shape.iter().map(|dim| dim.size(config)).collect();
            for part in &parts {
                check(source, part, &shape)?;
            }
            used.extend(parts.iter().cloned());
            if row.change == Change::Transposed {
                shape.reverse();
            }
            if row.from.contains("{x}") {
                shape.insert(0, parts.len());
            }
            let heads = match row.change {
                Change::RotatedQueries => config.heads,
                Change::RotatedKeys => config.kv_heads,
                _ => 1,
            };
            let name = row.to.replace("{}", &layer.to_string());
            list.push(Tensor { name, shape, origin: Origin::Model { parts, change: row.change, heads } });
        }
        for (name, values) in config.rope.iter().flat_map(|rope| rope.tensors()) {
            list.push(Tensor { name: name.into(), shape: vec![values.len()], origin: Origin::Values(values) });
        }
        let full_name = |name: &String| match bare {
            true if names::is_ignored(name, config, is_tied) => name.clone(),
            true => format!("{prefix}{name}"),
            false => name.clone(),
        };
        let unexpected: Vec<String> = source
            .tensors()
            .keys()
            .filter(|name| !used.contains(*name) && !names::is_ignored(&full_name(name), config, is_tied))
            .cloned()
            .collect();
        if !unexpected.is_empty() {
            return Err(Error::NameMismatch { path: source.path().to_path_buf(), missing: Vec::new(), unexpected });
        }
        Ok(Tensors { list })
    }

    /// Returns whether the head has its own weights.
    pub(super) fn has_output(&self) -> bool {
        self.list.iter().any(|tensor| tensor.name == "output.weight")
    }

    /// Returns the quantization that keeps the most frequent 16-bit dtype of the matrices; otherwise f32.
    pub(super) fn own_quantization(&self, source: &dyn TensorSource) -> Quantization {
        let mut sizes = BTreeMap::<&str, (u64, Quantization)>::new();
        for tensor in source.tensors().values().filter(|tensor| tensor.shape.len() > 1) {
            let kept = match tensor.dtype {
                DType::BF16 => Quantization::BF16,
                DType::F16 => Quantization::F16,
                _ => Quantization::F32,
            };
            sizes.entry(kept.name()).or_insert((0, kept)).0 += tensor.bytes() / tensor.dtype.size() as u64;
        }
        sizes.values().max_by_key(|(elements, _)| *elements).map_or(Quantization::F32, |(_, kept)| *kept)
    }

    /// Reads a tensor and passes it to `sink` in order, whole rows at a time, with the length of a row.
    pub(super) fn stream(
        &self,
        source: &dyn TensorSource,
        tensor: &Tensor,
        sink: &mut dyn FnMut(&[f32], usize) -> Result<()>,
    ) -> Result<()> {
        let columns = tensor.shape.last().copied().unwrap_or(1);
        let (parts, change, heads) = match &tensor.origin {
            Origin::Values(values) => return sink(values, columns),
            Origin::Model { parts, change, heads } => (parts, *change, *heads),
        };
        // Vectors have rows of one element, so that biases of heads are permuted like matrices.
        let [rows, width] = match &tensor.shape[..] {
            [.., rows, columns] => [*rows, *columns],
            [length] => [*length, 1],
            [] => [1, 1],
        };
        let unit = if heads > 1 || is_rotated(change) { rows / heads } else { 1 };
        let most = (BLOCK / (4 * width * unit)).max(1) * unit;
        for part in parts {
            for first in (0..rows).step_by(most) {
                let count = most.min(rows - first);
                let mut values = read(source, part, first, count, change)?;
                if is_rotated(change) {
                    values = interleave(&values, unit, width);
                }
                sink(&values, columns)?;
            }
        }
        Ok(())
    }
}

fn is_rotated(change: Change) -> bool {
    matches!(change, Change::RotatedQueries | Change::RotatedKeys)
}

/// Checks that a tensor exists with a shape and a floating point dtype.
fn check(source: &dyn TensorSource, name: &str, shape: &[usize]) -> Result<()> {
    let tensor = source.tensor(name)?;
    if tensor.shape != shape {
        let reason = format!("it has shape {:?}, expected {shape:?} by config.json", tensor.shape);
        return Err(malformed(source.path(), Some(name), reason));
    }
    if !tensor.dtype.is_float() {
        let reason = format!("it has dtype {}, expected floating point", tensor.dtype);
        return Err(malformed(source.path(), Some(name), reason));
    }
    Ok(())
}

/// Reads rows of a tensor, as in the file.
fn read(source: &dyn TensorSource, name: &str, first: usize, count: usize, change: Change) -> Result<Vec<f32>> {
    let tensor = source.tensor(name)?;
    let region = match (change, &tensor.shape[..]) {
        (Change::Transposed, [rows, _]) => Region { offsets: vec![0, first], sizes: vec![*rows, count] },
        (_, shape) => {
            let mut region = Region::whole(shape);
            if let (Some(offset), Some(size)) = (region.offsets.first_mut(), region.sizes.first_mut()) {
                (*offset, *size) = (first, count);
            }
            region
        }
    };
    let elements = region.elements();
    let mut bytes = vec![0; elements * tensor.dtype.size()];
    source.read(name, &region, &mut bytes)?;
    let mut values = vec![0f32; elements];
    let mut native = vec![0; elements * 4];
    if cast(&bytes, tensor.dtype, &mut native, DType::F32).is_none() {
        let reason = format!("{} can't be converted to F32", tensor.dtype);
        return Err(Error::InvalidRead { tensor: name.to_string(), reason });
    }
    for (value, bytes) in values.iter_mut().zip(native.as_chunks().0) {
        *value = f32::from_ne_bytes(*bytes);
    }
    match change {
        Change::PlusOne => values.iter_mut().for_each(|value| *value += 1.),
        Change::Transposed => values = transpose(&values, count),
        Change::None | Change::RotatedQueries | Change::RotatedKeys => {}
    }
    Ok(values)
}

fn transpose(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns)).copied().collect()
}

/// Reorders the rows of each head: the rows of its first half alternate with the rows of its second half.
fn interleave(values: &[f32], head: usize, width: usize) -> Vec<f32> {
    let mut mixed = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head * width) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks_exact(width).zip(second.chunks_exact(width)) {
            mixed.extend_from_slice(a);
            mixed.extend_from_slice(b);
        }
    }
    mixed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_heads_alternate() {
        let rows = [0., 1., 2., 3., 10., 11., 12., 13.];
        assert_eq!(interleave(&rows, 4, 1), [0., 2., 1., 3., 10., 12., 11., 13.]);
        let pairs = [0., 0.5, 1., 1.5, 2., 2.5, 3., 3.5];
        assert_eq!(interleave(&pairs, 4, 2), [0., 0.5, 2., 2.5, 1., 1.5, 3., 3.5]);
        assert_eq!(transpose(&[1., 2., 3., 4., 5., 6.], 3), [1., 4., 2., 5., 3., 6.]);
    }
}
