//! How far two checkpoints or models are apart, whatever their formats.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::layout::Region;
use serde::Serialize;

use crate::cast::decode;
use crate::region::blocks;
use crate::{MODEL, Result, TensorSource};

/// The most bytes of a tensor that are read at once from each side.
const BLOCK: usize = 4 << 20;

/// Numbers `a` and `b` are as good as equal when |a - b| <= `atol` + `rtol` * |b|, or both are NaN. With both zero,
/// tensors must be equal to the bit and of one dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Relative to the second side.
    pub rtol: f64,
    /// Absolute.
    pub atol: f64,
}

impl Tolerance {
    fn exact(self) -> bool {
        self.rtol == 0.0 && self.atol == 0.0
    }
}

/// What [`diff`] has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Names that only the first has.
    pub only_a: Vec<String>,
    /// Names that only the second has.
    pub only_b: Vec<String>,
    /// Tensors that differ at all, by name.
    pub differing: BTreeMap<String, TensorDiff>,
    /// The number of tensors that are equal to the bit.
    pub equal: usize,
    /// The number of tensors that were not compared, because one side is a model alone and these are not parameters.
    pub not_compared: usize,
    /// The numbers of tensors that can't be read on either side, for their dtypes.
    pub unreadable: [usize; 2],
}

impl Diff {
    /// Whether nothing differs beyond the tolerance.
    pub fn is_within_tolerance(&self) -> bool {
        self.only_a.is_empty() && self.only_b.is_empty() && self.differing.values().all(|tensor| !tensor.beyond)
    }
}

/// How a tensor differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorDiff {
    /// The dtypes on both sides.
    pub dtypes: [DType; 2],
    /// The shapes on both sides.
    pub shapes: [Vec<usize>; 2],
    /// Whether this is more than the tolerance allows.
    pub beyond: bool,
    /// How the numbers differ; nothing where the shapes do.
    pub values: Option<ValueDiff>,
}

/// How the numbers of a tensor differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ValueDiff {
    /// The number of elements.
    pub elements: u64,
    /// How many of them differ by more than the tolerance.
    pub beyond: u64,
    /// The largest |a - b|; infinite (null in JSON) where a NaN or an infinity stands against a number.
    pub max_abs: f64,
    /// The largest |a - b| / max(|a|, |b|).
    pub max_rel: f64,
}

/// Compares all tensors of two sources. `seen` is told the bytes as they are read, those of both sides together.
///
/// When one of them names parameters `model.<fqn>` and the other `<fqn>`, the parameters alone are compared.
///
/// # Errors
/// As [`TensorSource::read`].
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

/// What to take off the names of each side: one may call `model.<fqn>` what is `<fqn>` to the other.
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

/// The names in a source that begin with a prefix, by what comes after it.
fn without<'a>(source: &'a dyn TensorSource, prefix: &str) -> BTreeMap<&'a str, &'a str> {
    source.tensors().keys().filter_map(|name| Some((name.strip_prefix(prefix)?, name.as_str()))).collect()
}

/// Compares a tensor; nothing when it is equal to the bit.
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
    for block in blocks(&Region::whole(&left.shape), sizes[0].max(sizes[1]), BLOCK) {
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
    /// Adds two numbers whose bits differ, or whose dtypes do.
    fn add(&mut self, a: f64, b: f64, tolerance: Tolerance, same_dtype: bool) {
        if a == b || (a.is_nan() && b.is_nan()) {
            // Zeros of both signs, NaNs, integers that f64 can't tell apart, or the same number in another dtype.
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
