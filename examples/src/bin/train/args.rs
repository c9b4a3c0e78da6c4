//! Command line of `train`.

use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Parser, Subcommand, ValueEnum};
use fsdp_candle::{AdjustLr, AttentionExchange, DeviceChoice, ReshardAfterForward, World};
use fsdp_ckpt::gguf::Quantization;
use fsdp_corpus::sequence::Pack;
use fsdp_corpus::tokens::Width;
use fsdp_train::data::{BatchShape, CorpusOptions};
use fsdp_train::flags::{ActivationPlace, ContextExchange, not_negative, positive, reshard};
use fsdp_train::job;
use fsdp_train::models::{Base, Compute};
use fsdp_train::ranks::{Ranks, sequence_multiple};
use fsdp_train::schedule::LrSchedule;
use serde::Serialize;

use crate::flag_types::{
    ActivationCheckpoint, AllGather, CheckpointKeep, DropoutChoice, GradSync, InBackward, InitChoice, Offload,
    PackChoice, Precision, Resume, Switch, TokenBits, activation_checkpoint, betas, checkpoint_path, count, debug_name,
    dropout, fraction, loss_scale, optional_path, optional_quantization, quantization,
};
use crate::prepare::PrepareArgs;
use crate::task::TaskChoice;

const AFTER_HELP: &str = "Examples:

  Train the built-in byte-level Llama on the sources of the current workspace, on two processes:
      fsdp-launch --nproc-per-node 2 train

  Fine-tune a Hugging Face model on text, and export it for transformers:
      fsdp-launch --nproc-per-node 4 train --model ./Llama-3.2-1B --data ./texts --lr 1e-5 --seq-len 512 \\
        --export-hf ./tuned

  Fine-tune it on conversations, and evaluate it on others:
      fsdp-launch --nproc-per-node 4 train --model ./Llama-3.2-1B-Instruct --sft chats.jsonl --lr 1e-5 \\
        --seq-len 512 --eval others.jsonl --eval-every 50 --export-hf ./tuned

  Tokenise a corpus once, without the launcher, to train on it as --data ./tokens:
      train prepare --model ./gpt2 --data './corpus/*.parquet' --out ./tokens

  Pre-train from random weights on tokens, saving every 500 steps:
      fsdp-launch --nproc-per-node 4 train --model ./gpt2 --init random --data train.bin --steps 10000 \\
        --checkpoint-dir ./saved --save-every 500

  Resume that run, on any number of processes: the same command with --resume auto
      fsdp-launch --nproc-per-node 2 train --model ./gpt2 --init random --data train.bin --steps 10000 \\
        --checkpoint-dir ./saved --save-every 500 --resume auto

A step reads (processes / --tensor-parallel x --batch-size x --grad-accum) sequences. Runs with the same product read \
the same data in the same order and have the same losses up to rounding.";

/// Flags that name inputs. They may differ between ranks, whose inputs are compared instead.
pub(crate) const INPUTS: [&str; 6] = ["model", "data", "sft", "dpo", "eval", "lora-from"];
/// Flags that only rank 0 uses.
pub(crate) const RANK_0_FLAGS: [&str; 2] = ["metrics", "tensorboard"];

/// Pre-trains or fine-tunes a language model. Parameters, gradients and optimizer state are sharded over the processes.
#[derive(Parser, Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(name = "train", version, after_long_help = AFTER_HELP, allow_negative_numbers = true)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
#[command(subcommand_help_heading = "Subcommands")]
#[command(after_help = "Example: fsdp-launch --nproc-per-node 2 train --steps 100     (--help has more)")]
// `[@revision]` is help text, not a link.
#[allow(rustdoc::broken_intra_doc_links)]
pub(crate) struct Args {
    /// Hugging Face model directory, or org/name[@revision] on the hub [default: a built-in byte-level Llama with
    /// about 5 M parameters]
    ///
    /// Required: config.json with model type llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, mixtral,
    /// qwen3_moe, deepseek_v2, deepseek_v3, gpt_oss, gpt2 or bert. Optional: tokenizer.json, and the weights in
    /// model.safetensors or pytorch_model.bin (or an index such as model.safetensors.index.json and the files it
    /// names). Each process reads only its own slices of the weights. A bert is trained as a masked language model.
    /// Dropout is off without --dropout.
    ///
    /// A name such as org/name or org/name@revision that is not a path is downloaded from the Hugging Face hub, once
    /// for each host, into the cache that all Hugging Face libraries share. HF_TOKEN, HF_HOME, HF_ENDPOINT and
    /// HF_HUB_OFFLINE have their usual meaning. See docs/fine-tuning.md.
    #[arg(long, value_name = "DIR|NAME", help_heading = "Model")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) model: Option<PathBuf>,

    /// Source of the initial weights
    #[arg(long, value_enum, default_value_t = InitChoice::Auto, help_heading = "Model")]
    pub(crate) init: InitChoice,

    /// Dropout probability while training, or `config` for the probabilities in config.json
    ///
    /// gpt2 and bert drop embeddings, attention weights and the outputs of attention and MLP. The other models drop
    /// attention weights. The choice of elements depends on --seed and the number of sequences read. It is the same at
    /// every number of processes, and after --resume. Evaluation and samples use no dropout.
    #[arg(long, value_name = "P|config", default_value = "0", value_parser = dropout, allow_hyphen_values = true)]
    #[arg(help_heading = "Model")]
    pub(crate) dropout: DropoutChoice,

