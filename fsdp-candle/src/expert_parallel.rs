//! The plan of expert parallelism: which rank has each expert. `nn::mixture_of_experts` sends tokens to the experts'
//! ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::ProcessGroup;

use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};
use crate::pattern::NamePattern;
use crate::tensor_parallel::{ParallelPlan, ParallelStyle};

/// The rank that has a parameter's expert, and the roles of the ranks that hold the parameter.
pub(crate) struct Expert {
    pub(crate) ranks: Arc<DataParallel>,
    /// A rank of [`DataParallel::experts`].
    pub(crate) owner: usize,
}

/// The lists of experts whose experts live on different ranks.
pub(crate) struct ExpertPlan {
    /// The ranks that hold the experts' parameters.
    ranks: Arc<DataParallel>,
    lists: Vec<List>,
}

struct List {
    pattern: NamePattern,
    /// Whether a list with experts has matched.
    matched: AtomicBool,
}

impl ExpertPlan {
    /// Parses the plan's patterns, all of which are of lists of experts.
    pub(crate) fn new(ranks: Arc<DataParallel>, plan: &ParallelPlan) -> Result<Self> {
        let list = |(text, _): &(String, ParallelStyle)| {
            Ok(List { pattern: NamePattern::new(text)?, matched: AtomicBool::new(false) })
        };
        Ok(ExpertPlan { ranks, lists: plan.modules().iter().map(list).collect::<Result<_>>()? })
    }

    /// Returns the patterns that no list of experts has matched so far.
    pub(crate) fn unmatched(&self) -> impl Iterator<Item = &NamePattern> {
        self.lists.iter().filter(|list| !list.matched.load(Ordering::Relaxed)).map(|list| &list.pattern)
    }

    /// Returns the expert of this parameter, or `None` if the parameter is in no list of experts. Fails if a list's
    /// parameter does not belong to a numbered expert.
    pub(crate) fn of(&self, name: &str) -> Result<Option<Expert>> {
        for (dot, _) in name.match_indices('.') {
            let (module, rest) = (&name[..dot], &name[dot + 1..]);
            let Some(list) = self.lists.iter().find(|list| list.pattern.matches(module)) else { continue };
            let Some(number) = rest.split_once('.').and_then(|(number, _)| number.parse::<usize>().ok()) else {
                return Err(Error::parameter(
                    name,
                    format!(
                        "`{}` of the plan makes `{module}` ExpertParallel, but this is not a parameter of a numbered \
                         expert, such as `{module}.0.up_proj.weight`: name the list of experts in the plan",
                        list.pattern
                    ),
                ));
            };
            list.matched.store(true, Ordering::Relaxed);
            let expert = |ranks: &ProcessGroup| Expert { ranks: self.ranks.clone(), owner: number % ranks.size() };
            return Ok(self.ranks.experts().map(expert));
        }
        Ok(None)
    }
}
