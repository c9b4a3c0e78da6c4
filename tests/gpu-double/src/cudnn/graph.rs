//! Graphs: operations between tensors, which uids name.

use std::{collections::BTreeMap, sync::Arc};

use super::refusal::{Result, bad};
use super::tensor::{DataType, Tensor};

/// A `cudnnPointwiseMode_t` that is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Multiply,
    Subtract,
    Exp,
    Identity,
}

/// The elements that a mask keeps.
#[derive(Debug)]
pub(super) enum Band {
    /// `row + shift >= column`, where no shift is 0.
    Right(Option<Arc<Tensor>>),
    /// `column + left > row`.
    Left(Arc<Tensor>),
}

/// The softmax within attention. `x` and `y` are virtual.
#[derive(Debug)]
pub(super) struct Softmax {
    pub(super) x: Arc<Tensor>,
    pub(super) y: Arc<Tensor>,
    /// Logarithm of the sums of exponentials.
    pub(super) stats: Option<Arc<Tensor>>,
}

/// A graph that changes the scores of attention.
#[derive(Debug)]
pub(super) struct Modifier {
    pub(super) graph: Arc<Graph>,
    /// Uids of the scores.
    pub(super) input: i64,
    pub(super) output: i64,
}

#[derive(Debug)]
pub(super) struct Attention {
    pub(super) q: Arc<Tensor>,
    pub(super) k: Arc<Tensor>,
    pub(super) v: Arc<Tensor>,
    pub(super) o: Arc<Tensor>,
    /// A scale of 1 if missing.
    pub(super) scale: Option<Arc<Tensor>>,
    pub(super) softmax: Arc<Softmax>,
    pub(super) modifier: Option<Modifier>,
}

#[derive(Debug)]
pub(super) enum Operation {
    Pointwise { mode: Mode, x: Arc<Tensor>, b: Option<Arc<Tensor>>, y: Arc<Tensor> },
    Matmul { a: Arc<Tensor>, b: Arc<Tensor>, c: Arc<Tensor> },
    Reduction { x: Arc<Tensor>, y: Arc<Tensor> },
    Reshape { x: Arc<Tensor>, y: Arc<Tensor> },
    Mask { x: Arc<Tensor>, fill: Arc<Tensor>, band: Band, y: Arc<Tensor> },
    Attention(Attention),
}

impl Operation {
    /// Returns itself if the shapes fit.
    pub(super) fn checked(self) -> Result<Self> {
        let fits = match &self {
            Self::Pointwise { mode, x, b, y } => {
                let is_binary = matches!(mode, Mode::Multiply | Mode::Subtract);
                let broadcasts = |b: &Tensor| b.dims.iter().zip(y.dims).all(|(b, y)| *b == 1 || *b == y);
                x.dims == y.dims && b.is_some() == is_binary && b.as_ref().is_none_or(|b| broadcasts(b))
            }
            Self::Matmul { a, b, c } => {
                let [[batch, heads, m, k], [b_batch, b_heads, b_k, n]] = [a.dims, b.dims];
                batch == b_batch && k == b_k && heads.is_multiple_of(b_heads) && c.dims == [batch, heads, m, n]
            }
            Self::Reduction { x, y } => (0..4).all(|dim| {
                let [x, y] = [x.dims[dim], y.dims[dim]];
                y == 1 || y == x || (dim == 1 && x.is_multiple_of(y))
            }),
            Self::Reshape { x, y } => {
                x.dims.iter().product::<usize>() == y.dims.iter().product::<usize>() && is_nested(x) && is_nested(y)
            }
            Self::Mask { x, fill, band, y } => {
                let bounds = match band {
                    Band::Right(shift) => shift.as_ref().is_none_or(|by| by.is_by_value && by.of == DataType::I32),
                    Band::Left(left) => left.is_by_value && left.of == DataType::F32,
                };
                x.dims == y.dims && fill.is_by_value && fill.of == DataType::F32 && bounds
            }
            Self::Attention(attention) => attention.fits(),
        };
        if self.outputs().iter().any(|one| one.is_by_value) {
            return Err(bad("a result is by value"));
        }
        if !fits {
            return Err(bad(format!("shapes or types do not fit: {self:?}")));
        }
        Ok(self)
    }

    /// Returns the tensors that it reads. Modifiers of scores read further ones.
    pub(super) fn inputs(&self) -> Vec<&Arc<Tensor>> {
        match self {
            Self::Pointwise { x, b, .. } => [x].into_iter().chain(b).collect(),
            Self::Matmul { a, b, .. } => vec![a, b],
            Self::Reduction { x, .. } | Self::Reshape { x, .. } => vec![x],
            Self::Mask { x, fill, band, .. } => {
                let bound = match band {
                    Band::Right(shift) => shift.as_ref(),
                    Band::Left(left) => Some(left),
                };
                [x, fill].into_iter().chain(bound).collect()
            }
            Self::Attention(Attention { q, k, v, scale, .. }) => [q, k, v].into_iter().chain(scale).collect(),
        }
    }

    pub(super) fn outputs(&self) -> Vec<&Arc<Tensor>> {
        match self {
            Self::Pointwise { y, .. } | Self::Reduction { y, .. } | Self::Reshape { y, .. } | Self::Mask { y, .. } => {
                vec![y]
            }
            Self::Matmul { c, .. } => vec![c],
            Self::Attention(Attention { o, softmax, .. }) => [o].into_iter().chain(&softmax.stats).collect(),
        }
    }

