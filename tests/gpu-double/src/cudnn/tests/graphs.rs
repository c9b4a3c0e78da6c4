//! The graphs of attention and of its gradients.

use super::*;

/// A mask of scores.
#[derive(Clone, Copy, Debug)]
pub(super) enum Band {
    All,
    /// Keys until the row plus a shift.
    Causal(i32),
    /// The same, and fewer than `left` keys before the row.
    Window(i32, f32),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) width: usize,
    pub(super) band: Band,
    pub(super) scale: f32,
}

pub(super) struct Named {
    pub(super) uid: i64,
    pub(super) made: Made,
    pub(super) dims: [usize; 4],
}

/// A graph with its numbers by value.
pub(super) struct Builder {
    next: i64,
    of: i64,
    numbers: Vec<(i64, Box<[u8; 4]>)>,
}

/// Uids of the tensors in memory, by name.
pub(super) type Uids = std::collections::BTreeMap<&'static str, i64>;

pub(super) fn contiguous([a, b, c, d]: [usize; 4]) -> ([usize; 4], [usize; 4]) {
    ([a, b, c, d], [b * c * d, c * d, d, 1])
}

/// Rows of all heads, one position after the other.
fn rows([batch, heads, rows, width]: [usize; 4]) -> ([usize; 4], [usize; 4]) {
    ([batch, heads, rows, width], [rows * heads * width, width, heads * width, 1])
}

fn swapped((mut dims, mut strides): ([usize; 4], [usize; 4])) -> ([usize; 4], [usize; 4]) {
    dims.swap(2, 3);
    strides.swap(2, 3);
    (dims, strides)
}

impl Builder {
    pub(super) fn new() -> Self {
        Self::of(BF16)
    }

    /// Returns a builder of graphs whose tensors in memory are of this type.
    pub(super) fn of(of: i64) -> Self {
        Self { next: 1, of, numbers: Vec::new() }
    }

    pub(super) fn tensor(
        &mut self,
        of: i64,
        (dims, strides): ([usize; 4], [usize; 4]),
        flag: Option<&Attribute>,
    ) -> Named {
        let uid = self.next;
        self.next += 1;
        let list = |sizes: [usize; 4]| sizes.map(|size| size as i64);
        let made = Made::new(Kind::Tensor).with(&at::TENSOR_DATA_TYPE, &[of]);
        let made = made.with(&at::TENSOR_DIMENSIONS, &list(dims)).with(&at::TENSOR_STRIDES, &list(strides));
        let made = made.with(&at::TENSOR_UNIQUE_ID, &[uid]).with(&at::TENSOR_BYTE_ALIGNMENT, &[16]);
        let made = flag.into_iter().fold(made, |made, flag| made.with(flag, &[1]));
        Named { uid, made: made.done(), dims }
    }

    fn real(&mut self, shape: ([usize; 4], [usize; 4])) -> Named {
        self.tensor(self.of, shape, None)
    }

    fn scratch(&mut self, of: i64, shape: ([usize; 4], [usize; 4])) -> Named {
        self.tensor(of, shape, Some(&at::TENSOR_IS_VIRTUAL))
    }

    fn number(&mut self, of: i64, bytes: [u8; 4]) -> Named {
        let named = self.tensor(of, ([1; 4], [1; 4]), Some(&at::TENSOR_IS_BY_VALUE));
        self.numbers.push((named.uid, Box::new(bytes)));
        named
    }

    pub(super) fn float(&mut self, value: f32) -> Named {
        self.number(F32, value.to_ne_bytes())
    }

    /// Returns the addresses of the numbers.
    pub(super) fn places(&self) -> Vec<(i64, u64)> {
        self.numbers.iter().map(|(uid, number)| (*uid, number.as_ptr() as u64)).collect()
    }

    pub(super) fn pointwise(mode: i64, x: &Named, b: Option<&Named>, y: &Named) -> Made {
        let described = Made::new(Kind::Pointwise).with(&at::POINTWISE_MODE, &[mode]);
        let described = described.with(&at::POINTWISE_MATH_PREC, &[F32]).done();
        let made = Made::new(Kind::PointwiseOperation).of(&at::OPERATION_POINTWISE_PW_DESCRIPTOR, &[&described]);
        let made = made.of(&at::OPERATION_POINTWISE_XDESC, &[&x.made]);
        let made = b.into_iter().fold(made, |made, b| made.of(&at::OPERATION_POINTWISE_BDESC, &[&b.made]));
        made.of(&at::OPERATION_POINTWISE_YDESC, &[&y.made]).done()
    }

