//! The model and the optimizer in a training state of PyTorch, whatever their keys.
//!
//! Trainers save `{"model": .., "optimizer": ..}`, `{"state_dict": .., "optimizer_states": [..]}`, `{"app": {..}}` and
//! more. [`TrainingState`] finds the parts by their tensors: an optimizer has `state` and `param_groups`, and a model
//! has matrices. Its names are those of this crate: `model.<fqn>`, and `optim.<name>` for the optimizer.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_core::layout::Region;
use serde_json::Value;

use crate::model_prefix::OPTIM;
use crate::source::{ChunkEntry, SourceIndex, TensorEntry};
use crate::{Checksums, Error, Format, MODEL, ModelPart, Result, TensorSource};

/// Values of an optimizer for each parameter. They tell an optimizer without `param_groups` from a model with a layer
/// `state`.
const MOMENTS: [&str; 12] = [
    "step",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "sum",
    "acc_delta",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
];
/// Names that wrappers of a whole model put before the names of its parameters.
const WRAPPERS: [&str; 4] = ["module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module."];
/// Names that wrappers of a layer put within the names of its parameters.
const INNER_WRAPPERS: [&str; 3] = ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."];
/// Starts of the names in a whole transformer. After `model.`, they show that it is an attribute of the trainer.
const TOPS: [&str; 7] = ["model.", "lm_head.", "transformer.", "score.", "bert.", "cls.", "classifier."];
/// Keys of a training state under which trainers save the model.
const MODEL_KEYS: [&str; 6] = ["model", "module", "state_dict", "model_state_dict", "net", "network"];

/// Name of the [`ModelPart`] with the tensors outside of dicts. Without such tensors, the part is a model in nested dicts:
/// all dicts but the optimizer.
pub const ROOT: &str = ".";

/// A training state with the names of this crate: `model.<fqn>` and `optim.<name>`. Values have `optim.<name>`, or their
/// own names. Tensors of neither are left out.
///
/// ```no_run
/// use fsdp_ckpt::{TensorSource, TrainingState};
///
/// let state = TrainingState::find(fsdp_ckpt::open("lightning.ckpt")?, None)?;
/// println!("{} parameters in {}", state.tensors().len(), state.model());
/// # Ok::<_, fsdp_ckpt::Error>(())
/// ```
#[derive(Debug)]
pub struct TrainingState {
    source: Box<dyn TensorSource>,
    index: SourceIndex,
    /// The source's name of each tensor.
    from: BTreeMap<String, String>,
    found: Option<Found>,
}

/// Parts that were found in a training state.
#[derive(Debug)]
struct Found {
    model: String,
    optimizer: Option<String>,
    /// Why the optimizer's state is left out, if it is.
    unnamed: Option<String>,
    /// Start of the parameters' names that was removed.
    removed: String,
    /// Names of tensors and of objects that are left out.
    left_out: Vec<String>,
}

impl TrainingState {
    /// Finds the parts of a file or checkpoint of PyTorch. Other sources keep their names. The model is the `part` with
    /// this name, or the only one. Wrappers in the parameters' names (`module.`, `_orig_mod.`) are removed.
    ///
    /// # Errors
    /// [`Error::Parts`] if several parts may be the model, or none is called `part`; [`Error::Malformed`] if two parameters
    /// have the same name without wrappers.
    pub fn find(source: Box<dyn TensorSource>, part: Option<&str>) -> Result<Self> {
        if !matches!(source.format(), Format::TorchDcp | Format::TorchFile) {
            if let Some(part) = part {
                let format = source.format();
                let reason = format!("the part {part:?}: {} is {format}, which has no parts", source.path().display());
                return Err(Error::Argument(reason));
            }
            return Ok(Self::whole(source));
        }
        let tree = Tree::of(source.index());
        let mut found = Search::default();
        found.explore(&tree, &mut vec![]);
        let models = found.models();
        let at = match (part, &models[..]) {
            (None, []) => return Ok(Self::whole(source)),
            (None, [only]) => only.clone(),
            (Some(part), models) => match models.iter().find(|path| name_of(path) == part) {
                Some(path) => path.clone(),
                None if part == ROOT => vec![],
                None => return Err(several(&*source, models, Some(part))),
            },
            (None, models) => return Err(several(&*source, models, None)),
        };
        Self::of(source, &at, &found, &models)
    }

