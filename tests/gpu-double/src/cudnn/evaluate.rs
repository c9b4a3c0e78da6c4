//! The values of a graph: one operation after the other in f64, from the operands' tensors to the result's. Only tensors
//! in memory are rounded to their types.
//!
//! # Reshape
//! An element of the result is the element of the operand at the same place in memory: with equal sums of index times
//! stride. So a result whose last two dimensions and strides are the operand's, swapped, is its transpose. Other strides
//! give other elements, and NaN where the operand has a gap.

use std::{collections::BTreeMap, rc::Rc};

use crate::element::{Element, Matrix, Product, Strides, multiply};

use super::graph::{Attention, Band, Graph, Mode, Operation, nest};
use super::tensor::{DataType, Dims, Tensor, indices, offset, row_major};

/// A row-major array.
#[derive(Debug)]
struct Array {
    dims: Dims,
    values: Vec<f64>,
}

impl Array {
    fn new(dims: Dims, value: impl FnMut(Dims) -> f64) -> Self {
        Self { dims, values: indices(dims).map(value).collect() }
    }

    /// Returns an element. Dimensions of one element repeat.
    fn at(&self, mut index: Dims) -> f64 {
        for (index, dim) in index.iter_mut().zip(self.dims) {
            *index = if dim == 1 { 0 } else { *index };
        }
        self.values[offset(index, row_major(self.dims))]
    }

    /// Returns the rows of the last dimension.
    fn rows(&mut self) -> impl Iterator<Item = &mut [f64]> {
        self.values.chunks_mut(self.dims[3])
    }

    /// Returns the address of a matrix, and its strides.
    fn matrix(&self, batch: usize, head: usize, transposed: bool) -> Matrix {
        let [_, heads, rows, cols] = self.dims;
        let at = self.values[(batch * heads + head) * rows * cols..].as_ptr() as u64;
        let strides = match cols as isize {
            cols if transposed => Strides { rows: 1, cols },
            cols => Strides { rows: cols, cols: 1 },
        };
        Matrix { at, element: Element::F64, strides }
    }
}

/// Multiplies matrices for each batch and head. The heads of `b` are shared by adjacent heads of `a`.
fn matmul(a: &Array, b: &Array, b_transposed: bool) -> Array {
    let [batches, heads, m, k] = a.dims;
    let n = b.dims[if b_transposed { 2 } else { 3 }];
    let c = Array { dims: [batches, heads, m, n], values: vec![0.0; batches * heads * m * n] };
    let product = Product { m, n, k, alpha: 1.0, beta: 0.0 };
    for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        let right = b.matrix(batch, head / (heads / b.dims[1]), b_transposed);
        // SAFETY: the matrices have these sizes, and only this thread has the arrays.
        unsafe { multiply(product, a.matrix(batch, head, false), right, c.matrix(batch, head, false)) };
    }
    c
}

/// Memory of a call.
pub(super) struct Memory {
    /// Addresses of tensors in memory, by uid.
    pub(super) places: BTreeMap<i64, u64>,
    /// Numbers by value, by uid.
    pub(super) numbers: BTreeMap<i64, f64>,
}

/// Evaluates a graph.
///
/// The places hold tensors of the graph's shapes, and no other thread uses them.
pub(super) unsafe fn evaluate(graph: &Graph, memory: &Memory) {
    // SAFETY: ensured by the caller.
    unsafe { Evaluation { memory, kept: BTreeMap::new() }.run(graph, None) };
}

struct Evaluation<'a> {
    memory: &'a Memory,
    /// Virtual tensors that are still needed.
    kept: BTreeMap<i64, Rc<Array>>,
}

