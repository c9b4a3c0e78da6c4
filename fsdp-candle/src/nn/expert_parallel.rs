//! Mixtures whose experts live on different ranks (Lepikhin et al., "GShard", 2020, arXiv:2006.16668).
//!
//! A rank sorts its routes by the rank and the number of their experts, and sends each route's row to the expert's rank.
//! Local experts compute the rows that they get, and the outputs go back the same way. The rank then adds the outputs of
//! each token. Backward sends gradients of outputs to the experts and gradients of rows back. All ranks take part in all
//! exchanges, with or without tokens, so that none waits for another.

use candle_core::{Device, Result, Tensor, bail};
use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};

use super::cpu::indices;
use super::local_experts::{FUNCTION, combined, local_mixture, selected};
use super::swiglu::SwiGlu;
use super::weight::{GradDestination, Weight};
use crate::collectives::{all_to_all_v, exchanged_rows};
use crate::error::Error;
use crate::fsdp::FsdpParam;
use crate::graph::{Reads, graph_op};
use crate::storage::take;

/// The ranks of a mixture's experts.
pub(super) struct ExpertRanks {
    group: ProcessGroup,
    /// The rank of each expert.
    owners: Vec<usize>,
}

impl ExpertRanks {
    /// Returns the ranks, or `None` if this rank has all experts. Fails if a plan names only some of them, and if a rank has
    /// none.
    pub(super) fn of(experts: &[SwiGlu]) -> Result<Option<Self>> {
        let first = experts.first().and_then(|expert| FsdpParam::of(expert.output_weight()));
        let Some(first) = first else { return Ok(None) };
        let Some((group, _)) = first.owner().filter(|(group, _)| group.size() > 1) else { return Ok(None) };
        let owner = |(at, expert): (usize, &SwiGlu)| match FsdpParam::of(expert.output_weight()) {
            Some(param) if let Some((_, owner)) = param.owner() => Ok(owner),
            _ => bail!(
                "{FUNCTION}: the plan makes `{}` and not expert {at} ExpertParallel: name all or none",
                first.name()
            ),
        };
        let owners = experts.iter().enumerate().map(owner).collect::<Result<Vec<_>>>()?;
        if let Some(idle) = (0..group.size()).find(|rank| !owners.contains(rank)) {
            bail!(
                "{FUNCTION} of `{}`: rank {idle} of the {} ranks of experts has none of the {} experts: use as many ranks as \
                 experts, or fewer",
                first.name(),
                group.size(),
                owners.len()
            )
        }
        let subject = Subject::new(format!("the mixture of parameter `{}`", first.name()), []);
        let group = group.signed(Signature::new(&subject, []));
        Ok(Some(ExpertRanks { group, owners }))
    }

