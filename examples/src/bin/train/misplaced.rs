//! Flags that mean nothing beside the others: whoever passes one expects something of it.

use anyhow::ensure;

use crate::args::Args;
use crate::optimizer_flags::Kind;
use crate::values::{ActivationCheckpoint, Resume};

/// Fails where a flag is given that nothing is done with.
///
/// # Errors
/// Names the flag, and what it is for.
pub(crate) fn check(args: &Args) -> anyhow::Result<()> {
    of_the_optimizer(args)?;
    for (flag, is_given, has_meaning, what) in [
        ("--packing", args.packing.is_some(), args.sft.is_some(), "for the examples of --sft"),
        (
            "--shard-optimizer-over-replicas",
            args.shard_optimizer_over_replicas,
            args.replicate > 1,
            "for copies of the model, and --replicate is 1",
        ),
        (
            "--grad-sync",
            args.grad_sync.is_some(),
            args.grad_accum > 1,
            "for several micro-batches a step, and --grad-accum is 1",
        ),
        (
            "--checkpoint-keep",
            !args.checkpoint_keep.is_empty(),
            args.activation_checkpoint != ActivationCheckpoint::None,
            "for blocks that run again: say which by --activation-checkpoint",
        ),
        ("--resume-anyway", args.resume_anyway, args.resume != Resume::None, "for --resume, which is not given"),
    ] {
        ensure!(!is_given || has_meaning, "{flag} is {what}: leave it out");
    }
    Ok(())
}

fn of_the_optimizer(args: &Args) -> anyhow::Result<()> {
    use Kind::{Adam, Adamw, Adamw8bit, Muon, Sgd};
    let flags = &args.optimizer;
    let of_adam = &[Adamw, Adam, Adamw8bit, Muon][..];
    for (flag, is_given, of) in [
        ("--betas", flags.betas.is_some(), of_adam),
        ("--eps", flags.eps.is_some(), of_adam),
        ("--momentum", flags.momentum.is_some(), &[Sgd, Muon]),
        ("--dampening", flags.dampening.is_some(), &[Sgd]),
        ("--nesterov", flags.nesterov.is_some(), &[Sgd, Muon]),
        ("--muon-lr", flags.muon_lr.is_some(), &[Muon]),
        ("--muon-adjust-lr", flags.muon_adjust_lr.is_some(), &[Muon]),
        ("--min-8bit-size", flags.min_8bit_size.is_some(), &[Adamw8bit]),
    ] {
        let kinds = of.iter().map(|kind| kind.word()).collect::<Vec<_>>().join(" or ");
        let own = flags.optimizer.word();
        ensure!(
            !is_given || of.contains(&flags.optimizer),
            "{flag} is for --optimizer {kinds}, and this one is {own}: leave it out"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_flag_without_a_meaning_is_refused_and_has_one_beside_others() {
        let checked =
            |flags: &str| check(&Args::try_parse_from(["train"].into_iter().chain(flags.split(' '))).unwrap());
        for (flag, needs, what) in [
            ("--packing on", "--sft a.jsonl", "--packing is for the examples of --sft: leave it out"),
            ("--packing off", "--sft a.jsonl", "--packing is for the examples of --sft: leave it out"),
            ("--shard-optimizer-over-replicas", "--replicate 2", "for copies of the model, and --replicate is 1"),
            ("--grad-sync every", "--grad-accum 2", "for several micro-batches a step, and --grad-accum is 1"),
            ("--grad-sync last", "--grad-accum 2", "--grad-sync is for several micro-batches"),
            ("--checkpoint-keep linear", "--activation-checkpoint full", "for blocks that run again"),
            ("--resume-anyway", "--resume auto", "--resume-anyway is for --resume"),
            ("--optimizer sgd --betas 0.9,0.95", "", "--betas is for --optimizer adamw or adam or adamw8bit or muon"),
            ("--optimizer sgd --eps 1e-8", "", "--eps is for --optimizer adamw or adam or adamw8bit or muon"),
            ("--momentum 0.9", "--optimizer sgd", "--momentum is for --optimizer sgd or muon, and this one is adamw"),
            ("--dampening 0.1", "--optimizer sgd", "--dampening is for --optimizer sgd"),
            ("--nesterov on", "--optimizer muon", "--nesterov is for --optimizer sgd or muon"),
            ("--muon-lr 1", "--optimizer muon", "--muon-lr is for --optimizer muon"),
            ("--muon-adjust-lr original", "--optimizer muon", "--muon-adjust-lr is for --optimizer muon"),
            ("--min-8bit-size 1", "--optimizer adamw8bit", "--min-8bit-size is for --optimizer adamw8bit"),
        ] {
            let error = checked(flag).unwrap_err().to_string();
            assert!(error.contains(what) && error.ends_with("leave it out"), "{flag}: {error}");
            if !needs.is_empty() {
                checked(&format!("{flag} {needs}")).unwrap();
            }
        }
        for kind in ["adamw", "adam", "adamw8bit", "muon"] {
            checked(&format!("--optimizer {kind} --betas 0.9,0.95 --eps 1e-8")).unwrap();
        }
    }
}
