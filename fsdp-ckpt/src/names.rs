//! Names in a training state and in what it is loaded from.
//!
//! A checkpoint of a run holds a model's tensors as `model.<fqn>`, beside `optim.*`; a model by itself holds them as
//! `<fqn>`, which may begin with `model.`, too.

use std::borrow::Cow;

use crate::{Format, TensorSource};

/// What a model's names begin with in a training state.
pub const MODEL: &str = "model.";

/// What an optimizer's names begin with there.
const OPTIM: &str = "optim.";

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

    /// Finds out by the source's own names, where none are wanted.
    ///
    /// `model.` may be the FQNs' own: in files of a model by itself, it is the prefix where the optimizer is there too,
    /// or `model.model.` is.
    pub fn guess(source: &dyn TensorSource) -> Self {
        let names = || source.tensors().keys().chain(source.unreadable().keys());
        let any = |prefix: &str| names().any(|name| name.starts_with(prefix));
        let all = || names().all(|name| name.starts_with(MODEL) || name.starts_with(OPTIM));
        let has_prefix = match source.format() {
            Format::Fsdp => any(MODEL) || any(OPTIM),
            // Of what is saved so, a model is a part: `{"model": ..., "optim": ...}`.
            Format::TorchDcp => all(),
            _ => all() && (any(OPTIM) || any("model.model.")),
        };
        Names { has_prefix }
    }

    /// The FQN of the parameter or buffer that the source calls `name`; nothing for what is not the model's.
    pub fn fqn<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.has_prefix { name.strip_prefix(MODEL) } else { Some(name) }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::hf::HfModel;

    /// A safetensors file of scalars with these names.
    fn file(path: &Path, names: &[&str]) -> HfModel {
        let entries: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(i, name)| format!(r#""{name}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{}]}}"#, i + 1))
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.resize(bytes.len() + names.len(), 0);
        std::fs::write(path, bytes).unwrap();
        HfModel::open_file(path).unwrap()
    }

    #[test]
    fn the_naming_that_finds_more_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("m.safetensors");
        let (with, without) = (Names { has_prefix: true }, Names { has_prefix: false });
        let wanted = ["model.model.embed.weight", "model.lm_head.weight", "optim.state.lm_head.weight.step"];
        let of = |source: &HfModel| Names::of(source, wanted.into_iter());

        let plain = file(&path, &["model.embed.weight", "lm_head.weight"]);
        assert_eq!((of(&plain), Names::guess(&plain)), (without, without));
        assert_eq!((without.fqn("model.embed.weight"), with.fqn("model.a")), (Some("model.embed.weight"), Some("a")));
        assert_eq!(with.fqn("optim.state.lm_head.weight.step"), None);
        let prefixed = file(&path, &["model.model.embed.weight", "model.lm_head.weight"]);
        assert_eq!((of(&prefixed), Names::guess(&prefixed)), (with, with));
        // A Llama with tied weights: every parameter's own name begins so.
        let tied = file(&path, &["model.embed.weight", "model.norm.weight"]);
        assert_eq!((of(&tied), Names::guess(&tied)), (without, without));
        assert_eq!(Names::guess(&file(&path, &["model.wte.weight", "optim.state.wte.weight.step"])), with);
        assert_eq!(Names::guess(&file(&path, &["wte.weight", "optim.weight"])), without);
    }
}
