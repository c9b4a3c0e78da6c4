//! What a run learns: its batches, losses and evaluation, behind one interface for the training loop.

use clap::ValueEnum;
use fsdp_candle::{ContextParallel, FsdpModule, World};
use fsdp_corpus::sequence::Pack;
use fsdp_train::data::{Batches, Text};
use fsdp_train::metrics::{DataRecord, EvalRecord};
use fsdp_train::models::{self, Batch, Head, LanguageModel};
use fsdp_train::tasks::TaskEvalRecord;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::agreement::Fields;
use crate::args::Args;
use crate::evaluate::{self, Evaluation, Sampler};
use crate::objective::{BatchLoss, Objective, Preference};

/// Key of the place in corpora in a checkpoint.
const PLACE: &str = "train.data";

/// Value of --task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TaskChoice {
    /// Predict the next token, or masked tokens
    Language,
    /// Classify texts
    Classify,
    /// Embed texts, so that those that belong together are similar
    Embed,
}

/// Measurements of an evaluation.
pub(crate) enum Evaluated {
    Language(EvalRecord),
    Texts(TaskEvalRecord),
}

/// What a run learns. Positions count sequences or records of the whole run.
pub(crate) trait Task {
    /// Returns the sequences of a step over all ranks, by which it advances the position.
    fn sequences_per_step(&self) -> u64;

    /// Returns the tokens of the step at `position` over all ranks.
    fn tokens(&self, position: u64) -> f64;

    /// Returns the number of counted targets of all ranks in the step at `position`. Collective.
    fn counted(&self, position: u64) -> anyhow::Result<u64>;

    /// Returns the index of the first row of a micro-batch, over all ranks and steps. It seeds dropout.
    fn first_row(&self, position: u64, micro_step: usize) -> u64;

    /// Returns the loss of this rank's micro-batch. `model` is in training mode.
    fn loss(&self, model: &Model, position: u64, micro_step: usize, world: &World) -> anyhow::Result<BatchLoss>;

    /// Compares the gradients of the next batch with finite differences. Collective.
    fn check_gradients(&self, args: &Args, model: &Model, position: u64, world: &World) -> anyhow::Result<()>;

    /// Evaluates the model if an evaluation is due after `step` steps. Collective.
    fn evaluate(&self, model: &Model, step: usize, world: &World) -> anyhow::Result<Option<Evaluated>>;

    /// Returns a sample of the model's outputs. Collective.
    fn sample(&self, model: &Model, world: &World) -> anyhow::Result<String>;

    /// Returns whether a sample is also printed before the first step.
    fn samples_first(&self) -> bool {
        true
    }

    /// Describes the training data for the user.
    fn description(&self) -> String;

    /// Describes the training data by size and checksum.
    fn summary(&self) -> String;

    /// Returns values for a checkpoint by which [`Task::resume`] continues in the data. A position is enough for data that
    /// allows random access.
    fn values(&self) -> anyhow::Result<Map<String, Value>> {
        Ok(Map::new())
    }

    /// Continues in the data where a checkpoint was saved. Returns a note for the user, if any.
    fn resume(&self, _values: &Map<String, Value>, _args: &Args) -> anyhow::Result<Option<String>> {
        Ok(None)
    }

    /// Returns the use of corpora, with the time that this rank waited for data since the last call.
    fn data_record(&self) -> Option<DataRecord> {
        None
    }

    /// Lists what ranks must have read alike besides the training data.
    fn inputs(&self) -> Fields {
        Fields::new()
    }

    /// Lists settings that a run that resumes compares: those that define what weights mean, and others.
    fn settings(&self, _args: &Args) -> (Fields, Fields) {
        Default::default()
    }

    /// Returns warnings about the data.
    fn warnings(&self) -> Vec<String>;

    /// Sets what preference tuning compares the model with.
    fn prefer(&mut self, _preference: Preference) {}

    /// Returns the bytes of this rank's shards besides those of the trained model.
    fn shard_bytes(&self) -> u64 {
        0
    }

    /// Returns the model's output.
    fn head(&self) -> Head {
        Head::Vocabulary
    }

    /// Returns the tokens of a micro-batch on which the estimate of memory is based.
    fn batch_tokens(&self, args: &Args) -> usize;

    /// Returns the files of an export that differ from the model's own, or `None` for a language model.
    fn export(&self, _args: &Args) -> anyhow::Result<Option<TextExport>> {
        Ok(None)
    }
}

/// Export of a model that classifies or embeds texts.
pub(crate) struct TextExport {
    /// Paths and contents of files in JSON.
    pub(crate) files: Vec<(std::path::PathBuf, serde_json::Value)>,
    /// Name of a parameter in the export.
    pub(crate) name: fn(&str) -> String,
    /// PEFT's task type.
    pub(crate) peft_task: &'static str,
}

/// Model of a run.
pub(crate) type Model = FsdpModule<LanguageModel>;

/// Language modelling, masked or not, on text, examples or preference pairs.
pub(crate) struct Language {
    pub(crate) batches: Batches,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) text: Text,
    /// Longest sequence that the model supports.
    pub(crate) positions: usize,
    /// Whether the data are examples or pairs.
    pub(crate) has_examples: bool,
    pub(crate) objective: Objective,
    /// Ranks that share sequences, if there are several.
    pub(crate) context: Option<ContextParallel>,
}

