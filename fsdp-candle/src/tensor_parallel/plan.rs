//! Which modules are parallel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::{DeviceMesh, ProcessGroup};

use super::parallel::Parallel;
use super::style::ParallelStyle;
use crate::adapter::adapter_of;
use crate::error::{Error, Result};
use crate::pattern::NamePattern;

/// The styles of modules by patterns of their FQNs ([`NamePattern`]), for [`parallelize`](crate::parallelize):
/// PyTorch's `parallelize_plan`.
///
/// A style belongs to the module whose own parameters it cuts, as `model.layers.0.mlp.up_proj` of
/// `model.layers.0.mlp.up_proj.weight`. Modules that no pattern matches are whole on every rank.
///
/// ```
/// use fsdp_candle::{ActivationLayout, ColwiseParallel, ParallelPlan, RowwiseParallel, SequenceParallel};
///
/// let sequence = ActivationLayout::Shard(1);
/// let plan = ParallelPlan::new()
///     .module("model.layers.*.*_layernorm", SequenceParallel::default())
///     .module("model.layers.*.self_attn.[qkv]_proj", ColwiseParallel { input_layout: sequence, ..Default::default() })
///     .module("model.layers.*.self_attn.o_proj", RowwiseParallel { output_layout: sequence, ..Default::default() });
/// # let _ = plan;
/// ```
#[derive(Clone, Debug, Default)]
pub struct ParallelPlan {
    modules: Vec<(String, ParallelStyle)>,
}

impl ParallelPlan {
    /// A plan without modules.
    pub fn new() -> Self {
        ParallelPlan::default()
    }

    /// The plan, and this style for the modules whose FQN the pattern matches.
    pub fn module(mut self, pattern: impl Into<String>, style: impl Into<ParallelStyle>) -> Self {
        self.modules.push((pattern.into(), style.into()));
        self
    }
}

/// A plan for the ranks of a mesh.
pub(crate) struct Planned {
    mesh: DeviceMesh,
    rules: Vec<Rule>,
}

struct Rule {
    pattern: NamePattern,
    style: ParallelStyle,
    /// Whether a module with parameters was so.
    matched: AtomicBool,
}

impl Planned {
    /// Reads the plan's patterns. The mesh has one dimension.
    pub(crate) fn new(mesh: &DeviceMesh, plan: &ParallelPlan) -> Result<Self> {
        let rule = |(text, style): &(String, ParallelStyle)| {
            Ok(Rule { pattern: NamePattern::new(text)?, style: *style, matched: AtomicBool::new(false) })
        };
        Ok(Planned { mesh: mesh.clone(), rules: plan.modules.iter().map(rule).collect::<Result<_>>()? })
    }

    /// The ranks of the mesh.
    pub(crate) fn ranks(&self) -> Option<&ProcessGroup> {
        self.mesh.group(0).ok()
    }

    /// The patterns that no module has matched so far.
    pub(crate) fn idle(&self) -> impl Iterator<Item = &NamePattern> {
        self.rules.iter().filter(|rule| !rule.matched.load(Ordering::Relaxed)).map(|rule| &rule.pattern)
    }

    /// What a parameter of this name and shape is; `None` where no pattern matches its module.
    ///
    /// # Errors
    /// When two patterns match, the style knows no such parameter, or the dimension that it cuts does not divide.
    pub(crate) fn of(&self, name: &str, shape: &[usize]) -> Result<Option<Arc<Parallel>>> {
        let fail = |message: String| Error::Parameter { name: name.into(), message };
        let adapter = adapter_of(name);
        let (module, last) = match adapter {
            Some((module, _)) => (module, ""),
            None => name.rsplit_once('.').unwrap_or(("", name)),
        };
        let mut matching = self.rules.iter().filter(|rule| rule.pattern.matches(module));
        let Some(rule) = matching.next() else { return Ok(None) };
        if let Some(other) = matching.next() {
            return Err(fail(format!(
                "the patterns `{}` and `{}` of the plan both match its module `{module}`: let one of them",
                rule.pattern, other.pattern
            )));
        }
        rule.matched.store(true, Ordering::Relaxed);
        let share = match adapter {
            Some((_, is_up)) => rule.style.share_of_adapter(is_up),
            None => rule.style.share(last, shape.len()),
        };
        let style = rule.style.name();
        let Some(share) = share else {
            return Err(fail(format!(
                "the plan's `{}` makes its module {style}, which has no such parameter of shape {shape:?}: a linear \
                 layer has a weight of two dimensions and a bias of one, an embedding a weight of two. Leave the \
                 module out of the plan",
                rule.pattern
            )));
        };
        let ranks = self.mesh.size();
        if let Some(dim) = share.cut
            && !shape[dim].is_multiple_of(ranks)
        {
            return Err(fail(format!(
                "{style} cuts dimension {dim} of its shape {shape:?}, whose size {} does not divide evenly over the \
                 {ranks} ranks of the mesh {}: take a number of ranks that divides it, or leave `{}` out of the plan",
                shape[dim],
                self.mesh.layout(),
                rule.pattern
            )));
        }
        Ok(Some(Arc::new(Parallel::new(&self.mesh, rule.style, share.cut, share.partial)?)))
    }
}
