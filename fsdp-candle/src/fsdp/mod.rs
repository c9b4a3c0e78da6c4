//! FSDP: sharded parameters, the units that unshard and reduce them, and the hooks that decide when.
//!
//! The files follow PyTorch's `torch/distributed/fsdp/_fully_shard`. The table groups them into levels, the highest
//! first. A file imports only files of its own level and of lower ones, in one direction (`tests/it/layering.rs`). A
//! parameter calls its unit and its model by two traits, [`param_events::ParamUnit`] and [`param_events::ParamModel`].
//!
//! | level | files | subject | PyTorch |
//! |---|---|---|---|
//! | making | `fully_shard`, `var_map`, `built`, `parallelize` | making units and parameters | `_fully_shard.py` |
//! | | `module`, `unit_call`, `handles` | `FsdpModule`: calls, backward, settings | `FSDPModule` |
//! | running | `schedule`, `order`, `hooks`, `frozen_call`, `backward_nodes`, `callers` | when a unit communicates | `_fsdp_state.py` |
//! | | `diagnostics` | reports of cut graphs and missing gradients | |
//! | a unit | `param_group`, `unit_params`, `settings` | its parameters | `_fsdp_param_group.py` |
//! | | `all_gather`, `replica_shards`, `reduction` | its collectives | `_fsdp_collectives.py` |
//! | a parameter | `param`, `param_spec`, `param_nodes`, `param_events`, `gradient` | its state, its nodes in the graph | `_fsdp_param.py` |
//! | | `shard`, `offload`, `shard_reader` | its shard, and where the values are | |
//! | | `encoding`, `weight_format` | how it travels in an all-gather | |
//! | | `full_values`, `unsharded_memory` | its full values | |
//! | | `unit_path`, `listed` | the identity of a unit, lists of names | |
//! | | `policy`, `unit_options`, `comm` | policies, options, collectives of the user | `_fsdp_api.py` |
//!
//! [Note: Life of a parameter]
//!
//! 1. A layer asks its builder for a tensor. [`ShardedVarMap`] allocates this rank's shard, a `Var` that the optimizer
//!    owns. The shard is not a node of Candle's graph: it may be on the host while layers compute on a device, and a
//!    graph is on one device.
//! 2. The layer holds the *full* tensor: an operation's result of the full shape without memory. Unsharding swaps
//!    memory into it, and resharding takes the memory out (`storage::swap`). Views share the storage, so the graph that
//!    forward made sees the memory that backward swaps in. If the parameter was built frozen, the layer holds the same
//!    tensor detached from the graph.
//! 3. While a parameter is sharded, its storage has the dtype F4, which no kernel accepts. A use of a sharded parameter
//!    is an error, never a read of freed memory. Layers of `nn` name the parameter; `FsdpModule` explains Candle's
//!    message for other layers.
//! 4. In backward, each use adds to the gradient's buffer. The anchor's backward reports that the gradient is complete:
//!    the full values are freed, and the unit's last anchor starts the reduction.
//! 5. An accumulated gradient has one of the stages of [`gradient::Stage`]: unreduced (no synchronisation), partly
//!    reduced (over shards, not replicas), reduced. Gradients accumulate within a stage. `backward` hands out reduced
//!    gradients under the shards' ids, for any optimizer. A rank with an empty shard stores a mark under the anchor's
//!    id instead, since Candle's optimizers fail on tensors without elements.
//!
//! [Note: Why a scalar anchors the graph]
//!
//! A parameter is three nodes: `leaf -> anchor -> full`. The leaf is a scalar variable, which makes the others a graph.
//! The anchor is a scalar whose backward runs once, after every use of the parameter. If `full` itself reported,
//! Candle's backward would allocate a zeroed tensor and a sum for every gradient that an operation returns: three times
//! the weight. The layers of `nn` therefore take the anchor as their graph argument. They add their gradient to the
//! parameter's buffer, by a matrix product that accumulates there, and only scalars pass through Candle's store.
//! Candle's own layers use `full`.
//!
//! A unit that runs several times before a backward gets further anchors on top of the first, one for each pass. Their
//! backward reports the end of the pass.
//!
//! [Note: Units by name]
//!
//! Nobody calls a unit by name ([`shard`]), so it has no hooks at its boundary. Its layers run pre-use hooks instead,
//! in forward and in backward: the first use unshards the unit and prefetches the next one, by the same state machine.
//! A parameter whose layer runs no such hook is unmanaged, and stays in the enclosing unit.
//!
//! [Note: Shards divided over replicas]
//!
//! With `shard_optimizer_over_replicas`, the replicas of HSDP divide each shard ([`replica_shards`]). They gather the
//! shards of all units inside a root when its forward begins, in the order in which the units were built, whatever the
//! forward will use. They drop the gathered shards when a backward hands out gradients, when a forward without a graph
//! ends, and when parameters are loaded. These events are the same on every rank. No rank needs to know whether the
//! shards of another rank changed.
//!
//! [Note: Bound on memory]
//!
//! - A gradient buffer exists from the first use of a parameter in backward to its reduce-scatter. A full parameter
//!   exists from its unit's pre-forward or pre-backward hook to the end of that forward, or to the anchor's backward.
//! - A collective takes its outputs from the pool when it starts, not when it is issued, and returns its inputs as soon
//!   as they are read. A queue of reduce-scatter, all-gather, reduce-scatter needs no more than the largest of them.
//! - The pool and the buffers taken from it never exceed the largest amount that was taken at once.
//! - Hence the bound that `tests/it/memory.rs` asserts: the parameters of two units and the gradients of one, on top of
//!   the shards.
//! - Values that a forward unsharded and no backward freed stay for the next root forward if the unit keeps them for
//!   backward (a root, or `ReshardAfterForward::Never`); prefetched values are dropped. See [Note: Stale values].
//!
//! [Note: Stale values]
//!
//! A forward of a unit that is unsharded issues no all-gather, so unsharded values must never be older than the shards,
//! and all ranks must decide alike. An optimizer of this crate frees the unsharded values of the units that it steps.
//! So do loads, `set_local` and averages. Other optimizers report no step. A unit with a parameter that has handed out
//! a gradient and that no optimizer of this crate has is therefore gathered again at each root forward. So is a unit
//! whose variable was asked for ([`FsdpParam::var`]) while it was unsharded.
//!
//! [Note: Threads and waits]
//!
//! - Hooks run on the thread that computes, which waits for collectives. The process groups' threads never wait for it.
//! - One thread at a time unshards or reshards a unit, and waits for others with the groups' timeout. It may not do so
//!   again before it is done. Hooks of backward that free single parameters take only the parameter's own lock.
//! - No other lock is held while a collective is waited for, or while the user's code runs (custom collectives,
//!   extensions, allocators, initializers). The exception is `Schedule::uses`: a thread that uses a unit by name waits
//!   while another thread unshards it. Locks are taken in the order units, settings, order.
//! - Units issue collectives in an order that follows from the graph and from counts, never from time. `order` decides
//!   it, and its notes say why it is the same on every rank.
//! - Calls of units nest as in one thread (`callers`). Layers of one unit may compute in several threads.
//! - Everything between `backward` and the next forward can be dropped: `reset_iter_state` waits for pending
//!   collectives.

