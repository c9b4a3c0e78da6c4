//! Configuration of multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

use anyhow::{Context, ensure};

use crate::models::config::at_least_one;
use crate::models::config::families::LatentKeys;
use crate::models::config::fields::{Fields, RopeParameters};

/// Sizes of latent attention. A head of queries and keys has plain elements, then rotated ones.
#[derive(Clone, Copy, Debug)]
pub struct LatentConfig {
    /// Width of the latent queries. `None`: the queries are a product with the residual stream.
    pub query_rank: Option<usize>,
    /// Width of the latent keys and values.
    pub rank: usize,
    /// Elements of a head that are not rotated.
    pub plain: usize,
    /// Elements of a head that are rotated. Those of the keys are the same in all heads.
    pub rotated: usize,
    /// Elements of a head of the values.
    pub value: usize,
    /// Whether an element is paired with the next one for rotation, rather than with one of the other half.
    pub interleaved: bool,
}

impl LatentConfig {
    pub(super) fn new(keys: LatentKeys, fields: &Fields, kv_heads: usize) -> anyhow::Result<Self> {
        let latent = LatentConfig {
            query_rank: fields.q_lora_rank.unwrap_or(Some(1536)),
            rank: fields.kv_lora_rank.unwrap_or(512),
            plain: fields.qk_nope_head_dim.unwrap_or(128),
            rotated: fields.qk_rope_head_dim.unwrap_or(64),
            value: fields.v_head_dim.unwrap_or(128),
            interleaved: !keys.chooses_pairs || fields.rope_interleave.unwrap_or(true),
        };
        at_least_one(&[
            ("q_lora_rank", latent.query_rank.unwrap_or(1)),
            ("kv_lora_rank", latent.rank),
            ("qk_nope_head_dim", latent.plain),
            ("qk_rope_head_dim", latent.rotated),
            ("v_head_dim", latent.value),
        ])?;
        ensure!(latent.rotated.is_multiple_of(2), "qk_rope_head_dim = {} must be even", latent.rotated);
        let heads = fields.num_attention_heads;
        ensure!(
            kv_heads == heads,
            "num_key_value_heads = {kv_heads} must be num_attention_heads = {heads}: all heads have the same latent keys"
        );
        Ok(latent)
    }

    /// Returns the elements of a head of queries and keys.
    pub fn head_dim(&self) -> usize {
        self.plain + self.rotated
    }
}

/// Returns the factor of the scores beside `1 / sqrt(D)`, as transformers' `yarn_apply_mscale` does.
pub(super) fn score_factor(own: &RopeParameters) -> anyhow::Result<f64> {
    let kind = own.rope_type.as_deref().or(own.old_rope_type.as_deref()).unwrap_or("default");
    let Some(by) = own.mscale_all_dim.filter(|by| *by != 0. && kind != "default") else { return Ok(1.) };
    let factor = own.factor.with_context(|| format!("mscale_all_dim = {by} needs factor"))?;
    Ok(if factor <= 1. { 1. } else { (0.1 * by * factor.ln() + 1.).powi(2) })
}
