//! Rules over several flags: which flag needs or excludes which. `--help` shows each rule at its flag, and the error of a
//! command line that breaks a rule has the same words.
//!
//! clap's `requires` and `conflicts_with` are not used, because its help does not show them.

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, CommandFactory};
use fsdp_train::command_line;
use fsdp_train::flags::ActivationPlace;
use fsdp_train::models::{Base, Compute};

use crate::args::OptimizerKind::{Adamw8bit, Muon, Sgd};
use crate::args::{Args, OptimizerFlags, OptimizerKind};
use crate::flag_types::{ActivationCheckpoint, AllGather, InBackward, InitChoice, Precision, Resume, Switch};
use crate::task::TaskChoice;

/// A rule over several flags.
struct Rule {
    /// The flag whose help shows the rule, and the flags that it depends on.
    flags: &'static [&'static str],
    /// Returns whether a command line breaks the rule.
    is_broken: fn(&Args) -> bool,
    /// The rule, as the help and the error state it.
    words: &'static str,
    reason: &'static str,
    way_out: &'static str,
}

/// Returns the rule of a flag that is unused without others.
const fn unused(flags: &'static [&'static str], words: &'static str, is_broken: fn(&Args) -> bool) -> Rule {
    Rule { flags, is_broken, words, reason: "it has no effect otherwise", way_out: "leave it out" }
}

/// Returns the rule of a flag that other tasks do not support.
const fn unsupported(flags: &'static [&'static str], words: &'static str, is_broken: fn(&Args) -> bool) -> Rule {
    Rule { flags, is_broken, words, reason: "other tasks do not support it", way_out: "leave it out" }
}

/// Returns the rule of two flags that exclude each other.
const fn either(
    flags: &'static [&'static str; 2],
    words: &'static str,
    reason: &'static str,
    is_broken: fn(&Args) -> bool,
) -> Rule {
    Rule { flags, is_broken, words, reason, way_out: "leave one out" }
}

