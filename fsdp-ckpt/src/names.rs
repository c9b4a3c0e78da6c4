//! Names in a training state and in what it is loaded from.
//!
//! A checkpoint of a run holds a model's tensors as `model.<fqn>`, beside `optim.*`; a model by itself holds them as `<fqn>`, which may begin with `model.`, too.

use std::borrow::Cow;

use crate::TensorSource;

/// What a model's names begin with in a training state.
pub const MODEL: &str = "model.";

/// How a source calls what a training state calls `model.<fqn>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    has_prefix: bool,
}

impl Names {
    /// Finds out by which of the two more of the `wanted` names, as a training state has them, are in `source`.
    pub fn of<'a>(source: &dyn TensorSource, wanted: impl Iterator<Item = &'a str>) -> Self {
        let is_there = |name: &str| source.tensors().contains_key(name) || source.unreadable().contains_key(name);
        let (mut with, mut without) = (0, 0);
        for name in wanted {
            let Some(fqn) = name.strip_prefix(MODEL) else { continue };
            with += usize::from(is_there(name));
            without += usize::from(is_there(fqn));
        }
        Names { has_prefix: with >= without }
    }

    /// What the source calls the state's `name`.
    pub fn in_source<'a>(&self, name: &'a str) -> &'a str {
        if self.has_prefix { name } else { name.strip_prefix(MODEL).unwrap_or(name) }
    }

    /// What the state calls the source's `name`.
    pub fn in_state<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.has_prefix { Cow::Borrowed(name) } else { Cow::Owned(format!("{MODEL}{name}")) }
    }
}