    /// What the model learns
    ///
    /// `classify` trains a classifier: a bert with a pooler and `classifier`, or another model with `score` at the last
    /// token. --data and --eval are .jsonl, .json, .parquet or .csv files with the columns text, maybe text_pair, and label. `embed`
    /// trains embeddings: the columns are anchor, positive and maybe negative, and each anchor is told from the positives
    /// and negatives of the whole batch. See docs/fine-tuning.md.
    #[arg(long, value_enum, default_value_t = TaskChoice::Language, help_heading = "Model")]
    pub(crate) task: TaskChoice,

    /// Training data: text, .jsonl, .json, .parquet (also .gz and .zst), .bin files of tokens, a directory or a pattern
    /// of these, what `train prepare` wrote, several with weights, or org/dataset[@revision]:file on the hub [default:
    /// the sources of the workspace]
    ///
    /// Each text of a record (--text-field) is a document, which ends with the tokenizer's end token. A mixture such as
    /// a.parquet:0.7,'b/*.jsonl.zst':0.3 has these shares of the tokens. Corpora may be larger than memory: they are read
    /// and tokenised while training. Plain text files up to 256 MiB are read whole, as one text.
    ///
    /// A .bin file holds unsigned 16-bit little-endian token ids (--token-bits), or is one of llm.c or of Megatron-LM with
    /// its .idx. Text is tokenised by the model directory's tokenizer.json, or byte by byte without one. A directory is
    /// read recursively in the order of names. Hidden files, directories named target, symbolic links and binary files
    /// are skipped. Without --data, the text is the .rs, .md and .toml files of the Cargo workspace around the current
    /// directory. The data repeats when it is used up. Files of a dataset on the hub, such as org/texts:data/train.txt
    /// or org/texts:'data/*.parquet', are downloaded as --model is. See docs/data.md.
    #[arg(long, value_name = "PATH|NAME", help_heading = "Data")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) data: Option<PathBuf>,

    /// Field or column of the texts in records of --data and --eval [default: text]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub(crate) text_field: Option<String>,

