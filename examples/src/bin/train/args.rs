//! The command line of `train`.
//! The flags of the optimizer.
//! Flags that mean nothing beside the others: whoever passes one expects something of it.

use std::path::PathBuf;

use anyhow::ensure;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use fsdp_candle::{AdjustLr, ReshardAfterForward, World};
use fsdp_examples::data::BatchShape;
use fsdp_examples::device::DeviceChoice;
use fsdp_examples::ranks::Ranks;
use fsdp_examples::schedule::LrSchedule;
use serde::Serialize;

use crate::flag_types::{
    ActivationCheckpoint, AllGather, CheckpointKeep, DropoutChoice, GradSync, InitChoice, Offload, Precision, Resume,
    Switch,
};
use crate::flag_types::{
    activation_checkpoint, betas, checkpoint_place, count, dropout, loss_scale, not_negative, place, positive, reshard,
    reshard_word, share,
};

const AFTER_HELP: &str = "Examples:

  Train the built-in byte-level Llama on the sources of the workspace you are in, over two processes:
      fsdp-launch --nproc-per-node 2 train

  Fine-tune a model that you downloaded from Hugging Face on your own text, and export it for transformers:
      fsdp-launch --nproc-per-node 4 train --model ./Llama-3.2-1B --data ./texts --lr 1e-5 --seq-len 512 \\
        --export-hf ./tuned

  Fine-tune it on conversations, and see how well it does on others:
      fsdp-launch --nproc-per-node 4 train --model ./Llama-3.2-1B-Instruct --sft chats.jsonl --lr 1e-5 \\
        --seq-len 512 --eval others.jsonl --eval-every 50 --export-hf ./tuned

  Pre-train a model of a known architecture from random weights, on tokens prepared before, saving every 500 steps:
      fsdp-launch --nproc-per-node 4 train --model ./gpt2 --init random --data train.bin --steps 10000 \\
        --checkpoint-dir ./saved --save-every 500

  Go on where it stopped, also with another number of processes: the same command with --resume auto
      fsdp-launch --nproc-per-node 2 train --model ./gpt2 --init random --data train.bin --steps 10000 \\
        --checkpoint-dir ./saved --save-every 500 --resume auto

One step sees (processes / --tensor-parallel x --batch-size x --grad-accum) sequences. Runs for which this product is \
the same see the same data in the same order and give the same losses, up to rounding.";

/// Flags that name what is read, and that may differ from rank to rank: what is read through them is compared.
pub(crate) const INPUTS: [&str; 5] = ["model", "data", "sft", "eval", "lora-from"];
/// Flags that may differ because they are for rank 0 alone.
pub(crate) const RANK_0_FLAGS: [&str; 2] = ["metrics", "tensorboard"];

/// Pre-trains or fine-tunes a language model whose parameters, gradients and optimizer state are sharded over the
/// processes.
#[derive(Parser, Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(name = "train", version, after_long_help = AFTER_HELP, allow_negative_numbers = true)]
#[command(after_help = "Example: fsdp-launch --nproc-per-node 2 train --steps 100     (--help tells more)")]
pub(crate) struct Args {
    /// Hugging Face model directory [default: a built-in byte-level Llama of about 5 M parameters]
    ///
    /// Needed there: config.json with one of the model types llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3,
    /// mixtral, qwen3_moe, gpt2 and bert. Used if there: model.safetensors (or model.safetensors.index.json and the
    /// files it names) and tokenizer.json. Each process reads only its own slices of the weights. A bert is trained as
    /// a masked language model. Nothing is dropped without --dropout.
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    #[serde(serialize_with = "place")]
    pub(crate) model: Option<PathBuf>,

    /// Where the first weights come from
    #[arg(long, value_enum, default_value_t = InitChoice::Auto, help_heading = "Model")]
    pub(crate) init: InitChoice,

