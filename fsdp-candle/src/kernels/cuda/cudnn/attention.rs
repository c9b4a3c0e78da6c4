//! The graphs of attention.
//!
//! Forward is one operation (`SDPA_FWD`). Backward is a graph of products, from which cuDNN makes one kernel:
//!
//! ```text
//! row_sums = sum(d_out * out)            p   = exp(masks(scale q k^T) - log_sums)
//! d_v = sum over heads of p^T d_out      d_s = scale p (d_out v^T - row_sums)
//! d_k = sum over heads of d_s^T q        d_q = d_s k
//! ```

use fsdp_core::DType;

use super::super::flash_attention::FlashAttention;
use super::graph::{Engine, Graph, Masks, Place, Plan, Target, Tensor, contiguous};
use super::library::{Library, Refused};
use super::names::{DataType, Knob, Pointwise};

/// Numbers of tensors.
pub(super) const Q: i64 = 1;
pub(super) const K: i64 = 2;
pub(super) const V: i64 = 3;
pub(super) const OUT: i64 = 4;
pub(super) const LOG_SUMS: i64 = 5;
pub(super) const D_OUT: i64 = 6;
pub(super) const D_Q: i64 = 7;
pub(super) const D_K: i64 = 8;
pub(super) const D_V: i64 = 9;
/// Gradients of queries in F32, and sums of rows: memory that backward needs while it runs.
pub(super) const D_Q_SUMS: i64 = 10;
pub(super) const ROW_SUMS: i64 = 11;
/// Values.
pub(super) const SCALE: i64 = 12;
pub(super) const FILL: i64 = 13;
pub(super) const SHIFT: i64 = 14;
pub(super) const LEFT: i64 = 15;
pub(super) const ONE: i64 = 16;

/// Heads have a multiple of this many elements, and at most so many.
const HEAD_STEP: usize = 8;
const LARGEST_HEAD: usize = 128;

const FLOAT: DataType = DataType::Float;

/// The properties of an attention for which cuDNN makes a plan.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Elements of a head.
    pub(super) dim: usize,
    /// Elements from one row of the batch to the next, and from one position to the next, in q, k and v.
    pub(super) strides: [[usize; 2]; 3],
    pub(super) is_causal: bool,
    /// Whether the first query is not the first key.
    pub(super) is_shifted: bool,
    pub(super) has_window: bool,
}

impl Shape {
    /// Returns the shape of an attention, or `None` if cuDNN does not compute such attentions.
    pub(super) fn of(flash: &FlashAttention<'_>, dtype: DType) -> Option<Self> {
        let FlashAttention { batch, visible, heads, kv_heads, dim, softcap, places, .. } = *flash;
        let has_gap = visible.gap > 0 && visible.gap_at < visible.queries;
        let is_covered = matches!(dtype, DType::BF16 | DType::F16)
            && dim <= LARGEST_HEAD
            && dim.is_multiple_of(HEAD_STEP)
            && softcap.is_none()
            && visible.bounds.is_none()
            && !has_gap
            && (visible.is_causal || visible.window.is_none());
        let strides = places.map(|heads| [heads.batch_stride, heads.row_stride]);
        is_covered.then_some(Shape {
            dtype,
            batch,
            queries: visible.queries,
            keys: visible.keys,
            heads,
            kv_heads,
            dim,
            strides,
            is_causal: visible.is_causal,
            is_shifted: visible.is_causal && visible.first > 0,
            has_window: visible.window.is_some(),
        })
    }

    /// Returns the elements of queries.
    pub(super) fn queries_len(&self) -> usize {
        self.batch * self.heads * self.queries * self.dim
    }

    fn dtype(&self) -> DataType {
        if self.dtype == DType::F16 { DataType::Half } else { DataType::Bfloat16 }
    }

    /// Returns the dimensions of q, k or v: `[batch, heads, positions, dim]`.
    fn dims(&self, operand: usize) -> [i64; 4] {
        let (heads, positions) = if operand == 0 { (self.heads, self.queries) } else { (self.kv_heads, self.keys) };
        [self.batch, heads, positions, self.dim].map(|size| size as i64)
    }

    fn strides(&self, operand: usize) -> [i64; 4] {
        let [batch, row] = self.strides[operand];
        [batch, self.dim, row, 1].map(|stride| stride as i64)
    }

    /// Returns q, k or v, or its gradient.
    fn operand(&self, graph: &mut Graph, number: i64, operand: usize) -> Result<Tensor, Refused> {
        graph.tensor(Place::Memory(number), self.dtype(), self.dims(operand), self.strides(operand))
    }