    /// Width of the ids in .bin files without a header [default: 16]
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) token_bits: Option<TokenBits>,

    /// Whether attention stays within the documents of a sequence [default: stream]
    ///
    /// With `stream`, as in nanoGPT and torchtitan, a sequence is one text, and end tokens separate its documents. With
    /// `documents`, tokens attend only to tokens of their document, positions restart with each document, and no token
    /// is predicted from another document.
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) pack: Option<PackChoice>,

    /// Fine-tune on examples: a file of conversations, or of prompts with completions (.jsonl, .json, .parquet, .gz and
    /// .zst), here or on the hub
    ///
    /// A record is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or
    /// {"prompt": "...", "completion": "..."}. Conversations are formatted by the model directory's chat template
    /// (chat_template.jinja, or the one in tokenizer_config.json), or in a plain format without one. The loss covers
    /// only the assistant's messages or the completion. See docs/fine-tuning.md.
    #[arg(long, value_name = "FILE|NAME", help_heading = "Data")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) sft: Option<PathBuf>,

    /// Tune on preferences (DPO): a file of prompts, each with a chosen and a rejected completion (formats as --sft),
    /// here or on the hub
    ///
    /// A record is {"prompt": "...", "chosen": "...", "rejected": "..."}, or has lists of messages in place of the texts.
    /// Without a prompt, it is the common start of both. The loss is TRL's: -log sigmoid(beta * (difference of the
    /// log probabilities - their difference under the reference model)), a mean over the pairs. The reference is the
    /// model before the first step: the frozen layers below new adapters (--lora-rank), or else a second copy, sharded
    /// over the processes. A sequence of --batch-size is a pair. See docs/fine-tuning.md.
    #[arg(long, value_name = "FILE|NAME", help_heading = "Data")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) dpo: Option<PathBuf>,

    /// With --dpo: beta; larger values keep the model closer to the reference [default: 0.1]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true, help_heading = "Data")]
    pub(crate) dpo_beta: Option<f64>,

    /// With --sft: whether a sequence may hold several examples, which never see each other; `off` pads each example to
    /// a sequence [default: on]
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) packing: Option<Switch>,

    /// Shuffle the data in each epoch, seeded by --seed [default: on, but off for --data without --task]
    #[arg(long, value_enum, help_heading = "Data")]
    pub(crate) shuffle: Option<Switch>,

    /// Evaluation data, of the same kind as --sft, --dpo or --data; its loss is measured before the first step and at the end
    #[arg(long, value_name = "PATH|NAME", help_heading = "Data")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) eval: Option<PathBuf>,

    /// Also measure the loss on --eval every N steps
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Data")]
    pub(crate) eval_every: Option<usize>,

    /// Sequences per process and micro-batch
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, help_heading = "Data")]
    pub(crate) batch_size: usize,

    /// Tokens per sequence
    #[arg(long, value_name = "N", default_value = "128", value_parser = count, help_heading = "Data")]
    pub(crate) seq_len: usize,

    /// For a bert: share of tokens that it predicts, above 0 and at most 1 [default: 0.15]
    ///
    /// Of these tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. The loss is the mean over all
    /// of them in a step. The choice depends on --seed and the number of sequences read. It is the same at every number
    /// of processes, and differs in each epoch.
    #[arg(long, value_name = "P", value_parser = fraction, allow_hyphen_values = true, help_heading = "Data")]
    pub(crate) mlm_probability: Option<f64>,

    /// For a bert: id of the mask token [default: that of the model directory's tokenizer]
    #[arg(long, value_name = "ID", help_heading = "Data")]
    pub(crate) mask_token: Option<u32>,

    /// Micro-batches of --batch-size sequences per step
    ///
    /// Gradients add up over the micro-batches, so the memory stays that of one. `--batch-size 8` and `--batch-size 2
    /// --grad-accum 4` take the same steps.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Data")]
    pub(crate) grad_accum: usize,

    /// Steps of the whole run, including those before --resume
    #[arg(long, value_name = "N", default_value = "300", value_parser = count, help_heading = "Optimizer")]
    pub(crate) steps: usize,

    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) optimizer: OptimizerFlags,

    /// Steps in which the learning rate rises linearly to --lr
    #[arg(long, value_name = "N", default_value = "10", help_heading = "Optimizer")]
    pub(crate) warmup_steps: usize,

    /// Learning rate after the warm-up: `cosine` and `linear` decay to 0 at the last step
    #[arg(long, value_enum, default_value_t = LrSchedule::Cosine, help_heading = "Optimizer")]
    pub(crate) lr_schedule: LrSchedule,

    /// Clip the global gradient norm to this value; 0 does not clip
    #[arg(long, value_name = "NORM", default_value = "1.0", value_parser = not_negative, allow_hyphen_values = true)]
    #[arg(help_heading = "Optimizer")]
    pub(crate) clip_grad_norm: f64,

    /// Step each block while backward goes on, and drop its gradients: the gradients of all blocks never exist
    ///
    /// The norm of all gradients is known only after backward. `last-norm` clips by the norm of the step before, and
    /// does not clip the first step. `unclipped` has the bits of a run with --clip-grad-norm 0. With --grad-accum,
    /// gradients add up until the last micro-batch: whole with --grad-sync last, in shards with `every`. A
    /// loss that is not finite ends the run after the step, whose weights are not saved.
    #[arg(long, value_enum, value_name = "off|unclipped|last-norm", default_value_t = InBackward::Off)]
    #[arg(help_heading = "Optimizer")]
    pub(crate) optimizer_in_backward: InBackward,

    /// Train low-rank adapters (LoRA) of this rank and freeze all other parameters
    ///
    /// --export-hf then writes only the adapters, in PEFT's format.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Adapters")]
    pub(crate) lora_rank: Option<usize>,

    /// LoRA's alpha: adapter outputs are multiplied by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    #[arg(help_heading = "Adapters")]
    pub(crate) lora_alpha: Option<f64>,

    /// Fully connected layers that get adapters, by name or end of name [default: the query and value projections of
    /// attention]
    ///
    /// `*` and `?` match within one part between dots, `**` matches any parts. all-linear matches every fully connected
    /// layer except the head. Example: --lora-targets q_proj,v_proj,model.layers.0.mlp.*
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',', help_heading = "Adapters")]
    pub(crate) lora_targets: Vec<String>,

    /// Continue training adapters that PEFT or --export-hf wrote, with their rank, alpha and layers
    ///
    /// The directory, or the model org/name[@revision] on the hub, holds adapter_config.json and
    /// adapter_model.safetensors.
    #[arg(long, value_name = "DIR|NAME", help_heading = "Adapters")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) lora_from: Option<PathBuf>,

    /// With adapters: storage of the frozen weights, which are also gathered and saved so
    ///
    /// nf4 (QLoRA) and int8 store the blocks' matrices in 0.53 and 1.03 bytes a weight, with a scale for every 64
    /// weights, and other matrices in bf16. A matrix whose rows are not multiples of 64 is stored in bf16 as well. bf16
    /// stores all matrices in 2 bytes a weight. Vectors stay f32. Layers compute in --param-dtype. See docs/memory.md.
    #[arg(long, value_enum, default_value_t = Base::F32, help_heading = "Adapters")]
    pub(crate) base: Base,

    /// Replicas of the model (HSDP): parameters are sharded over world size / N processes, and gradients are also
    /// summed over the N replicas
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) replicate: usize,

    /// Expert parallelism: the experts of a mixture live on N neighbouring processes, which send each other the tokens of
    /// their experts. N divides the processes that shard a replica
    ///
    /// Without it, each process gathers all experts of a layer. With it, expert e is on process e mod N, and sharded over
    /// the other processes; all other parameters are sharded as without. The N processes read different data. Losses are
    /// those without it. See docs/expert-parallel.md.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) expert_parallel: usize,

    /// Balance the experts of DeepSeek-V3 without a loss: after a step, the bias of each expert moves by X towards the mean
    ///
    /// Experts with more tokens than the mean of their layer are then chosen less often. DeepSeek-V3 was trained with 0.001.
    /// --metrics and --tensorboard have experts/least and experts/most: the tokens of the experts with the fewest and the
    /// most, as multiples of the mean. See docs/expert-parallel.md.
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true, help_heading = "Optimizer")]
    pub(crate) router_bias_rate: Option<f64>,

    /// Context parallelism: N processes share each sequence, and each has a part of its activations
    ///
    /// For long sequences: attention and the loss see the whole sequence, but a process holds 1/N of its tokens. The N
    /// processes read the same data, and the model is sharded over them, too. A sequence is cut into 2 N chunks, of which a
    /// process has one from the head and one from the tail, so that causal attention costs the same on each. Losses are
    /// those of one process. See docs/context-parallel.md.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) context_parallel: usize,

    /// With --context-parallel: how attention gets what other processes hold [default: gather]
    #[arg(long, value_enum, help_heading = "Sharding")]
    pub(crate) context_exchange: Option<ContextExchange>,

    /// Tensor parallelism: N neighbouring processes compute each layer together. N divides the model's heads, inner
    /// widths and vocabulary; not for phi3, gpt2 and bert
    ///
    /// The N processes read the same data. They split the heads, the inner width of MLPs and the vocabulary, and with
    /// them the activations inside layers. Each layer communicates in forward and backward, so place the N processes on
    /// one host. The other processes shard the rest of each matrix; world size / N processes read different data. See
    /// docs/tensor-parallel.md.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Sharding")]
    pub(crate) tensor_parallel: usize,

    /// With --tensor-parallel: also split sequences between the tensor-parallel layers. Norms and residuals then
    /// take 1/N of the memory; the communication volume stays the same
    #[arg(long, help_heading = "Sharding")]
    pub(crate) sequence_parallel: bool,

    /// With --replicate: split each shard's optimizer state and update over the replicas. Replicas gather the updated
    /// shards once a step; the communication volume stays the same
    #[arg(long, help_heading = "Sharding")]
    pub(crate) shard_optimizer_over_replicas: bool,

    /// Gathered parameters between forward and backward: `always` frees them (ZeRO-3), `never` keeps them (ZeRO-2),
    /// `default` keeps only those outside the blocks, a number K keeps shards that K neighbouring processes gather
    /// again among themselves
    #[arg(long, value_name = "default|always|never|K", default_value = "default", value_parser = reshard)]
    #[arg(help_heading = "Sharding")]
    #[serde(serialize_with = "debug_name")]
    pub(crate) reshard_after_forward: ReshardAfterForward,

    /// Communicate by memory that NCCL allocates and registers: its collectives then need no copies through buffers of
    /// their own, and fewer of the GPU's processors
    ///
    /// Takes the bytes of the largest all-gather or reduce-scatter. Needs a GPU for each process and NCCL 2.19 or newer.
    /// Losses do not change.
    #[arg(long, help_heading = "Sharding")]
    pub(crate) allocate_memory_from_process_group_for_comm: bool,

    /// Storage of shards, gradients and optimizer state: `cpu` keeps them in page-locked host memory, runs the
    /// optimizer there, and copies shards to the compute device. No effect when computing on CPUs. `disk:DIR` does the
    /// same, and keeps optimizer state in an unnamed file of each process in DIR. `disk+shards:DIR` keeps shards in such
    /// a file as well, when computing on CPUs
    ///
    /// With disk:DIR, 16 MiB of optimizer state are in memory. A step reads and writes all state: 16 bytes a parameter
    /// for AdamW, and 16 more with disk+shards:DIR, which takes 16 MiB as well. A faster disk or --grad-accum makes this
    /// cost smaller. Losses and checkpoints do not change. The files go away with the processes, even with killed ones.
    #[arg(long, value_name = "none|cpu|disk:DIR|disk+shards:DIR", default_value = "none", help_heading = "Sharding")]
    pub(crate) offload: Offload,

    /// Dtype of gathered parameters and of compute; shards and optimizer state stay f32. f16 uses --loss-scale
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Sharding")]
    pub(crate) param_dtype: Precision,

    /// Dtype in which gradients are summed over processes
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Sharding")]
    pub(crate) reduce_dtype: Precision,

    /// Dtype in which the blocks' matrices are gathered: `full` is --param-dtype, `float8` is E4M3 with one scale per
    /// process and matrix
    ///
    /// A gathered float8 weight differs by up to 1/16 of its value. Its all-gather moves a quarter of the bytes of f32,
    /// and half those of bf16 and f16. Shards, gradients, optimizer state and checkpoints are not affected, nor are
    /// embeddings, heads, norms, biases, routers of experts and adapters. Scales depend on the number of processes, so
    /// losses differ slightly between world sizes.
    #[arg(long, value_enum, default_value_t = AllGather::Full, help_heading = "Sharding")]
    pub(crate) all_gather: AllGather,

    /// How the blocks' matrix products are computed: in --param-dtype, or in 8-bit floats
    ///
    /// GPUs of compute capability 8.9 or later multiply 8-bit floats (float8) at twice the rate of bf16; the scales of
    /// rows need 9.0. Operands are scaled and rounded before each product, as torchao's recipes do: inputs and
    /// weights to E4M3, and gradients of outputs to E5M2, or to E4M3 where rows have scales. CPUs compute the same
    /// values, but no faster. Parameters, optimizer state, activations and checkpoints do not change. Embeddings, heads,
    /// routers of experts and adapters compute in full. Both dimensions of a matrix must be multiples of 16.
    #[arg(long, value_enum, default_value_t = Compute::Full, help_heading = "Sharding")]
    pub(crate) compute: Compute,

    /// With f16: initial loss scale, at least 1 [default: 65536]
    ///
    /// The smallest f16 number is 6e-8, and many gradients are smaller. The loss is therefore multiplied by a scale
    /// before backward, and the gradients are divided by it afterwards, as torch.amp.GradScaler does. A step whose
    /// gradients overflow (above 65504) is skipped with a line on stderr, and the scale is halved. 2000 good steps in a
    /// row double it. The run ends if gradients overflow at a scale of 1. Checkpoints hold the scale.
    #[arg(long, value_name = "SCALE", value_parser = loss_scale, allow_hyphen_values = true)]
    #[arg(help_heading = "Sharding")]
    pub(crate) loss_scale: Option<f64>,

    /// Number of blocks whose parameters are gathered ahead
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Sharding")]
    pub(crate) prefetch: usize,

    /// With --grad-accum: sum gradients over processes after `every` micro-batch (less memory) or after the `last` one
    /// (less communication) [default: every]
    #[arg(long, value_enum, help_heading = "Sharding")]
    pub(crate) grad_sync: Option<GradSync>,

    /// Compare the gradients with finite differences of the loss before the first step, and stop if they differ
    ///
    /// Each block is checked along two random directions with four forwards each, or more where the loss is not smooth.
    /// The error names the first block that loses gradient.
    #[arg(long, help_heading = "Run")]
    pub(crate) gradcheck: bool,

    /// Write a trace of compute and communication on all processes, for ui.perfetto.dev (`Open trace file`) or
    /// chrome://tracing
    ///
    /// Each process is a row `rank N` with a line for compute (steps, forward and backward of each unit) and one line
    /// per group that it communicates in. Each process writes its own file, such as trace.rank0.json. A run that
    /// succeeds joins the files.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) trace: Option<PathBuf>,

    /// Pass the spans of --trace to NVTX, so that Nsight Systems shows steps, units and collectives beside kernels
    ///
    /// Start each process under `nsys profile --trace cuda,nvtx`. NVTX is a part of the CUDA toolkit, and of pip's
    /// nvidia-nvtx.
    #[arg(long, help_heading = "Run")]
    pub(crate) nvtx: bool,

    /// Blocks that recompute their activations in backward: less memory, a second forward, the same numbers. `full` is
    /// all blocks, a number K every K-th block, NAMES a comma-separated list of patterns that match block names or
    /// their ends, such as model.layers.[0-3]
    #[arg(long, value_name = "none|full|K|NAMES", default_value = "none", value_parser = activation_checkpoint)]
    #[arg(help_heading = "Sharding")]
    pub(crate) activation_checkpoint: ActivationCheckpoint,

    /// With --activation-checkpoint: activations that recomputed blocks keep, to compute them only once
    #[arg(long, value_enum, value_delimiter = ',', help_heading = "Sharding")]
    pub(crate) checkpoint_keep: Vec<CheckpointKeep>,

    /// With --activation-checkpoint: storage of the recomputed blocks' inputs between forward and backward. `cpu` is host
    /// memory (no effect when computing on CPUs), `disk:DIR` an unnamed file of each process in DIR
    #[arg(long, value_name = "none|cpu|disk:DIR", default_value = "none", help_heading = "Sharding")]
    pub(crate) activation_offload: ActivationPlace,

    /// Seed of random weights, dropout, masking and shuffling; its numbers are the same at every number of processes
    #[arg(long, value_name = "N", default_value = "42", help_heading = "Run")]
    pub(crate) seed: u64,

    /// Compute device: `auto` uses CUDA devices if this build (feature `cuda`) and the machine have them, else the CPU
    #[arg(long, default_value = "auto", value_parser = job::device_parser(), help_heading = "Run")]
    #[serde(serialize_with = "debug_name")]
    pub(crate) device: DeviceChoice,

    /// Directory for checkpoints, one subdirectory each [default: checkpoints/run-NNN, new for each run]
    ///
    /// All hosts share it, or each has its own (--checkpoint-local). Builds with `--features object-store` also accept
    /// a URL such as s3://bucket/run.
    ///
    /// Every process tests before the first step that it can write there. Weights with infinite or NaN values are not
    /// saved: the run ends and names them and the newest good checkpoint. It also ends before a step whose loss or
    /// gradient norm is not finite (but see --loss-scale).
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "checkpoint_path")]
    pub(crate) checkpoint_dir: Option<PathBuf>,

    /// Each host has its own --checkpoint-dir, on a disk that the others can't read
    ///
    /// Every host writes the shards of its own processes. The directories of one step from all hosts, copied into one
    /// in any order (`rsync -a`, `cp -a`), are a complete checkpoint for any number of processes. Without copying,
    /// --resume needs the same hosts in the same order (fsdp-launch --node-rank) with as many processes on each.
    /// --resume auto takes the newest step that all hosts have together. Hosts are told apart by the name that
    /// `hostname` prints. See docs/checkpoints.md.
    #[arg(long, help_heading = "Run")]
    pub(crate) checkpoint_local: bool,

    /// Save every N steps; 0 saves only at the end. The end is always saved
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Run")]
    pub(crate) save_every: usize,

    /// Keep the newest N checkpoints of this run and remove older ones after each save [default: all]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Run")]
    pub(crate) keep: Option<usize>,

    /// Write checkpoints in the background. Training stops only for the copy in memory, which needs the memory of a
    /// rank's state once more
    #[arg(long, help_heading = "Run")]
    pub(crate) async_save: bool,

    /// Resume from a checkpoint: `none`, `auto` (the newest complete one in --checkpoint-dir, if any), or its path
    ///
    /// Model, optimizer, step and position in the data continue, bit for bit at the same number of processes. The
    /// number of processes, --batch-size and --grad-accum may differ from the run that saved it. `auto` renames a
    /// checkpoint that is damaged or holds infinite or NaN values to step-00000010.damaged, and takes an older one. A
    /// path may also be a checkpoint of torch.distributed.checkpoint, a Hugging Face directory or file, or a .pt file.
    /// The step is then that of its optimizer, or 0 without one. For a directory named auto or none, pass ./auto or
    /// ./none.
    #[arg(long, value_name = "auto|none|PATH", default_value = "none")]
    #[arg(value_parser = OsStringValueParser::new().map(Resume::from), help_heading = "Run")]
    pub(crate) resume: Resume,

    /// Resume from a checkpoint although its settings do not match this run
    ///
    /// A checkpoint records the settings of its run. Other data, another learning rate and similar changes are
    /// reported. Refused without this flag: other values in config.json (except dropout), another kind of --optimizer,
    /// adapters of another rank or alpha. With the flag, an optimizer without saved state starts afresh.
    #[arg(long, help_heading = "Run")]
    pub(crate) resume_anyway: bool,

    /// Export the trained model as a Hugging Face directory, which transformers can load
    ///
    /// Existing weights are never overwritten, except those that this run exported before --resume auto continued it.
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) export_hf: Option<PathBuf>,

    /// Export the trained model with its tokenizer as a GGUF file, which llama.cpp, Ollama and Candle read
    ///
    /// Rank 0 writes it from the last checkpoint, a few MiB at a time. Adapters are merged into the weights. The file
    /// must not exist. See docs/serving.md.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) export_gguf: Option<PathBuf>,

    /// With --export-gguf: types of the matrices [default: f32]
    #[arg(long, value_name = "TYPE", value_parser = quantization(), help_heading = "Run")]
    #[serde(serialize_with = "optional_quantization")]
    pub(crate) gguf_quantize: Option<Quantization>,

    /// Write measurements of each step to this file, one JSON object per line
    ///
    /// Fields: step, loss (mean over the counted tokens or the pairs of all processes), grad_norm (before clipping; null in a
    /// step that --loss-scale skips), lr, step_time_s, tokens_per_s, peak_mem_bytes (of the largest process),
    /// shard_bytes (parameters, gradients and optimizer state resident per process). Evaluations have the fields step,
    /// eval_loss, eval_perplexity, eval_tokens and eval_time_s. Corpora add data_wait_s (the longest wait of a process for
    /// data) and sources (name, tokens, epochs and documents of each since the start of the run). --dpo adds rewards/chosen, rewards/rejected,
    /// rewards/accuracies and rewards/margins, with the prefix eval_ in evaluations, which then have no perplexity. With
    /// --task, evaluations have eval_accuracy, eval_records, and eval_macro_f1 or eval_cosine.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) metrics: Option<PathBuf>,

    /// Write measurements of each step as TensorBoard event files, for `tensorboard --logdir DIR`
    ///
    /// Curves: train/loss, train/grad_norm (before clipping), train/lr, speed/tokens_per_s, speed/step_time_s,
    /// memory/peak_bytes, memory/shard_bytes, and with --eval eval/loss and eval/perplexity. Each start of a run writes
    /// its own file, and hides later steps of earlier files. To compare runs, give each a subdirectory of the one that
    /// --logdir names.
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    #[serde(serialize_with = "optional_path")]
    pub(crate) tensorboard: Option<PathBuf>,

    /// Subcommand, instead of training.
    #[command(subcommand)]
    #[serde(skip)]
    pub(crate) action: Option<Action>,

    /// Name of --model on the hub, whose path then is that of the downloaded files.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) model_name: Option<PathBuf>,
}