    /// Elements that become 0 while the model trains: their share, or `config` for what config.json says
    ///
    /// Of a gpt2 and a bert: of embeddings, of attention weights, and of what attention and MLP add to the residual
    /// stream; of the others: of attention weights. Which they are follows from --seed and from how many sequences the
    /// run has read, so that it is the same at every number of processes, and again after --resume. None while --eval
    /// measures and samples are drawn.
    #[arg(long, value_name = "P|config", default_value = "0", value_parser = dropout, allow_hyphen_values = true)]
    #[arg(help_heading = "Model")]
    pub(crate) dropout: DropoutChoice,

    /// What to train on: a .bin file of tokens, a text file, or a directory of them [default: the sources of the
    /// workspace]
    ///
    /// A .bin file holds unsigned 16-bit little-endian token ids and nothing else. Text is tokenised by the model
    /// directory's tokenizer.json, or as bytes if there is none. A directory is read recursively in the order of the
    /// names, without hidden files, directories called target, symbolic links and what is not text. Without --data, the
    /// .rs, .md and .toml files of the Cargo workspace around the current directory are the text. When all the data is
    /// read, it starts again.
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    #[serde(serialize_with = "place")]
    pub(crate) data: Option<PathBuf>,

    /// Fine-tune on examples instead: a JSONL file of conversations, or of prompts with completions
    ///
    /// A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or
    /// {"prompt": "...", "completion": "..."}. Conversations are written by the chat template of the model directory
    /// (chat_template.jinja, or the one in tokenizer_config.json), or else in a plain format. Only what the assistant
    /// says, or the completion, is learnt. docs/fine-tuning.md tells more.
    #[arg(long, value_name = "FILE", conflicts_with = "data", help_heading = "Data")]
    #[serde(serialize_with = "place")]
    pub(crate) sft: Option<PathBuf>,