    pub(super) fn matmul(a: &Named, b: &Named, c: &Named) -> Made {
        let described = Made::new(Kind::Matmul).with(&at::MATMUL_COMP_TYPE, &[F32]).done();
        let made = Made::new(Kind::MatmulOperation).of(&at::OPERATION_MATMUL_DESC, &[&described]);
        let made = made.of(&at::OPERATION_MATMUL_ADESC, &[&a.made]).of(&at::OPERATION_MATMUL_BDESC, &[&b.made]);
        made.of(&at::OPERATION_MATMUL_CDESC, &[&c.made]).done()
    }

    pub(super) fn reduction(x: &Named, y: &Named) -> Made {
        let described = Made::new(Kind::Reduction).with(&at::REDUCTION_OPERATOR, &[0]);
        let described = described.with(&at::REDUCTION_COMP_TYPE, &[F32]).done();
        let made = Made::new(Kind::ReductionOperation).of(&at::OPERATION_REDUCTION_DESC, &[&described]);
        let made = made.of(&at::OPERATION_REDUCTION_XDESC, &[&x.made]);
        made.of(&at::OPERATION_REDUCTION_YDESC, &[&y.made]).done()
    }

    pub(super) fn reshape(x: &Named, y: &Named) -> Made {
        let made = Made::new(Kind::Reshape).of(&at::OPERATION_RESHAPE_XDESC, &[&x.made]);
        made.of(&at::OPERATION_RESHAPE_YDESC, &[&y.made]).done()
    }

    /// Adds masks. Returns the masked scores.
    fn masks(&mut self, band: Band, mut scores: Named, operations: &mut Vec<Made>) -> Named {
        let (shift, left) = match band {
            Band::All => return scores,
            Band::Causal(shift) => (shift, None),
            Band::Window(shift, left) => (shift, Some(left)),
        };
        for left in [None, left].into_iter().take(1 + usize::from(left.is_some())) {
            let (masked, fill) = (self.scratch(F32, contiguous(scores.dims)), self.float(f32::MIN));
            let made = Made::new(Kind::Mask).of(&at::OPERATION_DIAGONAL_BAND_MASK_XDESC, &[&scores.made]);
            let made = made.of(&at::OPERATION_DIAGONAL_BAND_MASK_BDESC, &[&fill.made]);
            let (made, mode) = match left {
                Some(left) => {
                    let left = self.float(left);
                    (made.of(&at::OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC, &[&left.made]), 302)
                }
                None if shift == 0 => (made, 303),
                None => {
                    let shift = self.number(I32, shift.to_ne_bytes());
                    (made.of(&at::OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC, &[&shift.made]), 303)
                }
            };
            let made = made.with(&at::OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE, &[mode]);
            operations.push(made.of(&at::OPERATION_DIAGONAL_BAND_MASK_YDESC, &[&masked.made]).done());
            scores = masked;
        }
        scores
    }

    pub(super) fn graph(operations: &[Made]) -> Made {
        Made::new(Kind::Graph).of(&at::OPERATIONGRAPH_OPS, &operations.iter().collect::<Vec<_>>())
    }

    /// Returns the graph of attention. All other descriptors are destroyed.
    pub(super) fn forward(&mut self, case: Case) -> (Made, Uids) {
        let Case { batch, heads, key_heads, keys, width, .. } = case;
        let [q, o] = [0; 2].map(|_| self.real(rows([batch, heads, case.rows, width])));
        let [k, v] = [0; 2].map(|_| self.real(rows([batch, key_heads, keys, width])));
        let stats = self.tensor(F32, contiguous([batch, heads, case.rows, 1]), None);
        let square = contiguous([batch, heads, case.rows, keys]);
        let [x, y, scores] = [0; 3].map(|_| self.scratch(F32, square));
        let (input, mut masks) = (scores.uid, Vec::new());
        let output = self.masks(case.band, scores, &mut masks).uid;
        let softmax = Made::new(Kind::Softmax).of(&at::OPERATION_SOFTMAX_XDESC, &[&x.made]);
        let softmax = softmax.of(&at::OPERATION_SOFTMAX_YDESC, &[&y.made]);
        let softmax = softmax.of(&at::OPERATION_SOFTMAX_STATS_DESC, &[&stats.made]).done();
        let scale = self.float(case.scale);
        let made = Made::new(Kind::Attention).of(&at::OPERATION_SDPA_FWD_QDESC, &[&q.made]);
        let made = made.of(&at::OPERATION_SDPA_FWD_KDESC, &[&k.made]).of(&at::OPERATION_SDPA_FWD_VDESC, &[&v.made]);
        let made = made.of(&at::OPERATION_SDPA_FWD_ODESC, &[&o.made]);
        let made = made.of(&at::OPERATION_SDPA_FWD_SCALEDESC, &[&scale.made]);
        let mut made = made.of(&at::OPERATION_SDPA_FWD_SOFTMAX_DESC, &[&softmax]);
        if !masks.is_empty() {
            made = made.of(&at::OPERATION_SDPA_FWD_SUBGRAPH, &[&Self::graph(&masks).done()]);
            made = made.with(&at::OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, &[input]);
            made = made.with(&at::OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, &[output]);
        }
        let uids = [("q", q.uid), ("k", k.uid), ("v", v.uid), ("o", o.uid), ("stats", stats.uid)];
        (Self::graph(&[made.done()]).done(), uids.into())
    }

