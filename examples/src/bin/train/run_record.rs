//! Settings of a run, saved in its checkpoints. A run that resumes reports the settings that differ, and refuses those
//! that would change the meaning of weights or optimizer state.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use fsdp_candle::ShardedOptimizer;
use fsdp_ckpt::{TensorSource, escape};
use fsdp_train::models::{Base, Dropout, ModelConfig};
use fsdp_train::schedule::LrSchedule;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::adapters::Adapters;
use crate::agreement::{Fields, NOT_GIVEN, fields};
use crate::args::Args;
use crate::task::Task;

/// Key of the record in a checkpoint.
const KEY: &str = "train.run";
const DATA: &str = "the data";
/// Prefix of hyper-parameter names.
const HYPER: &str = "the optimizer's ";

/// Fields of config.json that affect only the initial weights, or that --dropout replaces.
const INIT_FIELDS: [&str; 7] = [
    "initializer_range",
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
];
/// Fields of config.json that affect only the loss.
const LOSS_FIELDS: [&str; 2] = ["output_router_logits", "router_aux_loss_coef"];

/// Settings of a run by flag.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Settings that define the meaning of weights and optimizer state.
    fixed: Fields,
    /// Other settings that affect the numbers of a step.
    settings: Fields,
    /// Notes on some settings, which are not compared.
    #[serde(rename = "beside")]
    notes: Fields,
}

/// Differences between the run that saved a checkpoint and the run that resumes from it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Changes {
    /// Differences that can't be continued.
    pub(crate) refused: Vec<String>,
    /// Differences that only change the run.
    pub(crate) reported: Vec<String>,
}

