//! What a run was, which its checkpoints hold: a run that goes on from one says what it does otherwise, and is refused
//! where the weights or the optimizer's state would mean something else.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use fsdp_candle::ShardedOptimizer;
use fsdp_ckpt::{TensorSource, escape};
use fsdp_examples::data::Batches;
use fsdp_examples::models::{Dropout, ModelConfig};
use fsdp_examples::schedule::LrSchedule;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::alike::{Words, words};
use crate::args::Args;
use crate::lora::Adapters;

/// The record's name in a checkpoint.
const KEY: &str = "train.run";
const DATA: &str = "the data";
/// The prefix of hyper-parameters' names.
const HYPER: &str = "the optimizer's ";
/// The words for an absent value.
const NOT_GIVEN: &str = "not given";

/// Fields of config.json on which no step depends after the first: weights are drawn by then, and --dropout says
/// what is dropped.
const OF_THE_START: [&str; 7] = [
    "initializer_range",
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
];
/// Fields of config.json on which only the loss depends.
const OF_THE_LOSS: [&str; 2] = ["output_router_logits", "router_aux_loss_coef"];

/// The settings of a run, by the names of their flags.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Settings that give the weights and the optimizer's state their meaning.
    fixed: Words,
    /// Other settings that change the numbers of a step.
    settings: Words,
    /// Explanations of some settings, which are not compared.
    beside: Words,
}

/// Differences between the run that saved a checkpoint and the run that resumes from it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Changes {
    /// Differences that can't be right.
    pub(crate) refused: Vec<String>,
    /// Differences that change the run.
    pub(crate) said: Vec<String>,
}

impl Record {
    /// # Errors
    /// When a value can't be written as JSON.
    pub(crate) fn new(
        args: &Args,
        config: &ModelConfig,
        batches: &Batches,
        adapters: Option<&Adapters>,
        optim: &dyn ShardedOptimizer,
    ) -> anyhow::Result<Self> {
        let mut record = Record::default();
        let Record { fixed, settings, beside } = &mut record;
        for (field, value) in words("", config)? {
            let name = format!("config.json's {field}");
            match field.as_str() {
                field if OF_THE_START.contains(&field) => None,
                field if OF_THE_LOSS.contains(&field) => settings.insert(name, value),
                _ => fixed.insert(name, value),
            };
        }
        fixed.insert("the kind of --optimizer".into(), args.optimizer.optimizer.family().into());
        if let Some(adapters) = adapters {
            let config = adapters.lora.config;
            fixed.insert("the adapters' rank".into(), config.rank.to_string());
            fixed.insert("the adapters' alpha".into(), config.alpha.to_string());
        }

        let data = args.sft.as_ref().or(args.data.as_ref());
        let place = data.map_or("the sources of the workspace".into(), |path| path.display().to_string());
        beside.insert(DATA.into(), place);
        let seeded = |text: String| format!("{text}, by --seed {}", args.seed);
        let masking = batches.masking().map_or("none".into(), |masking| {
            seeded(format!("{} of the tokens, by token {}", masking.probability, masking.mask_token))
        });
        let order = if args.shuffled() { seeded("shuffled".into()) } else { "as it stands".into() };
        let schedule = match args.lr_schedule {
            LrSchedule::Constant => "constant".into(),
            LrSchedule::Cosine => format!("cosine, over {} steps", args.steps),
            LrSchedule::Linear => format!("linear, over {} steps", args.steps),
        };
        let dropped = dropped(args.dropout.of(config), config);
        let dropout = if dropped.is_empty() { "none".into() } else { seeded(dropped) };
        for (name, value) in [
            (DATA, batches.account()),
            ("the order of the data", order),
            ("the sequences of a step", batches.sequences_per_step().to_string()),
            ("the masked tokens", masking),
            ("--packing", args.packed().to_string()),
            ("--seq-len", args.seq_len.to_string()),
            ("--dropout", dropout),
            ("--lr-schedule", schedule),
            ("--warmup-steps", args.warmup_steps.to_string()),
            ("--clip-grad-norm", args.clip_grad_norm.to_string()),
        ] {
            settings.insert(name.into(), value);
        }
        let flags = words("--", args)?;
        let alike = ["--optimizer", "--no-decay", "--param-dtype", "--reduce-dtype", "--all-gather"];
        settings.extend(flags.into_iter().filter(|(flag, _)| alike.contains(&flag.as_str())));
        let mut hyper = BTreeMap::<String, Vec<String>>::new();
        for group in optim.param_groups() {
            for (name, value) in words(HYPER, &group.hyper)? {
                let values = hyper.entry(name).or_default();
                if !values.contains(&value) {
                    values.push(value);
                }
            }
        }
        settings.extend(hyper.into_iter().map(|(name, values)| (name, values.join(" and "))));
        [fixed, settings].into_iter().for_each(|words| words.retain(|_, value| value != NOT_GIVEN));
        Ok(record)
    }

