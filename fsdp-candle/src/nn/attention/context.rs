//! Attention of context-parallel ranks, each of which has a part of every sequence.
//!
//! With [`AttentionExchange::Gather`], the ranks' keys and values are gathered in forward, and again in backward, so that
//! a rank keeps only its own. The gradients of the gathered ones are reduce-scattered. With
//! [`AttentionExchange::Heads`], each rank computes the attention of its part of the heads over whole sequences.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::composite::composite;
use super::cpu::Cpu;
use super::cuda;
use super::engine::{AttentionDims, Engine};
use super::fused::{Checked, is_fused};
use crate::activation_checkpoint::{Operation, operation};
use crate::collectives::all_to_all;
use crate::context_parallel::exchange::{by_rank, in_order, own_sum, whole};
use crate::context_parallel::{AttentionExchange, ContextParallel, Scope, outside};
use crate::graph::{Reads, graph_op};
use crate::random::{Mask, Part, get_rng_state, in_part};

/// Returns the output `[batch, T, n_heads * D]` of this rank's tokens. The documents are those of whole sequences.
pub(super) fn over_ranks(own: Checked<'_>, scope: &Scope, operands: &[&Tensor]) -> Result<Tensor> {
    scope.attends();
    let &Checked { function, batch, queries, keys, documents, .. } = &own;
    let of = ContextAttention { own, scope };
    if queries != keys {
        bail!(
            "{function}: in a context-parallel forward, a rank has as many keys as queries, found {queries} queries and \
             {keys} keys"
        )
    }
    if !queries.is_multiple_of(2) {
        bail!(
            "{function}: a context-parallel rank has two chunks of each sequence, found {queries} tokens: cut sequences by \
             `ContextParallel::split`"
        )
    }
    if let Some(documents) = documents {
        documents.check(function, batch, queries * of.ranks())?;
    }
    match scope.context().exchange() {
        AttentionExchange::Heads => of.exchanged(operands),
        AttentionExchange::Gather if !is_fused(operands[0]) => of.composite(operands),
        AttentionExchange::Gather => match cuda::engine(operands[0]) {
            Some(engine) => of.gathered(engine, operands),
            None => of.gathered(Cpu, operands),
        },
    }
}

/// An attention of this rank's tokens.
struct ContextAttention<'a> {
    own: Checked<'a>,
    scope: &'a Scope,
}

