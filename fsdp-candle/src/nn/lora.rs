//! Low-rank adapters (LoRA): a frozen layer and a small trainable difference beside it.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), arXiv:2106.09685:
//! `y = base(x) + alpha / r * B A x` with `A` `[r, in]` random and `B` `[out, r]` zero, so that training starts from
//! the base model.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::linear::Linear;

/// A layer with a low-rank adapter: input `[.., in]`, output `[.., out]`, as the base layer's.
///
/// The base layer is [`Linear`], [`Conv1D`](super::Conv1D) or any other module. To train the adapters alone, freeze
/// what they adapt, before the model is built: `vars.freeze(|name| !is_adapter(name))`. Base and adapter may be of one
/// FSDP unit: frozen parameters are gathered with the rest, and have neither gradients nor optimizer state.
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
    down: Linear,
    up: Linear,
    scale: f64,
}

/// How large an adapter is, and how much it counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank `r`.
    pub rank: usize,
    /// The adapter's output is multiplied by `alpha / rank`.
    pub alpha: f64,
}

impl<M> Lora<M> {
    /// The adapted layer.
    pub fn base(&self) -> &M {
        &self.base
    }
}

impl<M: Module> Module for Lora<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Scaled where it is small, [.., r].
        self.base.forward(x)? + self.up.forward(&(self.down.forward(x)? * self.scale)?)?
    }
}

/// A [`Lora`] around `base`, with the tensors `lora_A.weight` `[rank, in]` and `lora_B.weight` `[out, rank]` of `vb`.
///
/// Pass the `vb` that the base layer was built from: the adapter then stands beside its `weight`, under the names that
/// PEFT gives it in adapter files. The base keeps its own name (`q_proj.weight`, where PEFT's wrapped model says
/// `q_proj.base_layer.weight`), so that pretrained weights load as they are.
///
/// # Errors
/// When the rank is 0 or the adapter is larger than any memory, `alpha` is not finite, or a tensor can't be had.
pub fn lora<M>(base: M, in_dim: usize, out_dim: usize, config: LoraConfig, vb: VarBuilder) -> Result<Lora<M>> {
    let LoraConfig { rank, alpha } = config;
    if rank == 0 || !alpha.is_finite() {
        bail!(
            "lora: `{}` is to have an adapter of rank {rank} with alpha = {alpha}: the rank is at least 1 and alpha \
             finite",
            vb.prefix()
        );
    }
    let longest = in_dim.max(out_dim).max(1);
    if rank > isize::MAX as usize / longest / vb.dtype().size_in_bytes().max(1) {
        bail!(
            "lora: `{}` is to have an adapter of rank {rank} on {in_dim} inputs and {out_dim} outputs, which is larger \
             than any memory: a rank is a small number, and one above {} adds nothing",
            vb.prefix(),
            in_dim.min(out_dim)
        );
    }
    // Kaiming-uniform with a = sqrt(5), as the paper's authors and PEFT draw it.
    let bound = 1. / (in_dim as f64).sqrt();
    let a = vb.pp("lora_A").get_with_hints((rank, in_dim), "weight", Init::Uniform { lo: -bound, up: bound })?;
    let b = vb.pp("lora_B").get_with_hints((out_dim, rank), "weight", Init::Const(0.))?;
    Ok(Lora { base, down: Linear::new(a, None), up: Linear::new(b, None), scale: alpha / rank as f64 })
}

/// Whether a parameter of this name belongs to an adapter that [`lora`] made.
pub fn is_adapter(name: &str) -> bool {
    ["lora_A.weight", "lora_B.weight"]
        .iter()
        .any(|end| name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}
