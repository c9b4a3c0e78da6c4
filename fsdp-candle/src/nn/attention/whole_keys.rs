//! The attention of one rank's queries to the keys and values of all ranks that share sequences.
//!
//! Keys and values are gathered in forward, and again in backward, so that a rank keeps only its own. Their gradients are
//! reduce-scattered. On a device, the key heads have two halves: while the device attends to the first, it gathers the
//! second, and in backward it also reduces the first half's gradients behind the attention to the second. No head's sums
//! change by it.

use std::ops::Range;

use candle_core::op::BackpropOp;
use candle_core::{Result, Storage, Tensor, bail};
use fsdp_core::ProcessGroup;

use super::engine::{AttentionDims, Engine};
use crate::collectives::Pending;
use crate::context_parallel::exchange::{start_own_sums, start_whole};
use crate::storage::take;

/// The engine of queries of one rank. Its operands are the rank's; [`AttentionDims::keys`] counts those of all ranks.
pub(super) struct WholeKeys<E> {
    engine: E,
    group: ProcessGroup,
    /// Number of parts of the key heads, each with collectives of its own.
    parts: usize,
}

/// Key heads, and the queries' heads that look at them.
struct Part {
    heads: Range<usize>,
    kv_heads: Range<usize>,
    dims: AttentionDims,
}

impl<E: Engine> WholeKeys<E> {
    /// Returns the engine of a device (`is_device`) or the CPU. On the CPU nothing runs beside a collective.
    pub(super) fn new(engine: E, group: &ProcessGroup, is_device: bool) -> Self {
        match is_device {
            true => WholeKeys { engine, group: group.clone(), parts: 2 },
            false => WholeKeys { engine, group: group.blocking(), parts: 1 },
        }
    }

    fn parts(&self, dims: &AttentionDims) -> Vec<Part> {
        let parts = self.parts.min(dims.n_kv_heads);
        let start = |part: usize| part * dims.n_kv_heads / parts;
        let of_part = |part: usize| {
            let kv_heads = start(part)..start(part + 1);
            let of_one = dims.n_heads / dims.n_kv_heads;
            let heads = kv_heads.start * of_one..kv_heads.end * of_one;
            Part { dims: dims.of_heads(&heads, &kv_heads), heads, kv_heads }
        };
        (0..parts).map(of_part).collect()
    }

    /// Issues the gather of a part's keys and values.
    fn gather(&self, part: &Part, dims: &AttentionDims, operands: &[&Tensor]) -> Result<Pending<[Tensor; 2]>> {
        let [k, v] = [1, 2].map(|which| of_heads(operands, dims, which, &part.kv_heads));
        start_whole([&k?, &v?], &self.group)
    }
}

impl<E: Engine> Engine for WholeKeys<E> {
    fn forward(&self, dims: &AttentionDims, operands: &[&Tensor]) -> Result<(Storage, Tensor)> {
        let parts = self.parts(dims);
        let gather = |part: &Part| self.gather(part, dims, operands);
        let gathers = parts.iter().map(gather).collect::<Result<Vec<_>>>()?;
        let (mut outputs, mut log_sums) = (vec![], vec![]);
        for (part, gather) in parts.iter().zip(gathers) {
            let q = of_heads(operands, dims, 0, &part.heads)?;
            let [k, v] = gather.wait()?;
            let (output, sums) = self.engine.forward(&part.dims, &[&q, &k, &v])?;
            let shape = (dims.batch, dims.queries, part.heads.len() * dims.dim);
            outputs.push(Tensor::from_storage(output, shape, BackpropOp::none(), false));
            log_sums.push(sums);
        }
        Ok((take(&joined(&outputs, 2)?)?, joined(&log_sums, 1)?))
    }

    fn backward(
        &self,
        dims: &AttentionDims,
        operands: &[&Tensor],
        outputs: [&Tensor; 2],
        log_sums: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let parts = self.parts(dims);
        let gather = |part: &Part| self.gather(part, dims, operands);
        let gathers = parts.iter().map(gather).collect::<Result<Vec<_>>>()?;
        let (mut d_q, mut reductions) = (vec![], vec![]);
        for (part, gather) in parts.iter().zip(gathers) {
            let sums = log_sums.narrow(1, part.heads.start, part.heads.len())?.contiguous()?;
            let q = of_heads(operands, dims, 0, &part.heads)?;
            let of_part = outputs.map(|output| columns(output, 0, &part.heads, dims.dim));
            let [output, d_output] = of_part;
            let [k, v] = gather.wait()?;
            let gradients = self.engine.backward(&part.dims, &[&q, &k, &v], [&output?, &d_output?], &sums)?;
            let Ok([Some(q), Some(k), Some(v)]) = <[_; 3]>::try_from(gradients) else {
                bail!("attention: an engine returned no gradient")
            };
            reductions.push(start_own_sums([&k, &v], &self.group)?);
            d_q.push(q);
        }
        let own = reductions.into_iter().map(Pending::wait).collect::<Result<Vec<_>>>()?;
        let of_operand = |at: usize| joined(&own.iter().map(|sums| sums[at].clone()).collect::<Vec<_>>(), 2);
        let own = [joined(&d_q, 2)?, of_operand(0)?, of_operand(1)?];
        match operands {
            [_] => Ok(vec![Some(Tensor::cat(&own, 2)?.contiguous()?)]),
            separate => own.iter().zip(separate).map(|(own, like)| own.reshape(like.shape()).map(Some)).collect(),
        }
    }
}