    /// Returns k or v with the last two dimensions swapped.
    fn transposed(&self, graph: &mut Graph, number: i64, operand: usize) -> Result<Tensor, Refused> {
        let ([batch, heads, keys, dim], [of_batch, of_head, of_key, of_dim]) =
            (self.dims(operand), self.strides(operand));
        let (dims, strides) = ([batch, heads, dim, keys], [of_batch, of_head, of_dim, of_key]);
        graph.tensor(Place::Memory(number), self.dtype(), dims, strides)
    }

    /// Returns the output or its gradient: `[batch, queries, heads, dim]`.
    fn output(&self, graph: &mut Graph, number: i64) -> Result<Tensor, Refused> {
        let [row, head] = [self.heads * self.dim, self.dim].map(|size| size as i64);
        let strides = [self.queries as i64 * row, head, row, 1];
        graph.tensor(Place::Memory(number), self.dtype(), self.dims(0), strides)
    }

    /// Returns a float of each query of each head.
    fn of_queries(&self, graph: &mut Graph, number: i64) -> Result<Tensor, Refused> {
        let dims = self.query_dims();
        graph.tensor(Place::Memory(number), FLOAT, dims, contiguous(dims))
    }

    fn query_dims(&self) -> [i64; 4] {
        let [batch, heads, queries, _] = self.dims(0);
        [batch, heads, queries, 1]
    }

    fn score_dims(&self) -> [i64; 4] {
        let [batch, heads, queries, _] = self.dims(0);
        [batch, heads, queries, self.keys as i64]
    }

    /// Masks scores. Returns them, and the number of the result.
    fn masked(&self, graph: &mut Graph, mut scores: Tensor) -> Result<Tensor, Refused> {
        if !self.is_causal {
            return Ok(scores);
        }
        let fill = graph.value(FILL, FLOAT)?;
        let shift = match self.is_shifted {
            true => Some(graph.value(SHIFT, DataType::Int32)?),
            false => None,
        };
        let seen = graph.between(FLOAT, self.score_dims())?;
        graph.causal_mask(&scores, &fill, shift.as_ref(), &seen)?;
        scores = seen;
        if self.has_window {
            let left = graph.value(LEFT, FLOAT)?;
            let seen = graph.between(FLOAT, self.score_dims())?;
            graph.window_mask(&scores, &fill, &left, &seen)?;
            scores = seen;
        }
        Ok(scores)
    }

    /// Returns the plan of forward.
    pub(super) fn forward(&self, library: &'static Library, target: Target<'_>) -> Result<Plan, Refused> {
        let mut new = Graph::new(library);
        let graph = &mut new;
        let operands = [self.operand(graph, Q, 0)?, self.operand(graph, K, 1)?, self.operand(graph, V, 2)?];
        let [q, k, v] = &operands;
        let scale = graph.value(SCALE, FLOAT)?;
        let (out, log_sums) = (self.output(graph, OUT)?, self.of_queries(graph, LOG_SUMS)?);
        let scores = [graph.between(FLOAT, self.score_dims())?, graph.between(FLOAT, self.score_dims())?];
        let masks = if self.is_causal {
            let mut masks = graph.within();
            let from = masks.between(FLOAT, self.score_dims())?;
            let number = from.number();
            let to = self.masked(&mut masks, from)?.number();
            Some(Masks { graph: masks, from: number, to })
        } else {
            None
        };
        graph.attention([q, k, v], &scale, masks, [&scores[0], &scores[1]], &out, &log_sums)?;
        new.plan(target, None)
    }