const RULES: &[Rule] = &[
    Rule {
        flags: &["init", "model"],
        is_broken: |args| args.init == InitChoice::Pretrained && args.model.is_none(),
        words: "--init pretrained needs --model DIR with weights",
        reason: "the built-in model has none",
        way_out: "pass --model, or leave it out",
    },
    Rule {
        flags: &["task", "data"],
        is_broken: |args| args.task == TaskChoice::Classify && args.data.is_none(),
        words: "--task classify needs --data FILE",
        reason: "the default data has no labels",
        way_out: "pass a .jsonl, .parquet or .csv file with the columns text and label, and maybe text_pair",
    },
    Rule {
        flags: &["task", "data"],
        is_broken: |args| args.task == TaskChoice::Embed && args.data.is_none(),
        words: "--task embed needs --data FILE",
        reason: "the default data has no pairs of texts",
        way_out: "pass a .jsonl, .parquet or .csv file with the columns anchor and positive, and maybe negative",
    },
    // Data.
    unsupported(&["sft", "task"], "--sft is for --task language", |args| !is_language(args) && args.sft.is_some()),
    unsupported(&["dpo", "task"], "--dpo is for --task language", |args| !is_language(args) && args.dpo.is_some()),
    either(&["sft", "data"], "--sft and --data exclude each other", "both are training data", |args| {
        args.sft.is_some() && args.data.is_some()
    }),
    either(&["dpo", "data"], "--dpo and --data exclude each other", "both are training data", |args| {
        args.dpo.is_some() && args.data.is_some()
    }),
    either(&["dpo", "sft"], "--dpo and --sft exclude each other", "both are training data", |args| {
        args.dpo.is_some() && args.sft.is_some()
    }),
    Rule {
        flags: &["dpo", "model"],
        is_broken: |args| args.dpo.is_some() && args.model.is_none(),
        words: "--dpo needs --model DIR with weights",
        reason: "the tuned model is compared with them, and the built-in model has none",
        way_out: "pass --model",
    },
    either(
        &["dpo", "init"],
        "--dpo and --init random exclude each other",
        "the tuned model is compared with the weights of --model",
        |args| args.dpo.is_some() && args.init == InitChoice::Random,
    ),
    unused(&["dpo-beta", "dpo"], "--dpo-beta needs --dpo", |args| args.dpo_beta.is_some() && args.dpo.is_none()),
    unused(&["packing", "sft"], "--packing needs --sft", |args| args.packing.is_some() && args.sft.is_none()),
    unused(&["pack", "data"], "--pack needs --data", |args| args.pack.is_some() && args.data.is_none()),
    unsupported(&["pack", "task"], "--pack is for --task language", |args| args.pack.is_some() && !is_language(args)),
    unused(&["text-field", "data"], "--text-field needs --data", |args| {
        args.text_field.is_some() && args.data.is_none()
    }),
    unsupported(&["text-field", "task"], "--text-field is for --task language", |args| {
        args.text_field.is_some() && !is_language(args)
    }),
    unused(&["token-bits", "data"], "--token-bits needs --data", |args| {
        args.token_bits.is_some() && args.data.is_none()
    }),
    unsupported(&["token-bits", "task"], "--token-bits is for --task language", |args| {
        args.token_bits.is_some() && !is_language(args)
    }),
    unused(&["eval-every", "eval"], "--eval-every needs --eval", |args| {
        args.eval_every.is_some() && args.eval.is_none()
    }),
    unused(&["mlm-probability", "task"], "--mlm-probability is for --task language", |args| {
        args.mlm_probability.is_some() && !is_language(args)
    }),
    unused(&["mask-token", "task"], "--mask-token is for --task language", |args| {
        args.mask_token.is_some() && !is_language(args)
    }),
    // Optimizer.
    unused(&["betas", "optimizer"], "--betas is for --optimizer adamw, adam, adamw8bit or muon", |args| {
        args.optimizer.betas.is_some() && is_optimizer(args, &[Sgd])
    }),
    unused(&["eps", "optimizer"], "--eps is for --optimizer adamw, adam, adamw8bit or muon", |args| {
        args.optimizer.eps.is_some() && is_optimizer(args, &[Sgd])
    }),
    unused(&["momentum", "optimizer"], "--momentum is for --optimizer sgd or muon", |args| {
        args.optimizer.momentum.is_some() && !is_optimizer(args, &[Sgd, Muon])
    }),
    unused(&["dampening", "optimizer"], "--dampening is for --optimizer sgd", |args| {
        args.optimizer.dampening.is_some() && !is_optimizer(args, &[Sgd])
    }),
    unused(&["nesterov", "optimizer"], "--nesterov is for --optimizer sgd or muon", |args| {
        args.optimizer.nesterov.is_some() && !is_optimizer(args, &[Sgd, Muon])
    }),
    Rule {
        flags: &["nesterov", "optimizer", "momentum", "dampening"],
        is_broken: |args| {
            let OptimizerFlags { nesterov, momentum, dampening, .. } = args.optimizer;
            let is_plain = momentum == Some(0.) || dampening.is_some_and(|dampening| dampening > 0.);
            is_optimizer(args, &[Sgd]) && nesterov == Some(Switch::On) && is_plain
        },
        words: "--nesterov on with --optimizer sgd needs a --momentum above 0 and no --dampening",
        reason: "Nesterov momentum is defined so",
        way_out: "leave one out",
    },
    unused(&["muon-lr", "optimizer"], "--muon-lr is for --optimizer muon", |args| {
        args.optimizer.muon_lr.is_some() && !is_optimizer(args, &[Muon])
    }),
    unused(&["muon-adjust-lr", "optimizer"], "--muon-adjust-lr is for --optimizer muon", |args| {
        args.optimizer.muon_adjust_lr.is_some() && !is_optimizer(args, &[Muon])
    }),
    unused(&["min-8bit-size", "optimizer"], "--min-8bit-size is for --optimizer adamw8bit", |args| {
        args.optimizer.min_8bit_size.is_some() && !is_optimizer(args, &[Adamw8bit])
    }),
    Rule {
        flags: &["optimizer-in-backward", "param-dtype", "reduce-dtype"],
        is_broken: |args| args.optimizer_in_backward != InBackward::Off && args.computes_in_f16(),
        words: "--optimizer-in-backward is not for f16 in --param-dtype or --reduce-dtype",
        reason: "whether gradients overflow is known after backward",
        way_out: "use bf16",
    },
    Rule {
        flags: &["optimizer-in-backward", "clip-grad-norm"],
        is_broken: |args| args.optimizer_in_backward == InBackward::LastNorm && args.clip_grad_norm == 0.,
        words: "--optimizer-in-backward last-norm needs a --clip-grad-norm above 0",
        reason: "it clips to that norm",
        way_out: "pass unclipped, or a norm above 0",
    },
    // Adapters.
    unused(&["lora-alpha", "lora-rank"], "--lora-alpha needs --lora-rank", |args| {
        args.lora_alpha.is_some() && args.lora_rank.is_none()
    }),
    unused(&["lora-targets", "lora-rank"], "--lora-targets needs --lora-rank", |args| {
        !args.lora_targets.is_empty() && args.lora_rank.is_none()
    }),
    either(
        &["lora-from", "lora-rank"],
        "--lora-from and --lora-rank exclude each other",
        "adapters that are continued have a rank",
        |args| args.lora_from.is_some() && args.lora_rank.is_some(),
    ),
    unused(&["base", "lora-rank", "lora-from"], "--base needs --lora-rank or --lora-from", |args| {
        args.base != Base::F32 && args.lora_rank.is_none() && args.lora_from.is_none()
    }),
    Rule {
        flags: &["router-bias-rate", "lora-rank", "lora-from"],
        is_broken: |args| args.router_bias_rate.is_some() && (args.lora_rank.is_some() || args.lora_from.is_some()),
        words: "--router-bias-rate excludes --lora-rank and --lora-from",
        reason: "adapters do not contain the biases of routers",
        way_out: "leave one out",
    },
    // Sharding.
    Rule {
        flags: &["context-parallel", "seq-len", "sequence-parallel"],
        is_broken: |args| args.context_parallel > 1 && !args.seq_len.is_multiple_of(args.sequence_multiple()),
        words: "--context-parallel N needs a --seq-len that is a multiple of 2 N, and with --sequence-parallel of N times \
                --tensor-parallel",
        reason: "each process has two equal chunks of each sequence",
        way_out: "pass a multiple",
    },
    Rule {
        flags: &["context-parallel", "task"],
        is_broken: |args| args.context_parallel > 1 && args.task == TaskChoice::Embed,
        words: "--context-parallel is for --task language and classify",
        reason: "embeddings are compared between processes with different texts",
        way_out: "leave it out",
    },
    unused(&["context-exchange", "context-parallel"], "--context-exchange needs --context-parallel", |args| {
        args.context_exchange.is_some() && args.context_parallel == 1
    }),
    unsupported(&["tensor-parallel", "task"], "--tensor-parallel is for --task language", |args| {
        args.tensor_parallel > 1 && !is_language(args)
    }),
    unused(&["sequence-parallel", "tensor-parallel"], "--sequence-parallel needs --tensor-parallel", |args| {
        args.sequence_parallel && args.tensor_parallel == 1
    }),
    Rule {
        flags: &["sequence-parallel", "seq-len", "tensor-parallel"],
        is_broken: |args| args.sequence_parallel && !args.seq_len.is_multiple_of(args.tensor_parallel),
        words: "--sequence-parallel needs a --seq-len that is a multiple of --tensor-parallel",
        reason: "it splits each sequence into as many equal parts",
        way_out: "pass a multiple, or leave out --sequence-parallel",
    },
    unused(
        &["shard-optimizer-over-replicas", "replicate"],
        "--shard-optimizer-over-replicas needs --replicate of at least 2",
        |args| args.shard_optimizer_over_replicas && args.replicate == 1,
    ),
    Rule {
        flags: &["offload", "optimizer"],
        is_broken: |args| args.offload.disk().is_some() && is_optimizer(args, &[Muon]),
        words: "--offload disk:DIR is for --optimizer adamw, adam, adamw8bit or sgd",
        reason: "others need whole matrices in memory",
        way_out: "use one of them",
    },
    unused(&["all-gather", "base"], "--all-gather float8 is for --base f32", |args| {
        args.all_gather != AllGather::Full && args.base != Base::F32
    }),
    Rule {
        flags: &["loss-scale", "param-dtype", "reduce-dtype"],
        is_broken: |args| args.loss_scale.is_some() && !args.computes_in_f16(),
        words: "--loss-scale needs f16 in --param-dtype or --reduce-dtype",
        reason: "only gradients in f16 are scaled",
        way_out: "pass --param-dtype f16, or leave it out",
    },
    unused(&["grad-sync", "grad-accum"], "--grad-sync needs --grad-accum of at least 2", |args| {
        args.grad_sync.is_some() && args.grad_accum == 1
    }),
    unused(&["checkpoint-keep", "activation-checkpoint"], "--checkpoint-keep needs --activation-checkpoint", |args| {
        !args.checkpoint_keep.is_empty() && !recomputes(args)
    }),
    unused(
        &["activation-offload", "activation-checkpoint"],
        "--activation-offload needs --activation-checkpoint",
        |args| args.activation_offload != ActivationPlace::None && !recomputes(args),
    ),
    // Run.
    Rule {
        flags: &["gradcheck", "param-dtype"],
        is_broken: |args| args.gradcheck && args.param_dtype != Precision::F32,
        words: "--gradcheck needs --param-dtype f32",
        reason: "it compares small differences of the loss, which bf16 and f16 round away",
        way_out: "pass --param-dtype f32",
    },
    Rule {
        flags: &["gradcheck", "all-gather"],
        is_broken: |args| args.gradcheck && args.all_gather != AllGather::Full,
        words: "--gradcheck needs --all-gather full",
        reason: "it compares small differences of the loss, which 8-bit weights round away",
        way_out: "pass --all-gather full",
    },
    Rule {
        flags: &["gradcheck", "compute"],
        is_broken: |args| args.gradcheck && args.compute != Compute::Full,
        words: "--gradcheck needs --compute full",
        reason: "it compares small differences of the loss, which 8-bit products round away",
        way_out: "pass --compute full",
    },
    Rule {
        flags: &["checkpoint-local", "checkpoint-dir"],
        is_broken: |args| args.checkpoint_local && args.checkpoint_dir.is_none(),
        words: "--checkpoint-local needs --checkpoint-dir",
        reason: "each host has a directory of this name",
        way_out: "pass --checkpoint-dir",
    },
    either(
        &["async-save", "offload"],
        "--async-save and --offload disk:DIR exclude each other",
        "--async-save copies optimizer state to memory, and --offload disk:DIR keeps it out of memory",
        |args| args.async_save && args.offload.disk().is_some(),
    ),
    Rule {
        flags: &["resume", "checkpoint-dir"],
        is_broken: |args| args.resume == Resume::Auto && args.checkpoint_dir.is_none(),
        words: "--resume auto needs --checkpoint-dir",
        reason: "it continues the newest checkpoint there",
        way_out: "pass the --checkpoint-dir of the run that saved it",
    },
    unused(&["resume-anyway", "resume"], "--resume-anyway needs --resume", |args| {
        args.resume_anyway && args.resume == Resume::None
    }),
    unsupported(&["export-gguf", "task"], "--export-gguf is for --task language", |args| {
        args.export_gguf.is_some() && !is_language(args)
    }),
    Rule {
        flags: &["export-gguf", "model"],
        is_broken: |args| args.export_gguf.is_some() && args.model.is_none(),
        words: "--export-gguf needs --model",
        reason: "the file holds a tokenizer, and the built-in model has none",
        way_out: "pass --model, or leave it out",
    },
    either(
        &["export-gguf", "checkpoint-local"],
        "--export-gguf and --checkpoint-local exclude each other",
        "rank 0 reads the whole checkpoint, and its host has a part",
        |args| args.export_gguf.is_some() && args.checkpoint_local,
    ),
    unused(&["gguf-quantize", "export-gguf"], "--gguf-quantize needs --export-gguf", |args| {
        args.gguf_quantize.is_some() && args.export_gguf.is_none()
    }),
];