/// Subcommands.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Action {
    Prepare(PrepareArgs),
}

impl Args {
    /// Returns whether gradients may overflow f16.
    pub(crate) fn computes_in_f16(&self) -> bool {
        [self.param_dtype, self.reduce_dtype].contains(&Precision::F16)
    }

    /// Returns how the ranks share the model.
    pub(crate) fn ranks(&self, world: &World) -> anyhow::Result<Ranks> {
        Ranks::new(world.size(), self.replicate, self.context_parallel, self.tensor_parallel)?
            .with_experts(self.expert_parallel)
    }

    /// Returns what each rank reads per step. Fails if the flags do not divide the world size, or the sequences of a
    /// step overflow.
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

    /// Returns the number that must divide the length of a sequence, because processes split it.
    pub(crate) fn sequence_multiple(&self) -> usize {
        sequence_multiple(self.context_parallel, if self.sequence_parallel { self.tensor_parallel } else { 1 })
    }

    /// Returns the settings of an attention over processes.
    pub(crate) fn exchange(&self) -> AttentionExchange {
        self.context_exchange.map_or(AttentionExchange::Gather, AttentionExchange::from)
    }

    /// Returns whether the data is shuffled in each epoch.
    pub(crate) fn shuffled(&self) -> bool {
        self.shuffle.map_or(self.has_examples() || self.task != TaskChoice::Language, |shuffle| shuffle == Switch::On)
    }

