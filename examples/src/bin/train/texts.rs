//! `--task classify` and `--task embed`: the tasks on whole texts.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use candle_core::Tensor;
use fsdp_candle::{ContextParallel, ReduceOp, World, no_grad};
use fsdp_ckpt::open_weights;
use fsdp_train::data::Text;
use fsdp_train::data::records::{Labels, RecordBatches, RecordReader, Records, padding_token};
use fsdp_train::models::config::BUILTIN;
use fsdp_train::models::{Head, ModelConfig, Pooling, normalizes};
use fsdp_train::tasks::classify::{self, most_likely};
use fsdp_train::tasks::embed;
use fsdp_train::tasks::export::{classifier_config, embedding_config, exported_name, sentence_transformers_files};
use fsdp_train::tasks::{TaskEvalRecord, TextBatch};

use crate::adapters::CLASSIFIER_TASK;
use crate::agreement::Fields;
use crate::args::Args;
use crate::evaluate::{self, Schedule};
use crate::objective::BatchLoss;
use crate::setup::pretrained;
use crate::task::{Evaluated, Model, Task, TaskChoice, TextExport};

/// A task on whole texts.
pub(crate) struct Texts {
    batches: RecordBatches,
    evaluation: Option<(RecordBatches, Schedule)>,
    text: Text,
    kind: Kind,
    /// Ranks that share sequences, if there are several.
    context: Option<ContextParallel>,
    /// Width of the residual stream.
    width: usize,
    /// Padding token that config.json does not name.
    padding: Option<u32>,
}

enum Kind {
    Classify(Labels),
    Embed { pooling: Pooling, normalizes: bool },
}

impl Texts {
    /// Reads the data.
    pub(crate) fn new(
        args: &Args,
        config: &ModelConfig,
        text: Text,
        context: Option<ContextParallel>,
        world: &World,
    ) -> anyhow::Result<Self> {
        let model = args.model.as_deref();
        let (width, types, own_padding) = match config {
            ModelConfig::Decoder(config) => (config.width, 0, config.padding),
            ModelConfig::Gpt2(config) => (config.n_embd, 0, None),
            ModelConfig::Bert(config) => (config.hidden_size, config.type_vocab_size, config.padding),
        };
        let vocabulary = config.vocab_size();
        let padding = match own_padding {
            Some(_) => None,
            None => padding_token(model, &text)?.filter(|&token| (token as usize) < vocabulary),
        };
        // Without a padding token, an id that no text has marks every token as data.
        let fill = own_padding.map(|token| token as u32).or(padding);
        let classes = head_classes(args, config)?;
        let reader = RecordReader { text: &text, seq_len: args.seq_len, vocabulary, types, classes };
        let data = args.data.as_deref().unwrap_or(Path::new(""));
        let read_eval = |read: &dyn Fn(&Path) -> anyhow::Result<Records>| {
            args.eval.as_deref().map(|path| read(path).context("--eval")).transpose()
        };
        let (records, eval, kind) = match args.task {
            TaskChoice::Embed => {
                let pooling = model.map(Pooling::from_dir).transpose()?.flatten().unwrap_or_default();
                let normalizes = model.map(normalizes).transpose()?.unwrap_or(false);
                let (records, eval) = (reader.pairs(data).context("--data")?, read_eval(&|path| reader.pairs(path))?);
                (records, eval, Kind::Embed { pooling, normalizes })
            }
            _ => {
                let known = Labels::of_config(model)?;
                let (records, labels) = reader.labelled(data, known.as_ref(), false).context("--data")?;
                let eval = read_eval(&|path| Ok(reader.labelled(path, Some(&labels), true)?.0))?;
                (records, eval, Kind::Classify(labels))
            }
        };
        let (shape, multiple) = (args.batch_shape(world)?, args.sequence_multiple());
        let shuffle = args.shuffled().then_some(args.seed);
        let evaluation = match eval {
            Some(records) => {
                Some((RecordBatches::for_evaluation(records, shape, fill)?.padded_to(multiple), Schedule::new(args)))
            }
            None => None,
        };
        let batches = RecordBatches::new(records, shape, shuffle, fill)?.padded_to(multiple);
        ensure!(
            args.task != TaskChoice::Embed || shape.world_size * shape.batch_size > 1,
            "--task embed needs other records in the batch to tell a positive from: pass a --batch-size of at least 2"
        );
        Ok(Texts { batches, evaluation, text, kind, context, width, padding })
    }

    fn batch(&self, position: u64, micro_step: usize, world: &World) -> anyhow::Result<TextBatch> {
        Ok(TextBatch::new(self.batches.micro_batch(position, micro_step), world.device(), self.context.as_ref())?)
    }

