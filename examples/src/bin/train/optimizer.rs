//! AdamW with the groups that the flags make.

use anyhow::{Context, ensure};
use fsdp_candle::{AdamW, AdamWConfig, NamePattern, ShardedVarMap};

use crate::args::Args;

/// Parameters that decay, and those that do not.
pub(crate) fn adamw(args: &Args, vars: &ShardedVarMap) -> anyhow::Result<AdamW> {
    let config = AdamWConfig { lr: args.lr, betas: args.betas, eps: args.eps, weight_decay: args.weight_decay };
    let params = vars.trainable();
    if args.no_decay.is_empty() {
        return Ok(AdamW::new(params, config)?);
    }
    let patterns = args.no_decay.iter().map(|text| NamePattern::new(text));
    let patterns = patterns.collect::<Result<Vec<_>, _>>().context("--no-decay")?;
    for pattern in &patterns {
        ensure!(
            params.iter().any(|param| pattern.matches_end(param.name())),
            "--no-decay: `{pattern}` means no parameter that is trained, such as {}",
            params.first().map_or("none", |param| param.name())
        );
    }
    let (kept, decaying) =
        params.into_iter().partition(|param| patterns.iter().any(|pattern| pattern.matches_end(param.name())));
    Ok(AdamW::with_groups(vec![(decaying, config), (kept, AdamWConfig { weight_decay: 0., ..config })])?)
}