    /// Returns the settings of corpora.
    pub(crate) fn corpus_options(&self, vocab_size: usize) -> CorpusOptions {
        CorpusOptions {
            field: self.text_field.clone(),
            width: self.token_bits.map(Width::from),
            pack: self.pack.map_or(Pack::Stream, Pack::from),
            seq_len: self.seq_len,
            vocab_size,
        }
    }

    /// Returns whether the data is a list of examples or pairs, not a stream of tokens.
    pub(crate) fn has_examples(&self) -> bool {
        self.sft.is_some() || self.dpo.is_some()
    }

    /// Returns the training data's flag and path. No path stands for the sources of the workspace.
    pub(crate) fn training_data(&self) -> (&'static str, Option<&Path>) {
        match (&self.sft, &self.dpo) {
            (Some(path), _) => ("--sft", Some(path)),
            (None, Some(path)) => ("--dpo", Some(path)),
            (None, None) => ("--data", self.data.as_deref()),
        }
    }

    /// Returns whether a sequence may hold several examples.
    pub(crate) fn packed(&self) -> bool {
        self.packing != Some(Switch::Off)
    }

    /// Returns the number of sequences of a step, over all ranks.
    pub(crate) fn sequences_per_step(&self, world: &World) -> anyhow::Result<u64> {
        self.batch_shape(world)?.sequences_per_step()
    }
}

