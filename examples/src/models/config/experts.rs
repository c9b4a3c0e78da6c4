//! Configuration of experts, and of the router that chooses them.

use anyhow::{Context, ensure};
use fsdp_candle::nn::SwiGluClamp;
use fsdp_ckpt::hf::ExpertNames;

use crate::models::config::families::{ExpertKeys, ExpertLayers, Family, RouterKeys};
use crate::models::config::fields::Fields;
use crate::models::config::{Activation, above_zero, at_least_one, not_negative};

/// Experts: MLPs of which each token uses some.
#[derive(Clone, Debug)]
pub struct ExpertsConfig {
    /// Number of experts.
    pub count: usize,
    /// Experts per token.
    pub per_token: usize,
    /// Width inside an expert.
    pub inner: usize,
    /// Name of the width in `config.json`.
    pub width_name: &'static str,
    /// Width inside the MLP that all tokens use beside the experts, if there is one.
    pub shared: Option<usize>,
    /// Limits of the experts' projections, if they have some.
    pub clamp: Option<SwiGluClamp>,
    /// Whether the experts' layers have biases.
    pub biases: bool,
    /// Choice of experts.
    pub router: RouterConfig,
    /// Coefficient of the load-balancing loss, if any.
    pub auxiliary: Option<f64>,
    /// Names of the experts' parameters.
    pub names: ExpertNames,
    /// Whether the model counts the tokens of each expert while it trains.
    pub counted: bool,
    layers: Layers,
}

/// The choice of a token's experts, and their weights.
#[derive(Clone, Copy, Debug)]
pub struct RouterConfig {
    /// The scores of the experts.
    pub scores: Scores,
    /// Whether its layer has a bias.
    pub has_bias: bool,
    /// Whether the choice adds a bias to each expert's score (Wang et al., 2024, arXiv:2408.15664).
    pub has_choice_bias: bool,
    /// Groups of experts, of which a token uses some.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are normalised to sum up to 1.
    pub renormalized: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// Whether the router computes in f32, whatever the dtype of the parameters. Such a router has no adapter.
    pub in_f32: bool,
}

/// How a router turns its outputs into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Scores {
    Softmax,
    Sigmoid,
}

/// Groups of experts, as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). A token's experts are all in its best groups.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups {
    /// Number of groups. All have as many experts.
    pub count: usize,
    /// Groups of a token.
    pub per_token: usize,
    /// A group is as good as the sum of this many highest scores in it.
    pub best: usize,
}

/// Layers that have experts.
#[derive(Clone, Debug)]
enum Layers {
    /// Every `step`-th one, except the dense ones.
    Sparse { step: usize, dense: Vec<usize> },
    /// Layers from this one on.
    From(usize),
}

impl ExpertsConfig {
    pub(super) fn new(family: &Family, fields: &Fields) -> anyhow::Result<Option<Self>> {
        let Some(keys) = family.experts else { return Ok(None) };
        let (count, width_name) = ((keys.count)(fields), keys.width_name);
        let inner = (keys.width)(fields).with_context(|| format!("missing field `{width_name}`"))?;
        let per_token = fields.num_experts_per_tok.or(keys.per_token);
        let per_token = per_token.context("missing field `num_experts_per_tok`")?;
        let layers = match keys.layers {
            ExpertLayers::All => Layers::Sparse { step: 1, dense: vec![] },
            ExpertLayers::Sparse => {
                let (step, mut dense) =
                    (fields.decoder_sparse_step, fields.mlp_only_layers.clone().unwrap_or_default());
                dense.sort_unstable();
                dense.dedup();
                Layers::Sparse { step: step.unwrap_or(1), dense }
            }
            ExpertLayers::From(usual) => Layers::From(fields.first_k_dense_replace.unwrap_or(usual)),
        };
        let step = if let Layers::Sparse { step, .. } = &layers { *step } else { 1 };
        at_least_one(&[
            ("num_experts", count),
            ("num_experts_per_tok", per_token),
            (width_name, inner),
            ("decoder_sparse_step", step),
        ])?;
        ensure!(per_token <= count, "num_experts_per_tok = {per_token} must be at most the {count} experts");
        let noise = fields.router_jitter_noise.unwrap_or(0.);
        ensure!(noise == 0., "router_jitter_noise = {noise} is not supported; expected 0");
        let hidden_act = fields.hidden_act.as_deref().unwrap_or("silu");
        ensure!(
            Activation::parse("hidden_act", hidden_act)? == Activation::Silu,
            "hidden_act = \"{hidden_act}\" is not supported for experts; expected \"silu\""
        );
        let shared = match keys.shared {
            None => None,
            Some(usual) => {
                let shared = fields.n_shared_experts.unwrap_or(usual);
                at_least_one(&[("n_shared_experts", shared)])?;
                Some(shared.saturating_mul(inner))
            }
        };
        let coefficient = fields.router_aux_loss_coef.unwrap_or(0.001);
        not_negative(&[("router_aux_loss_coef", coefficient)])?;
        let has_auxiliary = keys.has_auxiliary && fields.output_router_logits.unwrap_or(false);
        Ok(Some(ExpertsConfig {
            count,
            per_token,
            inner,
            width_name,
            shared,
            clamp: keys.is_gpt_oss.then(|| clamp(fields)).transpose()?,
            biases: keys.is_gpt_oss,
            router: RouterConfig::new(family.name, &keys, fields, (count, per_token))?,
            auxiliary: has_auxiliary.then_some(coefficient),
            names: keys.names,
            counted: false,
            layers,
        }))
    }

