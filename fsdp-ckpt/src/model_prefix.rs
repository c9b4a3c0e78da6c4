//! The prefix `model.` of the parameters' names in a training state.

use std::borrow::Cow;

use crate::{Format, TensorSource};

/// Prefix of a model's names in a training state.
pub const MODEL: &str = "model.";

/// Prefix of an optimizer's names in a training state.
pub(crate) const OPTIM: &str = "optim.";

/// Whether a source stores the parameter `<fqn>` as `model.<fqn>`, like a training state, or as `<fqn>`, like a model.
/// FQNs may themselves begin with `model.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPrefix {
    has_prefix: bool,
}

impl ModelPrefix {
    /// Chooses the way by which `source` has more of the `wanted` names of a training state.
    pub fn of<'a>(source: &dyn TensorSource, wanted: impl Iterator<Item = &'a str>) -> Self {
        let is_there = |name: &str| source.tensors().contains_key(name) || source.unreadable().contains_key(name);
        let (mut with, mut without) = (0, 0);
        for name in wanted {
            let Some(fqn) = name.strip_prefix(MODEL) else { continue };
            with += usize::from(is_there(name));
            without += usize::from(is_there(fqn));
        }
        ModelPrefix { has_prefix: with >= without }
    }

    /// Guesses from the source's names alone.
    ///
    /// In files of a model, `model.` is the prefix if the optimizer's names exist, too, or if `model.model.` does.
    pub fn guess(source: &dyn TensorSource) -> Self {
        if let Some(has_prefix) = source.index().has_prefix {
            return ModelPrefix { has_prefix };
        }
        let names = || source.tensors().keys().chain(source.unreadable().keys());
        let any = |prefix: &str| names().any(|name| name.starts_with(prefix));
        let all = || names().all(|name| name.starts_with(MODEL) || name.starts_with(OPTIM));
        let has_prefix = match source.format() {
            Format::Fsdp => any(MODEL) || any(OPTIM),
            // DCP checkpoints usually hold `{"model": ..., "optim": ...}`.
            Format::TorchDcp => all(),
            _ => all() && (any(OPTIM) || any("model.model.")),
        };
        ModelPrefix { has_prefix }
    }

    /// Returns the FQN of the parameter or buffer that the source stores as `name`; `None` for other names.
    pub fn fqn<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.has_prefix { name.strip_prefix(MODEL) } else { Some(name) }
    }

    /// Returns the source's name of a training state's `name`.
    pub fn stored_name<'a>(&self, name: &'a str) -> &'a str {
        if self.has_prefix { name } else { name.strip_prefix(MODEL).unwrap_or(name) }
    }

    /// Returns the training state's name of the source's `name`.
    pub fn state_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.has_prefix { Cow::Borrowed(name) } else { Cow::Owned(format!("{MODEL}{name}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::path::Path;

    use crate::hf::HfModel;

    /// Creates a safetensors file of scalars with these names.
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
    fn chooses_the_prefix_with_more_names() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("m.safetensors");
        let (with, without) = (ModelPrefix { has_prefix: true }, ModelPrefix { has_prefix: false });
        let wanted = ["model.model.embed.weight", "model.lm_head.weight", "optim.state.lm_head.weight.step"];
        let of = |source: &HfModel| ModelPrefix::of(source, wanted.into_iter());

        let plain = file(&path, &["model.embed.weight", "lm_head.weight"]);
        assert_eq!((of(&plain), ModelPrefix::guess(&plain)), (without, without));
        assert_eq!((without.fqn("model.embed.weight"), with.fqn("model.a")), (Some("model.embed.weight"), Some("a")));
        assert_eq!(with.fqn("optim.state.lm_head.weight.step"), None);
        let prefixed = file(&path, &["model.model.embed.weight", "model.lm_head.weight"]);
        assert_eq!((of(&prefixed), ModelPrefix::guess(&prefixed)), (with, with));
        // A Llama with tied weights: every FQN begins with `model.`.
        let tied = file(&path, &["model.embed.weight", "model.norm.weight"]);
        assert_eq!((of(&tied), ModelPrefix::guess(&tied)), (without, without));
        assert_eq!(ModelPrefix::guess(&file(&path, &["model.wte.weight", "optim.state.wte.weight.step"])), with);
        assert_eq!(ModelPrefix::guess(&file(&path, &["wte.weight", "optim.weight"])), without);
    }
}
