//! Checks that a flag of `train` has an effect beside the others.

use anyhow::ensure;
use fsdp_train::flags::ActivationPlace;
use fsdp_train::models::Base;

use crate::args::{Args, OptimizerKind};
use crate::flag_types::{ActivationCheckpoint, AllGather, InBackward, Resume};

/// Fails if a flag has no effect beside the other flags.
pub(crate) fn check_unused_flags(args: &Args) -> anyhow::Result<()> {
    check_unused_optimizer_flags(args)?;
    if args.offload.disk().is_some() {
        ensure!(
            args.optimizer.optimizer != OptimizerKind::Muon,
            "--offload disk:DIR is for --optimizer adamw, adam, adamw8bit or sgd, found muon: use another optimizer"
        );
        ensure!(
            !args.async_save,
            "--async-save copies optimizer state to memory, and --offload disk:DIR keeps it out of memory: leave one out"
        );
    }
    if args.optimizer_in_backward != InBackward::Off {
        ensure!(
            !args.computes_in_f16(),
            "--optimizer-in-backward can't step in f16: whether gradients overflow is known after backward. Use bf16"
        );
        ensure!(
            args.optimizer_in_backward != InBackward::LastNorm || args.clip_grad_norm > 0.,
            "--optimizer-in-backward last-norm clips, and --clip-grad-norm 0 does not: pass unclipped, or a norm above 0"
        );
    }
    let has_adapters = args.lora_rank.is_some() || args.lora_from.is_some();
    let recomputes = args.activation_checkpoint != ActivationCheckpoint::None;
    for (flag, is_given, has_effect, needed) in [
        ("--packing", args.packing.is_some(), args.sft.is_some(), "--sft"),
        (
            "--shard-optimizer-over-replicas",
            args.shard_optimizer_over_replicas,
            args.replicate > 1,
            "--replicate of at least 2",
        ),
        ("--grad-sync", args.grad_sync.is_some(), args.grad_accum > 1, "--grad-accum of at least 2"),
        ("--checkpoint-keep", !args.checkpoint_keep.is_empty(), recomputes, "--activation-checkpoint"),
        (
            "--activation-offload",
            args.activation_offload != ActivationPlace::None,
            recomputes,
            "--activation-checkpoint",
        ),
        ("--base", args.base != Base::F32, has_adapters, "--lora-rank or --lora-from"),
        ("--all-gather", args.all_gather != AllGather::Full, args.base == Base::F32, "--base f32"),
        ("--resume-anyway", args.resume_anyway, args.resume != Resume::None, "--resume"),
    ] {
        ensure!(!is_given || has_effect, "{flag} has no effect without {needed}: leave it out");
    }
    Ok(())
}

fn check_unused_optimizer_flags(args: &Args) -> anyhow::Result<()> {
    use OptimizerKind::{Adam, Adamw, Adamw8bit, Muon, Sgd};
    let flags = &args.optimizer;
    let adams = &[Adamw, Adam, Adamw8bit, Muon][..];
    for (flag, is_given, kinds) in [
        ("--betas", flags.betas.is_some(), adams),
        ("--eps", flags.eps.is_some(), adams),
        ("--momentum", flags.momentum.is_some(), &[Sgd, Muon]),
        ("--dampening", flags.dampening.is_some(), &[Sgd]),
        ("--nesterov", flags.nesterov.is_some(), &[Sgd, Muon]),
        ("--muon-lr", flags.muon_lr.is_some(), &[Muon]),
        ("--muon-adjust-lr", flags.muon_adjust_lr.is_some(), &[Muon]),
        ("--min-8bit-size", flags.min_8bit_size.is_some(), &[Adamw8bit]),
    ] {
        let expected = kinds.iter().map(|kind| kind.word()).collect::<Vec<_>>().join(" or ");
        let found = flags.optimizer.word();
        ensure!(
            !is_given || kinds.contains(&flags.optimizer),
            "{flag} is for --optimizer {expected}, found {found}: leave it out"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn flags_without_effect_are_refused() {
        let checked = |flags: String| check_unused_flags(&Args::parse_from(format!("train {flags}").split(' ')));
        for (flag, needs, what) in [
            ("--packing on", "--sft a.jsonl", "--packing has no effect without --sft: leave it out"),
            ("--packing off", "--sft a.jsonl", "--packing has no effect without --sft: leave it out"),
            ("--shard-optimizer-over-replicas", "--replicate 2", "without --replicate of at least 2"),
            ("--grad-sync every", "--grad-accum 2", "without --grad-accum of at least 2"),
            ("--grad-sync last", "--grad-accum 2", "without --grad-accum of at least 2"),
            ("--checkpoint-keep linear", "--activation-checkpoint full", "without --activation-checkpoint"),
            ("--activation-offload disk:.", "--activation-checkpoint full", "without --activation-checkpoint"),
            ("--lora-rank 2 --base nf4 --all-gather float8", "", "--all-gather has no effect without --base f32"),
            ("--base nf4", "--lora-rank 2", "--base has no effect without --lora-rank or --lora-from"),
            ("--resume-anyway", "--resume auto", "--resume-anyway has no effect without --resume"),
            ("--optimizer sgd --betas 0.9,0.95", "", "--betas is for --optimizer adamw or adam or adamw8bit or muon"),
            ("--optimizer sgd --eps 1e-8", "", "--eps is for --optimizer adamw or adam or adamw8bit or muon"),
            ("--momentum 0.9", "--optimizer sgd", "--momentum is for --optimizer sgd or muon, found adamw"),
            ("--dampening 0.1", "--optimizer sgd", "--dampening is for --optimizer sgd"),
            ("--nesterov on", "--optimizer muon", "--nesterov is for --optimizer sgd or muon"),
            ("--muon-lr 1", "--optimizer muon", "--muon-lr is for --optimizer muon"),
            ("--muon-adjust-lr original", "--optimizer muon", "--muon-adjust-lr is for --optimizer muon"),
            ("--min-8bit-size 1", "--optimizer adamw8bit", "--min-8bit-size is for --optimizer adamw8bit"),
        ] {
            let error = checked(flag.into()).unwrap_err().to_string();
            assert!(error.contains(what) && error.ends_with("leave it out"), "{flag}: {error}");
            if !needs.is_empty() {
                checked(format!("{flag} {needs}")).unwrap();
            }
        }
        for (flags, what) in [
            ("--optimizer muon", "--offload disk:DIR is for --optimizer adamw, adam, adamw8bit or sgd, found muon"),
            ("--async-save", "--async-save copies optimizer state to memory"),
        ] {
            for on_disk in ["disk:/nvme", "disk+shards:/nvme"] {
                let error = checked(format!("--offload {on_disk} {flags}")).unwrap_err().to_string();
                assert!(error.contains(what), "{flags}: {error}");
            }
            checked(format!("--offload cpu {flags}")).unwrap();
        }
        for (flags, what) in [
            ("unclipped --param-dtype f16", "can't step in f16"),
            ("last-norm --reduce-dtype f16", "can't step in f16"),
            ("last-norm --clip-grad-norm 0", "pass unclipped, or a norm above 0"),
        ] {
            let error = checked(format!("--optimizer-in-backward {flags}")).unwrap_err().to_string();
            assert!(error.contains(what), "{flags}: {error}");
        }
        checked("--optimizer-in-backward unclipped --clip-grad-norm 0".into()).unwrap();
        for kind in ["adamw", "adam", "adamw8bit", "muon"] {
            checked(format!("--optimizer {kind} --betas 0.9,0.95 --eps 1e-8")).unwrap();
        }
    }
}