    /// With --sft: whether several examples may share a sequence. They never see each other. `off` pads each of them
    /// [default: on]
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) packing: Option<Switch>,

    /// Read the data in another order in each epoch, which follows from --seed [default: on with --sft, else off]
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) shuffle: Option<Switch>,

    /// Measure the loss on this data as well, before the first step and at the end: of the kind of --sft or --data
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    #[serde(serialize_with = "place")]
    pub(crate) eval: Option<PathBuf>,

    /// Measure the loss on --eval after so many steps, again and again
    #[arg(long, value_name = "N", value_parser = count, requires = "eval", help_heading = "Data")]
    pub(crate) eval_every: Option<usize>,

    /// Sequences that each process reads at once
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, help_heading = "Data")]
    pub(crate) batch_size: usize,

    /// Tokens a sequence
    #[arg(long, value_name = "N", default_value = "128", value_parser = count, help_heading = "Data")]
    pub(crate) seq_len: usize,

    /// For a bert: the share of tokens that it has to tell from the others, above 0 and at most 1 [default: 0.15]
    ///
    /// Of these, 80 % become the mask token, 10 % a random one, and 10 % stay; the loss is the mean over all of a step.
    /// Which they are follows from --seed and from how many sequences the run has read, so that it is the same at every
    /// number of processes, and another one when the data starts again.
    #[arg(long, value_name = "P", value_parser = share, allow_hyphen_values = true, help_heading = "Data")]
    pub(crate) mlm_probability: Option<f64>,

    /// For a bert: the id of the mask token [default: the one of the model directory's tokenizer]
    #[arg(long, value_name = "ID", help_heading = "Data")]
    pub(crate) mask_token: Option<u32>,

    /// Micro-batches of --batch-size sequences whose gradients add up to one step
    ///
    /// A larger batch without more memory: `--batch-size 8` and `--batch-size 2 --grad-accum 4` give the same steps.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Data")]
    pub(crate) grad_accum: usize,

    /// Steps of the whole run; a resumed run counts from where it stopped
    #[arg(long, value_name = "N", default_value = "300", value_parser = count, help_heading = "Optimizer")]
    pub(crate) steps: usize,

    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) optimizer: OptimizerFlags,

    /// Steps in which the learning rate rises to --lr; 0 starts with it
    #[arg(long, value_name = "N", default_value = "10", help_heading = "Optimizer")]
    pub(crate) warmup_steps: usize,

    /// What the learning rate does after the warm-up: `cosine` and `linear` let it fall to 0 at the last step
    #[arg(long, value_enum, default_value_t = LrSchedule::Cosine, help_heading = "Optimizer")]
    pub(crate) lr_schedule: LrSchedule,

    /// Scale the gradients down to this global norm where theirs is larger; 0 never does
    #[arg(long, value_name = "NORM", default_value = "1.0", value_parser = not_negative, allow_hyphen_values = true)]
    #[arg(help_heading = "Optimizer")]
    pub(crate) clip_grad_norm: f64,

    /// Train low-rank adapters of this rank, and freeze all else (LoRA)
    ///
    /// Weights that the model directory lacks are drawn for adapters only. --export-hf then writes the adapters alone,
    /// as PEFT reads them.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Adapters")]
    pub(crate) lora_rank: Option<usize>,

    /// An adapter's output is multiplied by this number / rank [default: twice the rank]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true, requires = "lora_rank")]
    #[arg(help_heading = "Adapters")]
    pub(crate) lora_alpha: Option<f64>,

    /// The layers that get adapters, by their names or what these end with: any fully connected ones [default: the
    /// attention's projections of queries and values]
    ///
    /// `*` and `?` stand for characters of one part between dots, `**` for any parts, and all-linear for every fully
    /// connected layer but the head: --lora-targets q_proj,v_proj,model.layers.0.mlp.*
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',', requires = "lora_rank", help_heading = "Adapters")]
    pub(crate) lora_targets: Vec<String>,

    /// Go on training adapters that PEFT or --export-hf has written, with the rank, alpha and layers that they have
    ///
    /// In the directory are adapter_config.json and adapter_model.safetensors.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["lora_rank"], help_heading = "Adapters")]
    #[serde(serialize_with = "place")]
    pub(crate) lora_from: Option<PathBuf>,

    /// Copies of the sharded model (HSDP): parameters are sharded over world size / N processes, gradients are summed
    /// over the N copies as well
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) replicate: usize,

    /// Processes that compute each layer together: each holds a part of its matrices and computes with it, on the same
    /// data as the N - 1 others. N divides the model's heads, inner widths and vocabulary; not for phi3, gpt2 and bert
    ///
    /// Heads, the MLPs' inner width and the vocabulary are shared out, and with them the activations inside layers.
    /// Each layer communicates in forward and backward, so let these processes be near to each other: they are
    /// neighbours. The other processes shard what is left of each matrix, as without this flag; world size / N of them
    /// read data. docs/tensor-parallel.md tells more.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) tensor_parallel: usize,

    /// With --tensor-parallel: share out the sequence as well, where layers don't see all of it. Norms and residuals
    /// then take 1/N of the memory, and as much is communicated as without
    #[arg(long, help_heading = "Sharding")]
    pub(crate) sequence_parallel: bool,

    /// With --replicate: divide each shard, its gradient and optimizer state over the copies as well, each of which
    /// updates its part. They gather shards once a step; as many bytes travel
    #[arg(long, help_heading = "Sharding")]
    pub(crate) shard_optimizer_over_replicas: bool,

    /// What becomes of gathered parameters between forward and backward: `always` frees them (ZeRO-3), `never` keeps
    /// them (ZeRO-2), `default` keeps only those outside the blocks, a number K keeps what K neighbouring processes
    /// need to gather them again among themselves
    #[arg(long, value_name = "default|always|never|K", default_value = "default", value_parser = reshard)]
    #[arg(help_heading = "Sharding")]
    #[serde(serialize_with = "reshard_word")]
    pub(crate) reshard_after_forward: ReshardAfterForward,

    /// Where shards, their gradients and the optimizer's state live: `cpu` keeps them in page-locked memory of the
    /// host, where the optimizer runs, and copies shards to the device that computes. On CPUs they are there anyway
    #[arg(long, value_enum, default_value_t = Offload::None, help_heading = "Sharding")]
    pub(crate) offload: Offload,

    /// The dtype of gathered parameters, and so of compute; shards and optimizer state stay f32. With f16 the loss is
    /// scaled (--loss-scale)
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Sharding")]
    pub(crate) param_dtype: Precision,

    /// The dtype in which gradients are summed over processes
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Sharding")]
    pub(crate) reduce_dtype: Precision,

    /// What the matrices of the blocks travel as when they are gathered: `full` in --param-dtype, `float8` as 8-bit
    /// floats (E4M3) with one scale for each process's shard of a matrix
    ///
    /// A gathered weight then differs by up to 1/16 of itself, and a quarter of the bytes of f32, or half of those of
    /// bf16 and f16, travel. Shards, gradients, optimizer state and what is saved stay as they are. So do embeddings,
    /// heads, norms, biases, the routers of experts, and adapters. Where a shard begins follows from the number of
    /// processes, and so do the scales: other numbers of processes train a little differently.
    #[arg(long, value_enum, default_value_t = AllGather::Full, help_heading = "Sharding")]
    pub(crate) all_gather: AllGather,

    /// With f16: what the loss is multiplied by at first, at least 1 [default: 65536]
    ///
    /// f16 has no numbers below 6e-8, and many gradients are smaller. So the loss is multiplied by a scale before
    /// backward, and the gradients are divided by it after. As torch.amp.GradScaler does, a step whose gradients
    /// overflow (f16 ends at 65504) is skipped and the scale halved, which a line on stderr tells; 2000 good steps in a
    /// row double it. If they overflow even at a scale of 1, the run ends. Checkpoints hold the scale, with which
    /// --resume goes on.
    #[arg(long, value_name = "SCALE", value_parser = loss_scale, allow_hyphen_values = true)]
    #[arg(help_heading = "Sharding")]
    pub(crate) loss_scale: Option<f64>,

    /// How many blocks ahead parameters are gathered
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Sharding")]
    pub(crate) prefetch: usize,

    /// With --grad-accum: sum gradients over processes after `every` micro-batch (less memory), or after the `last` one
    /// (less communication) [default: every]
    #[arg(long, value_enum, help_heading = "Sharding")]
    pub(crate) grad_sync: Option<GradSync>,

    /// Compare the gradients with differences of the loss before the first step, and stop if they are not the same
    ///
    /// Each block is checked along two random directions, of four forwards each (of more where the loss jumps); the
    /// first that loses gradient is named. Only with --param-dtype f32 and --all-gather full.
    #[arg(long, help_heading = "Run")]
    pub(crate) gradcheck: bool,

    /// Write a trace of what every process computes and communicates, to be opened at ui.perfetto.dev
    /// (`Open trace file`) or chrome://tracing
    ///
    /// Each process is a row called `rank N` with a line for compute (steps, and forward and backward of each unit) and
    /// one for each group that it communicates in. While the run lasts, and after one that fails, the processes have
    /// files of their own, such as trace.rank0.json; a run that ends well joins them.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(serialize_with = "place")]
    pub(crate) trace: Option<PathBuf>,

    /// The blocks that run again in backward instead of keeping their activations: less memory, a second forward, the
    /// same numbers. `full` is all of them, a number K every K-th, NAMES (patterns, with commas between them) the
    /// blocks whose names match, whole or at their end, such as model.layers.[0-3]
    #[arg(long, value_name = "none|full|K|NAMES", default_value = "none", value_parser = activation_checkpoint)]
    #[arg(help_heading = "Sharding")]
    pub(crate) activation_checkpoint: ActivationCheckpoint,

    /// With --activation-checkpoint: what blocks that run again keep all the same, to compute it once
    #[arg(long, value_enum, value_delimiter = ',', help_heading = "Sharding")]
    pub(crate) checkpoint_keep: Vec<CheckpointKeep>,

    /// Seed of random weights and of the order of shuffled data; the same seed gives the same ones at every number of
    /// processes
    #[arg(long, value_name = "N", default_value = "42", help_heading = "Run")]
    pub(crate) seed: u64,

    /// Where to compute: `auto` is CUDA devices where this build (feature `cuda`) and the machine have some, else the
    /// CPU
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto, help_heading = "Run")]
    pub(crate) device: DeviceChoice,

    /// Where checkpoints are written, each a directory in it [default: checkpoints/run-NNN, a new one for each run]
    ///
    /// All hosts share it, or each has its own (--checkpoint-local). Where train was built with `--features
    /// object-store`, it may be a URL as s3://bucket/run, which no host has to share.
    ///
    /// Every process tries to write there before the first step. Weights that are infinite or not a number are not
    /// saved: the run ends, and says which they are and which checkpoint is the newest good one. So it does when the
    /// loss or the norm of the gradients is not finite, before the step is taken (but see --loss-scale).
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "checkpoint_place")]
    pub(crate) checkpoint_dir: Option<PathBuf>,

    /// Each host has a --checkpoint-dir of its own, on a disk that the others don't see
    ///
    /// The first process of each host looks after it. Every host writes what its own processes hold, and what the whole
    /// checkpoint is made of: all hosts' directories of one step, copied into one in any order (`rsync -a`, `cp -a`),
    /// are a checkpoint that any number of processes loads. Without copying --resume goes on where each process finds
    /// its part on its own host: with the same hosts in the same order (fsdp-launch --node-rank) and as many processes
    /// on each. --resume auto takes the newest step that all hosts have together. Hosts are told apart by their names,
    /// which `hostname` prints. docs/checkpoints.md tells more.
    #[arg(long, requires = "checkpoint_dir", help_heading = "Run")]
    pub(crate) checkpoint_local: bool,

    /// Save after so many steps, again and again; 0 saves only at the end, which is always saved
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Run")]
    pub(crate) save_every: usize,

    /// Keep the newest N checkpoints of this run and remove older ones after each save [default: keep all]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Run")]
    pub(crate) keep: Option<usize>,

    /// Write checkpoints in the background: training stops only while they are copied in memory, which takes once more
    /// the memory of a rank's state
    #[arg(long, help_heading = "Run")]
    pub(crate) async_save: bool,

    /// Go on from a checkpoint: `none`, `auto` (the newest whole one in --checkpoint-dir, if any), or its path
    ///
    /// Model, optimizer, step and position in the data continue, at the same number of processes bit for bit. The
    /// number of processes, --batch-size and --grad-accum may differ from the run that saved it. A checkpoint that
    /// turns out to be damaged, or to hold values that are infinite or not a number, is set aside by `auto`, as
    /// step-00000010.damaged, and an older one taken. A path may also be a checkpoint of PyTorch's
    /// torch.distributed.checkpoint, a Hugging Face directory or file, or a .pt file; the step is then that of its
    /// optimizer, or 0 if it has none. A directory that is called auto or none is ./auto or ./none.
    #[arg(long, value_name = "auto|none|PATH", default_value = "none")]
    #[arg(value_parser = OsStringValueParser::new().map(Resume::from), help_heading = "Run")]
    pub(crate) resume: Resume,

    /// Go on from a checkpoint although it can't be right
    ///
    /// A checkpoint says how its run was set up. What a run that goes on from it does otherwise, such as other data or
    /// another learning rate, is said. Refused without this flag are: other values of config.json than dropout's,
    /// another kind of --optimizer, adapters of another rank or alpha. With it the optimizer starts afresh where it
    /// finds no state of its own.
    #[arg(long, help_heading = "Run")]
    pub(crate) resume_anyway: bool,

    /// Write the trained model there as a Hugging Face directory, which transformers can load
    ///
    /// Weights that are there already are never overwritten, but for those that this run has exported itself before it
    /// was started again with --resume auto.
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "place")]
    pub(crate) export_hf: Option<PathBuf>,

    /// Write what each step measured to this file, one JSON object a line
    ///
    /// Fields: step, loss (mean over all processes' tokens that are to be learnt), grad_norm (before clipping; null in
    /// a step that --loss-scale skips), lr, step_time_s, tokens_per_s, peak_mem_bytes (the largest process's),
    /// shard_bytes (parameters, gradients and optimizer state resident a process). Lines of --eval have step,
    /// eval_loss, eval_perplexity, eval_tokens and eval_time_s instead.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(serialize_with = "place")]
    pub(crate) metrics: Option<PathBuf>,

    /// Write what each step measured as TensorBoard event files, to be seen by `tensorboard --logdir DIR`
    ///
    /// Curves: train/loss, train/grad_norm (before clipping), train/lr, speed/tokens_per_s, speed/step_time_s,
    /// memory/peak_bytes, memory/shard_bytes, and with --eval eval/loss and eval/perplexity. Rank 0 writes, step by
    /// step. Each start of the run is a file of its own; a run that goes on from an earlier step, or from the
    /// beginning, hides what the files before it tell of later steps. For several runs in one picture, give each a
    /// directory below the one that --logdir names.
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "place")]
    pub(crate) tensorboard: Option<PathBuf>,
}