    /// Keeps all names of the source, and looks for no parts.
    pub fn whole(source: Box<dyn TensorSource>) -> Self {
        let from = source.tensors().keys().map(|name| (name.clone(), name.clone())).collect();
        TrainingState { index: source.index().clone(), source, from, found: None }
    }

    fn of(source: Box<dyn TensorSource>, at: &Path, found: &Search, models: &[Path]) -> Result<Self> {
        let old = source.index();
        let is_optimizers = |path: &[String]| found.optimizers.iter().any(|optimizer| path.starts_with(optimizer));
        let is_models = |path: &[String]| match at[..] {
            [] if models.contains(at) => path.len() == 1,
            [] => !is_optimizers(path),
            _ => path.starts_with(at),
        };
        let path = |name: &str| old.paths.get(name).map_or(&[][..], |path| &path[..]);
        let parameters: Vec<(&String, String)> = (old.tensors.keys().filter(|name| is_models(path(name))))
            .map(|name| (name, path(name)[at.len()..].join(".")))
            .collect();
        if parameters.is_empty() {
            return Err(several(&*source, models, Some(&name_of(at))));
        }
        let removed = wrapper(parameters.iter().map(|(_, name)| name.as_str()), !at.is_empty());
        let fqn = |name: &str| {
            let name = name.strip_prefix(&removed).unwrap_or(name);
            INNER_WRAPPERS.iter().fold(name.to_string(), |name, wrapper| name.replace(wrapper, ""))
        };
        let (mut from, mut values) = (BTreeMap::new(), old.values.clone());
        for (name, inner) in &parameters {
            if from.insert(format!("{MODEL}{}", fqn(inner)), (*name).clone()).is_some() {
                let reason = format!("two parameters are called {:?} without the names of wrappers", fqn(inner));
                return Err(Error::Malformed { path: old.path.clone(), item: Some((*name).clone()), reason });
            }
        }
        let optimizer = found.optimizer_of(at);
        let mut unnamed = None;
        if optimizer.is_none() && !found.optimizers.is_empty() {
            let names = found.optimizers.iter().map(|path| format!("`{}`", name_of(path))).collect::<Vec<_>>();
            unnamed = Some(format!(
                "it has several optimizers, of which none belongs to the model alone: {}; convert the weights alone, to a \
                 Hugging Face model",
                names.join(", ")
            ));
        }
        if let Some(optimizer) = optimizer {
            let numbers = numbers(&old.values, optimizer);
            let own = |name: &str| {
                let below = path(name).strip_prefix(&optimizer[..])?;
                Some(optimizer_name(&below.join("."), &numbers, &fqn))
            };
            let own_tensors: Vec<(String, &String)> =
                old.tensors.keys().filter_map(|name| Some((own(name)?, name))).collect();
            let is_there = |fqn: &str| from.contains_key(&format!("{MODEL}{fqn}"));
            let stray = own_tensors.iter().find_map(|(name, _)| stray(name, is_there));
            match stray {
                Some(stray) => unnamed = Some(explained(&stray, &name_of(optimizer))),
                None => from.extend(own_tensors.into_iter().map(|(new, name)| (new, name.clone()))),
            }
            values =
                old.values.iter().map(|(name, value)| (own(name).unwrap_or(name.clone()), value.clone())).collect();
        }
        let is_used: BTreeSet<&String> = from.values().collect();
        let is_needed = |name: &str| is_models(path(name)) || is_optimizers(path(name)) && unnamed.is_none();
        let objects = old.unreadable.keys().filter(|name| !is_needed(name));
        let left_out: Vec<String> =
            old.tensors.keys().filter(|name| !is_used.contains(name)).chain(objects).cloned().collect();
        let tensors = from.iter().map(|(new, name)| (new.clone(), old.tensors[name].clone())).collect();
        let unreadable = old.unreadable.iter().filter(|(name, _)| is_needed(name));
        let unreadable = unreadable.map(|(name, what)| (name.clone(), what.clone())).collect();
        let has_prefix = Some(true);
        let index = SourceIndex { tensors, values, unreadable, has_prefix, paths: BTreeMap::new(), ..old.clone() };
        let optimizer = optimizer.map(|path| name_of(path));
        let found = Found { model: name_of(at), optimizer, unnamed, removed, left_out };
        Ok(TrainingState { source, index, from, found: Some(found) })
    }