    /// Returns the graph of the gradients. All other descriptors are destroyed.
    pub(super) fn backward(&mut self, case: Case) -> (Made, Uids) {
        let [mul, sub, exp, identity] = [1, 9, 13, 21];
        let Case { batch, heads, key_heads, keys, width, .. } = case;
        let wide = [batch, heads, case.rows, width];
        let [q, o, d_o, dq] = [0; 4].map(|_| self.real(rows(wide)));
        let key_rows = rows([batch, key_heads, keys, width]);
        let [k, v] = [0; 2].map(|_| self.real(swapped(key_rows)));
        let [dk, dv] = [0; 2].map(|_| self.real(key_rows));
        let column = contiguous([batch, heads, case.rows, 1]);
        let [stats, sums] = [0; 2].map(|_| self.tensor(F32, column, None));
        let accumulated = self.tensor(F32, contiguous(wide), None);
        let (one, scale) = (self.float(1.0), self.float(case.scale));
        let square = contiguous([batch, heads, case.rows, keys]);
        let mut all = Vec::new();

        let products = self.scratch(F32, contiguous(wide));
        all.push(Self::pointwise(mul, &d_o, Some(&o), &products));
        let total = self.scratch(F32, column);
        all.push(Self::reduction(&products, &total));
        all.push(Self::pointwise(mul, &total, Some(&one), &sums));

        let [scores, scaled, shifted] = [0; 3].map(|_| self.scratch(F32, square));
        all.push(Self::matmul(&q, &k, &scores));
        all.push(Self::pointwise(mul, &scores, Some(&scale), &scaled));
        all.push(Self::pointwise(sub, &scaled, Some(&stats), &shifted));
        let shifted = self.masks(case.band, shifted, &mut all);
        let parts = self.scratch(F32, square);
        all.push(Self::pointwise(exp, &shifted, None, &parts));
        let turned = self.scratch(self.of, swapped(square));
        all.push(Self::reshape(&parts, &turned));
        self.per_key_head(&turned, &d_o, &dv, &mut all);

        let [dp, less, times, ds] = [0; 4].map(|_| self.scratch(F32, square));
        all.push(Self::matmul(&d_o, &v, &dp));
        all.push(Self::pointwise(sub, &dp, Some(&sums), &less));
        all.push(Self::pointwise(mul, &less, Some(&parts), &times));
        all.push(Self::pointwise(mul, &times, Some(&scale), &ds));
        let turned = self.scratch(self.of, swapped(square));
        all.push(Self::reshape(&ds, &turned));
        self.per_key_head(&turned, &q, &dk, &mut all);

        let straight = self.scratch(self.of, key_rows);
        all.push(Self::reshape(&k, &straight));
        all.push(Self::matmul(&ds, &straight, &accumulated));
        all.push(Self::pointwise(identity, &accumulated, None, &dq));
        let named = [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("do", &d_o), ("dq", &dq), ("dk", &dk), ("dv", &dv)];
        let floats = [("stats", &stats), ("sums", &sums), ("accumulated", &accumulated)];
        let uids = named.into_iter().chain(floats).map(|(name, of)| (name, of.uid)).collect();
        (Self::graph(&all).done(), uids)
    }

    /// Adds a product for each head of the queries, and its sum over the heads that share keys.
    fn per_key_head(&mut self, a: &Named, b: &Named, to: &Named, all: &mut Vec<Made>) {
        if b.dims[1] == to.dims[1] {
            all.push(Self::matmul(a, b, to));
            return;
        }
        let full = self.scratch(self.of, contiguous([a.dims[0], a.dims[1], a.dims[2], b.dims[3]]));
        all.push(Self::matmul(a, b, &full));
        all.push(Self::reduction(&full, to));
    }
}