impl Args {
    /// How the ranks share the model.
    ///
    /// # Errors
    /// When the flags don't divide them.
    pub(crate) fn ranks(&self, world: &World) -> anyhow::Result<Ranks> {
        Ranks::new(world.size(), self.replicate, self.tensor_parallel)
    }

    /// What a rank reads at each step.
    ///
    /// # Errors
    /// When the flags don't divide the ranks, or all of them together would read more than any data holds.
    pub(crate) fn batch_shape(&self, world: &World) -> anyhow::Result<BatchShape> {
        let ranks = self.ranks(world)?;
        let shape = BatchShape {
            world_size: ranks.data(),
            rank: ranks.data_rank(world.rank()),
            batch_size: self.batch_size,
            grad_accum: self.grad_accum,
            seq_len: self.seq_len,
        };
        shape.sequences_per_step()?;
        Ok(shape)
    }

    /// Whether the data is read in another order in each epoch.
    pub(crate) fn shuffled(&self) -> bool {
        self.shuffle.map_or(self.sft.is_some(), |shuffle| shuffle == Switch::On)
    }

    /// Whether several examples may share a sequence.
    pub(crate) fn packed(&self) -> bool {
        self.packing != Some(Switch::Off)
    }

    /// How many sequences one step sees, over all ranks.
    ///
    /// # Errors
    /// As those of [`batch_shape`](Self::batch_shape).
    pub(crate) fn sequences_per_step(&self, world: &World) -> anyhow::Result<u64> {
        self.batch_shape(world)?.sequences_per_step()
    }
}

