//! The experts of a decoder's layers.

use anyhow::{Context, ensure};

use super::checks::{at_least_one, not_negative};
use super::fields::{Family, Fields};

/// MLPs of which each token chooses some.
#[derive(Clone, Debug)]
pub struct ExpertsConfig {
    /// How many there are.
    pub count: usize,
    /// How many a token chooses.
    pub per_token: usize,
    /// Width inside one.
    pub inner: usize,
    /// What `config.json` calls it.
    pub width_name: &'static str,
    /// Whether the weights of those chosen are made to add up to 1.
    pub renormalized: bool,
    /// What the loss that keeps experts equally busy is multiplied by, where there is one.
    pub auxiliary: Option<f64>,
    /// Their name in a layer, and those of an expert's projections: gate, up, down.
    pub names: (&'static str, [&'static str; 3]),
    sparse_step: usize,
    dense_layers: Vec<usize>,
}

impl ExpertsConfig {
    pub(super) fn new(family: Family, fields: &Fields) -> anyhow::Result<Option<Self>> {
        let (names, count, (width_name, inner), per_token, renormalized) = match family {
            Family::Mixtral => {
                let count = fields.num_local_experts.or(fields.num_experts).unwrap_or(8);
                let inner = ("intermediate_size", fields.intermediate_size);
                (("block_sparse_moe", ["w1", "w3", "w2"]), count, inner, 2, true)
            }
            Family::Qwen3Moe => {
                let count = fields.num_experts.or(fields.num_local_experts).unwrap_or(128);
                let name = "moe_intermediate_size";
                let inner = (name, fields.moe_intermediate_size.with_context(|| format!("missing field `{name}`"))?);
                let names = ("mlp", ["gate_proj", "up_proj", "down_proj"]);
                (names, count, inner, 8, fields.norm_topk_prob.unwrap_or(false))
            }
            _ => return Ok(None),
        };
        let per_token = fields.num_experts_per_tok.unwrap_or(per_token);
        let sparse_step = fields.decoder_sparse_step.filter(|_| family == Family::Qwen3Moe).unwrap_or(1);
        let mut dense_layers = match family {
            Family::Qwen3Moe => fields.mlp_only_layers.clone().unwrap_or_default(),
            _ => vec![],
        };
        dense_layers.sort_unstable();
        dense_layers.dedup();
        at_least_one(&[
            ("num_experts", count),
            ("num_experts_per_tok", per_token),
            (width_name, inner),
            ("decoder_sparse_step", sparse_step),
        ])?;
        ensure!(per_token <= count, "num_experts_per_tok = {per_token} must be at most the {count} experts");
        let noise = fields.router_jitter_noise.unwrap_or(0.);
        ensure!(noise == 0., "router_jitter_noise = {noise} is not supported; 0 is");
        let coefficient = fields.router_aux_loss_coef.unwrap_or(0.001);
        not_negative(&[("router_aux_loss_coef", coefficient)])?;
        let auxiliary = fields.output_router_logits.unwrap_or(false).then_some(coefficient);
        Ok(Some(ExpertsConfig {
            count,
            per_token,
            inner,
            width_name,
            renormalized,
            auxiliary,
            names,
            sparse_step,
            dense_layers,
        }))
    }

    /// Whether a layer has them.
    pub fn are_in(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.sparse_step) && self.dense_layers.binary_search(&layer).is_err()
    }
}
