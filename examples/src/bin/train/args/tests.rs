use std::{collections::BTreeSet, ffi::OsString, os::unix::ffi::OsStringExt};

use super::*;
use clap::CommandFactory;

fn parse(arguments: &[&str]) -> Result<Args, String> {
    Args::try_parse_from([&["train"], arguments].concat()).map_err(|error| error.to_string())
}

#[test]
fn the_definition_is_sound() {
    Args::command().debug_assert();
}

#[test]
fn no_flags_are_needed() {
    let args = parse(&[]).unwrap();
    assert_eq!(
        (args.model, args.data, args.checkpoint_dir, args.export_hf, args.metrics, args.tensorboard),
        (None, None, None, None, None, None)
    );
    assert_eq!((args.init, args.device, args.resume), (InitChoice::Auto, DeviceChoice::Auto, Resume::None));
    assert_eq!(args.optimizer.betas, None);
}

#[test]
fn the_command_of_the_recorded_runs_is_understood() {
    let command = "--model DIR --data DIR/tokens.bin --seq-len 32 --steps 20 --lr 1e-3 --betas 0.9,0.95 \
                   --eps 1e-8 --weight-decay 0.1 \
                   --clip-grad-norm 1.0 --lr-schedule constant --warmup-steps 0 --batch-size 2 --grad-accum 2 \
                   --resume auto --init pretrained --device cpu";
    let args = parse(&command.split_whitespace().collect::<Vec<_>>()).unwrap();
    assert_eq!((args.seq_len, args.steps, args.batch_size, args.grad_accum, args.warmup_steps), (32, 20, 2, 2, 0));
    let OptimizerFlags { lr, betas, eps, weight_decay, .. } = args.optimizer;
    assert_eq!((lr, betas, eps, weight_decay), (1e-3, Some((0.9, 0.95)), Some(1e-8), 0.1));
    assert_eq!(
        (args.lr_schedule, args.init, args.device),
        (LrSchedule::Constant, InitChoice::Pretrained, DeviceChoice::Cpu)
    );
    assert_eq!(args.clip_grad_norm, 1.0);
    assert_eq!(args.model, Some("DIR".into()));
    assert_eq!(args.data, Some("DIR/tokens.bin".into()));
    assert_eq!(args.resume, Resume::Auto);
}

/// Every flag is compared between ranks, unless it is named as one that is not.
#[test]
fn no_flag_is_forgotten_when_ranks_compare_theirs() {
    let described = serde_json::to_value(parse(&[]).unwrap()).unwrap();
    let described: BTreeSet<&str> = described.as_object().unwrap().keys().map(String::as_str).collect();
    let command = Args::command();
    let flags = command.get_arguments().filter_map(|argument| argument.get_long());
    assert_eq!(described, flags.filter(|flag| !["help", "version"].contains(flag)).collect());
    assert!(INPUTS.iter().chain(&OF_RANK_0).all(|flag| described.contains(flag)));
}

#[test]
fn places_are_compared_as_they_are_meant() {
    let place = |flag: &str, value: &str| {
        serde_json::to_value(parse(&[&format!("--{flag}"), value]).unwrap()).unwrap()[flag].clone()
    };
    let here = std::env::current_dir().unwrap();
    for flag in ["checkpoint-dir", "export-hf", "trace", "resume", "data", "sft"] {
        assert_eq!(place(flag, "some/where"), here.join("some/where").to_str().unwrap(), "{flag}");
        assert_eq!(place(flag, "/a/b"), "/a/b", "{flag}");
    }
    assert_eq!(place("resume", "auto"), "auto");
    let unnamed = OsString::from_vec(b"/a\xff".to_vec());
    let args = Args::try_parse_from([OsString::from("train"), "--data".into(), unnamed]).unwrap();
    assert_eq!(serde_json::to_value(args).unwrap()["data"], "/a\\xff");
}