    fn loss_of(&self, model: &Model, batch: &TextBatch, world: &World) -> candle_core::Result<Tensor> {
        let outputs = batch.outputs(model)?;
        match self.kind {
            Kind::Classify(_) => classify::loss(&outputs, &batch.labels),
            Kind::Embed { .. } => embed::loss(&outputs, self.columns(), world.group()),
        }
    }

    fn columns(&self) -> usize {
        self.batches.records().columns()
    }

    fn score(
        &self,
        batches: &RecordBatches,
        model: &Model,
        step: usize,
        world: &World,
    ) -> anyhow::Result<TaskEvalRecord> {
        let start = Instant::now();
        let rounds = (0..batches.rounds()).map(|round| {
            let batch = TextBatch::new(batches.pass(round), world.device(), self.context.as_ref())?;
            // A rank without records computes on empty rows, because all ranks must gather the parameters.
            let outputs = no_grad(|| batch.outputs(model)).context("can't evaluate")?;
            anyhow::Ok((batch, outputs))
        });
        Ok(match &self.kind {
            Kind::Classify(labels) => {
                let mut own = classify::Scores::new(labels.names().len());
                for round in rounds {
                    let (batch, logits) = round?;
                    own.add(&logits, &batch.labels)?;
                }
                let mut values = own.values();
                if self.context.as_ref().is_some_and(|context| context.group().rank() > 0) {
                    // The ranks that share sequences have the same records.
                    values.fill(0.);
                }
                let scores = classify::Scores::of_values(&world.all_reduce(&values, ReduceOp::Sum)?);
                TaskEvalRecord {
                    step,
                    eval_loss: scores.mean_loss(),
                    eval_accuracy: scores.accuracy(),
                    eval_macro_f1: Some(scores.macro_f1()),
                    eval_cosine: None,
                    eval_records: scores.records(),
                    eval_time_s: start.elapsed().as_secs_f64(),
                }
            }
            Kind::Embed { .. } => {
                let columns = batches.records().columns();
                let block = embed::BLOCK * columns * self.width;
                let (mut scores, mut waiting) = (embed::Scores::default(), Vec::new());
                for round in rounds {
                    let (batch, embeddings) = round?;
                    let own = embeddings.narrow(0, 0, batch.counted * columns)?.flatten_all()?.to_vec1::<f32>()?;
                    // In the order of the records, so blocks do not depend on the ranks.
                    let bytes = own.iter().flat_map(|x| x.to_le_bytes()).collect();
                    for part in world.group().gather_bytes(bytes)? {
                        waiting.extend(part.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
                    }
                    while waiting.len() >= block {
                        scores.add(&waiting[..block], columns, self.width);
                        waiting.drain(..block);
                    }
                }
                scores.add(&waiting, columns, self.width);
                TaskEvalRecord {
                    step,
                    eval_loss: scores.mean_loss(),
                    eval_accuracy: scores.accuracy(),
                    eval_macro_f1: None,
                    eval_cosine: Some(scores.cosine()),
                    eval_records: scores.records(),
                    eval_time_s: start.elapsed().as_secs_f64(),
                }
            }
        })
    }
}

/// Returns the number of classes of the head in the initial weights, if a classifier starts from one.
fn head_classes(args: &Args, config: &ModelConfig) -> anyhow::Result<Option<usize>> {
    let Some(dir) = pretrained(args)?.filter(|_| args.task == TaskChoice::Classify) else { return Ok(None) };
    let weights = open_weights(dir).with_context(|| format!("can't read the weights in {}", dir.display()))?;
    let Some(weights) = weights else { return Ok(None) };
    let layer = if matches!(config, ModelConfig::Bert(_)) { "classifier.weight" } else { "score.weight" };
    Ok(weights.tensors().get(layer).and_then(|tensor| tensor.shape.first().copied()))
}

impl Task for Texts {
    fn sequences_per_step(&self) -> u64 {
        self.batches.records_per_step()
    }

    fn tokens(&self, position: u64) -> f64 {
        self.batches.tokens(position) as f64
    }

    fn counted(&self, _position: u64) -> anyhow::Result<u64> {
        Ok(self.batches.records_per_step())
    }

    fn first_row(&self, position: u64, micro_step: usize) -> u64 {
        self.batches.first_record(position, micro_step).wrapping_mul(self.columns() as u64)
    }

    fn loss(&self, model: &Model, position: u64, micro_step: usize, world: &World) -> anyhow::Result<BatchLoss> {
        let batch = self.batch(position, micro_step, world)?;
        Ok(BatchLoss { loss: self.loss_of(model, &batch, world)?, weight: batch.counted as u64, rewards: None })
    }