impl Record {
    pub(crate) fn new(
        args: &Args,
        config: &ModelConfig,
        task: &dyn Task,
        adapters: Option<&Adapters>,
        optim: &dyn ShardedOptimizer,
    ) -> anyhow::Result<Self> {
        let mut record = Record::default();
        let Record { fixed, settings, notes } = &mut record;
        for (field, value) in fields("", config)? {
            let name = format!("config.json's {field}");
            match field.as_str() {
                field if INIT_FIELDS.contains(&field) => None,
                field if LOSS_FIELDS.contains(&field) => settings.insert(name, value),
                _ => fixed.insert(name, value),
            };
        }
        fixed.insert("the kind of --optimizer".into(), args.optimizer.optimizer.family().into());
        if let Some(adapters) = adapters {
            let config = adapters.lora.config;
            fixed.insert("the adapters' rank".into(), config.rank.to_string());
            fixed.insert("the adapters' alpha".into(), config.alpha.to_string());
            if args.base != Base::F32 {
                fixed.insert("--base".into(), fields("--", args)?.remove("--base").unwrap_or_default());
            }
        }

        let (_, data) = args.training_data();
        let place = data.map_or("the sources of the workspace".into(), |path| path.display().to_string());
        notes.insert(DATA.into(), place);
        let seeded = |text: String| format!("{text}, by --seed {}", args.seed);
        let (of_weights, others) = task.settings(args);
        fixed.extend(of_weights);
        settings.extend(others);
        let order = if args.shuffled() { seeded("shuffled".into()) } else { "as it stands".into() };
        let schedule = match args.lr_schedule {
            LrSchedule::Constant => "constant".into(),
            LrSchedule::Cosine => format!("cosine, over {} steps", args.steps),
            LrSchedule::Linear => format!("linear, over {} steps", args.steps),
        };
        let dropped = dropped(args.dropout.of(config), config);
        let dropout = if dropped.is_empty() { "none".into() } else { seeded(dropped) };
        for (name, value) in [
            (DATA, task.summary()),
            ("the order of the data", order),
            ("the sequences of a step", task.sequences_per_step().to_string()),
            ("--packing", args.packed().to_string()),
            ("--seq-len", args.seq_len.to_string()),
            ("--dropout", dropout),
            ("--lr-schedule", schedule),
            ("--warmup-steps", args.warmup_steps.to_string()),
            ("--clip-grad-norm", args.clip_grad_norm.to_string()),
        ] {
            settings.insert(name.into(), value);
        }
        let flags = fields("--", args)?;
        let alike = [
            "--router-bias-rate",
            "--optimizer",
            "--no-decay",
            "--param-dtype",
            "--reduce-dtype",
            "--all-gather",
            "--compute",
            "--optimizer-in-backward",
        ];
        settings.extend(flags.into_iter().filter(|(flag, _)| alike.contains(&flag.as_str())));
        let mut hyper = BTreeMap::<String, Vec<String>>::new();
        for group in optim.param_groups() {
            for (name, value) in fields(HYPER, &group.hyper)? {
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

    /// Compares with the run that saved a checkpoint. Checkpoints of other programs and old versions have no record,
    /// and no differences.
    pub(crate) fn changes_since(&self, source: &dyn TensorSource) -> anyhow::Result<Changes> {
        let Some(saved) = source.values().get(KEY) else { return Ok(Changes::default()) };
        let saved =
            Record::deserialize(saved).with_context(|| format!("its value `{KEY}` is not a record of settings"))?;
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
            let line =
                format!("{}: it was {}, and is {}", escape(name), saved.described(name, was), self.described(name, is));
            let is_fixed = [self, saved].iter().any(|record| record.fixed.contains_key(name));
            if is_fixed { &mut changes.refused } else { &mut changes.reported }.push(line);
        }
        changes
    }

    fn get(&self, name: &str) -> &str {
        self.fixed.get(name).or_else(|| self.settings.get(name)).map_or(NOT_GIVEN, String::as_str)
    }

    /// Formats a value with its note.
    fn described(&self, name: &str, value: &str) -> String {
        let notes = self.notes.get(name).map_or(String::new(), |notes| format!(" ({notes})"));
        escape(format!("{value}{notes}")).to_string()
    }
}

/// Formats dropout probabilities. Empty without dropout.
fn dropped(dropout: Dropout, config: &ModelConfig) -> String {
    // Decoders drop only attention weights.
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
        Record { fixed: words(fixed), settings: words(settings), notes: words(&[(DATA, path)]) }
    }

    #[test]
    fn differences_are_refused_or_reported() {
        let saved = record(&[("theta", "1e4"), ("heads", "4")], &[(DATA, "9 tokens"), ("--seq-len", "32")], "a.bin");
        assert_eq!(saved.changes(&saved), Changes::default());
        // The same data elsewhere is the same data.
        let moved = record(&[("theta", "1e4"), ("heads", "4")], &[(DATA, "9 tokens"), ("--seq-len", "32")], "b.bin");
        assert_eq!(moved.changes(&saved), Changes::default());
        let now = record(&[("theta", "77"), ("alpha", "2")], &[(DATA, "8 tokens"), ("--seq-len", "32")], "b.bin");
        let Changes { refused, reported } = now.changes(&saved);
        let all =
            ["alpha: it was not given, and is 2", "heads: it was 4, and is not given", "theta: it was 1e4, and is 77"];
        assert_eq!(refused, all);
        assert_eq!(reported, ["the data: it was 9 tokens (a.bin), and is 8 tokens (b.bin)"]);
    }

    /// A later version may know more fields, which mean what they meant when they are not given, and may move some.
    #[test]
    fn records_of_other_versions_are_compatible() {
        let saved = record(&[("moved", "1")], &[], "");
        let now = record(&[("new", NOT_GIVEN)], &[("moved", "1")], "");
        assert_eq!(now.changes(&saved), Changes::default());
        let now = record(&[], &[("moved", "2")], "");
        assert_eq!(now.changes(&saved).refused, ["moved: it was 1, and is 2"]);
    }

    #[test]
    fn recorded_text_is_escaped() {
        let saved = record(&[], &[("a\x1b", "b\x1b")], "");
        let reported = Record::default().changes(&saved).reported;
        assert!(reported.len() == 1 && !reported[0].contains('\x1b'), "{reported:?}");
    }
}