impl Language {
    fn batch(&self, position: u64, micro_step: usize, world: &World) -> anyhow::Result<Batch> {
        Ok(Batch::new(self.batches.micro_batch(position, micro_step)?, world.device(), self.context.as_ref())?)
    }
}

impl Task for Language {
    fn sequences_per_step(&self) -> u64 {
        self.batches.sequences_per_step()
    }

    fn tokens(&self, position: u64) -> f64 {
        self.batches.tokens(position) as f64
    }

    fn counted(&self, position: u64) -> anyhow::Result<u64> {
        self.batches.counted(position)
    }

    fn first_row(&self, position: u64, micro_step: usize) -> u64 {
        self.batches.first_row(position, micro_step)
    }

    fn loss(&self, model: &Model, position: u64, micro_step: usize, world: &World) -> anyhow::Result<BatchLoss> {
        let batch = self.batch(position, micro_step, world)?;
        model.inner().set_training(false);
        let reference = self.objective.reference(model, &batch)?;
        model.inner().set_training(true);
        Ok(self.objective.loss(model, &batch, reference.as_ref())?)
    }

    fn check_gradients(&self, _args: &Args, model: &Model, position: u64, world: &World) -> anyhow::Result<()> {
        let batch = self.batch(position, 0, world)?;
        let reference = self.objective.reference(model, &batch)?;
        evaluate::run_gradcheck(model, world, |model| match &reference {
            Some(reference) => self.objective.loss(model, &batch, Some(reference)).map(|of_batch| of_batch.loss),
            None => models::cross_entropy(model, &batch),
        })
    }

    fn evaluate(&self, model: &Model, step: usize, world: &World) -> anyhow::Result<Option<Evaluated>> {
        let due = self.evaluation.as_ref().filter(|evaluation| evaluation.schedule.is_due(step));
        due.map(|evaluation| Ok(Evaluated::Language(evaluation.run(model, &self.objective, step, world)?))).transpose()
    }

    fn sample(&self, model: &Model, world: &World) -> anyhow::Result<String> {
        let sampler = Sampler { model, text: &self.text, positions: self.positions };
        match self.has_examples {
            true => {
                let prompts = self.evaluation.as_ref().map_or(&self.batches, |evaluation| &evaluation.batches);
                sampler.answer_example(prompts, world)
            }
            false => sampler.continue_stream(&self.batches, world),
        }
    }

    fn samples_first(&self) -> bool {
        self.has_examples
    }

    fn description(&self) -> String {
        self.batches.description()
    }

    fn summary(&self) -> String {
        self.batches.summary()
    }

    fn values(&self) -> anyhow::Result<Map<String, Value>> {
        let place = self.batches.corpus().map(|corpus| corpus.place()).transpose()?;
        Ok(place.map(|place| (PLACE.to_owned(), place)).into_iter().collect())
    }

    fn resume(&self, values: &Map<String, Value>, args: &Args) -> anyhow::Result<Option<String>> {
        let Some(corpus) = self.batches.corpus() else { return Ok(None) };
        let resumed = corpus.resume(values.get(PLACE));
        match (resumed, values.contains_key(PLACE)) {
            (Ok(()), true) => Ok(None),
            (Ok(()), false) => Ok(Some("from the start of the data: it holds no place in these".into())),
            (Err(error), _) if args.resume_anyway => {
                corpus.resume(None)?;
                Ok(Some(format!("from the start of the data: {error:#}")))
            }
            (Err(error), _) => {
                Err(error.context("its place does not fit the data; --resume-anyway begins at the start of the data"))
            }
        }
    }

    fn data_record(&self) -> Option<DataRecord> {
        self.batches.corpus().map(|corpus| corpus.record())
    }

    fn inputs(&self) -> Fields {
        let mut read = Fields::new();
        if let Some(masking) = self.batches.masking() {
            read.insert("the mask token".into(), masking.mask_token.to_string());
        }
        if let Some(evaluation) = &self.evaluation {
            read.insert("the data of --eval".into(), evaluation.batches.summary());
        }
        read
    }

    fn settings(&self, args: &Args) -> (Fields, Fields) {
        let masking = self.batches.masking().map_or("none".into(), |masking| {
            let (share, token) = (masking.probability, masking.mask_token);
            format!("{share} of the tokens, by token {token}, by --seed {}", args.seed)
        });
        let (mut fixed, mut others) = (Fields::new(), Fields::from([("the masked tokens".to_owned(), masking)]));
        if let Some(corpus) = self.batches.corpus() {
            let pack = match corpus.pack() {
                Pack::Documents => "documents",
                Pack::Stream => "stream",
            };
            others.insert("--pack".into(), pack.into());
        }
        if let Objective::Preference(preference) = &self.objective {
            fixed.extend(preference.start.clone());
            others.insert("--dpo-beta".into(), preference.beta.to_string());
        }
        (fixed, others)
    }

    fn prefer(&mut self, preference: Preference) {
        self.objective = Objective::Preference(preference);
    }

    fn shard_bytes(&self) -> u64 {
        self.objective.shard_bytes()
    }

    fn batch_tokens(&self, args: &Args) -> usize {
        // Pairs may be shorter than --seq-len.
        if args.dpo.is_some() { 0 } else { args.batch_size * args.seq_len / args.context_parallel }
    }

    fn warnings(&self) -> Vec<String> {
        let all = [Some(&self.batches), self.evaluation.as_ref().map(|evaluation| &evaluation.batches)];
        all.into_iter().flatten().filter_map(Batches::warning).collect()
    }
}