#[test]
fn resume_takes_a_word_or_a_path() {
    let resume = |value| parse(&["--resume", value]).unwrap().resume;
    assert_eq!(resume("none"), Resume::None);
    assert_eq!(resume("./auto"), Resume::Path("./auto".into()));
}

#[test]
fn nonsense_is_refused_with_the_flag_and_what_it_must_be() {
    for (flag, bad, expected) in [
        ("--steps", &["0", "-1", "x", "1.5"][..], "whole number of at least 1"),
        ("--keep", &["0", "all"], "whole number of at least 1"),
        ("--eval-every", &["0", "-1", "x"], "whole number of at least 1"),
        ("--shuffle", &["yes"], "on, off"),
        ("--packing", &["tight"], "on, off"),
        ("--mlm-probability", &["0", "-0.1", "1.1", "nan", "x"], "above 0 and at most 1"),
        ("--mask-token", &["-1", "4294967296", "[MASK]"], ""),
        ("--batch-size", &["0", "-1", "x", "99999999999999999999999"], "whole number of at least 1"),
        ("--seq-len", &["0", "-5", ""], "whole number of at least 1"),
        ("--grad-accum", &["0"], "whole number of at least 1"),
        ("--lora-rank", &["0", "-1", "x"], "whole number of at least 1"),
        ("--lora-alpha", &["0", "-1", "nan"], "number above 0"),
        ("--activation-checkpoint", &["some", "0", "-1", ""], "none, full, a number K"),
        ("--checkpoint-keep", &["norm"], "linear, attention"),
        ("--dropout", &["1", "-0.1", "nan", "some"], "`config`, or a number of at least 0 and below 1"),
        ("--reshard-after-forward", &["maybe", "-2", "1.5"], "default, always, never, or a number"),
        ("--offload", &["disk", "gpu"], "none, cpu"),
        ("--param-dtype", &["int8", "float8"], "f32, bf16, f16"),
        ("--all-gather", &["int8", "f16"], "full, float8"),
        ("--loss-scale", &["0", "0.5", "-1", "nan", "inf", "1e39", "x"], "at least 1"),
        ("--replicate", &["0", "two"], "whole number of at least 1"),
        ("--grad-sync", &["first"], "every, last"),
        ("--lr", &["0", "-1e-3", "nan", "inf", "1e999", "fast"], "number above 0"),
        ("--eps", &["0", "-1"], "number above 0"),
        ("--weight-decay", &["-0.1", "NaN", "inf"], "at least 0"),
        ("--clip-grad-norm", &["-1", "NaN"], "at least 0"),
        ("--betas", &["0.9", "0.9,1", "0.9,0.95,0.99", "-0.1,0.9", "a,b", "0.9 0.95", "nan,0.5"], "two numbers"),
        ("--lr-schedule", &["step"], "constant, cosine, linear"),
        ("--init", &["zeros"], "auto, pretrained, random"),
        ("--device", &["tpu"], "auto, cpu, cuda"),
        ("--warmup-steps", &["-1"], ""),
        ("--seed", &["-1"], ""),
    ] {
        for bad in bad {
            let error = parse(&[flag, bad]).unwrap_err();
            assert!(error.contains(flag) && error.contains(bad) && error.contains(expected), "{flag} {bad}: {error}");
        }
    }
}

#[test]
fn flags_that_need_or_exclude_others_say_so() {
    let error = parse(&["--sft", "a.jsonl", "--data", "b"]).unwrap_err();
    assert!(error.contains("--sft") && error.contains("--data"), "{error}");
    let error = parse(&["--eval-every", "3"]).unwrap_err();
    assert!(error.contains("--eval <PATH>"), "{error}");
}

#[test]
fn what_the_command_line_does_not_know_is_refused() {
    assert!(parse(&["--learning-rate", "1"]).unwrap_err().contains("--learning-rate"));
    assert!(parse(&["extra"]).unwrap_err().contains("extra"));
}