/// What steps the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerKind {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam; weight decay is added to gradients (L2)
    Adam,
    /// Gradient descent with momentum; weight decay is L2
    Sgd,
    /// Muon for the matrices of the blocks, AdamW for the rest
    Muon,
    /// AdamW whose moments are kept in 8 bits: a quarter of their memory
    Adamw8bit,
}

impl OptimizerKind {
    /// What the flag calls it.
    pub(crate) fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
    }

    /// The kinds that go on with each other's checkpoints.
    pub(crate) fn family(self) -> &'static str {
        match self {
            OptimizerKind::Adamw | OptimizerKind::Adam | OptimizerKind::Adamw8bit => "Adam",
            OptimizerKind::Sgd => "SGD",
            OptimizerKind::Muon => "Muon",
        }
    }
}

/// How Muon's learning rate follows from a matrix's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MuonAdjustLr {
    /// Times the root of rows / columns, at least 1
    Original,
    /// So that updates are as large as AdamW's, and one --lr suits both
    MatchRmsAdamw,
    /// Times the root of rows / columns
    SpectralUnclamped,
}

impl From<MuonAdjustLr> for AdjustLr {
    fn from(adjust: MuonAdjustLr) -> Self {
        match adjust {
            MuonAdjustLr::Original => AdjustLr::Original,
            MuonAdjustLr::MatchRmsAdamw => AdjustLr::MatchRmsAdamW,
            MuonAdjustLr::SpectralUnclamped => AdjustLr::SpectralUnclamped,
        }
    }
}