/// Returns q, k or v `[batch, T, heads * D]` of some heads, outside of the graph. q is operand 0.
fn of_heads(operands: &[&Tensor], dims: &AttentionDims, which: usize, heads: &Range<usize>) -> Result<Tensor> {
    let counts = [dims.n_heads, dims.n_kv_heads, dims.n_kv_heads];
    match operands {
        [packed] => columns(packed, counts[..which].iter().sum(), heads, dims.dim),
        separate => {
            let steps = separate[which].dim(1)?;
            columns(&separate[which].reshape((dims.batch, steps, counts[which] * dims.dim))?, 0, heads, dims.dim)
        }
    }
}

/// Returns some heads, counted from head `first`, of a tensor whose rows have heads of `dim` elements.
fn columns(x: &Tensor, first: usize, heads: &Range<usize>, dim: usize) -> Result<Tensor> {
    x.detach().narrow(2, (first + heads.start) * dim, heads.len() * dim)?.contiguous()
}

/// Returns parts of the heads, which are along `dim`, as one tensor.
fn joined(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    match parts {
        [whole] => Ok(whole.clone()),
        parts => Tensor::cat(parts, dim)?.contiguous(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use fsdp_core::process_group::local;

    use super::*;
    use crate::context_parallel::Positions;
    use crate::nn::attention::cpu::Cpu;
    use crate::nn::attention::options::AttentionOptions;
    use crate::random::{Mask, RngState, set_rng_state};

    const HEADS: (usize, usize) = (6, 3);
    const DIM: usize = 4;

    /// Returns the output and the gradients of a rank's queries, keys and values.
    fn computed(group: &ProcessGroup, parts: usize, dropout: f64, packed: bool) -> Result<Vec<Vec<f32>>> {
        let (ranks, own) = (group.size(), 4);
        let positions = Positions::of_rank(group.rank(), ranks, own);
        set_rng_state(RngState::new(5));
        let shape = [2, HEADS.0, own, own * ranks];
        let mask = Mask::draw_at(dropout, &shape, Some(positions))?;
        let dims = AttentionDims {
            batch: 2,
            queries: own,
            keys: own * ranks,
            n_heads: HEADS.0,
            n_kv_heads: HEADS.1,
            dim: DIM,
            dtype: DType::F32,
            options: AttentionOptions { dropout, ..AttentionOptions::causal(0.5) },
            positions,
            documents: None,
            mask: (dropout > 0.).then_some(mask),
        };
        let values = |heads: usize, seed: usize| {
            let count = 2 * own * heads * DIM;
            let value = |at: usize| ((at * 7 + seed * 5 + group.rank() * 3) % 11) as f32 / 5. - 1.;
            Tensor::from_vec((0..count).map(value).collect::<Vec<_>>(), (2, own, heads * DIM), &Device::Cpu)
        };
        let operands = [values(HEADS.0, 1)?, values(HEADS.1, 2)?, values(HEADS.1, 3)?];
        let operands = if packed { vec![Tensor::cat(&operands, 2)?] } else { operands.to_vec() };
        let operands: Vec<&Tensor> = operands.iter().collect();
        let engine = WholeKeys { engine: Cpu, group: group.clone(), parts };
        let (output, log_sums) = engine.forward(&dims, &operands)?;
        let output = Tensor::from_storage(output, (2, own, HEADS.0 * DIM), BackpropOp::none(), false);
        let gradients = engine.backward(&dims, &operands, [&output, &values(HEADS.0, 4)?], &log_sums)?;
        let all = std::iter::once(Some(output)).chain(gradients).flatten();
        all.map(|tensor| tensor.flatten_all()?.to_vec1()).collect()
    }

    #[test]
    fn halves_of_the_heads_have_the_bits_of_the_whole() {
        for (ranks, dropout, packed) in [(2, 0., false), (3, 0., true), (2, 0.4, true)] {
            let outcome = local::try_run(ranks, |group| {
                let whole = computed(&group, 1, dropout, packed)?;
                assert_eq!(whole.len(), if packed { 2 } else { 4 });
                for parts in [2, 3, 5] {
                    assert_eq!(computed(&group, parts, dropout, packed)?, whole, "{parts} parts on {ranks} ranks");
                }
                Ok::<_, candle_core::Error>(())
            });
            outcome.unwrap();
        }
    }
}
