//! FSDP2 for Candle: parameters, gradients and optimizer state are sharded over ranks, gathered for compute and reduced
//! after it.
//!
//! A model stays an ordinary Candle model. Build it bottom-up with [`fully_shard`], from the builder of a
//! [`ShardedVarMap`]. Call it through the [`FsdpModule`] that `fully_shard` returns. Take gradients from
//! [`FsdpModule::backward`], and step an optimizer such as [`AdamW`].
//!
//! ```
//! use candle_core::{DType, Module, Tensor};
//! use fsdp_candle::{clip_grad_norm, fully_shard, nn, AdamW, AdamWConfig, FullyShard, ShardedVarMap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = fsdp_candle::init()?;                              // reads RANK, WORLD_SIZE, ...; one rank without them
//! let vars = ShardedVarMap::of_world(&world)?;                   // a sharded VarMap
//! let vb = vars.builder(DType::F32);                             // an ordinary VarBuilder
//! let opts = FullyShard::new(&vars);
//!
//! // Bottom-up: each block, then the root, which owns the remaining parameters.
//! let blocks = (0..2)
//!     .map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| nn::linear(8, 8, vb)))
//!     .collect::<Result<Vec<_>, _>>()?;
//! struct Model(Vec<fsdp_candle::FsdpModule<nn::Linear>>, nn::Linear);
//! impl Module for Model {
//!     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
//!         let x = self.0.iter().try_fold(x.clone(), |x, block| nn::gelu(&block.forward(&x)?))?;
//!         self.1.forward(&x)
//!     }
//! }
//! let model = fully_shard(&opts, vb, |vb| Ok(Model(blocks, nn::linear(8, 1, vb.pp("head"))?)))?;
//!
//! let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
//! let x = Tensor::ones((4, 8), DType::F32, world.device())?;
//! for _ in 0..3 {
//!     let loss = model.forward(&x)?.sqr()?.mean_all()?;
//!     let mut grads = model.backward(&loss)?;                    // Candle's GradStore, gradients sharded
//!     clip_grad_norm(&vars, &mut grads, 1.0)?;
//!     optim.step(&grads)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Candle's messages about F4
//!
//! While a parameter is sharded, Candle calls its storage F4, and a layer that uses it fails. Layers of [`nn`], and all
//! layers inside the forward of a unit, return an error that names the unit to call. Candle's own layers outside of any
//! [`FsdpModule`] call return an error such as
//!
//! ```text
//! dtype mismatch in matmul, lhs: F32, rhs: F4
//! ```
//!
//! with this or another operation, or `found F4`, or `unsupported dtype F4`. Candle's norms name only the dtype of
//! their input:
//!
//! ```text
//! unsupported dtype for rmsnorm F32
//! ```
//!
//! Call the layer's unit through its [`FsdpModule`] ([`FsdpModule::call`] or `forward`), or hold the model by
//! [`FsdpModule::unshard_all`]. To read a weight, as `to_vec2` of a layer's tensor does, gather it: on every rank, call
//! `vars.get("layer.weight")`, and [`DTensor::full_tensor`] of [`FsdpParam::dtensor`].
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod activation_checkpoint;
mod adapter;
mod autograd;
mod checkpoints;
pub mod collectives;
mod context_parallel;
mod data_parallel;
mod disk;
mod display;
/// Types in the code that `#[derive(Tensors)]` generates.
#[doc(hidden)]
pub mod derived {
    pub use candle_core::{Result, Tensor};
}
#[doc(hidden)]
pub mod doc_example;
mod dtensor;
mod error;
mod expert_parallel;
mod extension;
mod float8;
mod fsdp;
mod gradcheck;
mod graph;
pub mod initializer;
mod kernels;
pub mod nn;
mod optim;
mod pattern;
pub mod random;
mod state_dict;
mod storage;
mod tensor_parallel;
mod tensors;
mod upload;
mod warning;
mod world;

pub use autograd::no_grad;
pub use checkpoints::{CheckpointManager, Resumed, TrainState};
pub use context_parallel::{AttentionExchange, ContextParallel};
pub use data_parallel::{DataParallelMeshDims, ShardMesh};
pub use disk::StateOnDisk;
pub use dtensor::{DTensor, Operand, PartialNorm, Redistribution, distribute_tensor, distribute_tensor_from};
pub use error::{Error, GradientMismatch, NonFinite, NonFiniteTensor, Result, UnitGradient};
pub use extension::{AllGatherExtension, Float8};
pub use float8::Float8Recipe;
pub use fsdp::{
    AllGather, AllReduceHook, BufferMemory, ExtensionFn, FsdpModule, FsdpParam, FullyShard, GradientReductionHandle,
    GraphCut, GraphCutKind, MemorySummary, MixedPrecisionPolicy, NamePredicate, OffloadPolicy, ParamDtypeFn,
    PostAccumulateGradHook, Recurse, ReduceScatter, ReshardAfterForward, ShardPlacement, ShardPlacementFn,
    ShardedVarMap, StoreFn, Unit, UnshardHandle, UnshardedUnits, WeightFormat, fully_shard, parallelize, shard,
};
pub use fsdp_candle_derive::Tensors;
pub use fsdp_core::{BlockFormat, DTensorSpec, DeviceMesh, Placement, ProcessGroup, ReduceOp};
pub use gradcheck::{GradcheckOptions, gradcheck};
pub use optim::{
    Adam, AdamConfig, AdamParams, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, AdjustLr, CandleOptimizer,
    ClipOptions, ElementwiseOptimizer, ElementwiseRule, Ema, GradAccumulator, GradNorm, GradScaler, GradScalerState,
    Muon, MuonConfig, NormType, Optimizers, ParamGroup, ParamState, SGD, SgdConfig, ShardedOptimizer, ValuesOf,
    check_finite, clip_factor, clip_grad_norm, clip_grad_norm_of, clip_grad_norm_with, clip_grads_with_norm, grad_norm,
    group_by_name,
};
pub use pattern::NamePattern;
pub use state_dict::{
    IncompatibleKeys, StateDict, StateDictOptions, StateTensor, get_ema_state_dict, get_model_state_dict,
    get_optimizer_state_dict, get_state_dict, load_model, load_optimizer, load_param_groups, model_tensors,
    optimizer_tensors, optimizer_values, set_ema_state_dict, set_model_state_dict, set_optimizer_state_dict,
    set_state_dict,
};
pub use tensor_parallel::{
    ActivationLayout, ColwiseParallel, ExpertParallel, HiddenParallel, ParallelPlan, ParallelStyle, RowwiseParallel,
    SequenceParallel, VocabParallel,
};
pub use tensors::Tensors;
pub use upload::upload;
#[cfg(feature = "cuda")]
pub use world::cuda_device;
pub use world::{DeviceChoice, World, init, init_on};

/// Runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