    /// Returns whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        match &self.layers {
            Layers::Sparse { step, dense } => (layer + 1).is_multiple_of(*step) && dense.binary_search(&layer).is_err(),
            Layers::From(first) => layer >= *first,
        }
    }
}

impl RouterConfig {
    fn new(
        family: &str,
        keys: &ExpertKeys,
        fields: &Fields,
        (count, per_token): (usize, usize),
    ) -> anyhow::Result<Self> {
        let scale = fields.routed_scaling_factor;
        let in_f32 = matches!(keys.router, RouterKeys::DeepseekV2 | RouterKeys::DeepseekV3);
        let usual = RouterConfig {
            scores: Scores::Softmax,
            has_bias: keys.is_gpt_oss,
            has_choice_bias: false,
            groups: None,
            renormalized: false,
            scale: 1.,
            in_f32,
        };
        let router = match keys.router {
            RouterKeys::Softmax { renormalized } => {
                let renormalized = renormalized.or(fields.norm_topk_prob).unwrap_or(false);
                return Ok(RouterConfig { renormalized, ..usual });
            }
            RouterKeys::DeepseekV2 => {
                check_name("scoring_func", &fields.scoring_func, &["softmax"])?;
                check_name("topk_method", &fields.topk_method, &["greedy", "group_limited_greedy"])?;
                let grouped = fields.topk_method.as_deref() == Some("group_limited_greedy");
                RouterConfig {
                    groups: grouped.then(|| groups(fields, (None, None), 1)).transpose()?,
                    scale: scale.unwrap_or(1.),
                    ..usual
                }
            }
            RouterKeys::DeepseekV3 => {
                check_name("scoring_func", &fields.scoring_func, &["sigmoid"])?;
                check_name("topk_method", &fields.topk_method, &["noaux_tc"])?;
                RouterConfig {
                    scores: Scores::Sigmoid,
                    has_choice_bias: true,
                    groups: Some(groups(fields, (Some(8), Some(4)), 2)?),
                    renormalized: fields.norm_topk_prob.unwrap_or(true),
                    scale: scale.unwrap_or(2.5),
                    ..usual
                }
            }
        };
        above_zero(&[("routed_scaling_factor", router.scale)])?;
        let step = fields.moe_layer_freq.unwrap_or(1);
        ensure!(step == 1, "moe_layer_freq = {step} is not supported for {family}; expected 1");
        if let Some(ExpertGroups { count: groups, per_token: used, best }) = router.groups {
            let of_group = count / groups;
            ensure!(
                count.is_multiple_of(groups) && of_group >= best,
                "n_group = {groups} must divide the {count} experts into groups of at least {best}"
            );
            ensure!(used <= groups, "topk_group = {used} must be at most n_group = {groups}");
            ensure!(
                per_token <= used * of_group,
                "num_experts_per_tok = {per_token} must be at most the {} experts in topk_group = {used} groups",
                used * of_group
            );
        }
        Ok(router)
    }
}

fn clamp(fields: &Fields) -> anyhow::Result<SwiGluClamp> {
    let (alpha, limit) = (fields.swiglu_alpha.unwrap_or(1.702), fields.swiglu_limit.unwrap_or(7.));
    above_zero(&[("swiglu_alpha", alpha), ("swiglu_limit", limit)])?;
    Ok(SwiGluClamp { alpha, limit })
}

fn groups(fields: &Fields, usual: (Option<usize>, Option<usize>), best: usize) -> anyhow::Result<ExpertGroups> {
    let count = fields.n_group.or(usual.0).context("missing field `n_group`")?;
    let per_token = fields.topk_group.or(usual.1).context("missing field `topk_group`")?;
    at_least_one(&[("n_group", count), ("topk_group", per_token)])?;
    Ok(ExpertGroups { count, per_token, best })
}

/// Fails for a value that is not known.
fn check_name(name: &str, value: &Option<String>, known: &[&str]) -> anyhow::Result<()> {
    let Some(value) = value.as_deref() else { return Ok(()) };
    let expected = known.iter().map(|known| format!("\"{known}\"")).collect::<Vec<_>>().join(" or ");
    ensure!(known.contains(&value), "{name} = \"{value}\" is not supported; expected {expected}");
    Ok(())
}
