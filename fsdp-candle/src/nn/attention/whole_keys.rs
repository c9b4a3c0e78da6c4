//! The keys and values of all ranks that share sequences, for the queries of one rank.
//!
//! They are gathered in forward, and again in backward, so that a rank keeps only its own. Their gradients are
//! reduce-scattered.

use candle_core::{Result, Tensor, bail};
use fsdp_core::ProcessGroup;

use crate::context_parallel::exchange::{own_sum, whole};

/// The ranks that share sequences, and the widths of q, k and v.
pub(super) struct WholeKeys {
    pub(super) group: ProcessGroup,
    pub(super) widths: [usize; 3],
}

impl WholeKeys {
    /// Returns this rank's queries, and all ranks' keys and values, outside of the graph.
    pub(super) fn gathered(&self, operands: &[&Tensor]) -> Result<[Tensor; 3]> {
        let own: Vec<Tensor> = operands.iter().map(|operand| operand.detach()).collect();
        let [q, k, v] = parts(&own.iter().collect::<Vec<_>>(), self.widths)?;
        let [k, v] = whole([&k, &v], &self.group)?;
        Ok([q, k, v])
    }

    /// Returns the gradients of the operands, given those of [`WholeKeys::gathered`].
    pub(super) fn own_gradients(
        &self,
        gradients: Vec<Option<Tensor>>,
        operands: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let [Some(q), Some(k), Some(v)] = &gradients[..] else { bail!("attention: an engine returned no gradient") };
        let own = [q.clone(), own_sum(k, &self.group)?, own_sum(v, &self.group)?];
        match operands {
            [_] => Ok(vec![Some(Tensor::cat(&own, 2)?.contiguous()?)]),
            separate => own.iter().zip(separate).map(|(own, like)| own.reshape(like.shape()).map(Some)).collect(),
        }
    }
}

/// Returns q, k and v as `[batch, T, width]`, of separate tensors or of one.
pub(super) fn parts(operands: &[&Tensor], widths: [usize; 3]) -> Result<[Tensor; 3]> {
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