    /// Checks that the state of the optimizer, if there is one, is named after the parameters.
    ///
    /// # Errors
    /// [`Error::Malformed`] otherwise; the optimizer is left out then.
    pub fn check_optimizer(&self) -> Result<()> {
        match self.found.as_ref().and_then(|found| found.unnamed.clone()) {
            Some(reason) => Err(Error::Malformed { path: self.path().to_path_buf(), item: None, reason }),
            None => Ok(()),
        }
    }

    /// Returns the name of the model's part. [`ROOT`] if the source has no parts.
    pub fn model(&self) -> &str {
        self.found.as_ref().map_or(ROOT, |found| &found.model)
    }

    /// Returns lines that say what was found. None if the source has the names of this crate.
    pub fn notes(&self) -> Vec<String> {
        let Some(Found { model, optimizer, unnamed, removed, left_out }) = &self.found else { return vec![] };
        let mut notes = vec![];
        let of_optimizer = match (optimizer, unnamed) {
            (Some(name), None) => format!(", and its optimizer `{name}`"),
            (Some(name), Some(_)) => format!("; the optimizer `{name}` does not name its parameters"),
            (None, _) => String::new(),
        };
        if model != ROOT || optimizer.is_some() {
            notes.push(format!("the model is `{model}`{of_optimizer}"));
        }
        if !removed.is_empty() {
            notes.push(format!("the names of its parameters began with `{removed}`, which was removed"));
        }
        if let Some(first) = left_out.first() {
            let others = if left_out.len() == 1 { "" } else { " and others" };
            notes.push(format!(
                "{} tensors and objects of other parts were left out: `{first}`{others}",
                left_out.len()
            ));
        }
        notes
    }
}

impl TensorSource for TrainingState {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.tensor(fqn)?;
        self.source.read(&self.from[fqn], region, into)
    }

    fn checksums(&self) -> Checksums {
        self.source.checksums()
    }

    fn has_checksum(&self, chunk: &ChunkEntry) -> bool {
        self.source.has_checksum(chunk)
    }

    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.index.chunk(fqn, chunk)?;
        self.source.verify_chunk(&self.from[fqn], chunk, seen)
    }
}

/// The keys that lead to a dict.
type Path = Vec<String>;

fn name_of(path: &[String]) -> String {
    if path.is_empty() { ROOT.to_string() } else { path.join(".") }
}

/// Returns the error for parts of which several may be meant, or none has the wanted name.
fn several(source: &dyn TensorSource, models: &[Path], wanted: Option<&str>) -> Error {
    let part = |path: &Path| {
        let is_in = |name: &&String| {
            let own = source.index().paths.get(*name);
            own.is_some_and(|own| if path.is_empty() { own.len() == 1 } else { own.starts_with(path) })
        };
        let tensors: Vec<&TensorEntry> =
            source.tensors().keys().filter(is_in).map(|name| &source.tensors()[name]).collect();
        let bytes = tensors.iter().map(|tensor| tensor.bytes()).sum();
        ModelPart { name: name_of(path), tensors: tensors.len(), bytes }
    };
    Error::Parts {
        path: source.path().to_path_buf(),
        wanted: wanted.map(str::to_string),
        parts: models.iter().map(part).collect(),
    }
}

/// Returns what all names begin with and wrappers have added. `model.` is the attribute of a trainer if the names after
/// it are those of a whole transformer.
fn wrapper<'a>(names: impl Iterator<Item = &'a str> + Clone, is_in_dict: bool) -> String {
    let mut removed = String::new();
    let rest = |removed: &str| {
        let len = removed.len();
        names.clone().map(move |name| &name[len..])
    };
    let all = |removed: &str, wrapper: &str| rest(removed).all(|name| name.starts_with(wrapper));
    while let Some(wrapper) = WRAPPERS.iter().find(|wrapper| all(&removed, wrapper)) {
        removed.push_str(wrapper);
    }
    let is_attribute =
        |name: &str| TOPS.iter().any(|top| name.strip_prefix(MODEL).is_some_and(|name| name.starts_with(top)));
    if is_in_dict && all(&removed, MODEL) && rest(&removed).any(is_attribute) {
        removed.push_str(MODEL);
        while let Some(wrapper) = WRAPPERS.iter().find(|wrapper| all(&removed, wrapper)) {
            removed.push_str(wrapper);
        }
    }
    removed
}