    /// Returns the plan of backward on a device of this compute capability, which gives the same bits each time.
    pub(super) fn backward(
        &self,
        library: &'static Library,
        target: Target<'_>,
        capability: (i32, i32),
    ) -> Result<Plan, Refused> {
        let mut new = Graph::new(library);
        let graph = &mut new;
        let (q, out, d_out) = (self.operand(graph, Q, 0)?, self.output(graph, OUT)?, self.output(graph, D_OUT)?);
        let (k_t, v_t) = (self.transposed(graph, K, 1)?, self.transposed(graph, V, 2)?);
        let log_sums = self.of_queries(graph, LOG_SUMS)?;
        let (scale, one) = (graph.value(SCALE, FLOAT)?, graph.value(ONE, FLOAT)?);
        let scores = |graph: &mut Graph| graph.between(FLOAT, self.score_dims());

        let products = graph.between(FLOAT, self.dims(0))?;
        graph.pointwise(Pointwise::Mul, &d_out, Some(&out), &products)?;
        let sums = graph.between(FLOAT, self.query_dims())?;
        graph.sum(&products, &sums)?;
        // cuDNN recognizes attention by this product with one.
        let row_sums = self.of_queries(graph, ROW_SUMS)?;
        graph.pointwise(Pointwise::Mul, &sums, Some(&one), &row_sums)?;

        let (s, scaled, shifted) = (scores(graph)?, scores(graph)?, scores(graph)?);
        graph.product(&q, &k_t, &s)?;
        graph.pointwise(Pointwise::Mul, &s, Some(&scale), &scaled)?;
        graph.pointwise(Pointwise::Sub, &scaled, Some(&log_sums), &shifted)?;
        let (seen, p) = (self.masked(graph, shifted)?, scores(graph)?);
        graph.pointwise(Pointwise::Exp, &seen, None, &p)?;
        let p_t = self.swapped(graph, &p)?;
        self.of_keys(graph, D_V, 2, &p_t, &d_out)?;

        let (d_p, less, d_s, d_scaled) = (scores(graph)?, scores(graph)?, scores(graph)?, scores(graph)?);
        graph.product(&d_out, &v_t, &d_p)?;
        graph.pointwise(Pointwise::Sub, &d_p, Some(&row_sums), &less)?;
        graph.pointwise(Pointwise::Mul, &less, Some(&p), &d_s)?;
        graph.pointwise(Pointwise::Mul, &d_s, Some(&scale), &d_scaled)?;
        let d_s_t = self.swapped(graph, &d_scaled)?;
        self.of_keys(graph, D_K, 1, &d_s_t, &q)?;

        let k = graph.tensor(Place::Virtual, FLOAT, self.dims(1), self.strides(1))?;
        graph.reshape(&k_t, &k)?;
        let d_q = self.operand(graph, D_Q, 0)?;
        if adds_up_queries(capability) {
            let dims = self.dims(0);
            let d_q_sums = graph.tensor(Place::Memory(D_Q_SUMS), FLOAT, dims, contiguous(dims))?;
            graph.product(&d_scaled, &k, &d_q_sums)?;
            graph.pointwise(Pointwise::Identity, &d_q_sums, None, &d_q)?;
        } else {
            graph.product(&d_scaled, &k, &d_q)?;
        }
        new.plan(target, Some(deterministic(capability)))
    }

    /// Returns scores with the last two dimensions swapped, in the operands' dtype.
    fn swapped(&self, graph: &mut Graph, scores: &Tensor) -> Result<Tensor, Refused> {
        let ([batch, heads, queries, keys], [of_batch, of_head, of_query, of_key]) =
            (self.score_dims(), contiguous(self.score_dims()));
        let (dims, strides) = ([batch, heads, keys, queries], [of_batch, of_head, of_key, of_query]);
        let swapped = graph.tensor(Place::Virtual, self.dtype(), dims, strides)?;
        graph.reshape(scores, &swapped)?;
        Ok(swapped)
    }

    /// Writes the gradients of keys or values: products of each query head, added up over the heads of a key head.
    fn of_keys(
        &self,
        graph: &mut Graph,
        number: i64,
        operand: usize,
        scores: &Tensor,
        by: &Tensor,
    ) -> Result<(), Refused> {
        let to = self.operand(graph, number, operand)?;
        if self.heads == self.kv_heads {
            return graph.product(scores, by, &to);
        }
        let [batch, _, keys, dim] = self.dims(operand);
        let of_all = graph.between(self.dtype(), [batch, self.heads as i64, keys, dim])?;
        graph.product(scores, by, &of_all)?;
        graph.sum(&of_all, &to)
    }
}

/// Returns whether a kernel of backward adds up the gradients of queries in memory.
fn adds_up_queries((major, _): (i32, i32)) -> bool {
    major == 9
}

/// Returns the engine of backward that adds up the gradients of queries in a fixed order, as cuDNN's frontend names it.
fn deterministic((major, minor): (i32, i32)) -> Engine {
    let mut knobs = vec![(Knob::KernelCfg, 2), (Knob::StreamK, 0), (Knob::TileCgaM, 0)];
    let (number, tile_m, tile_n, stages) = match (major, minor) {
        (9, _) => (6, 2, 1, 4),
        (10, 0..=3) => (5, 3, 2, 2),
        _ => (17, 3, 2, 2),
    };
    knobs.extend([(Knob::TileM, tile_m), (Knob::TileN, tile_n), (Knob::Stages, stages)]);
    Engine { number, knobs }
}
