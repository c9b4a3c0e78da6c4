//! The setup of a plan, and the search for the best one.

use anyhow::{bail, ensure};
use fsdp_candle::ReshardAfterForward;
use fsdp_train::models::Base;
use serde::Serialize;

use super::framework::{Checkpoint, Framework};
use super::hardware::{Device, Links, Mesh, Precision};
use super::model::{Layer, Model};
use super::{memory, on_device, time};

/// Returns the value of `--reshard-after-forward` for a policy.
pub(super) fn reshard_word(policy: ReshardAfterForward) -> String {
    match policy {
        ReshardAfterForward::To(ranks) => ranks.to_string(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// All inputs of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup<'a> {
    /// The model, or the part of it that a tensor-parallel rank computes.
    pub(super) model: &'a Model,
    pub(super) whole: &'a Model,
    pub(super) mesh: Mesh,
    pub(super) device: Device,
    pub(super) links: Links,
    pub(super) framework: Framework,
    /// Sequences of a rank's batch.
    pub(super) batch: usize,
    /// Tokens per sequence.
    pub(super) seq: usize,
    /// Dtype of gathered parameters and compute.
    pub(super) compute: Precision,
    /// Dtype of reductions.
    pub(super) reduce: Precision,
    /// Dtype of shards, their gradients and optimizer state.
    pub(super) shards: Precision,
    /// Storage of a frozen base; `None` if all parameters are trained.
    pub(super) base: Option<Base>,
    /// Whether the optimizer steps in backward.
    pub(super) in_backward: bool,
    /// Whether the optimizer's state is on disk.
    pub(super) on_disk: bool,
    /// Whether shards are on disk.
    pub(super) shards_on_disk: bool,
    pub(super) checkpoint: Checkpoint,
    /// Whether the inputs of recomputed blocks are in host memory or on disk.
    pub(super) offload: bool,
    pub(super) reshard: ReshardAfterForward,
    /// Whether cuDNN computes the attention that it covers.
    pub(super) cudnn: bool,
    /// Whether all-gathers and reduce-scatters use memory that is registered with NCCL.
    pub(super) registered: bool,
    /// Reserve of the allocator, as a share.
    pub(super) reserve: f64,
}

impl Setup<'_> {
    /// Returns the bytes of a parameter of a block, and of the root, in a shard.
    pub(super) fn stored(&self) -> [f64; 2] {
        match self.base {
            // Matrices outside the blocks are stored in BF16.
            Some(base) => [base.bytes(), base.bytes().max(Base::Bf16.bytes())],
            None => [self.shards.bytes(); 2],
        }
    }

    /// Returns whether embedding and head are the root unit, rather than two units. torchtitan's runs of 2024, with which
    /// plans are compared, had such a root too.
    pub(super) fn has_root(&self) -> bool {
        self.model.root.tied || self.framework == Framework::Pytorch
    }

    /// Returns the number of parameters of an embedding that is a unit of its own.
    pub(super) fn own_embedding(&self) -> f64 {
        if self.has_root() { 0. } else { self.model.root.head }
    }

    /// Returns the products of a layer's backward for each in its forward: for its input's gradient, and its weight's.
    pub(super) fn backward_products(&self) -> f64 {
        1. + self.trained()
    }

    /// Returns the floating point operations per token, forward and backward.
    pub(super) fn operations(&self) -> f64 {
        // Attention has no weights, so this is slightly too few for a frozen base.
        self.whole.operations() * (1. + self.backward_products()) / 3.
    }

    /// Returns 1 if parameters have gradients, and 0 if they are frozen.
    pub(super) fn trained(&self) -> f64 {
        if self.base.is_none() { 1. } else { 0. }
    }

    /// Returns the dtype of whole gradients, if parameters are trained. candle-fsdp's layers compute those of bf16
    /// parameters in f32, and keep them so for a reduction in f32.
    pub(super) fn gradient(&self) -> Option<Precision> {
        let is_wide =
            self.framework != Framework::Pytorch && (self.compute, self.reduce) == (Precision::Bf16, Precision::F32);
        self.base.is_none().then_some(if is_wide { self.reduce } else { self.compute })
    }

    /// Returns the tokens of a rank's batch, or of its part of the sequences. Tensor-parallel ranks have the same.
    pub(super) fn tokens(&self) -> f64 {
        self.batch as f64 * self.seq as f64 / self.mesh.context as f64
    }

    /// Returns the bytes of a layer's keys, or values, of all ranks that share sequences. 0 without them.
    pub(super) fn whole_keys(&self, layer: &Layer) -> f64 {
        match self.mesh.context {
            1 => 0.,
            _ => self.compute.bytes() * layer.keys * self.batch as f64 * self.seq as f64,
        }
    }

    /// Returns the elements of a tensor that is too large for Candle's CUDA kernels, if any.
    pub(super) fn uncountable(&self) -> Option<f64> {
        let widest = self.tokens() * self.model.layers.iter().map(Layer::widest).fold(0., f64::max);
        (self.framework == Framework::OnDevice && widest >= on_device::COUNTABLE).then_some(widest)
    }

    /// Returns whether the device has this much memory, and its kernels can count the tensors' elements.
    pub(super) fn fits(&self, bytes: f64) -> bool {
        self.device.memory.is_none_or(|there| bytes <= there) && self.uncountable().is_none()
    }

    /// Fails if the setup is not possible.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Mesh { shard, replicate, context, tensor, expert, ranks_per_host, hosts } = self.mesh;
        let parts = match tensor {
            1 => format!("--replicate {replicate}"),
            _ => format!("--replicate {replicate} times --tensor-parallel {tensor}"),
        };
        ensure!(
            shard * replicate * tensor == self.mesh.ranks(),
            "{parts} must divide the {} ranks of {hosts} hosts with {ranks_per_host} each",
            self.mesh.ranks()
        );
        ensure!(
            shard.is_multiple_of(context),
            "--context-parallel {context} must divide the {shard} ranks that a replica is sharded over"
        );
        ensure!(
            (shard / context).is_multiple_of(expert),
            "--expert-parallel {expert} must divide the {} ranks that shard a replica and read different data",
            shard / context
        );
        ensure!(
            expert == 1 || self.framework != Framework::Pytorch,
            "--expert-parallel is not planned with --framework pytorch: leave out one of them"
        );
        ensure!(
            context == 1 || self.framework != Framework::Pytorch,
            "--context-parallel is not planned with --framework pytorch: leave out one of them"
        );
        ensure!(
            tensor == 1 || self.framework != Framework::Pytorch,
            "--tensor-parallel is not planned with --framework pytorch: leave out one of them"
        );
        if let ReshardAfterForward::To(ranks) = self.reshard {
            ensure!(
                ranks > 1 && ranks < shard && shard.is_multiple_of(ranks),
                "--reshard-after-forward {ranks} must divide the {shard} ranks that a replica is sharded over, and be \
                 neither 1 nor that number"
            );
        }
        ensure!(
            !self.offload || self.checkpoint == Checkpoint::Full,
            "--activation-offload has no effect without --activation-checkpoint full: leave it out"
        );
        let has_cudnn = self.framework == Framework::OnDevice && self.device.name.has_cudnn();
        ensure!(
            !self.cudnn || has_cudnn && self.compute == Precision::Bf16,
            "--cudnn is for bf16 on h100-sxm, h200 and b200 with candle-fsdp: cuDNN computes no other attention"
        );
        ensure!(
            !self.registered || self.framework == Framework::OnDevice,
            "--allocate-memory-from-process-group-for-comm is for candle-fsdp on a GPU: the memory is NCCL's"
        );
        let positions = self.model.positions;
        ensure!(self.seq <= positions, "--seq {} is beyond the model's {positions} positions", self.seq);
        if self.framework != Framework::Pytorch && self.checkpoint == Checkpoint::Selective {
            bail!(
                "--activation-checkpoint selective is PyTorch's: `train` has none and full; --framework pytorch plans \
                 PyTorch"
            );
        }
        Ok(())
    }
}