/// Returns the training state's name of an optimizer's `state.<fqn>.<moment>` or `param_groups.<fqn>.<setting>`.
fn optimizer_name(name: &str, numbers: &BTreeMap<usize, String>, fqn: &dyn Fn(&str) -> String) -> String {
    let Some((kind, name)) = name.split_once('.').filter(|(kind, _)| ["state", "param_groups"].contains(kind)) else {
        return format!("{OPTIM}{name}");
    };
    let numbered = name.split_once('.').and_then(|(number, rest)| Some((numbers.get(&number.parse().ok()?)?, rest)));
    match numbered {
        Some((name, rest)) if kind == "state" => format!("{OPTIM}{kind}.{}.{rest}", fqn(name)),
        _ => format!("{OPTIM}{kind}.{}", fqn(name)),
    }
}

/// Returns the parameters' names by number, which `Optimizer.state_dict()` has if it was made of `named_parameters()`.
fn numbers(values: &serde_json::Map<String, Value>, optimizer: &[String]) -> BTreeMap<usize, String> {
    let groups = values.get(&[optimizer, &["param_groups".to_string()]].concat().join(".")).and_then(Value::as_array);
    let of_group = |group: &Value| {
        let (numbers, names) = (group["params"].as_array()?, group["param_names"].as_array()?);
        let pair = |(number, name): (&Value, &Value)| Some((number.as_u64()? as usize, name.as_str()?.to_string()));
        numbers.iter().zip(names).map(pair).collect::<Option<Vec<_>>>()
    };
    groups.into_iter().flatten().filter_map(of_group).flatten().collect()
}

/// Returns the parameter of an optimizer's state that is not there.
fn stray(name: &str, is_there: impl Fn(&str) -> bool) -> Option<String> {
    let state = name.strip_prefix(OPTIM)?.strip_prefix("state.")?;
    let fqn = state.rsplit_once('.').map_or(state, |(fqn, _)| fqn);
    (!is_there(fqn)).then(|| fqn.to_string())
}

fn explained(stray: &str, optimizer: &str) -> String {
    if stray.split('.').next().is_some_and(|key| key.parse::<usize>().is_ok()) {
        format!(
            "the state of its optimizer `{optimizer}` numbers the parameters instead of naming them: save it by \
             torch.distributed.checkpoint.state_dict.get_state_dict, or convert the weights alone, to a Hugging Face model"
        )
    } else {
        format!(
            "its optimizer `{optimizer}` has a state for \"{stray}\", which the model lacks: convert the weights alone, \
             to a Hugging Face model"
        )
    }
}

/// Nested dicts with the tensors of a source.
#[derive(Default)]
struct Tree<'a> {
    below: BTreeMap<&'a str, Tree<'a>>,
    leaf: Option<Leaf>,
}

#[derive(Clone, Copy)]
enum Leaf {
    Floats { is_matrix: bool },
    Other,
}

impl<'a> Tree<'a> {
    fn of(index: &'a SourceIndex) -> Self {
        let mut root = Tree::default();
        for (name, path) in &index.paths {
            let mut at = &mut root;
            for key in path {
                at = at.below.entry(key).or_default();
            }
            let floats = index.tensors.get(name).filter(|tensor| tensor.dtype.is_float() && !tensor.shape.is_empty());
            at.leaf = Some(floats.map_or(Leaf::Other, |tensor| Leaf::Floats { is_matrix: tensor.shape.len() > 1 }));
        }
        root
    }

    /// Calls `seen` with the name of each leaf.
    fn leaves(&self, name: &str, seen: &mut dyn FnMut(&str, Leaf)) {
        if let Some(leaf) = self.leaf {
            seen(name, leaf);
        }
        for (key, below) in &self.below {
            below.leaves(&if name.is_empty() { key.to_string() } else { format!("{name}.{key}") }, seen);
        }
    }

    /// Returns whether it is what `Optimizer.state_dict()` returns, nested or flattened.
    fn is_optimizer(&self) -> bool {
        if self.below.contains_key("state") && self.below.contains_key("param_groups") {
            return true;
        }
        let (mut is_one, mut has_moments) = (!self.below.is_empty(), false);
        self.leaves("", &mut |name, _| {
            let is_state = name.starts_with("state.");
            is_one &= is_state || name.starts_with("param_groups");
            has_moments |= is_state && name.rsplit('.').next().is_some_and(|last| MOMENTS.contains(&last));
        });
        is_one && has_moments
    }

