//! Low-rank adapters (LoRA): a frozen layer and a small trainable difference beside it.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), arXiv:2106.09685:
//! `y = base(x) + alpha / r * B A x` with `A` `[r, in]` random and `B` `[out, r]` zero, so that training starts from
//! the base model.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::linear::adapter::Adapter;
use crate::adapter::LoraConfig;

/// A layer with a low-rank adapter: input `[.., in]`, output `[.., out]`, as the base layer's.
///
/// [`crate::ShardedVarMap::adapt`] gives adapters to layers of a model that nobody changes; this is for one's own.
///
/// The base layer is [`Linear`](super::Linear), [`Conv1D`](super::Conv1D) or any other module. To train the adapters
/// alone, freeze what they adapt, before the model is built: `vars.freeze(|name| !is_adapter(name))`. Base and adapter
/// may be of one FSDP unit: frozen parameters are gathered with the rest, and have neither gradients nor optimizer
/// state.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// let world = World::single().unwrap();
/// let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
/// vars.freeze(|name| !nn::is_adapter(name));
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///     let vb = vb.pp("q_proj");
///     nn::lora(nn::linear(8, 6, vb.clone())?, 8, 6, nn::LoraConfig { rank: 2, alpha: 4. }, vb)
/// })
/// .unwrap();
/// let names = |trainable| {
///     let params = vars.params().into_iter().filter(|param| param.trainable() == trainable);
///     params.map(|param| param.name().to_string()).collect::<Vec<_>>()
/// };
/// assert_eq!(names(true), ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]);
/// assert_eq!(names(false), ["q_proj.weight", "q_proj.bias"]);
/// let x = Tensor::ones((3, 8), DType::F32, &Device::Cpu).unwrap();
/// assert_eq!(model.forward(&x).unwrap().dims(), [3, 6]);
/// ```
#[derive(Clone, Debug)]
pub struct Lora<M> {
    base: M,
    adapter: Adapter,
}

impl<M> Lora<M> {
    /// The adapted layer.
    pub fn base(&self) -> &M {
        &self.base
    }
}

impl<M: Module> Module for Lora<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Adapter::beside(Some(&self.adapter), self.base.forward(x)?, x)
    }
}

/// A [`Lora`] around `base`, with the tensors `lora_A.weight` `[rank, in]` and `lora_B.weight` `[out, rank]` of `vb`.
///
/// Pass the `vb` that the base layer was built from: the adapter then stands beside its `weight`, under the names that
/// PEFT gives it in adapter files. The base keeps its own name (`q_proj.weight`, where PEFT's wrapped model says
/// `q_proj.base_layer.weight`), so that pretrained weights load as they are.
///
/// # Errors
/// When the rank is 0 or the adapter is larger than any memory, `alpha` is not finite, a tensor can't be had, or a plan
/// of tensor parallelism cuts the layer.
pub fn lora<M>(base: M, in_dim: usize, out_dim: usize, config: LoraConfig, vb: VarBuilder) -> Result<Lora<M>> {
    let prefix = vb.prefix();
    let adapter = Adapter::new(in_dim, out_dim, config, vb)?;
    if adapter.is_parallel() {
        bail!(
            "lora: the plan of tensor parallelism cuts `{prefix}`, and an adapter around a layer does not know how: \
             let `ShardedVarMap::adapt` give it to the layer"
        );
    }
    Ok(Lora { base, adapter })
}