/// Optimizer algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerKind {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam; weight decay is added to the gradients (L2)
    Adam,
    /// SGD with momentum; weight decay is L2
    Sgd,
    /// Muon for the blocks' matrices, AdamW for the rest
    Muon,
    /// AdamW with 8-bit moments, which take a quarter of the memory
    Adamw8bit,
}

impl OptimizerKind {
    /// Returns the family of optimizers that can load each other's checkpoints.
    pub(crate) fn family(self) -> &'static str {
        match self {
            OptimizerKind::Adamw | OptimizerKind::Adam | OptimizerKind::Adamw8bit => "Adam",
            OptimizerKind::Sgd => "SGD",
            OptimizerKind::Muon => "Muon",
        }
    }
}

/// Dependence of Muon's learning rate on the shape of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MuonAdjustLr {
    /// lr * max(1, sqrt(rows / columns))
    Original,
    /// Updates as large as AdamW's, so that one --lr suits both
    MatchRmsAdamw,
    /// lr * sqrt(rows / columns)
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
    /// Optimizer
    ///
    /// adamw, adam and adamw8bit can load each other's checkpoints. muon orthogonalises the update of each matrix in
    /// the blocks, distributed over the processes, and uses AdamW for embeddings, heads, norms and biases.
    #[arg(long, value_enum, default_value_t = OptimizerKind::Adamw)]
    pub(crate) optimizer: OptimizerKind,

    /// Peak learning rate; the default suits the small built-in model, fine-tuning needs about 2e-5
    #[arg(long, value_name = "RATE", default_value = "2e-3", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lr: f64,

    /// Adam's decay rates of the first and second moment, such as 0.9,0.999 [default: 0.9,0.95]
    #[arg(long, value_name = "B1,B2", value_parser = betas, allow_hyphen_values = true)]
    pub(crate) betas: Option<(f64, f64)>,

    /// Epsilon that Adam adds to the denominator [default: 1e-8]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,

    /// Weight decay, except for --no-decay parameters: decoupled, or added to the gradients for adam and sgd
    #[arg(long, value_name = "X", default_value = "0.1", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,

    /// Parameters without weight decay, by name or end of name, such as bias,*norm*.weight
    ///
    /// `*` and `?` match within one part between dots, `**` matches any parts.
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    pub(crate) no_decay: Vec<String>,

    /// Momentum of sgd and muon [default: 0.9 for sgd, 0.95 for muon]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) momentum: Option<f64>,

    /// Dampening of sgd's momentum [default: 0]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) dampening: Option<f64>,

    /// Nesterov momentum, for sgd and muon [default: off for sgd, on for muon]
    #[arg(long, value_enum)]
    pub(crate) nesterov: Option<Switch>,

    /// Peak learning rate of muon's matrices [default: --lr]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) muon_lr: Option<f64>,

    /// Dependence of muon's learning rate on the shape of a matrix [default: match-rms-adamw]
    #[arg(long, value_enum)]
    pub(crate) muon_adjust_lr: Option<MuonAdjustLr>,

    /// Smallest number of elements for which adamw8bit keeps moments in 8 bits [default: 4096]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) min_8bit_size: Option<usize>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use clap::CommandFactory;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Args, String> {
        Args::try_parse_from([&["train"], arguments].concat()).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_are_parsed() {
        Args::command().debug_assert();
        let args = parse(&[]).unwrap();
        assert_eq!((args.model, args.data, args.checkpoint_dir, args.export_hf), (None, None, None, None));
        assert_eq!((args.init, args.device), (InitChoice::Auto, DeviceChoice::Auto));
        // The command of the recorded runs.
        let command = "--model DIR --data DIR/tokens.bin --seq-len 32 --steps 20 --lr 1e-3 --betas 0.9,0.95 \
                       --eps 1e-8 --weight-decay 0.1 \
                       --clip-grad-norm 1.0 --lr-schedule constant --warmup-steps 0 --batch-size 2 --grad-accum 2 \
                       --resume auto --init pretrained --device cpu";
        let args = parse(&command.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert_eq!((args.seq_len, args.steps, args.batch_size, args.grad_accum, args.warmup_steps), (32, 20, 2, 2, 0));
        let OptimizerFlags { lr, betas, eps, weight_decay, .. } = args.optimizer;
        assert_eq!((lr, betas, eps, weight_decay), (1e-3, Some((0.9, 0.95)), Some(1e-8), 0.1));
        assert_eq!(
            (args.lr_schedule, args.init, args.device, args.clip_grad_norm),
            (LrSchedule::Constant, InitChoice::Pretrained, DeviceChoice::Cpu, 1.)
        );
        assert_eq!((args.model, args.data), (Some("DIR".into()), Some("DIR/tokens.bin".into())));
        let resume = |value| parse(&["--resume", value]).unwrap().resume;
        assert_eq!(
            (resume("none"), resume("auto"), resume("./auto")),
            (Resume::None, Resume::Auto, Resume::Path("./auto".into()))
        );
    }

    /// Ranks compare what is serialised.
    #[test]
    fn every_flag_is_serialised() {
        let serialised = serde_json::to_value(parse(&[]).unwrap()).unwrap();
        let serialised: BTreeSet<&str> = serialised.as_object().unwrap().keys().map(String::as_str).collect();
        let command = Args::command();
        let flags = command.get_arguments().filter_map(|argument| argument.get_long());
        assert_eq!(serialised, flags.filter(|flag| !["help", "version"].contains(flag)).collect());
        assert!(INPUTS.iter().chain(&RANK_0_FLAGS).all(|flag| serialised.contains(flag)));
    }

    #[test]
    fn paths_are_serialised_as_absolute() {
        let path = |flag: &str, value: &str| {
            serde_json::to_value(parse(&[&format!("--{flag}"), value]).unwrap()).unwrap()[flag].clone()
        };
        let here = std::env::current_dir().unwrap();
        for flag in ["checkpoint-dir", "export-hf", "trace", "resume", "data", "sft"] {
            assert_eq!(path(flag, "some/where"), here.join("some/where").to_str().unwrap(), "{flag}");
            assert_eq!(path(flag, "/a/b"), "/a/b", "{flag}");
        }
        assert_eq!(path("resume", "auto"), "auto");
        let not_utf8 = OsString::from_vec(b"/a\xff".to_vec());
        let args = Args::try_parse_from([OsString::from("train"), "--data".into(), not_utf8]).unwrap();
        assert_eq!(serde_json::to_value(args).unwrap()["data"], "/a\\xff");
    }

    #[test]
    fn bad_values_are_refused() {
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
            ("--dpo-beta", &["0", "-1", "nan", "x"], "number above 0"),
            ("--lora-alpha", &["0", "-1", "nan"], "number above 0"),
            ("--activation-checkpoint", &["some", "0", "-1", ""], "none, full, a number K"),
            ("--checkpoint-keep", &["norm"], "linear, attention"),
            ("--dropout", &["1", "-0.1", "nan", "some"], "`config`, or a number of at least 0 and below 1"),
            ("--reshard-after-forward", &["maybe", "-2", "1.5"], "default, always, never, or a number"),
            ("--offload", &["disk", "disk:", "disk+shards:", "shards:a", "gpu"], "none, cpu, disk:DIR"),
            ("--activation-offload", &["disk", "disk:", "gpu"], "none, cpu, or disk:DIR"),
            ("--base", &["int4", "float8"], "f32, bf16, int8, nf4"),
            ("--param-dtype", &["int8", "float8"], "f32, bf16, f16"),
            ("--all-gather", &["int8", "f16"], "full, float8"),
            ("--compute", &["bf16", "int8"], "full, float8, float8-rowwise, float8-rowwise-gw-hp"),
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
            ("--gguf-quantize", &["q4", "Q8_0", ""], "f32, f16, bf16, q8_0, q4_0, q4_k_m, q6_k"),
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
    fn unknown_flags_are_refused() {
        for flags in [&["--learning-rate", "1"][..], &["extra"]] {
            let error = parse(flags).unwrap_err();
            assert!(error.contains(flags[0]), "{error}");
        }
    }
}
