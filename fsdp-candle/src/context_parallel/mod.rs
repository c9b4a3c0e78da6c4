//! Context parallelism: the ranks of a mesh dimension share each sequence. Each has a part of the activations, so that
//! sequences may be longer than one device holds.
//!
//! A sequence is cut into `2 N` chunks for `N` ranks. Rank `r` has chunk `r` and chunk `2 N - 1 - r`, one from the head
//! and one from the tail, so that causal attention costs the same on every rank. Everything but attention sees one token
//! at a time. Attention gathers the keys and values of all ranks, or exchanges heads for positions
//! ([`AttentionExchange`]).
//!
//! | file | subject |
//! |---|---|
//! | `positions` | the positions of a rank's tokens |
//! | `exchange` | the collectives of a sequence's chunks |
//!
//! PyTorch: `torch.distributed.tensor.experimental.context_parallel`.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::shape::Dim;
use candle_core::{Result, Tensor, bail};
use fsdp_core::ProcessGroup;
use scopeguard::defer;

use crate::collectives::{Consumers, all_gather};

pub(crate) mod exchange;
mod positions;

pub(crate) use positions::Positions;

/// How attention gets what other ranks hold: PyTorch's `set_rotate_method`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionExchange {
    /// Each rank attends with its own queries to the keys and values of all ranks, which it gathers, and gathers again in
    /// backward. It sends keys and values only, which are few with grouped heads (Llama 3, arXiv:2407.21783, section
    /// 3.3).
    #[default]
    Gather,
    /// Each rank attends with a part of the heads to the whole sequence, after an all-to-all of queries, keys and values,
    /// and sends the outputs back (DeepSpeed Ulysses, arXiv:2309.14509). The number of ranks must divide the number of
    /// key heads.
    Heads,
}

/// The ranks that share each sequence.
///
/// [`ContextParallel::split`] cuts a batch's tensors, and [`ContextParallel::run`] runs a forward on the parts. In it,
/// these functions of [`nn`](crate::nn) follow the sequence over the ranks:
///
/// - attention ([`nn::attention`](crate::nn::attention()) and its variants). [`Documents`](crate::nn::Documents) are those
///   of the whole sequence.
/// - rotary embeddings. [`nn::Rotary`](crate::nn::Rotary) knows the positions. [`rope`](crate::nn::rotary_emb::rope) and
///   its variants take the tables of the whole sequence, and choose the rows.
/// - dropout of `[batch, T, width]` draws the numbers of these positions.
///
/// A forward in which no attention of `nn` ran is an error, and so is a softmax of scores `[batch, heads, T, S]`. Other
/// layers that look at neighbouring tokens see this rank's part only: convolutions over tokens (an error), recurrent
/// layers, and pooling (see [`ContextParallel::gather`]). Learned positions come from `split(&position_ids, 1)`.
///
/// All ranks of the group have the same sequences: rows of a batch are divided by the ranks of the other mesh dimensions,
/// not by [`World::rows`](crate::World::rows). Parameters are sharded over all of them ([`DataParallelMeshDims`]), and
/// gradients are averaged over all. So the loss of a rank is the sum over its own targets, times the number of ranks,
/// divided by the number of all ranks' targets. A mean would be NaN on a rank without targets.
///
/// [`DataParallelMeshDims`]: crate::DataParallelMeshDims
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::{ContextParallel, nn};
/// use fsdp_core::process_group::local;
///
/// local::try_run(2, |group| {
///     let context = ContextParallel::new(&group);
///     let x = Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((1, 8, 1))?; // a sequence of 8 tokens
///     let own = context.split(&x, 1)?;
///     let q = own.zeros_like()?;
///     let means = context.run(|| nn::causal_attention(&q, &q, &own, 1, 1, 1.))?;
///     let means = context.gather(&means, 1)?.flatten_all()?.to_vec1::<f32>()?;
///     // The mean of the tokens up to each one.
///     assert!(means.iter().enumerate().all(|(at, mean)| (mean - at as f32 / 2.).abs() < 1e-5));
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ContextParallel(Arc<Context>);

struct Context {
    group: ProcessGroup,
    exchange: AttentionExchange,
}

impl fmt::Debug for ContextParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Context { group, exchange, .. } = &*self.0;
        f.debug_struct("ContextParallel").field("group", &group.name()).field("exchange", exchange).finish()
    }
}

impl ContextParallel {
    /// Returns the ranks of a group, such as that of a mesh dimension, with [`AttentionExchange::Gather`].
    pub fn new(group: &ProcessGroup) -> Self {
        Self::with_exchange(group, AttentionExchange::default())
    }

    /// Returns the ranks of a group, whose attention exchanges as `exchange` says.
    pub fn with_exchange(group: &ProcessGroup, exchange: AttentionExchange) -> Self {
        ContextParallel(Arc::new(Context { group: group.clone(), exchange }))
    }

    /// Returns the group.
    pub fn group(&self) -> &ProcessGroup {
        &self.0.group
    }

    /// Returns how attention gets what other ranks hold.
    pub fn exchange(&self) -> AttentionExchange {
        self.0.exchange
    }

    /// Returns the number that must divide the length of a sequence: two for each rank, or 1 for a single rank.
    pub fn multiple(&self) -> usize {
        match self.0.group.size() {
            1 => 1,
            ranks => 2 * ranks,
        }
    }