fn is_language(args: &Args) -> bool {
    args.task == TaskChoice::Language
}

fn is_optimizer(args: &Args, kinds: &[OptimizerKind]) -> bool {
    kinds.contains(&args.optimizer.optimizer)
}

fn recomputes(args: &Args) -> bool {
    args.activation_checkpoint != ActivationCheckpoint::None
}

impl Rule {
    /// Returns the error of a command line that breaks the rule. It names the values of the flags that the rule depends
    /// on.
    fn explain(&self, given: &ArgMatches) -> String {
        let Rule { words, reason, way_out, .. } = self;
        let found = self.flags[1..].iter().filter_map(|flag| {
            let values = given.get_raw(&flag.replace('-', "_"))?.map(|value| value.to_string_lossy());
            let values = values.collect::<Vec<_>>().join(",");
            // A flag without a value is in the words.
            (!["true", "false"].contains(&values.as_str())).then(|| format!("--{flag} {values}"))
        });
        let found = found.collect::<Vec<_>>().join(" and ");
        let found = if found.is_empty() { found } else { format!(", found {found}") };
        format!("{words}{found}: {reason}; {way_out}")
    }
}

/// Parses the command line. Ends the program for a command line that breaks a rule, with the first such rule.
pub(crate) fn parse() -> Args {
    let args: Args = command_line::parse(command());
    if let Some(rule) = broken(&args).next() {
        let error = rule.explain(&command().get_matches());
        command().error(ErrorKind::ArgumentConflict, error).exit();
    }
    args
}