/// Summary of a plan.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Choice {
    pub(super) shard: usize,
    pub(super) replicate: usize,
    pub(super) reshard_after_forward: String,
    pub(super) batch: usize,
    /// Bytes of a rank.
    pub(super) memory: f64,
    /// Seconds of a step.
    pub(super) step: f64,
    pub(super) exposed: f64,
    pub(super) tokens_per_s_per_rank: f64,
    pub(super) mfu: f64,
}

/// Largest batch of the search, which doubles from 1.
const LARGEST_BATCH: usize = 1 << 10;
/// Relative difference below which speeds count as equal.
const ALIKE: f64 = 0.005;

/// Returns the `top` best setups that fit, fastest first. Among those as fast as the best, the first needs the least
/// memory.
///
/// Tries all numbers of replicas, all policies, and batches that double. For a device of unknown memory, tries only the
/// batch of `setup`.
pub(super) fn best(setup: &Setup, top: usize) -> Vec<Choice> {
    let ranks = setup.mesh.ranks() / setup.mesh.tensor;
    let mut choices = vec![];
    let parts = setup.mesh.context * setup.mesh.expert;
    for shard in (1..=ranks).filter(|shard| ranks.is_multiple_of(*shard) && shard.is_multiple_of(parts)) {
        let mesh = Mesh { shard, replicate: ranks / shard, ..setup.mesh };
        // Shards within a host, or within half of a replica.
        let parts = [setup.mesh.ranks_per_host / setup.mesh.tensor, shard / 2].map(ReshardAfterForward::To);
        let mut policies = vec![ReshardAfterForward::Default, ReshardAfterForward::Never];
        policies.extend(parts.iter().filter(|&&part| Setup { mesh, reshard: part, ..*setup }.check().is_ok()));
        policies.dedup();
        if shard == 1 {
            // A single rank gathers nothing.
            policies.truncate(1);
        }
        for reshard in policies {
            for batch in batches(setup) {
                let setup = Setup { mesh, reshard, batch, ..*setup };
                let memory = memory::of(&setup).total;
                if !setup.fits(memory) {
                    break;
                }
                choices.push(Choice { memory, ..choice(&setup) });
            }
        }
    }
    choices.sort_by(|a, b| b.tokens_per_s_per_rank.total_cmp(&a.tokens_per_s_per_rank));
    if let Some(fastest) = choices.first().map(|choice| choice.tokens_per_s_per_rank) {
        let alike = choices.partition_point(|choice| choice.tokens_per_s_per_rank >= fastest * (1. - ALIKE));
        choices[..alike].sort_by(|a, b| a.memory.total_cmp(&b.memory));
    }
    choices.truncate(top);
    choices
}

fn batches(setup: &Setup) -> Vec<usize> {
    match setup.device.memory {
        None => vec![setup.batch],
        Some(_) => {
            std::iter::successors(Some(1), |batch| Some(2 * batch)).take_while(|&b| b <= LARGEST_BATCH).collect()
        }
    }
}

fn choice(setup: &Setup) -> Choice {
    let time = time::of(setup);
    Choice {
        shard: setup.mesh.shard,
        replicate: setup.mesh.replicate,
        reshard_after_forward: reshard_word(setup.reshard),
        batch: setup.batch,
        memory: 0.,
        step: time.step,
        exposed: time.exposed,
        tokens_per_s_per_rank: time.tokens_per_s_per_rank,
        mfu: time.mfu,
    }
}
