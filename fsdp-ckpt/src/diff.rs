//! Comparing two checkpoints or models of any format.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::layout::Region;
use serde::Serialize;

use crate::cast::decode;
use crate::{MODEL, Result, TensorSource};

/// Bytes to read at once from each side.
const BLOCK: usize = 4 << 20;

/// Numbers `a` and `b` match if |a - b| <= `atol` + `rtol` * |b|, or both are NaN. If both tolerances are zero, tensors
/// must have the same dtype and bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Tolerance relative to the second side.
    pub rtol: f64,
    /// Absolute tolerance.
    pub atol: f64,
}

impl Tolerance {
    fn exact(self) -> bool {
        self.rtol == 0.0 && self.atol == 0.0
    }
}

/// Result of [`diff`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Names that only the first side has.
    pub only_a: Vec<String>,
    /// Names that only the second side has.
    pub only_b: Vec<String>,
    /// Tensors that differ in any bit, by name.
    pub differing: BTreeMap<String, TensorDiff>,
    /// Number of tensors with equal bits.
    pub equal: usize,
    /// Number of tensors that were not compared, because the other side holds only a model.
    pub not_compared: usize,
    /// Number of tensors of unsupported dtypes on each side.
    pub unreadable: [usize; 2],
}

impl Diff {
    /// Returns whether all differences are within the tolerance.
    pub fn is_within_tolerance(&self) -> bool {
        self.only_a.is_empty() && self.only_b.is_empty() && self.differing.values().all(|tensor| !tensor.beyond)
    }
}

/// The differences of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorDiff {
    /// Dtype on each side.
    pub dtypes: [DType; 2],
    /// Shape on each side.
    pub shapes: [Vec<usize>; 2],
    /// Whether the differences exceed the tolerance.
    pub beyond: bool,
    /// Differences of the elements; `None` if the shapes differ.
    pub values: Option<ValueDiff>,
}

/// The differences of a tensor's elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ValueDiff {
    /// Number of elements.
    pub elements: u64,
    /// Number of elements that differ by more than the tolerance.
    pub beyond: u64,
    /// Largest |a - b|; infinite (null in JSON) if NaN or infinity differs from a number.
    pub max_abs: f64,
    /// Largest |a - b| / max(|a|, |b|).
    pub max_rel: f64,
}

/// Compares all tensors of two sources. Calls `seen` with the bytes of each read, of both sides together.
///
/// If one source names parameters `model.<fqn>` and the other `<fqn>`, compares only the parameters.
///
/// # Errors
/// The errors of [`TensorSource::read`].
pub fn diff(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    tolerance: Tolerance,
    seen: &mut dyn FnMut(u64),
) -> Result<Diff> {
    let (prefix_a, prefix_b) = prefixes(a, b);
    let (left, right) = (without(a, prefix_a), without(b, prefix_b));
    let mut found = Diff {
        not_compared: a.tensors().len() - left.len() + b.tensors().len() - right.len(),
        unreadable: [a.unreadable().len(), b.unreadable().len()],
        only_b: right.keys().filter(|fqn| !left.contains_key(*fqn)).map(|fqn| fqn.to_string()).collect(),
        ..Diff::default()
    };
    for (fqn, name_a) in left {
        let Some(name_b) = right.get(fqn) else {
            found.only_a.push(fqn.to_string());
            continue;
        };
        match compare((a, name_a), (b, name_b), tolerance, seen)? {
            Some(tensor) => _ = found.differing.insert(fqn.to_string(), tensor),
            None => found.equal += 1,
        }
    }
    Ok(found)
}

/// Returns the prefix to remove from the names of each side: one may have `model.<fqn>` where the other has `<fqn>`.
fn prefixes(a: &dyn TensorSource, b: &dyn TensorSource) -> (&'static str, &'static str) {
    let common = |prefix_a, prefix_b| {
        let right = without(b, prefix_b);
        without(a, prefix_a).keys().filter(|name| right.contains_key(*name)).count()
    };
    let mut best = ("", "");
    for other in [(MODEL, ""), ("", MODEL)] {
        if common(other.0, other.1) > common(best.0, best.1) {
            best = other;
        }
    }
    best
}

/// Returns the names with a prefix, keyed by the rest of the name.
fn without<'a>(source: &'a dyn TensorSource, prefix: &str) -> BTreeMap<&'a str, &'a str> {
    source.tensors().keys().filter_map(|name| Some((name.strip_prefix(prefix)?, name.as_str()))).collect()
}

/// Compares a tensor; `None` if the bits are equal.
fn compare(
    (a, name_a): (&dyn TensorSource, &str),
    (b, name_b): (&dyn TensorSource, &str),
    tolerance: Tolerance,
    seen: &mut dyn FnMut(u64),
) -> Result<Option<TensorDiff>> {
    let (left, right) = (a.tensor(name_a)?, b.tensor(name_b)?);
    let dtypes = [left.dtype, right.dtype];
    let shapes = [left.shape.clone(), right.shape.clone()];
    if left.shape != right.shape {
        seen(left.bytes() + right.bytes());
        return Ok(Some(TensorDiff { dtypes, shapes, beyond: true, values: None }));
    }
    let same_dtype = left.dtype == right.dtype;
    let sizes = dtypes.map(DType::size);
    let mut values = ValueDiff::default();
    let mut equal = same_dtype;
    let (mut bytes_a, mut bytes_b) = (Vec::new(), Vec::new());
    for block in Region::whole(&left.shape).pieces(BLOCK / sizes[0].max(sizes[1])) {
        let elements = block.elements();
        bytes_a.resize(elements * sizes[0], 0);
        bytes_b.resize(elements * sizes[1], 0);
        a.read(name_a, &block, &mut bytes_a)?;
        b.read(name_b, &block, &mut bytes_b)?;
        seen((bytes_a.len() + bytes_b.len()) as u64);
        values.elements += elements as u64;
        if same_dtype && bytes_a == bytes_b {
            continue;
        }
        for (a, b) in bytes_a.chunks_exact(sizes[0]).zip(bytes_b.chunks_exact(sizes[1])) {
            if same_dtype && a == b {
                continue;
            }
            equal = false;
            values.add(decode(a, dtypes[0]), decode(b, dtypes[1]), tolerance, same_dtype);
        }
    }
    if equal {
        return Ok(None);
    }
    let beyond = values.beyond > 0 || (!same_dtype && tolerance.exact());
    Ok(Some(TensorDiff { dtypes, shapes, beyond, values: Some(values) }))
}

impl ValueDiff {
    /// Adds a pair of elements whose bits or dtypes differ.
    fn add(&mut self, a: f64, b: f64, tolerance: Tolerance, same_dtype: bool) {
        if a == b || (a.is_nan() && b.is_nan()) {
            // Zeros of both signs, NaNs, large integers that f64 rounds, or equal numbers of different dtypes.
            self.beyond += u64::from(same_dtype && tolerance.exact());
            return;
        }
        let abs = (a - b).abs();
        let abs = if abs.is_nan() { f64::INFINITY } else { abs };
        self.max_abs = self.max_abs.max(abs);
        let rel = if abs.is_infinite() { f64::INFINITY } else { abs / a.abs().max(b.abs()) };
        self.max_rel = self.max_rel.max(rel);
        let allowed = abs.is_finite() && abs <= tolerance.atol + tolerance.rtol * b.abs();
        self.beyond += u64::from(!allowed);
    }
}