/// Returns the rules that a command line breaks.
fn broken(args: &Args) -> impl Iterator<Item = &'static Rule> {
    RULES.iter().filter(|rule| (rule.is_broken)(args))
}

/// Returns the command, with the rules in the help of their flags.
fn command() -> Command {
    Args::command().mut_args(|arg| {
        let of_flag = RULES.iter().filter(|rule| Some(rule.flags[0]) == arg.get_long());
        let rules = of_flag.map(|rule| format!("{}.", rule.words)).collect::<Vec<_>>().join(" ");
        let Some(help) = arg.get_long_help().or(arg.get_help()).filter(|_| !rules.is_empty()) else { return arg };
        let help = format!("{help}\n\n{rules}");
        arg.long_help(help)
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// Command lines that break a rule, and what they need in addition to keep all rules.
    const BROKEN: &[(&str, &str)] = &[
        ("--context-parallel 2 --seq-len 30", ""),
        ("--context-parallel 2 --tensor-parallel 8 --sequence-parallel --seq-len 24", ""),
        ("--context-parallel 2 --task embed --data pairs.jsonl", ""),
        ("--context-exchange heads", "--context-parallel 2"),
        ("--router-bias-rate 0.001 --lora-rank 3", ""),
        ("--router-bias-rate 0.001 --lora-from adapters", ""),
        ("--init pretrained", "--model m"),
        ("--task classify", "--data a.csv"),
        ("--task embed", "--data a.csv"),
        ("--sft a.jsonl --task classify --data a.csv", ""),
        ("--dpo a.jsonl --task embed --data a.csv", ""),
        ("--sft a.jsonl --data b", ""),
        ("--dpo a.jsonl --data b --model m", ""),
        ("--dpo a.jsonl --sft b.jsonl --model m", ""),
        ("--dpo a.jsonl", "--model m"),
        ("--dpo a.jsonl --model m --init random", ""),
        ("--dpo-beta 0.2", "--dpo a.jsonl --model m"),
        ("--packing on", "--sft a.jsonl"),
        ("--packing off", "--sft a.jsonl"),
        ("--pack documents", "--data a.jsonl"),
        ("--pack stream --task embed --data a.csv", ""),
        ("--text-field body", "--data a.jsonl"),
        ("--text-field body --task embed --data a.csv", ""),
        ("--token-bits 32", "--data a.bin"),
        ("--token-bits 32 --task embed --data a.csv", ""),
        ("--eval-every 3", "--eval b"),
        ("--mlm-probability 0.1 --task embed --data a.csv", ""),
        ("--mask-token 3 --task embed --data a.csv", ""),
        ("--optimizer sgd --betas 0.9,0.95", ""),
        ("--optimizer sgd --eps 1e-8", ""),
        ("--momentum 0.9", "--optimizer sgd"),
        ("--momentum 0.9", "--optimizer muon"),
        ("--dampening 0.1", "--optimizer sgd"),
        ("--nesterov on", "--optimizer muon"),
        ("--nesterov off", "--optimizer sgd"),
        ("--nesterov on --optimizer sgd --dampening 0.5", ""),
        ("--nesterov on --optimizer sgd --momentum 0", ""),
        ("--muon-lr 1", "--optimizer muon"),
        ("--muon-adjust-lr original", "--optimizer muon"),
        ("--min-8bit-size 1", "--optimizer adamw8bit"),
        ("--optimizer-in-backward unclipped --param-dtype f16", ""),
        ("--optimizer-in-backward last-norm --reduce-dtype f16", ""),
        ("--optimizer-in-backward last-norm --clip-grad-norm 0", ""),
        ("--lora-alpha 8", "--lora-rank 2"),
        ("--lora-targets q_proj", "--lora-rank 2"),
        ("--lora-from m --lora-rank 2", ""),
        ("--base nf4", "--lora-rank 2"),
        ("--base nf4", "--lora-from m"),
        ("--tensor-parallel 2 --task embed --data a.csv", ""),
        ("--sequence-parallel", "--tensor-parallel 2"),
        ("--sequence-parallel --tensor-parallel 3", "--seq-len 12"),
        ("--shard-optimizer-over-replicas", "--replicate 2"),
        ("--offload disk:/nvme --optimizer muon", ""),
        ("--offload disk+shards:/nvme --optimizer muon", ""),
        ("--all-gather float8 --lora-rank 2 --base nf4", ""),
        ("--loss-scale 8", "--param-dtype f16"),
        ("--loss-scale 8", "--reduce-dtype f16"),
        ("--grad-sync every", "--grad-accum 2"),
        ("--grad-sync last", "--grad-accum 2"),
        ("--checkpoint-keep linear", "--activation-checkpoint full"),
        ("--activation-offload disk:.", "--activation-checkpoint full"),
        ("--gradcheck --param-dtype bf16", ""),
        ("--gradcheck --all-gather float8", ""),
        ("--gradcheck --compute float8", ""),
        ("--checkpoint-local", "--checkpoint-dir c"),
        ("--async-save --offload disk:/nvme", ""),
        ("--async-save --offload disk+shards:/nvme", ""),
        ("--resume auto", "--checkpoint-dir c"),
        ("--resume-anyway", "--resume c"),
        ("--export-gguf b --model m --task embed --data a.csv", ""),
        ("--export-gguf b", "--model m"),
        ("--export-gguf b --model m --checkpoint-local --checkpoint-dir c", ""),
        ("--gguf-quantize q8_0", "--export-gguf b --model m"),
    ];

    fn parsed(flags: &str) -> Args {
        Args::try_parse_from(format!("train {flags}").split_whitespace()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the rules that a command line breaks, with their errors.
    fn refusals(flags: &str) -> Vec<(&'static Rule, String)> {
        let given = command().get_matches_from(format!("train {flags}").split_whitespace());
        broken(&parsed(flags)).map(|rule| (rule, rule.explain(&given))).collect()
    }

    fn is_accepted(flags: &str) -> bool {
        refusals(flags).is_empty()
    }

    #[test]
    fn each_rule_refuses_a_combination_and_names_its_flags() {
        let mut refusing = vec![];
        for (flags, fix) in BROKEN {
            let refusals = refusals(flags);
            assert!(!refusals.is_empty(), "{flags}");
            for (rule, error) in refusals {
                assert!(error.starts_with(rule.words) && error.ends_with(rule.way_out), "{flags}: {error}");
                assert!(rule.flags.iter().all(|flag| error.contains(&format!("--{flag}"))), "{flags}: {error}");
                refusing.push(rule.words);
            }
            assert!(fix.is_empty() || is_accepted(&format!("{flags} {fix}")), "{flags} {fix}");
        }
        for rule in RULES {
            assert!(refusing.contains(&rule.words), "no command line breaks `{}`", rule.words);
        }
    }

    #[test]
    fn errors_name_what_was_found() {
        for (flags, error) in [
            ("--packing on", "--packing needs --sft: it has no effect otherwise; leave it out"),
            (
                "--momentum 0.9",
                "--momentum is for --optimizer sgd or muon, found --optimizer adamw: it has no effect otherwise; leave \
                 it out",
            ),
            (
                "--checkpoint-local",
                "--checkpoint-local needs --checkpoint-dir: each host has a directory of this name; pass --checkpoint-dir",
            ),
            (
                "--sequence-parallel --tensor-parallel 3 --seq-len 31",
                "--sequence-parallel needs a --seq-len that is a multiple of --tensor-parallel, found --seq-len 31 and \
                 --tensor-parallel 3: it splits each sequence into as many equal parts; pass a multiple, or leave out \
                 --sequence-parallel",
            ),
        ] {
            assert_eq!(refusals(flags)[0].1, error);
        }
    }

    #[test]
    fn help_shows_each_rule_at_its_flag() {
        command().debug_assert();
        let command = command();
        let argument = |flag: &str| command.get_arguments().find(|argument| argument.get_long() == Some(flag));
        for rule in RULES {
            assert!(rule.words.starts_with(&format!("--{}", rule.flags[0])), "{}", rule.words);
            assert!(rule.flags.iter().all(|flag| argument(flag).is_some()), "{}", rule.words);
            let help = argument(rule.flags[0]).unwrap().get_long_help().unwrap().to_string();
            assert!(help.contains(&format!("{}.", rule.words)), "{help}");
        }
    }

    #[test]
    fn kinds_of_optimizers_are_those_in_the_words() {
        for flag in ["betas 0.9,0.95", "eps 1e-8", "momentum 0.9", "dampening 0", "nesterov on", "muon-lr 1"]
            .into_iter()
            .chain(["muon-adjust-lr original", "min-8bit-size 1"])
        {
            let name = flag.split(' ').next().unwrap();
            let rule = RULES.iter().find(|rule| rule.flags == [name, "optimizer"]).unwrap();
            for kind in ["adamw", "adam", "sgd", "muon", "adamw8bit"] {
                let is_broken = (rule.is_broken)(&parsed(&format!("--{flag} --optimizer {kind}")));
                let words = rule.words.split([' ', ',']);
                assert_eq!(is_broken, !words.into_iter().any(|word| word == kind), "{flag}, {kind}");
            }
        }
    }

    #[test]
    fn other_command_lines_are_accepted() {
        for flags in [
            "",
            "--optimizer-in-backward unclipped --clip-grad-norm 0",
            "--offload cpu --async-save --optimizer muon",
            "--gradcheck --reduce-dtype bf16",
            "--base nf4 --lora-rank 2",
            "--resume c",
            "--packing off --sft a.jsonl --eval b",
        ] {
            assert!(is_accepted(flags), "{flags}");
        }
    }
}