    /// Returns the floating-point operations of its products.
    pub(super) fn flops(&self) -> u64 {
        let products = |[batch, heads, rows, cols]: [usize; 4], len: usize| {
            2 * [batch, heads, rows, cols, len].iter().map(|size| *size as u64).product::<u64>()
        };
        match self {
            Self::Matmul { a, c, .. } => products(c.dims, a.dims[3]),
            Self::Attention(Attention { q, k, v, softmax, .. }) => {
                products(softmax.x.dims, q.dims[3]) + products([q.dims[0], q.dims[1], q.dims[2], v.dims[3]], k.dims[2])
            }
            _ => 0,
        }
    }
}

impl Attention {
    fn fits(&self) -> bool {
        let Self { q, k, v, o, scale, softmax, modifier } = self;
        let [batch, heads, rows, width] = q.dims;
        let scores = [batch, heads, rows, k.dims[2]];
        let grouped = |of: &Tensor, width| {
            of.dims[0] == batch && heads.is_multiple_of(of.dims[1]) && of.dims[2..] == [k.dims[2], width]
        };
        let modifies = |by: &Modifier| {
            let tensor = |uid: i64| by.graph.tensors.get(&uid).is_some_and(|one| one.dims == scores && one.is_virtual);
            by.graph.open == [by.input] && tensor(by.input) && tensor(by.output) && by.graph.makes(by.output)
        };
        grouped(k, width)
            && grouped(v, v.dims[3])
            && o.dims == [batch, heads, rows, v.dims[3]]
            && scale.as_ref().is_none_or(|scale| scale.is_by_value && scale.of == DataType::F32)
            && [&softmax.x, &softmax.y].iter().all(|one| one.is_virtual && one.dims == scores)
            && softmax.stats.as_ref().is_none_or(|stats| stats.dims == [batch, heads, rows, 1])
            && modifier.as_ref().is_none_or(modifies)
    }
}

/// Returns a tensor's dimensions of more than one element, those of large strides first.
pub(super) fn nest(tensor: &Tensor) -> Vec<usize> {
    let mut order: Vec<usize> = (0..4).filter(|dim| tensor.dims[*dim] > 1).collect();
    order.sort_by_key(|dim| std::cmp::Reverse(tensor.strides[*dim]));
    order
}

/// Returns whether each dimension's elements lie within a step of the next larger dimension, so that an element's place
/// in memory tells its index.
fn is_nested(tensor: &Tensor) -> bool {
    let order = nest(tensor);
    order.windows(2).all(|pair| tensor.strides[pair[0]] >= tensor.strides[pair[1]] * tensor.dims[pair[1]])
}

/// A finalized graph.
#[derive(Debug)]
pub(super) struct Graph {
    /// In an order in which each tensor is made before it is read.
    pub(super) operations: Vec<Arc<Operation>>,
    /// By uid, including those of modifiers.
    pub(super) tensors: BTreeMap<i64, Arc<Tensor>>,
    /// Virtual tensors that no operation makes.
    pub(super) open: Vec<i64>,
}

impl Graph {
    pub(super) fn new(operations: Vec<Arc<Operation>>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        let mut add = |one: &Arc<Tensor>| match tensors.insert(one.uid, one.clone()) {
            Some(other) if other != *one => {
                Err(bad(format!("two tensors have the uid {}: {other:?}, {one:?}", one.uid)))
            }
            _ => Ok(()),
        };
        for operation in &operations {
            operation.inputs().into_iter().chain(operation.outputs()).try_for_each(&mut add)?;
            if let Operation::Attention(Attention { softmax, modifier, .. }) = &**operation {
                [&softmax.x, &softmax.y].into_iter().try_for_each(&mut add)?;
                modifier.iter().flat_map(|by| by.graph.tensors.values()).try_for_each(&mut add)?;
            }
        }
        let mut made: Vec<i64> = operations.iter().flat_map(|one| one.outputs()).map(|one| one.uid).collect();
        made.sort_unstable();
        if let Some(pair) = made.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(bad(format!("two operations make tensor {}", pair[0])));
        }
        let mut open: Vec<i64> =
            operations.iter().flat_map(|one| one.inputs()).filter(|one| one.is_virtual).map(|one| one.uid).collect();
        open.retain(|uid| made.binary_search(uid).is_err());
        open.sort_unstable();
        open.dedup();
        Ok(Self { operations: in_order(operations)?, tensors, open })
    }

    pub(super) fn makes(&self, uid: i64) -> bool {
        self.operations.iter().any(|one| one.outputs().iter().any(|made| made.uid == uid))
    }

    pub(super) fn reads(&self, uid: i64) -> bool {
        self.operations.iter().any(|one| one.inputs().iter().any(|read| read.uid == uid))
    }

    /// Returns whether it computes attention by one operation.
    pub(super) fn is_forward(&self) -> bool {
        self.operations.iter().any(|one| matches!(**one, Operation::Attention(_)))
    }
}

/// Sorts operations so that each tensor is made before it is read.
fn in_order(mut operations: Vec<Arc<Operation>>) -> Result<Vec<Arc<Operation>>> {
    let mut order = Vec::new();
    while !operations.is_empty() {
        let is_pending = |uid| operations.iter().any(|one| one.outputs().iter().any(|made| made.uid == uid));
        let next = operations.iter().position(|one| !one.inputs().iter().any(|read| is_pending(read.uid)));
        let Some(next) = next else { return Err(bad("operations wait for each other's results")) };
        order.push(operations.remove(next));
    }
    Ok(order)
}