    /// Returns the values to save in a checkpoint.
    pub(crate) fn values(&self) -> anyhow::Result<Map<String, Value>> {
        Ok(Map::from_iter([(KEY.to_owned(), serde_json::to_value(self)?)]))
    }

    /// What differs from the run that saved a checkpoint. Checkpoints of other programs, and of versions that kept no
    /// record, differ in nothing.
    ///
    /// # Errors
    /// When the record is not one.
    pub(crate) fn changes_since(&self, source: &dyn TensorSource) -> anyhow::Result<Changes> {
        let Some(saved) = source.values().get(KEY) else { return Ok(Changes::default()) };
        let saved = Record::deserialize(saved)
            .with_context(|| format!("its value `{KEY}` does not say how the run was set up, as `train` writes it"))?;
        Ok(self.changes(&saved))
    }

    fn changes(&self, saved: &Record) -> Changes {
        let mut changes = Changes::default();
        let names: BTreeSet<&String> =
            [self, saved].into_iter().flat_map(|record| record.fixed.keys().chain(record.settings.keys())).collect();
        for name in names {
            let (was, is) = (saved.get(name), self.get(name));
            // Another optimizer has other hyper-parameters.
            if was == is || (name.starts_with(HYPER) && [was, is].contains(&NOT_GIVEN)) {
                continue;
            }
            let line = format!("{}: it was {}, and is {}", escape(name), saved.told(name, was), self.told(name, is));
            let is_fixed = [self, saved].iter().any(|record| record.fixed.contains_key(name));
            if is_fixed { &mut changes.refused } else { &mut changes.said }.push(line);
        }
        changes
    }

    fn get(&self, name: &str) -> &str {
        self.fixed.get(name).or_else(|| self.settings.get(name)).map_or(NOT_GIVEN, String::as_str)
    }

    /// Formats a value with its explanation.
    fn told(&self, name: &str, value: &str) -> String {
        let beside = self.beside.get(name).map_or(String::new(), |beside| format!(" ({beside})"));
        escape(format!("{value}{beside}")).to_string()
    }
}

/// Formats dropout probabilities; empty where nothing is dropped.
fn dropped(dropout: Dropout, config: &ModelConfig) -> String {
    // Decoders drop attention weights alone.
    let rest = if matches!(config, ModelConfig::Decoder(_)) { 0. } else { 1. };
    let parts =
        [("attention", dropout.attention), ("embeddings", rest * dropout.embedding), ("hidden", rest * dropout.hidden)];
    let parts = parts.iter().filter(|(_, probability)| *probability > 0.);
    parts.map(|(name, probability)| format!("{name} {probability}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fixed: &[(&str, &str)], settings: &[(&str, &str)], path: &str) -> Record {
        let words =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Record { fixed: words(fixed), settings: words(settings), beside: words(&[(DATA, path)]) }
    }

    #[test]
    fn what_differs_is_refused_or_said() {
        let saved = record(&[("theta", "1e4"), ("heads", "4")], &[(DATA, "9 tokens"), ("--seq-len", "32")], "a.bin");
        assert_eq!(saved.changes(&saved), Changes::default());
        // The same data elsewhere is the same data.
        let moved = record(&[("theta", "1e4"), ("heads", "4")], &[(DATA, "9 tokens"), ("--seq-len", "32")], "b.bin");
        assert_eq!(moved.changes(&saved), Changes::default());
        let now = record(&[("theta", "77"), ("alpha", "2")], &[(DATA, "8 tokens"), ("--seq-len", "32")], "b.bin");
        let Changes { refused, said } = now.changes(&saved);
        let all =
            ["alpha: it was not given, and is 2", "heads: it was 4, and is not given", "theta: it was 1e4, and is 77"];
        assert_eq!(refused, all);
        assert_eq!(said, ["the data: it was 9 tokens (a.bin), and is 8 tokens (b.bin)"]);
    }

    /// A later version may know more fields, which mean what they meant when they are not given, and may move some.
    #[test]
    fn records_of_other_versions_are_compared_by_what_they_have() {
        let saved = record(&[("moved", "1")], &[], "");
        let now = record(&[("new", NOT_GIVEN)], &[("moved", "1")], "");
        assert_eq!(now.changes(&saved), Changes::default());
        let now = record(&[], &[("moved", "2")], "");
        assert_eq!(now.changes(&saved).refused, ["moved: it was 1, and is 2"]);
    }

    #[test]
    fn what_a_file_says_can_not_control_a_terminal() {
        let saved = record(&[], &[("a\x1b", "b\x1b")], "");
        let said = Record::default().changes(&saved).said;
        assert!(said.len() == 1 && !said[0].contains('\x1b'), "{said:?}");
    }
}