    /// Returns the positions of this rank's tokens in a sequence of `steps` tokens.
    ///
    /// # Errors
    /// [`ContextParallel::multiple`] does not divide the length.
    pub fn positions(&self, steps: usize) -> Result<Vec<u32>> {
        let own = self.own_steps("positions", steps)?;
        let positions = self.positions_of(own);
        Ok((0..own).map(|token| positions.of(token) as u32).collect())
    }

    /// Returns this rank's part along the sequence's dimension of a tensor that all ranks hold: token ids, targets,
    /// position ids. Backward passes the gradient of the own part on.
    ///
    /// # Errors
    /// [`ContextParallel::multiple`] does not divide the length: pad it, with
    /// [`IGNORED`](crate::nn::IGNORED) targets.
    pub fn split<D: Dim>(&self, x: &Tensor, dim: D) -> Result<Tensor> {
        let dim = dim.to_index(x.shape(), "ContextParallel::split")?;
        let own = self.own_steps("split", x.dims()[dim])?;
        if own == x.dims()[dim] {
            return Ok(x.clone());
        }
        let positions = self.positions_of(own);
        let runs = positions.runs(own).map(|(first, length)| x.narrow(dim, positions.of(first), length));
        Tensor::cat(&runs.collect::<Result<Vec<_>>>()?, dim)?.contiguous()
    }

    /// Returns the whole sequence of which each rank has a part, in order, for computations that all ranks repeat: pooled
    /// embeddings, or a sequence's last token. Backward sums the ranks' gradients, so that the mean over ranks of equal
    /// losses has the gradient of one of them. Collective.
    pub fn gather<D: Dim>(&self, x: &Tensor, dim: D) -> Result<Tensor> {
        let dim = dim.to_index(x.shape(), "ContextParallel::gather")?;
        if self.multiple() > 1 && !x.dims()[dim].is_multiple_of(2) {
            bail!(
                "ContextParallel::gather on rank {}: a rank has two chunks of each sequence, found {} tokens: gather what \
                 follows from `ContextParallel::split`",
                self.0.group.rank(),
                x.dims()[dim]
            )
        }
        exchange::in_order(&all_gather(x, dim, &self.0.group, Consumers::Differ)?, dim, self.0.group.size())
    }

    /// Returns the sum of the ranks' tensors on every rank, for a loss that all of them compute, such as one of whole
    /// sequences. Backward sums the ranks' gradients, as that of [`ContextParallel::gather`]. Collective.
    pub fn sum(&self, x: &Tensor) -> Result<Tensor> {
        all_gather(&x.unsqueeze(0)?, 0, &self.0.group, Consumers::Differ)?.sum(0)
    }

    /// Runs a forward on parts of sequences. Backward may run outside.
    ///
    /// # Errors
    /// Those of `forward`; a call within another; and a forward in which no attention of [`nn`](crate::nn) ran.
    pub fn run<T, E: From<candle_core::Error>>(
        &self,
        forward: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        if self.0.group.size() == 1 {
            return forward();
        }
        if current().is_some() {
            let nested: Result<T> = (|| bail!("ContextParallel::run: the forward of another is running"))();
            return Ok(nested?);
        }
        let scope = Scope::new(self.clone());
        let result = with_scope(Some(scope.clone()), forward)?;
        if !scope.has_attention() {
            let missing: Result<T> = (|| {
                bail!(
                    "ContextParallel::run: the forward ran no attention of `fsdp_candle::nn`, so each rank saw only its \
                     own part of the sequence: compute attention by `nn::attention`, `nn::causal_attention` or their \
                     variants"
                )
            })();
            return Ok(missing?);
        }
        Ok(result)
    }

    /// Returns the positions of this rank's `own` tokens.
    pub(crate) fn positions_of(&self, own: usize) -> Positions {
        Positions::of_rank(self.0.group.rank(), self.0.group.size(), own)
    }

    /// Checks a sequence's length, and returns the number of this rank's tokens.
    fn own_steps(&self, function: &str, steps: usize) -> Result<usize> {
        let group = &self.0.group;
        if !steps.is_multiple_of(self.multiple()) {
            bail!(
                "ContextParallel::{function} on rank {}: a sequence of {steps} tokens is cut into {} chunks, two for each \
                 rank of group \"{}\": pad it to {}",
                group.rank(),
                self.multiple(),
                group.name(),
                steps.next_multiple_of(self.multiple())
            )
        }
        Ok(steps / group.size())
    }
}

/// A forward on parts of sequences.
#[derive(Clone)]
pub(crate) struct Scope(Arc<Running>);

struct Running {
    context: ContextParallel,
    has_attention: AtomicBool,
}

impl Scope {
    fn new(context: ContextParallel) -> Self {
        Scope(Arc::new(Running { context, has_attention: AtomicBool::new(false) }))
    }

    pub(crate) fn context(&self) -> &ContextParallel {
        &self.0.context
    }

    /// Notes that attention ran.
    pub(crate) fn attends(&self) {
        self.0.has_attention.store(true, Ordering::Relaxed);
    }

    fn has_attention(&self) -> bool {
        self.0.has_attention.load(Ordering::Relaxed)
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Scope>> = const { RefCell::new(None) };
}

/// Returns the running forward, if it has parts of sequences.
pub(crate) fn current() -> Option<Scope> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs `f` in a forward, or outside of any.
pub(crate) fn with_scope<T>(scope: Option<Scope>, f: impl FnOnce() -> T) -> T {
    let before = CURRENT.replace(scope);
    defer!(drop(CURRENT.replace(before)));
    f()
}

/// Runs `f`, which has whole sequences.
pub(crate) fn outside<T>(f: impl FnOnce() -> T) -> T {
    with_scope(None, f)
}
