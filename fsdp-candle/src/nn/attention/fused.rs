//! Attention with grouped-query heads, in the manner of FlashAttention (Dao et al., 2022, arXiv:2205.14135): the matrix
//! of probabilities never exists whole.
//!
//! For query `i` of a head: `p_ij = e^(s_ij - L_i)` with `s_ij = scale q_i.k_j` over the visible keys `j`, and
//! `o_i = sum_j p_ij v_j`. Forward keeps `L_i`, the logarithm of the sum. Backward has `dv_j = sum_i p_ij do_i`,
//! `ds_ij = scale p_ij (do_i.v_j - do_i.o_i)`, `dq_i = sum_j ds_ij k_j`, `dk_j = sum_i ds_ij q_i`. Capped scores are
//! `s_ij = cap t_ij` with `t_ij = tanh(scale q_i.k_j / cap)`, and `ds_ij` gets a factor `1 - t_ij^2`. Dropout
//! multiplies `p_ij` by `m_ij` in the product with `v_j`, and `do_i.v_j` in backward; `do_i.o_i` does not change.
//!
//! Sinks change `L_i` and `o_i`: see `sinks`.
//!
//! Queries are processed in blocks of rows. A block's products cover the keys from its first query's first key to its
//! last query's last key, so the only hidden scores that are computed lie in corners along the diagonal. Heads are read
//! and written in place in `[batch, T, heads * head_dim]`, without a transpose.
//!
//! Each kind of device has an [`Engine`]: `cpu` and `cuda`.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use fsdp_core::ProcessGroup;

use super::composite::composite;
use super::cpu::Cpu;
use super::cuda;
use super::documents::Documents;
use super::engine::{AttentionDims, Engine};
use super::options::AttentionOptions;
use super::sinks::{after_sinks, with_sinks};
use super::whole_keys::WholeKeys;
use crate::activation_checkpoint::{Operation, operation};
use crate::context_parallel::Positions;
use crate::graph::{Reads, graph_op};
use crate::nn::weight::has_cpu_kernels;
use crate::random::Mask;

/// An attention whose operands are checked: q, k and v, or one tensor `[batch, T, width]` that holds all three. A row has
/// the queries and keys of this rank, or of whole sequences without context parallelism.
#[derive(Clone, Copy)]
pub(super) struct Checked<'a> {
    /// Name of the function, for messages.
    pub(super) function: &'a str,
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) dim: usize,
    pub(super) options: AttentionOptions,
    pub(super) documents: Option<&'a Documents>,
    /// Scores that no key has, `[n_heads]`.
    pub(super) sinks: Option<&'a Tensor>,
}

impl Checked<'_> {
    /// Computes the attention of whole sequences.
    pub(super) fn attention(&self, operands: &[&Tensor]) -> Result<Tensor> {
        if let Some(documents) = self.documents {
            documents.check(self.function, self.batch, self.queries)?;
            documents.check(self.function, self.batch, self.keys)?;
        }
        self.at(None, operands, None)
    }

    /// Returns q, k and v as `[batch, T, width]`, of separate tensors or of one.
    pub(super) fn separate(&self, operands: &[&Tensor]) -> Result<[Tensor; 3]> {
        let widths = [self.n_heads, self.n_kv_heads, self.n_kv_heads].map(|heads| heads * self.dim);
        let part = |at: usize| -> Result<Tensor> {
            match operands {
                [packed] => packed.narrow(2, widths[..at].iter().sum(), widths[at])?.contiguous(),
                separate => separate[at].contiguous()?.reshape((self.batch, separate[at].dim(1)?, widths[at])),
            }
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }

    /// Computes the attention of queries at these positions, or of the last ones of a row. The operands have all keys and
    /// values, or those of this rank if the ranks of a group share sequences.
    pub(super) fn at(
        &self,
        positions: Option<Positions>,
        operands: &[&Tensor],
        sharing: Option<&ProcessGroup>,
    ) -> Result<Tensor> {
        let &Checked { batch, queries, keys, n_heads, n_kv_heads, dim, options, documents, sinks, .. } = self;
        if !is_fused(operands[0]) {
            let [q, k, v] = self.separate(operands)?;
            return composite(&q, &k, &v, n_heads, n_kv_heads, &options, positions, documents, sinks);
        }
        let probabilities = [batch, n_heads, queries, keys];
        let draw = || Mask::draw_at(options.dropout, &probabilities, positions);
        let mask = (options.dropout > 0.).then(draw).transpose()?;
        let (dtype, documents) = (operands[0].dtype(), documents.cloned());
        let positions = positions.unwrap_or(Positions::from(keys.saturating_sub(queries)));
        let dims = AttentionDims {
            batch,
            queries,
            keys,
            n_heads,
            n_kv_heads,
            dim,
            dtype,
            options,
            positions,
            documents,
            mask,
        };
        match (cuda::engine(operands[0]), sharing) {
            (Some(engine), None) => node(engine, dims, operands, sinks),
            (Some(engine), Some(ranks)) => node(WholeKeys::new(engine, ranks, true), dims, operands, sinks),
            (None, None) => node(Cpu, dims, operands, sinks),
            (None, Some(ranks)) => node(WholeKeys::new(Cpu, ranks, false), dims, operands, sinks),
        }
    }
}

/// Returns whether an engine computes on this tensor.
pub(super) fn is_fused(tensor: &Tensor) -> bool {
    has_cpu_kernels(tensor) || cuda::engine(tensor).is_some()
}

/// Returns the attention as a node of the graph. Reuses the output that an activation checkpoint kept.
fn node<E: Engine>(engine: E, dims: AttentionDims, operands: &[&Tensor], sinks: Option<&Tensor>) -> Result<Tensor> {
    let out = [dims.batch, dims.queries, dims.n_heads * dims.dim];
    let mut of_sinks = None;
    let y = operation(Operation::Attention, &out, |known| {
        let kept = known.map(|(memory, log_sums)| Some((memory, log_sums.downcast::<Tensor>().ok()?)));
        let (memory, log_sums) = match kept.flatten() {
            Some(kept) => kept,
            None => {
                let computed = engine.forward(&dims, operands)?;
                let (memory, log_sums) = match sinks {
                    Some(sinks) => with_sinks(&dims, computed, sinks)?,
                    None => computed,
                };
                (memory, Arc::new(log_sums))
            }
        };
        let kept = log_sums.clone();
        let name = if operands.len() == 1 { "attention_qkv" } else { "attention" };
        let (of_node, sums) = (dims.clone(), log_sums.clone());
        let y = graph_op(name, operands, memory, &out, Reads::SourcesAndOutput, move |operands, out, d_out| {
            engine.backward(&of_node, operands, [out, d_out], &sums)
        })?;
        of_sinks = Some(log_sums);
        Ok((y, kept))
    })?;
    match (sinks, of_sinks) {
        (Some(sinks), Some(log_sums)) => after_sinks(dims, &y, log_sums, sinks),
        _ => Ok(y),
    }
}