impl Evaluation<'_> {
    /// See [`evaluate`]. Keeps the virtual tensor `wanted`.
    unsafe fn run(&mut self, graph: &Graph, wanted: Option<i64>) {
        for (place, operation) in graph.operations.iter().enumerate() {
            // SAFETY: ensured by the caller.
            unsafe { self.step(operation) };
            let rest = &graph.operations[place + 1..];
            let is_read = |uid| rest.iter().any(|one| one.inputs().iter().any(|read| read.uid == uid));
            self.kept.retain(|uid, _| wanted == Some(*uid) || is_read(*uid));
        }
    }

    /// See [`evaluate`].
    unsafe fn read(&self, tensor: &Tensor) -> Rc<Array> {
        if let Some(array) = self.kept.get(&tensor.uid) {
            return array.clone();
        }
        let values = match self.memory.places.get(&tensor.uid) {
            Some(at) => {
                let bytes = tensor.of.bytes();
                // SAFETY: ensured by the caller.
                tensor
                    .offsets()
                    .map(|offset| unsafe { tensor.of.read((*at as *const u8).add(offset * bytes)) })
                    .collect()
            }
            None => vec![self.number(tensor)],
        };
        Rc::new(Array { dims: tensor.dims, values })
    }

    /// See [`evaluate`].
    unsafe fn write(&mut self, tensor: &Tensor, array: Array) {
        let (Some(at), DataType::Float(element)) = (self.memory.places.get(&tensor.uid), tensor.of) else {
            self.kept.insert(tensor.uid, Rc::new(array));
            return;
        };
        for (offset, value) in tensor.offsets().zip(array.values) {
            // SAFETY: ensured by the caller.
            unsafe { element.write((*at as *mut u8).add(offset * element.bytes()), value) };
        }
    }

    fn number(&self, tensor: &Tensor) -> f64 {
        self.memory.numbers[&tensor.uid]
    }

    /// See [`evaluate`].
    unsafe fn step(&mut self, operation: &Operation) {
        // SAFETY: ensured by the caller.
        let read = |tensor: &Tensor| unsafe { self.read(tensor) };
        let (to, array) = match operation {
            Operation::Pointwise { mode, x, b, y } => {
                let (x, b) = (read(x), b.as_ref().map(|b| read(b)));
                let with_b = |index| b.as_ref().map_or(f64::NAN, |b| b.at(index));
                let value = |index| match mode {
                    Mode::Multiply => x.at(index) * with_b(index),
                    Mode::Subtract => x.at(index) - with_b(index),
                    Mode::Exp => x.at(index).exp(),
                    Mode::Identity => x.at(index),
                };
                (y, Array::new(y.dims, value))
            }
            Operation::Matmul { a, b, c } => (c, matmul(&read(a), &read(b), false)),
            Operation::Reduction { x, y } => (y, reduced(&read(x), y.dims)),
            Operation::Reshape { x, y } => (y, reshaped(x, &read(x), y)),
            Operation::Mask { x, fill, band, y } => {
                let (x, fill) = (read(x), self.number(fill));
                let bound = match band {
                    Band::Right(shift) => shift.as_ref().map_or(0.0, |shift| self.number(shift)),
                    Band::Left(left) => self.number(left),
                };
                let value = |index: Dims| {
                    let [row, col] = [index[2] as f64, index[3] as f64];
                    let is_kept = match band {
                        Band::Right(_) => row + bound >= col,
                        Band::Left(_) => col + bound > row,
                    };
                    if is_kept { x.at(index) } else { fill }
                };
                (y, Array::new(y.dims, value))
            }
            // SAFETY: ensured by the caller.
            Operation::Attention(attention) => return unsafe { self.attention(attention) },
        };
        // SAFETY: ensured by the caller.
        unsafe { self.write(to, array) };
    }

    /// See [`evaluate`].
    ///
    /// A row whose scores are all masked has zeros, and stats of minus infinity.
    unsafe fn attention(&mut self, attention: &Attention) {
        let Attention { q, k, v, o, scale, softmax, modifier } = attention;
        // SAFETY: ensured by the caller.
        let [q, k, v] = [q, k, v].map(|one| unsafe { self.read(one) });
        let scale = scale.as_ref().map_or(1.0, |scale| self.number(scale));
        let mut scores = matmul(&q, &k, true);
        scores.values.iter_mut().for_each(|score| *score *= scale);
        if let Some(modifier) = modifier {
            let kept = BTreeMap::from([(modifier.input, Rc::new(scores))]);
            let mut within = Evaluation { memory: self.memory, kept };
            // SAFETY: ensured by the caller.
            unsafe { within.run(&modifier.graph, Some(modifier.output)) };
            let output = within.kept.remove(&modifier.output).and_then(Rc::into_inner);
            scores = output.expect("the graph makes it, and nobody else reads it");
        }
        let [batches, heads, rows, _] = scores.dims;
        let mut stats = Array { dims: [batches, heads, rows, 1], values: Vec::new() };
        for row in scores.rows() {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // Masks fill with the least f32 or with minus infinity.
            let has_keys = most > f64::from(f32::MIN) || row.iter().any(|score| score.is_nan());
            row.iter_mut().for_each(|score| *score = if has_keys { (*score - most).exp() } else { 0.0 });
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|part| *part /= if has_keys { sum } else { 1.0 });
            stats.values.push(if has_keys { most + sum.ln() } else { f64::NEG_INFINITY });
        }
        // SAFETY: ensured by the caller.
        unsafe {
            self.write(o, matmul(&scores, &v, false));
            if let Some(to) = &softmax.stats {
                self.write(to, stats);
            }
        }
    }
}

/// Returns the sums over the dimensions, or over groups of adjacent heads, that are fewer in `dims`.
fn reduced(x: &Array, dims: Dims) -> Array {
    let mut sums = Array { dims, values: vec![0.0; dims.iter().product()] };
    for (index, value) in indices(x.dims).zip(&x.values) {
        let to = std::array::from_fn(|dim| index[dim] / (x.dims[dim] / dims[dim]));
        sums.values[offset(to, row_major(dims))] += value;
    }
    sums
}

/// See the module's docs.
fn reshaped(x: &Tensor, values: &Array, y: &Tensor) -> Array {
    let order = nest(x);
    Array::new(y.dims, |index| {
        let (mut left, mut from) = (offset(index, y.strides), [0; 4]);
        for dim in &order {
            (from[*dim], left) = (left / x.strides[*dim], left % x.strides[*dim]);
        }
        let is_element = left == 0 && from.iter().zip(x.dims).all(|(from, dim)| *from < dim);
        if is_element { values.at(from) } else { f64::NAN }
    })
}