    fn check_gradients(&self, _args: &Args, model: &Model, position: u64, world: &World) -> anyhow::Result<()> {
        let batch = self.batch(position, 0, world)?;
        evaluate::run_gradcheck(model, world, |model| self.loss_of(model, &batch, world))
    }

    fn evaluate(&self, model: &Model, step: usize, world: &World) -> anyhow::Result<Option<Evaluated>> {
        let due = self.evaluation.as_ref().filter(|(_, schedule)| schedule.is_due(step));
        due.map(|(batches, _)| Ok(Evaluated::Texts(self.score(batches, model, step, world)?))).transpose()
    }

    /// Shows the first record of the evaluation data: its most likely label, or how similar its texts are.
    fn sample(&self, model: &Model, world: &World) -> anyhow::Result<String> {
        let batches = self.evaluation.as_ref().map_or(&self.batches, |(batches, _)| batches);
        let batch = TextBatch::new(batches.first(), world.device(), None)?;
        let outputs = no_grad(|| batch.outputs(model)).context("can't compute a sample")?;
        let text = |column: usize| self.text.decode(batches.records().ids(0, column));
        Ok(match &self.kind {
            Kind::Classify(labels) => match most_likely(&outputs.to_vec2::<f32>()?.concat()) {
                Some((class, probability)) => {
                    format!("{:?} -> {:?} ({:.1} %)", text(0)?, labels.names()[class], 100. * probability)
                }
                None => format!("{:?} -> no label: the largest logits are equal, or NaN", text(0)?),
            },
            Kind::Embed { .. } => {
                let mut scores = embed::Scores::default();
                scores.add(&outputs.flatten_all()?.to_vec1::<f32>()?, batches.records().columns(), self.width);
                format!("{:?} and {:?}: a cosine of {:.3}", text(0)?, text(1)?, scores.cosine())
            }
        })
    }

    fn description(&self) -> String {
        let records = self.batches.records();
        match &self.kind {
            Kind::Classify(labels) => format!("{records} with the labels {labels}"),
            Kind::Embed { pooling, .. } => format!("{records}, by {} pooling", pooling.name()),
        }
    }

    fn summary(&self) -> String {
        self.batches.records().summary()
    }

    fn inputs(&self) -> Fields {
        let mut read = Fields::new();
        match &self.kind {
            Kind::Classify(labels) => {
                read.insert("the labels".into(), labels.to_string());
            }
            Kind::Embed { pooling, .. } => {
                read.insert("the pooling".into(), pooling.name().into());
            }
        }
        if let Some((batches, _)) = &self.evaluation {
            read.insert("the data of --eval".into(), batches.records().summary());
        }
        read
    }

    fn settings(&self, _args: &Args) -> (Fields, Fields) {
        let fixed = match &self.kind {
            Kind::Classify(labels) => ("the labels".to_owned(), labels.names().join(", ")),
            Kind::Embed { pooling, .. } => ("the pooling".to_owned(), pooling.name().to_owned()),
        };
        (Fields::from([fixed]), Fields::new())
    }

    fn warnings(&self) -> Vec<String> {
        let eval = self.evaluation.as_ref().map(|(batches, _)| batches);
        [Some(&self.batches), eval].into_iter().flatten().filter_map(|batches| batches.records().warning()).collect()
    }

    fn head(&self) -> Head {
        match &self.kind {
            Kind::Classify(labels) => Head::Classes(labels.names().len()),
            Kind::Embed { pooling, .. } => Head::Embedding(*pooling),
        }
    }

    fn batch_tokens(&self, args: &Args) -> usize {
        args.batch_size * self.columns() * self.batches.records().longest() / args.context_parallel
    }

    fn export(&self, args: &Args) -> anyhow::Result<Option<TextExport>> {
        let config = match &args.model {
            Some(model) => {
                let path = model.join("config.json");
                std::fs::read_to_string(&path).with_context(|| format!("can't read {}", path.display()))?
            }
            None => BUILTIN.into(),
        };
        let named = |config| vec![(PathBuf::from("config.json"), config)];
        Ok(Some(match &self.kind {
            Kind::Classify(labels) => TextExport {
                files: named(classifier_config(&config, labels.names(), self.padding)?),
                name: |name| exported_name(name, false),
                peft_task: CLASSIFIER_TASK,
            },
            Kind::Embed { pooling, normalizes } => {
                let mut files = named(embedding_config(&config)?);
                let others = sentence_transformers_files(self.width, *pooling, *normalizes, args.seq_len);
                files.extend(others.into_iter().map(|(path, content)| (path.to_owned(), content)));
                TextExport { files, name: |name| exported_name(name, true), peft_task: "FEATURE_EXTRACTION" }
            }
        }))
    }
}