    fn has_optimizer(&self) -> bool {
        self.is_optimizer() || self.below.values().any(Tree::has_optimizer)
    }

    /// Returns whether it has several dicts with floats, and no joined names as in a state dict.
    fn is_nested_model(&self) -> bool {
        let is_nested = |tree: &Tree<'_>| tree.below.keys().all(|key| !key.contains('.'));
        is_nested(self)
            && self.below.values().all(is_nested)
            && self.below.values().filter(|below| below.leaf.is_none() && below.has_floats()).count() > 1
    }

    /// Returns whether it has floats outside of optimizers.
    fn has_floats(&self) -> bool {
        matches!(self.leaf, Some(Leaf::Floats { .. }))
            || !self.is_optimizer() && self.below.values().any(Tree::has_floats)
    }
}

/// The parts of a tree.
#[derive(Default)]
struct Search {
    candidates: Vec<Path>,
    optimizers: Vec<Path>,
}

impl Search {
    fn explore(&mut self, tree: &Tree<'_>, path: &mut Path) {
        if tree.is_optimizer() {
            self.optimizers.push(path.clone());
            return;
        }
        let own = |matrix: bool| {
            let is_one = |leaf| matches!(leaf, Some(Leaf::Floats { is_matrix }) if is_matrix || !matrix);
            tree.below.values().any(|below| is_one(below.leaf))
        };
        let dicts: Vec<(&&str, &Tree<'_>)> = tree.below.iter().filter(|(_, below)| below.leaf.is_none()).collect();
        let with_floats = dicts.iter().filter(|(_, below)| below.has_floats()).count();
        let is_named_model = path.last().is_some_and(|key| MODEL_KEYS.contains(&key.as_str()))
            && dicts.iter().any(|(key, below)| **key == "model" && below.is_nested_model());
        // A model in nested dicts, or one that is in the dict itself.
        let is_model = own(true)
            || with_floats == 1 && is_named_model
            || with_floats == 0 && own(false)
            || with_floats > 1 && !path.is_empty() && !dicts.iter().any(|(_, below)| below.has_optimizer());
        if is_model {
            self.candidates.push(path.clone());
        }
        for (key, below) in dicts {
            // Dicts below a model belong to it. Dicts beside the tensors of the root are other parts.
            if !is_model || path.is_empty() || below.has_optimizer() {
                path.push((*key).to_string());
                self.explore(below, path);
                path.pop();
            }
        }
    }

    /// Returns the candidates that do not belong to an optimizer, as copies of the parameters do.
    fn models(&self) -> Vec<Path> {
        let all = || self.candidates.iter().chain(&self.optimizers);
        let shared = |path: &Path| all().all(|other| other.starts_with(path));
        let base = all().map(|path| (0..path.len()).take_while(|&len| shared(&path[..len + 1].to_vec())).count()).min();
        let base = base.unwrap_or(0);
        // Megatron's optimizer has copies of the parameters in f32.
        let is_beside_optimizer = |path: &&Path| {
            path.get(base).is_some_and(|top| {
                top.to_ascii_lowercase().contains("optim")
                    && self.optimizers.iter().any(|optimizer| optimizer.get(base) == Some(top))
            })
        };
        let others: Vec<Path> = self.candidates.iter().filter(|path| !is_beside_optimizer(path)).cloned().collect();
        if others.is_empty() { self.candidates.clone() } else { others }
    }

    /// Returns the optimizer that belongs to a model: the only one, or that of the same dict.
    fn optimizer_of(&self, model: &Path) -> Option<&Path> {
        match &self.optimizers[..] {
            [only] => Some(only),
            several => {
                let parent = model.split_last().map_or(&[][..], |(_, parent)| parent);
                let mut beside = several.iter().filter(|path| path.split_last().is_some_and(|(_, of)| of == parent));
                beside.next().filter(|_| beside.next().is_none())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use fsdp_core::DType;

    /// A source without elements.
    #[derive(Debug)]
    struct Names(SourceIndex);

    impl TensorSource for Names {
        fn index(&self) -> &SourceIndex {
            &self.0
        }

        fn read(&self, _: &str, _: &Region, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
    }

    /// A file of PyTorch with a matrix for each list of keys.
    fn file(paths: &[&[&str]]) -> Box<dyn TensorSource> {
        let mut index = SourceIndex::new("state.pt", Format::TorchFile);
        for path in paths {
            let shape = if path.contains(&"rng") { vec![] } else { vec![2, 2] };
            index.tensors.insert(path.join("."), TensorEntry { dtype: DType::F32, shape, chunks: vec![] });
            index.paths.insert(path.join("."), path.iter().map(ToString::to_string).collect());
        }
        Box::new(Names(index))
    }

    fn names(paths: &[&[&str]], part: Option<&str>) -> Vec<String> {
        TrainingState::find(file(paths), part).unwrap().tensors().keys().cloned().collect()
    }

    #[test]
    fn parts_are_found_by_what_they_hold() {
        let usual = ["model.b.weight", "model.w", "optim.state.w.exp_avg"];
        let model = |key| [vec![key, "w"], vec![key, "b.weight"]];
        for (model, optimizer) in [
            (model("model"), vec!["optim", "state", "w", "exp_avg"]),
            (model("net"), vec!["opt", "state.w.exp_avg"]),
            ([vec!["w"], vec!["b.weight"]], vec!["optimizer", "state", "w", "exp_avg"]),
            (
                [vec!["app", "model", "w"], vec!["app", "model", "b", "weight"]],
                vec!["app", "o", "state", "w", "exp_avg"],
            ),
            ([vec!["m", "module.w"], vec!["m", "module.b.weight"]], vec!["o", "state", "module.w", "exp_avg"]),
            ([vec!["m", "a", "_orig_mod.w"], vec!["m", "a", "b.weight"]], vec!["o", "state.w.exp_avg"]),
        ] {
            let paths: Vec<&[&str]> = model.iter().map(|path| &path[..]).chain([&optimizer[..]]).collect();
            assert_eq!(names(&paths, None), usual, "{paths:?}");
            let with_rng = names(&[&paths[..], &[&["more", "rng"]]].concat(), None);
            assert_eq!(with_rng, usual, "{paths:?}");
        }
    }

    #[test]
    fn several_models_need_a_choice() {
        let paths: [&[&str]; 3] = [&["model", "w"], &["ema", "w"], &["optim", "state", "w", "exp_avg"]];
        let error = TrainingState::find(file(&paths), None).unwrap_err().to_string();
        assert!(error.contains("`ema` (1 tensors, 16 bytes), `model` (1 tensors, 16 bytes)"), "{error}");
        let error = TrainingState::find(file(&paths), Some("teacher")).unwrap_err().to_string();
        assert!(error.contains("has no model \"teacher\": its parts are `ema`"), "{error}");
        assert_eq!(names(&paths, Some("ema")), ["model.w", "optim.state.w.exp_avg"]);
        assert_eq!(names(&paths, Some(ROOT)), ["model.ema.w", "model.model.w"]);
        let state = TrainingState::find(file(&paths), Some("ema")).unwrap();
        let notes = state.notes().join("\n");
        assert!(notes.contains("the model is `ema`, and its optimizer `optim`"), "{notes}");
        assert!(notes.contains("1 tensors and objects of other parts were left out: `model.w`"), "{notes}");
    }

    #[test]
    fn an_optimizer_that_does_not_name_its_parameters_is_left_out() {
        let numbered: [&[&str]; 2] = [&["model", "w"], &["optimizer", "state", "0", "exp_avg"]];
        let state = TrainingState::find(file(&numbered), None).unwrap();
        assert_eq!(state.tensors().keys().collect::<Vec<_>>(), ["model.w"]);
        let error = state.check_optimizer().unwrap_err().to_string();
        assert!(error.contains("`optimizer` numbers the parameters") && error.contains("get_state_dict"), "{error}");
    }

    #[test]
    fn an_attribute_of_the_trainer_is_no_part_of_names() {
        let model = |names: &[&str]| {
            let paths: Vec<Vec<&str>> = names.iter().map(|name| vec!["state_dict", name]).collect();
            super::tests::names(&paths.iter().map(|path| &path[..]).collect::<Vec<_>>(), None)
        };
        assert_eq!(model(&["model.model.a", "model.lm_head.w"]), ["model.lm_head.w", "model.model.a"]);
        assert_eq!(model(&["model.layers.0.w", "model.norm.w"]), ["model.model.layers.0.w", "model.model.norm.w"]);
    }
}
