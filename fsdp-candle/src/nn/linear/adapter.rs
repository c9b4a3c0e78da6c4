//! The low-rank difference beside a fully connected layer.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::super::input::Input;
use super::super::parallel::serve;
use super::super::weight::claim;
use super::affine::affine;
use crate::adapter::LoraConfig;
use crate::fsdp::FsdpParam;

/// `alpha / r * B A x`, with `A` `[r, in]` and `B` `[out, r]`.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Adapter {
    down: Tensor,
    up: Tensor,
    scale: f64,
}

impl Adapter {
    /// The adapter that the map of this weight, `[out, in]` or `[in, out]`, asks for, if it does.
    pub(super) fn wanted(weight: &Tensor, in_out: bool, vb: VarBuilder) -> Result<Option<Self>> {
        let Some(param) = FsdpParam::of(weight) else { return Ok(None) };
        let Some(config) = param.spec.adapter else { return Ok(None) };
        let (rows, columns) = param.shape().dims2()?;
        let (inputs, outputs) = if in_out { (rows, columns) } else { (columns, rows) };
        Adapter::new(inputs, outputs, config, vb).map(Some)
    }

    /// Notes that the layer does its part under a plan. There the adapter stands before the layer's collectives: a
    /// layer cut along its outputs has the whole `A`, of whose gradient each rank has a term, and its part of `B`; one
    /// cut along its inputs its part of `A`, and the whole `B`.
    pub(super) fn serve(&self) {
        serve(&self.down);
        serve(&self.up);
    }

    /// Whether a plan cuts the layer that it stands beside.
    pub(in crate::nn) fn is_parallel(&self) -> bool {
        FsdpParam::of(&self.down).is_some_and(|param| param.parallel().is_some())
    }

    /// Asks `vb` for the two matrices.
    pub(in crate::nn) fn new(in_dim: usize, out_dim: usize, config: LoraConfig, vb: VarBuilder) -> Result<Self> {
        let LoraConfig { rank, alpha } = config;
        if rank == 0 || !alpha.is_finite() {
            bail!(
                "lora: `{}` is to have an adapter of rank {rank} with alpha = {alpha}: the rank is at least 1 and \
                 alpha finite",
                vb.prefix()
            );
        }
        let longest = in_dim.max(out_dim).max(1);
        if rank > isize::MAX as usize / longest / vb.dtype().size_in_bytes().max(1) {
            bail!(
                "lora: `{}` is to have an adapter of rank {rank} on {in_dim} inputs and {out_dim} outputs, which is \
                 larger than any memory: a rank is a small number, and one above {} adds nothing",
                vb.prefix(),
                in_dim.min(out_dim)
            );
        }
        // Kaiming-uniform with a = sqrt(5), as the paper's authors and PEFT draw it.
        let bound = 1. / (in_dim as f64).sqrt();
        let a = vb.pp("lora_A").get_with_hints((rank, in_dim), "weight", Init::Uniform { lo: -bound, up: bound })?;
        let b = vb.pp("lora_B").get_with_hints((out_dim, rank), "weight", Init::Const(0.))?;
        claim(&a);
        claim(&b);
        Ok(Adapter { down: a, up: b, scale: alpha / rank as f64 })
    }

    /// What a layer gives for `x`, which is `y` without its adapter.
    pub(in crate::nn) fn beside<'a>(adapter: Option<&Self>, y: Tensor, x: impl Into<Input<'a>>) -> Result<Tensor> {
        let Some(Adapter { down, up, scale }) = adapter else { return Ok(y) };
        // Scaled where it is small, [.., r].
        let low = (affine("lora_A", x, down, None, false)? * *scale)?;
        y + affine("lora_B", &low, up, None, false)?
    }
}
