//! Where a unit is in the model: its path, and which path is inside which.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

/// What the root unit is called in messages.
pub(crate) const ROOT: &str = "(root)";

/// What others remember of a unit.
#[derive(Clone)]
pub(crate) struct UnitId {
    /// The position in the order of `fully_shard` calls.
    pub(crate) index: usize,
    /// Its path, for messages.
    pub(crate) name: Arc<str>,
}

/// A unit's path. Each unit has one of its own: two with the same path are two units.
pub(crate) struct UnitPath {
    path: Arc<str>,
    /// The paths of its modules, if they are called apart.
    parts: OnceLock<BTreeSet<String>>,
}

impl UnitPath {
    pub(crate) fn new(path: Arc<str>) -> Self {
        UnitPath { path, parts: OnceLock::new() }
    }

    /// Whether `other` is this unit or one inside it, as far as paths tell.
    pub(crate) fn contains(&self, other: &UnitPath) -> bool {
        match self.parts.get() {
            None => is_within(&other.path, &self.path),
            Some(parts) => std::ptr::eq(self, other) || parts.iter().any(|part| is_within(&other.path, part)),
        }
    }

    /// Notes that the unit is several modules that are called apart: what is beside them at its path is not inside it.
    pub(crate) fn take_apart<'a>(&self, parameters: impl Iterator<Item = &'a str>) {
        let root = &*self.path == ROOT;
        let path = if root { "" } else { &*self.path };
        let mut parts = BTreeSet::new();
        for parameter in parameters {
            let rest = parameter.strip_prefix(path).map(|rest| rest.trim_start_matches('.'));
            if let Some((module, _)) = rest.and_then(|rest| rest.split_once('.')) {
                parts.insert(if root { module.to_string() } else { format!("{path}.{module}") });
            }
        }
        // Taken apart once more, the answer is the same.
        let _ = self.parts.set(parts);
    }

    fn is_inside(&self, other: &UnitPath) -> bool {
        other.contains(self) && !self.contains(other)
    }

    /// How many of `others` this one is inside of.
    pub(crate) fn depth(&self, others: &[&UnitPath]) -> usize {
        others.iter().filter(|other| self.is_inside(other)).count()
    }
}

/// Whether `path` is `outer` or below it.
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
    fn a_unit_that_was_taken_apart_contains_its_modules_alone() {
        let all = ["last.norm.inner", "last.other", "last", "last", ROOT].map(path);
        all[2].take_apart(["last.norm.weight", "last.head.weight"].into_iter());
        let all: Vec<&UnitPath> = all.iter().collect();
        assert!(all[2].contains(all[2]) && !all[2].contains(all[3]) && !all[2].contains(all[1]));
    }
}
