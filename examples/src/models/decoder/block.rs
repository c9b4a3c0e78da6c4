//! One block: attention and MLP or experts, each behind a norm and beside a residual.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use super::attention::Attention;
use super::experts::Experts;
use super::mlp::Mlp;
use super::norm::Norm;
use super::rope::Turns;
use crate::models::batch::Rows;
use crate::models::config::DecoderConfig;
use crate::models::dropout::Drops;
use crate::models::parallel::TensorParallel;

/// One block.
pub struct Block {
    input_norm: Norm,
    attention: Attention,
    /// Behind the attention, where there are such.
    attention_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: Feed,
    /// Behind the MLP.
    output_norm: Option<Norm>,
}

enum Feed {
    Mlp(Mlp),
    Experts(Experts),
}

impl Block {
    /// Asks `vb` for the parameters of the block number `layer`; the rotary tables are shared by all blocks, whose
    /// layers several ranks may compute together.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(
        config: &DecoderConfig,
        layer: usize,
        turns: &Turns,
        drops: &Drops,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let norm = |name: &str| Norm::new(config.width, config.norms, vb.pp(name));
        let behind = |name: &str| config.norms.behind.then(|| norm(name)).transpose();
        // Gemma calls by this name what is behind the attention, the others what is before the MLP.
        let (after, before) = ("post_attention_layernorm", "pre_feedforward_layernorm");
        Ok(Block {
            input_norm: norm("input_layernorm")?,
            attention: Attention::new(config, layer, turns, drops, vb.pp("self_attn"))?,
            attention_norm: behind(after)?,
            mlp_norm: norm(if config.norms.behind { before } else { after })?,
            mlp: match config.experts(layer) {
                Some(experts) => Feed::Experts(Experts::new(config, experts, parallel, vb.pp(experts.names.0))?),
                None => Feed::Mlp(Mlp::new(config, vb.pp("mlp"))?),
            },
            output_norm: behind("post_feedforward_layernorm")?,
        })
    }

    /// The residual stream `[B, T, C]` behind the block, and what its experts say for the
    /// loss that keeps them equally busy.
    ///
    /// # Errors
    /// Those of its layers.
    pub fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let behind = |norm: &Option<Norm>, x: Tensor| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let attention = self.attention.forward(&self.input_norm.forward(x_btc)?, rows.documents.as_ref())?;
        let x_btc = (x_btc + behind(&self.attention_norm, attention)?)?;
        let normed = self.mlp_norm.forward(&x_btc)?;
        let (mlp, busy) = match &self.mlp {
            Feed::Mlp(mlp) => (mlp.forward(&normed)?, None),
            Feed::Experts(experts) => experts.forward(&normed, rows)?,
        };
        Ok(((x_btc + behind(&self.output_norm, mlp)?)?, busy))
    }
}