mod all_gather;
mod backward_nodes;
mod built;
mod callers;
mod comm;
mod diagnostics;
mod division;
mod encoding;
mod frozen_call;
mod full_values;
mod fully_shard;
mod gradient;
mod handles;
mod hooks;
mod listed;
mod memory_summary;
mod module;
mod offload;
mod order;
mod parallelize;
mod param;
mod param_events;
mod param_group;
mod param_nodes;
mod param_spec;
mod policy;
mod reduction;
mod replica_shards;
mod schedule;
mod settings;
mod shard;
mod shard_inputs;
mod shard_reader;
mod unit_call;
mod unit_options;
mod unit_params;
mod unit_path;
mod unsharded_memory;
mod var_map;
mod weight_format;

pub use comm::{AllGather, AllReduceHook, PostAccumulateGradHook, ReduceScatter};
pub use diagnostics::{GraphCut, GraphCutKind};
pub use fully_shard::{FullyShard, fully_shard, shard};
pub use handles::{GradientReductionHandle, Unit, UnshardHandle, UnshardedUnits};
pub(crate) use listed::listed;
pub use memory_summary::MemorySummary;
pub use module::FsdpModule;
pub use parallelize::parallelize;
pub use param::FsdpParam;
pub(crate) use param_group::FsdpParamGroup;
pub(crate) use param_nodes::without_reports;
pub use policy::{MixedPrecisionPolicy, NamePredicate, OffloadPolicy, ParamDtypeFn, Recurse, ReshardAfterForward};
pub(crate) use schedule::Schedule;
pub use unit_options::{ExtensionFn, ShardPlacement, ShardPlacementFn, StoreFn};
pub(crate) use unit_path::UnitPath;
pub use var_map::{BufferMemory, ShardedVarMap};
pub use weight_format::WeightFormat;
