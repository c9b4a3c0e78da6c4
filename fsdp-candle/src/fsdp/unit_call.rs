//! One call of a unit: the hooks before and after the module's own forward.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::diagnostics::is_freed_storage_error;
use super::hooks;
use super::memory_summary::explain_memory;
use super::order::GraphExists;
use super::param_group::FsdpParamGroup;
use super::schedule::Schedule;
use crate::autograd::{keeps_graph, no_grad};
use crate::collectives;
use crate::graph::{self, Lifetime};
use crate::storage::copied_storage;
use crate::tensors::Tensors;

/// A call of a unit, with the hooks around it.
pub(super) struct UnitCall<'a> {
    pub(super) group: &'a Arc<FsdpParamGroup>,
    pub(super) schedule: &'a Arc<Schedule>,
    pub(super) parts: usize,
}

impl UnitCall<'_> {
    /// Runs a forward. `inputs` are its watched inputs. Also returns whether the backward of the outputs unshards the
    /// unit.
    pub(super) fn run<O: Tensors>(
        &self,
        inputs: Vec<Tensor>,
        forward: impl FnOnce() -> Result<O>,
    ) -> Result<(O, bool)> {
        if self.schedule.runs_without_hooks(self.group)? {
            let outputs = no_grad(|| collectives::scope(forward)).map_err(|error| self.explain(error))?;
            let outputs = self.cast_outputs(outputs)?;
            return Ok((outputs.map_tensors(&mut |tensor| Ok(tensor.detach()))?, false));
        }
        let mut guard = self.schedule.pre_forward(self.group)?;
        let watch = match keeps_graph() {
            true => self.schedule.diagnostics.graph.begin(self.group, inputs)?,
            false => None,
        };
        let span = tracing::debug_span!("forward", unit = self.group.name());
        let heartbeat = fsdp_core::heartbeat::span("forward", self.group.name());
        let outputs = collectives::scope(|| span.in_scope(forward)).map_err(|error| self.explain(error))?;
        drop(heartbeat);
        let is_watched = watch.is_some();
        let outputs = match watch {
            Some(watch) => watch.end(outputs)?,
            None => outputs,
        };
        let outputs = self.cast_outputs(outputs)?;
        let hook = self.schedule.post_forward(self.group, &mut guard, self.parts)?;
        let outputs = match (hook, keeps_graph()) {
            (true, _) => outputs.map_tensors(&mut |tensor| {
                hooks::pre_backward(&tensor, self.group.id(), guard.forward.pass, self.schedule)
            })?,
            (false, true) => outputs,
            (false, false) => outputs.map_tensors(&mut |tensor| Ok(tensor.detach()))?,
        };
        let outputs = if is_watched { self.schedule.diagnostics.graph.note_returned(outputs)? } else { outputs };
        let outputs = match guard.forward.is_root && keeps_graph() {
            true => {
                let (outputs, exists) = with_lifetime(outputs)?;
                guard.exists = exists;
                outputs
            }
            false => outputs,
        };
        Ok((outputs, hook))
    }

    fn cast_outputs<O: Tensors>(&self, outputs: O) -> Result<O> {
        match self.group.mp_policy.output_dtype {
            Some(dtype) => cast(outputs, dtype),
            None => Ok(outputs),
        }
    }

    /// Explains Candle's message about F4, and that memory is full.
    fn explain(&self, error: candle_core::Error) -> candle_core::Error {
        if !is_freed_storage_error(&error) {
            return explain_memory(error, || self.schedule.memory_summary());
        }
        let units = self.schedule.units();
        let sharded = units.iter().filter(|group| !group.is_unsharded());
        let sharded: Vec<String> = (sharded.enumerate())
            .map(|(at, group)| match at {
                0 => format!("`{}` ({})", group.name(), group.listed()),
                _ => format!("`{}`", group.name()),
            })
            .collect();
        if sharded.is_empty() {
            return error; // a norm's weight of another dtype than its input
        }
        error.context(format!(
            "FSDP unit `{}`: a sharded parameter was used (Candle calls its storage F4) outside the forward of the \
             unit that owns it, or by a layer that computes on its weights while it is built. These units are not \
             gathered here: {}. Call the unit through its FsdpModule (`forward` or `call`), or hold it by \
             `unshard_all()`. To read a value, call `vars.get(name)`, and `dtensor()?.full_tensor()` of the parameter",
            self.group.name(),
            sharded.join(", ")
        ))
    }
}

/// Also returns a function that returns whether the graph of one of the tensors exists, if that can be told: for
/// scalars, as losses are, and for outputs of the layers of `nn`.
fn with_lifetime<T: Tensors>(tensors: T) -> Result<(T, Option<GraphExists>)> {
    let scalars = Arc::new(());
    let mut others: Option<Vec<Lifetime>> = Some(vec![]);
    let tensors = tensors.map_tensors(&mut |tensor| {
        if !tensor.track_op() {
            return Ok(tensor);
        }
        if tensor.rank() > 0 || !tensor.dtype().is_float() {
            match (graph::lifetime(&tensor), &mut others) {
                (Some(lifetime), Some(others)) => others.push(lifetime),
                _ => others = None,
            }
            return Ok(tensor);
        }
        let (exists, memory) = (scalars.clone(), copied_storage(&tensor)?);
        graph::node_without_values("fsdp-output", &tensor, memory, (), move |gradient| {
            let _ = &exists;
            Ok(Some(gradient.clone()))
        })
    })?;
    let scalars = Arc::downgrade(&scalars);
    let exists = others.map(|others| {
        Box::new(move || scalars.strong_count() > 0 || !others.iter().all(Lifetime::is_over)) as GraphExists
    });
    Ok((tensors, exists))
}

pub(super) fn cast<T: Tensors>(tensors: T, dtype: DType) -> Result<T> {
    tensors.map_tensors(&mut |tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor) })
}
