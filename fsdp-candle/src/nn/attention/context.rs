//! Attention of context-parallel ranks, each of which has a part of every sequence.
//!
//! With [`AttentionExchange::Gather`], a rank's queries attend to the keys and values of all ranks (`whole_keys`). With
//! [`AttentionExchange::Heads`], each rank computes the attention of its part of the heads over whole sequences.

use candle_core::{Result, Tensor, bail};

use super::fused::{Checked, is_fused};
use crate::collectives::all_to_all;
use crate::context_parallel::exchange::{by_rank, in_order};
use crate::context_parallel::{AttentionExchange, ContextParallel, Scope, outside};
use crate::random::{Part, get_rng_state, in_part};

/// Returns the output `[batch, T, n_heads * D]` of this rank's tokens. The documents are those of whole sequences.
pub(super) fn over_ranks(own: Checked<'_>, scope: &Scope, operands: &[&Tensor]) -> Result<Tensor> {
    scope.attends();
    let Checked { function, batch, queries, keys, documents, .. } = own;
    let context = scope.context();
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
        documents.check(function, batch, queries * context.group().size())?;
    }
    match context.exchange() {
        AttentionExchange::Heads => by_heads(own, context, operands),
        AttentionExchange::Gather => by_keys(own, context, operands),
    }
}

/// Attends with this rank's queries to all keys.
fn by_keys(own: Checked<'_>, context: &ContextParallel, operands: &[&Tensor]) -> Result<Tensor> {
    let group = context.group();
    let positions = Some(context.positions_of(own.queries));
    let all = Checked { keys: own.keys * group.size(), ..own };
    if is_fused(operands[0]) {
        return all.at(positions, operands, Some(group));
    }
    let [q, k, v] = own.separate(operands)?;
    all.at(positions, &[&q, &context.gather(&k, 1)?, &context.gather(&v, 1)?], None)
}

/// Attends with this rank's part of the heads to whole sequences.
fn by_heads(own: Checked<'_>, context: &ContextParallel, operands: &[&Tensor]) -> Result<Tensor> {
    let (group, ranks) = (context.group(), context.group().size());
    let Checked { function, queries, n_heads, n_kv_heads, .. } = own;
    if !n_kv_heads.is_multiple_of(ranks) {
        bail!(
            "{function} on rank {}: {ranks} ranks of group \"{}\" can't share {n_kv_heads} key heads: choose a number of \
             ranks that divides them, or AttentionExchange::Gather",
            group.rank(),
            group.name()
        )
    }
    let steps = queries * ranks;
    let sinks = own.sinks.map(|sinks| sinks.narrow(0, group.rank() * (n_heads / ranks), n_heads / ranks)?.contiguous());
    let sinks = sinks.transpose()?;
    let exchanged = |x: &Tensor| in_order(&all_to_all(x, 1, 2, group)?, 1, ranks);
    let [q, k, v] = own.separate(operands)?;
    let [q, k, v] = [exchanged(&q)?, exchanged(&k)?, exchanged(&v)?];
    // A tensor-parallel rank's heads are a part already.
    let before = get_rng_state().part.filter(|part| part.dim == 1);
    let (index, count) = before.map_or((0, 1), |part| (part.index, part.count));
    let part = Part { dim: 1, index: index * ranks + group.rank(), count: count * ranks };
    let of_heads = Checked {
        queries: steps,
        keys: steps,
        n_heads: n_heads / ranks,
        n_kv_heads: n_kv_heads / ranks,
        sinks: sinks.as_ref(),
        ..own
    };
    let out = outside(|| in_part(part, || of_heads.attention(&[&q, &k, &v])))?;
    all_to_all(&by_rank(&out, 1, ranks)?, 2, 1, group)
}
