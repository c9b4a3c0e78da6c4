//! The identity of a unit, and its path in the model.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

/// Name of the root unit in messages.
pub(crate) const ROOT: &str = "(root)";

/// Identity of a unit.
#[derive(Clone)]
pub(crate) struct UnitId {
    /// Position in the order of `fully_shard` calls.
    pub(crate) index: usize,
    /// Path in the model.
    pub(crate) name: Arc<str>,
}

/// A unit's path. Two units with the same path have two `UnitPath`s.
pub(crate) struct UnitPath {
    path: Arc<str>,
    /// Paths of the unit's modules, if they are called one by one.
    modules: OnceLock<BTreeSet<String>>,
}

impl UnitPath {
    pub(super) fn new(path: Arc<str>) -> Self {
        UnitPath { path, modules: OnceLock::new() }
    }

    /// Returns whether `other` is this unit or inside it, by their paths.
    pub(crate) fn contains(&self, other: &UnitPath) -> bool {
        match self.modules.get() {
            None => is_within(&other.path, &self.path),
            Some(modules) => std::ptr::eq(self, other) || modules.iter().any(|module| is_within(&other.path, module)),
        }
    }

    /// Records that the unit is several modules. Units beside these modules at its path are then outside of it.
    pub(super) fn split_into_modules<'a>(&self, parameters: impl Iterator<Item = &'a str>) {
        let root = &*self.path == ROOT;
        let path = if root { "" } else { &*self.path };
        let mut modules = BTreeSet::new();
        for parameter in parameters {
            let rest = parameter.strip_prefix(path).map(|rest| rest.trim_start_matches('.'));
            if let Some((module, _)) = rest.and_then(|rest| rest.split_once('.')) {
                modules.insert(if root { module.to_string() } else { format!("{path}.{module}") });
            }
        }
        // A second call has the same modules.
        let _ = self.modules.set(modules);
    }

    /// Returns how many of `others` this path is inside of.
    pub(crate) fn depth(&self, others: &[&UnitPath]) -> usize {
        others.iter().filter(|other| other.contains(self) && !self.contains(other)).count()
    }
}

/// Returns whether `path` is `outer` or below it.
fn is_within(path: &str, outer: &str) -> bool {
    outer == ROOT || path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str) -> UnitPath {
        UnitPath::new(path.into())
    }

    #[test]
    fn paths_nest_at_their_dots() {
        let all = ["blocks.1", "blocks.1.mlp", "blocks.10", "head", ROOT].map(path);
        let all: Vec<&UnitPath> = all.iter().collect();
        assert_eq!(all.iter().map(|path| path.depth(&all)).collect::<Vec<_>>(), [1, 2, 1, 1, 0]);
        assert!(all[0].contains(all[0]) && !all[0].contains(all[2]));
    }

    #[test]
    fn a_unit_of_several_modules_contains_only_these() {
        let all = ["last.norm.inner", "last.other", "last", "last", ROOT].map(path);
        all[2].split_into_modules(["last.norm.weight", "last.head.weight"].into_iter());
        let all: Vec<&UnitPath> = all.iter().collect();
        assert!(all[2].contains(all[2]) && !all[2].contains(all[3]) && !all[2].contains(all[1]));
        assert!(all[2].contains(all[0]));
    }
}