impl ContextAttention<'_> {
    fn context(&self) -> &ContextParallel {
        self.scope.context()
    }

    fn ranks(&self) -> usize {
        self.context().group().size()
    }

    fn widths(&self) -> [usize; 3] {
        let Checked { n_heads, n_kv_heads, dim, .. } = self.own;
        [n_heads, n_kv_heads, n_kv_heads].map(|heads| heads * dim)
    }

    fn gathered<E: Engine>(&self, engine: E, operands: &[&Tensor]) -> Result<Tensor> {
        let Checked { batch, queries, n_heads, n_kv_heads, dim, options, documents, .. } = self.own;
        let positions = self.context().positions_of(queries);
        let keys = queries * self.ranks();
        let probabilities = [batch, n_heads, queries, keys];
        let drops = options.dropout > 0.;
        let mask = drops.then(|| Mask::draw_at(options.dropout, &probabilities, Some(positions))).transpose()?;
        let (dtype, documents) = (operands[0].dtype(), documents.cloned());
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
        let out = [batch, queries, n_heads * dim];
        let (group, widths) = (self.context().group().clone(), self.widths());
        operation(Operation::Attention, &out, |known| {
            let kept = known.map(|(memory, log_sums)| Some((memory, log_sums.downcast::<E::LogSums>().ok()?)));
            let (memory, log_sums) = match kept.flatten() {
                Some(kept) => kept,
                None => {
                    let [q, k, v] = parts(operands, widths)?;
                    let all = whole([&k, &v], &group)?;
                    let (memory, log_sums) = engine.forward(&dims, &[&q, &all[0], &all[1]])?;
                    (memory, Arc::new(log_sums))
                }
            };
            let kept = log_sums.clone();
            let backward = move |operands: &[&Tensor], out: &Tensor, d_out: &Tensor| {
                let [q, k, v] = parts(operands, widths)?;
                let all = whole([&k, &v], &group)?;
                let gradients = engine.backward(&dims, &[&q, &all[0], &all[1]], [out, d_out], &log_sums)?;
                let mut own = vec![];
                for (at, gradient) in gradients.into_iter().enumerate() {
                    let Some(gradient) = gradient else { bail!("attention: an engine returned no gradient") };
                    own.push(if at == 0 { gradient } else { own_sum(&gradient, &group)? });
                }
                joined(own, operands)
            };
            let y = graph_op("attention-over-ranks", operands, memory, &out, Reads::SourcesAndOutput, backward)?;
            Ok((y, kept))
        })
    }

    /// [`ContextAttention::gathered`] as a chain of Candle's operations.
    fn composite(&self, operands: &[&Tensor]) -> Result<Tensor> {
        let [q, k, v] = parts_in_graph(operands, self.widths())?;
        let (k, v) = (self.context().gather(&k, 1)?, self.context().gather(&v, 1)?);
        let Checked { queries, n_heads, n_kv_heads, options, documents, .. } = self.own;
        let positions = Some(self.context().positions_of(queries));
        composite(&q, &k, &v, n_heads, n_kv_heads, &options, positions, documents)
    }

    fn exchanged(&self, operands: &[&Tensor]) -> Result<Tensor> {
        let (group, ranks) = (self.context().group(), self.ranks());
        let Checked { function, queries, n_heads, n_kv_heads, .. } = self.own;
        if !n_kv_heads.is_multiple_of(ranks) {
            bail!(
                "{function} on rank {}: {ranks} ranks of group \"{}\" can't share {n_kv_heads} key heads: choose a number \
                 of ranks that divides them, or AttentionExchange::Gather",
                group.rank(),
                group.name()
            )
        }
        let [q, k, v] = parts_in_graph(operands, self.widths())?;
        let exchanged = |x: &Tensor| in_order(&all_to_all(x, 1, 2, group)?, 1, ranks);
        let [q, k, v] = [exchanged(&q)?, exchanged(&k)?, exchanged(&v)?];
        let steps = queries * ranks;
        let of_heads = Checked {
            queries: steps,
            keys: steps,
            n_heads: n_heads / ranks,
            n_kv_heads: n_kv_heads / ranks,
            ..self.own
        };
        // A tensor-parallel rank's heads are a part already.
        let before = get_rng_state().part.filter(|part| part.dim == 1);
        let (index, count) = before.map_or((0, 1), |part| (part.index, part.count));
        let part = Part { dim: 1, index: index * ranks + group.rank(), count: count * ranks };
        let out = outside(|| in_part(part, || of_heads.attention(&[&q, &k, &v])))?;
        all_to_all(&by_rank(&out, 1, ranks)?, 2, 1, group)
    }
}

/// Returns q, k and v as `[batch, T, width]`, outside of the graph.
fn parts(operands: &[&Tensor], widths: [usize; 3]) -> Result<[Tensor; 3]> {
    let detached: Vec<Tensor> = operands.iter().map(|operand| operand.detach()).collect();
    parts_in_graph(&detached.iter().collect::<Vec<_>>(), widths)
}

/// Returns q, k and v as `[batch, T, width]`.
fn parts_in_graph(operands: &[&Tensor], widths: [usize; 3]) -> Result<[Tensor; 3]> {
    let part = |at: usize| -> Result<Tensor> {
        match operands {
            [packed] => packed.narrow(2, widths[..at].iter().sum(), widths[at])?.contiguous(),
            separate => {
                let (batch, steps) = (separate[at].dim(0)?, separate[at].dim(1)?);
                separate[at].contiguous()?.reshape((batch, steps, widths[at]))
            }
        }
    };
    Ok([part(0)?, part(1)?, part(2)?])
}

/// Returns the gradients of q, k and v in the shapes of the operands.
fn joined(gradients: Vec<Tensor>, operands: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
    match operands {
        [_] => Ok(vec![Some(Tensor::cat(&gradients, 2)?.contiguous()?)]),
        separate => {
            let shaped =
                gradients.iter().zip(separate).map(|(gradient, like)| gradient.reshape(like.shape()).map(Some));
            shaped.collect()
        }
    }
}
