//! What the model is fed: micro-batches as tensors, and what their losses are divided by.

use candle_core::Tensor;
use fsdp_candle::{ReduceOp, World};
use fsdp_examples::data::{Batches, Masking};

use crate::args::Args;

/// The data, and for a masked model what it has to tell.
pub(crate) struct Feed {
    batches: Batches,
    masking: Option<Masking>,
    batch_size: usize,
    seq_len: usize,
    grad_accum: usize,
}

impl Feed {
    pub(crate) fn new(batches: Batches, masking: Option<Masking>, args: &Args) -> Self {
        let Args { batch_size, seq_len, grad_accum, .. } = *args;
        Feed { batches, masking, batch_size, seq_len, grad_accum }
    }

    pub(crate) fn batches(&self) -> &Batches {
        &self.batches
    }

    pub(crate) fn masking(&self) -> Option<&Masking> {
        self.masking.as_ref()
    }

    /// Inputs and targets `[batch, time]` of this rank's micro-batch `a`, after so many sequences of all ranks.
    pub(crate) fn micro_batch(&self, sequences: u64, a: usize, world: &World) -> anyhow::Result<(Tensor, Tensor)> {
        let (mut inputs, mut targets) = self.batches.micro_batch(sequences, a)?;
        if let Some(masking) = &self.masking {
            (inputs, targets) = masking.apply(self.batches.first_sequence(sequences, a), self.seq_len, inputs);
        }
        let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (self.batch_size, self.seq_len), world.device());
        Ok((tensor(inputs)?, tensor(targets)?))
    }

    /// Where not all tokens count, how many do in a micro-batch of the step after so many sequences, on average over
    /// all ranks and micro-batches: what sums of losses are divided by, for their mean to be that of the step's tokens.
    /// Where none does, the loss is to be 0. Collective.
    pub(crate) fn counted(&self, sequences: u64, world: &World) -> anyhow::Result<Option<f64>> {
        let Some(masking) = &self.masking else { return Ok(None) };
        let tokens = self.batch_size * self.seq_len;
        let of = |a| masking.count(self.batches.first_sequence(sequences, a), self.seq_len, tokens);
        let own: u64 = (0..self.grad_accum).map(of).sum();
        let all = world.all_reduce(&[own as f64], ReduceOp::Sum)?[0];
        Ok(Some(all.max(1.) / (world.size() * self.grad_accum) as f64))
    }
}