#[derive(clap::Args, Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerFlags {
    /// What steps the weights
    ///
    /// Checkpoints of adamw, adam and adamw8bit go on with each other. Muon makes the update of a whole matrix
    /// orthogonal, of which each process does its share; embeddings, heads, norms and biases are AdamW's.
    #[arg(long, value_enum, default_value_t = OptimizerKind::Adamw)]
    pub(crate) optimizer: OptimizerKind,

    /// The highest learning rate; the default suits the small built-in model, fine-tuning wants about 2e-5
    #[arg(long, value_name = "RATE", default_value = "2e-3", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lr: f64,

    /// Adam's decay rates of the mean and of the mean square of the gradients, such as 0.9,0.999 [default: 0.9,0.95]
    #[arg(long, value_name = "B1,B2", value_parser = betas, allow_hyphen_values = true)]
    pub(crate) betas: Option<(f64, f64)>,

    /// The epsilon that Adam adds to the denominator [default: 1e-8]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,

    /// Weight decay, of every parameter but those of --no-decay: decoupled, of adam and sgd added to gradients
    #[arg(long, value_name = "X", default_value = "0.1", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,

    /// Parameters whose weights do not decay, by their names or what these end with, such as bias,*norm*.weight
    ///
    /// `*` and `?` stand for characters of one part between dots, `**` for any parts.
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    pub(crate) no_decay: Vec<String>,

    /// How much of the last steps' direction stays, of sgd and muon [default: 0.9, of muon 0.95]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) momentum: Option<f64>,

    /// How much of a gradient is kept out of sgd's momentum [default: 0]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) dampening: Option<f64>,

    /// Whether momentum looks ahead, as Nesterov has it [default: off, of muon on]
    #[arg(long, value_enum)]
    pub(crate) nesterov: Option<Switch>,

    /// The highest learning rate of muon's matrices [default: --lr]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) muon_lr: Option<f64>,

    /// How muon's learning rate follows from a matrix's shape [default: match-rms-adamw]
    #[arg(long, value_enum)]
    pub(crate) muon_adjust_lr: Option<MuonAdjustLr>,

    /// The fewest elements of a parameter whose moments adamw8bit keeps in 8 bits [default: 4096]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) min_8bit_size: Option<usize>,
}

/// Fails where a flag is given that nothing is done with.
///
/// # Errors
/// Names the flag, and what it is for.
pub(crate) fn check_unused_flags(args: &Args) -> anyhow::Result<()> {
    check_unused_optimizer_flags(args)?;
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

fn check_unused_optimizer_flags(args: &Args) -> anyhow::Result<()> {
    use OptimizerKind::{Adam, Adamw, Adamw8bit, Muon, Sgd};
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
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_flag_without_a_meaning_is_refused_and_has_one_beside_others() {
        let checked = |flags: &str| {
            check_unused_flags(&Args::try_parse_from(["train"].into_iter().chain(flags.split(' '))).unwrap())
        };
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
        assert!(INPUTS.iter().chain(&RANK_0_FLAGS).all(|flag| described.contains(flag)));
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
                assert!(
                    error.contains(flag) && error.contains(bad) && error.contains(expected),
                    "{flag} {bad}: {error}"
                );
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
}