    /// See [`mixture_of_experts`](super::mixture_of_experts). The tensors have been checked.
    pub(super) fn mixture(&self, x: &Tensor, experts: &[SwiGlu], chosen: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let (ranks, per_token) = (self.group.size(), chosen.dim(1)?);
        let chosen = indices(FUNCTION, "expert", chosen, experts.len(), "number of experts")?;
        let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
        let expert_of = |route: u32| chosen[route as usize] as usize;
        order.sort_by_key(|&route| (self.owners[expert_of(route)], expert_of(route)));

        // The experts of each rank, and the routes that each rank sends to this rank's experts.
        let of_rank = |rank: usize| (0..experts.len()).filter(move |&expert| self.owners[expert] == rank);
        let most = (0..ranks).map(|rank| of_rank(rank).count()).max().unwrap_or(0);
        let mut routes = vec![0i64; experts.len()];
        order.iter().for_each(|&route| routes[expert_of(route)] += 1);
        let padded = |rank: usize| of_rank(rank).map(|expert| routes[expert]).chain(std::iter::repeat(0)).take(most);
        let sent: Vec<i64> = (0..ranks).flat_map(padded).collect();
        let received = self.group.exchange_values(sent.clone()).map_err(Error::from)?;
        let sums = |counts: &[i64]| -> Vec<usize> {
            counts.chunks(most).map(|of_rank| of_rank.iter().sum::<i64>() as usize).collect()
        };
        let (send, recv) = (sums(&sent), sums(&received));

        let tokens: Vec<u32> = order.iter().map(|route| route / per_token as u32).collect();
        let rows = all_to_all_v(&selected(x, &tokens)?, &send, &recv, &self.group)?;
        let own: Vec<SwiGlu> = of_rank(self.group.rank()).map(|expert| experts[expert].clone()).collect();
        let local = received.chunks(most).flat_map(|of_rank| {
            of_rank.iter().zip(0u32..).flat_map(|(&count, expert)| std::iter::repeat_n(expert, count as usize))
        });
        let local: Vec<u32> = local.collect();
        let y = self.local(&rows, &own, &local)?;

        let others = (0..experts.len()).filter(|&expert| self.owners[expert] != self.group.rank());
        let back = self.returned(y, others.map(|expert| &experts[expert]), (recv, send))?;
        // The row of each route.
        let mut places = vec![0u32; order.len()];
        order.iter().zip(0u32..).for_each(|(&route, place)| places[route as usize] = place);
        combined(&back, &places, weights)
    }

    /// Sends the outputs `[m, out]` back to the ranks of their tokens. Experts of other ranks are used here too: each has a
    /// gradient without elements, so that all ranks agree on which parameters are trained, and take part in the backward.
    fn returned<'a>(
        &self,
        y: Tensor,
        others: impl Iterator<Item = &'a SwiGlu>,
        (send, recv): (Vec<usize>, Vec<usize>),
    ) -> Result<Tensor> {
        let back = exchanged_rows(&y, &send, &recv, &self.group)?;
        let others = others.flat_map(SwiGlu::tensors).map(Weight::of).collect::<Result<Vec<_>>>()?;
        let joined = Weight::joined(&others)?;
        let (arguments, shape, group) = ([y, joined.node().clone()], back.shape().clone(), self.group.clone());
        graph_op(FUNCTION, &arguments, take(&back)?, shape, Reads::Nothing, move |arguments, _, gradient| {
            let of_others = others.iter().map(|weight| match weight.grad_destination()? {
                GradDestination::Plain(value) => value.zeros_like().map(Some),
                GradDestination::Param { param, anchor } => {
                    param.gradient.write_in(|_, _| Ok(()))?;
                    Ok(Some(anchor.detach()))
                }
                GradDestination::Nothing => Ok(None),
            });
            let of_others = joined.set_gradients(of_others.collect::<Result<Vec<_>>>()?)?;
            // Also without a graph of this rank's outputs: those of other ranks may have one.
            let of_outputs = exchanged_rows(gradient, &recv, &send, &group)?;
            Ok([arguments[0].track_op().then_some(of_outputs), of_others])
        })
    }

    /// Applies this rank's experts to rows `[m, in]`, of which each is for one of them. Returns `[m, out]`.
    fn local(&self, rows: &Tensor, experts: &[SwiGlu], chosen: &[u32]) -> Result<Tensor> {
        let count = chosen.len();
        // A row of zeros keeps a rank without tokens in the graph: its experts have gradients of zeros.
        let (rows, chosen) = match count {
            0 => (Tensor::cat(&[rows, &Tensor::zeros((1, rows.dim(1)?), rows.dtype(), rows.device())?], 0)?, &[0][..]),
            _ => (rows.clone(), chosen),
        };
        let shape = (chosen.len(), 1);
        let weights = Tensor::full(if count == 0 { 0f32 } else { 1. }, shape, rows.device())?;
        let chosen = Tensor::from_slice(chosen, shape, &Device::Cpu)?;
        let y = local_mixture(&rows, experts, &chosen, &weights)?;
        if count == 0 { y.narrow(0, 0, 0) } else { Ok(y) }
    }
}
