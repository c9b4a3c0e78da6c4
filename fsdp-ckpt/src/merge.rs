//! Merging adapters (LoRA, in PEFT's format) into the weights of a model.

use std::collections::BTreeMap;
use std::fmt::{Debug, Formatter};
use std::path::Path;

use fsdp_core::DType;
use fsdp_core::layout::Region;
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::cast::cast;
use crate::error::did_you_mean;
use crate::hf::HfModel;
use crate::region::check_request;
use crate::source::{SourceIndex, TensorSource};
use crate::store::location;
use crate::{Error, Result};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";
/// Ends of the names of an adapter's two matrices, of which the first is [rank, in].
const MATRICES: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
/// Largest size of `adapter_config.json`.
const MAX_CONFIG: u64 = 1 << 24;

/// Layers of GPT-2 whose matrices are [in, out]. Other families have layers of these names whose matrices are [out, in].
const TRANSPOSED: [&str; 4] = ["c_attn", "q_attn", "c_fc", "c_proj"];
/// Embeddings of tokens, to which a head may be tied.
const EMBEDDINGS: [&str; 5] = ["embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"];
/// Ends of the names of heads.
const HEADS: [&str; 3] = ["lm_head.weight", "embed_out.weight", "predictions.decoder.weight"];
/// Parts of the names of classifiers, which are not tied.
const CLASSIFIERS: [&str; 2] = ["score.", "classifier."];

/// A model with merged adapters. Reads add the product of an adapter's matrices to a weight, in f32, and round the sum
/// once to the weight's dtype. Memory does not grow with the model.
///
/// ```no_run
/// use std::path::Path;
///
/// use fsdp_ckpt::{hf, merge::Merged};
///
/// let base = fsdp_ckpt::open(Path::new("base"))?;
/// let merged = Merged::new(&*base, Path::new("adapters"))?;
/// hf::write(Path::new("merged"), &merged, 5_000_000_000, &hf::config_files(Path::new("base"))?)?;
/// # Ok::<_, fsdp_ckpt::Error>(())
/// ```
pub struct Merged<'a> {
    base: &'a dyn TensorSource,
    /// The adapters' file, unless `base` has the adapters.
    file: Option<HfModel>,
    index: SourceIndex,
    /// Adapters by the name of the weight.
    adapters: BTreeMap<String, Adapter>,
    /// Weights that the adapter's file replaces, with their names there.
    replaced: BTreeMap<String, String>,
}

/// `down` is [rank, in], and `up` is [out, rank].
struct Adapter {
    down: Vec<f32>,
    up: Vec<f32>,
    rank: usize,
    scale: f32,
    /// Whether the weight is [in, out].
    transposed: bool,
}

#[derive(Deserialize)]
struct Config {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Settings that change what adapters compute in other ways than `Config` has.
const REFUSED: [&str; 12] = [
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "corda_config",
    "use_qalora",
    "alora_invocation_tokens",
    "target_parameters",
    "arrow_config",
    "velora_config",
    "use_bdlora",
    "monteclora_config",
];

impl<'a> Merged<'a> {
    /// Opens the adapters in the directory `adapter`: `adapter_config.json` and `adapter_model.safetensors`. Reads the
    /// adapters, which are small, into memory.
    ///
    /// # Errors
    /// [`Error::NotFound`] if a file is missing; [`Error::Malformed`] for settings or tensors that can't be merged;
    /// [`Error::MissingTensor`] if `base` lacks an adapted weight; the errors of [`HfModel::open_file`].
    pub fn new(base: &'a dyn TensorSource, adapter: impl AsRef<Path>) -> Result<Self> {
        let adapter = adapter.as_ref();
        let path = adapter.join(CONFIG);
        let config = Config::read(adapter, &path)?;
        let mut merged = Self::without_adapters(base);
        merged.file = Some(HfModel::open_file(adapter.join(WEIGHTS))?);
        let unreadable = merged.weights().unreadable();
        if !unreadable.is_empty() {
            let path = merged.weights().path().to_path_buf();
            return Err(Error::UnsupportedDTypes { path, tensors: unreadable.clone() });
        }
        let names: Vec<String> = merged.weights().tensors().keys().cloned().collect();
        for name in &names {
            merged.add(name, &config, &path)?;
        }
        merged.check_head()?;
        if merged.adapters.is_empty() && merged.replaced.is_empty() {
            return Err(merged.malformed(None, format!("it has no tensors, expected {PREFIX}*.lora_A.weight")));
        }
        merged.forget_checksums();
        Ok(merged)
    }

    /// Merges adapters that `base` itself has, as checkpoints of runs with adapters do: `NAME.lora_A.weight` and
    /// `NAME.lora_B.weight` beside `NAME.weight`. Multiplies their products by `scale`, which is alpha / rank.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if a matrix or a weight is missing; [`Error::Malformed`] if shapes do not fit; the
    /// errors of [`TensorSource::read`].
    pub fn in_checkpoint(base: &'a dyn TensorSource, scale: f64) -> Result<Self> {
        let mut merged = Self::without_adapters(base);
        for name in base.tensors().keys() {
            let [down, up] = MATRICES.map(|end| name.strip_suffix(end));
            let Some(layer) = down.or(up) else { continue };
            merged.index.tensors.remove(name);
            let [down_name, up_name] = MATRICES.map(|end| format!("{layer}{end}"));
            if up.is_some() {
                base.tensor(&down_name)?;
                continue;
            }
            let weight = merged.base_name(&format!("{layer}.weight"))?;
            let is_turned = merged.is_turned(layer, &weight, true);
            let adapter = merged.adapter(&weight, [&down_name, &up_name], scale as f32, is_turned)?;
            merged.adapters.insert(weight, adapter);
        }
        merged.forget_checksums();
        Ok(merged)
    }

    /// Gives the changed weights in f32, without rounding them to the base's dtype.
    pub fn in_f32(mut self) -> Self {
        for name in self.adapters.keys().chain(self.replaced.keys()) {
            if let Some(tensor) = self.index.tensors.get_mut(name) {
                tensor.dtype = DType::F32;
            }
        }
        self
    }

    fn without_adapters(base: &'a dyn TensorSource) -> Self {
        let index = base.index().clone();
        Merged { base, file: None, index, adapters: BTreeMap::new(), replaced: BTreeMap::new() }
    }

    /// Removes checksums of the base's bytes from changed weights.
    fn forget_checksums(&mut self) {
        for name in self.adapters.keys().chain(self.replaced.keys()) {
            if let Some(tensor) = self.index.tensors.get_mut(name) {
                tensor.chunks.iter_mut().for_each(|chunk| chunk.crc32c = None);
            }
        }
    }

    /// Returns the source that has the adapters.
    fn weights(&self) -> &dyn TensorSource {
        match &self.file {
            Some(file) => file,
            None => self.base,
        }
    }

    /// Returns the number of weights with adapters, and of weights that the adapter's file replaces.
    pub fn changed(&self) -> [usize; 2] {
        [self.adapters.len(), self.replaced.len()]
    }

    fn malformed(&self, item: Option<&str>, reason: String) -> Error {
        Error::Malformed { path: self.weights().path().to_path_buf(), item: item.map(str::to_string), reason }
    }

    /// Adds the adapter or weight that a tensor of the file belongs to.
    fn add(&mut self, name: &str, config: &Config, path: &Path) -> Result<()> {
        let Some(own) = name.strip_prefix(PREFIX) else {
            return Err(self.malformed(Some(name), format!("its name does not begin with {PREFIX}")));
        };
        let kinds = [(MATRICES[0], MATRICES[1], false), (".lora_embedding_A", ".lora_embedding_B", true)];
        for (down, up, is_embedding) in kinds {
            if let Some(layer) = own.strip_suffix(up) {
                let partner = format!("{PREFIX}{layer}{down}");
                return self.weights().tensor(&partner).map(|_| ());
            }
            if let Some(layer) = own.strip_suffix(down) {
                let weight = self.base_name(&format!("{layer}.weight"))?;
                let up = format!("{PREFIX}{layer}{up}");
                let scale = config.scale(layer, path)?;
                let is_turned = self.is_turned(layer, &weight, config.fan_in_fan_out);
                let adapter = self.adapter(&weight, [name, &up], scale, is_embedding || is_turned)?;
                self.adapters.insert(weight, adapter);
                return Ok(());
            }
        }
        if own.contains(".lora_") {
            return Err(self.malformed(Some(name), "it can't be merged; merge it with PEFT's merge_and_unload".into()));
        }
        // A module of `modules_to_save`, a bias, or what PEFT saves beside the adapters of an embedding.
        let weight = self.base_name(&own.replace(".base_layer.", "."))?;
        let (found, expected) = (&self.weights().tensor(name)?.shape, &self.index.tensors[&weight].shape);
        if found != expected {
            let reason = format!("it has shape {found:?}, expected {expected:?} by \"{weight}\" of the base");
            return Err(self.malformed(Some(name), reason));
        }
        self.replaced.insert(weight, name.to_string());
        Ok(())
    }

    /// Returns the base's name of a weight. Bases of GPT-2 and models without a head often lack the first part.
    fn base_name(&self, name: &str) -> Result<String> {
        let bare = name.split_once('.').map_or(name, |(_, rest)| rest);
        match [name, bare].into_iter().find(|name| self.index.tensors.contains_key(*name)) {
            Some(found) => Ok(found.to_string()),
            None if HEADS.iter().any(|head| name.ends_with(head)) => Err(self.malformed(None, tied(name))),
            None => {
                let hint = did_you_mean(name, self.index.tensors.keys().map(String::as_str));
                Err(Error::MissingTensor { path: self.base.path().to_path_buf(), tensor: name.to_string(), hint })
            }
        }
    }

    /// Refuses changes of an embedding to which the head is tied: PEFT's head keeps the base's weights.
    fn check_head(&self) -> Result<()> {
        let changed = self.adapters.keys().chain(self.replaced.keys());
        let is_embedding =
            |name: &&String| name.strip_suffix(".weight").is_some_and(|it| EMBEDDINGS.contains(&last_of(it)));
        let Some(embedding) = changed.into_iter().find(is_embedding) else { return Ok(()) };
        let is_head = |name: &String| {
            HEADS.iter().any(|head| name.ends_with(head)) || CLASSIFIERS.iter().any(|part| name.contains(part))
        };
        if self.index.tensors.keys().any(is_head) {
            return Ok(());
        }
        Err(self.malformed(Some(embedding), tied("its head")))
    }

    /// Returns whether a square weight is [in, out], as in GPT-2. `c_attn` of the same block tells, and otherwise
    /// `fan_in_fan_out`, which PEFT saves as the last layer had it.
    fn is_turned(&self, layer: &str, weight: &str, fan_in_fan_out: bool) -> bool {
        let mut parts = weight.rsplitn(4, '.').skip(3);
        let attention = parts.next().and_then(|block| self.index.tensors.get(&format!("{block}.attn.c_attn.weight")));
        let of_attention = attention.and_then(|entry| match entry.shape[..] {
            [rows, columns] if rows != columns => Some(rows < columns),
            _ => None,
        });
        TRANSPOSED.contains(&last_of(layer)) && of_attention.unwrap_or(fan_in_fan_out)
    }

    /// Reads the adapter of a weight. If the weight is square, `is_turned` tells whether it is [in, out].
    fn adapter(&self, weight: &str, [down_name, up_name]: [&str; 2], scale: f32, is_turned: bool) -> Result<Adapter> {
        let [down, up] = [self.weights().tensor(down_name)?, self.weights().tensor(up_name)?];
        let entry = &self.index.tensors[weight];
        let ([rank, input], [output, up_rank], [rows, columns]) = (&down.shape[..], &up.shape[..], &entry.shape[..])
        else {
            return Err(self.malformed(Some(down_name), "it, its partner or the weight is not a matrix".into()));
        };
        let (plain, turned) = ([output, input] == [rows, columns], [input, output] == [rows, columns]);
        let transposed = turned && (is_turned || !plain);
        if rank != up_rank || !(plain || turned) {
            let reason = format!(
                "its shape {:?} and its partner's {:?} do not fit the weight's {:?}; pass the base of these adapters",
                down.shape, up.shape, entry.shape
            );
            return Err(self.malformed(Some(down_name), reason));
        }
        if !entry.dtype.is_float() {
            let reason = format!("the weight has dtype {}, expected floating point", entry.dtype);
            return Err(self.malformed(Some(down_name), reason));
        }
        let (rank, output) = (*rank, *output);
        Ok(Adapter {
            down: self.floats(self.weights(), down_name, &Region::whole(&[rank, *input]))?,
            up: self.floats(self.weights(), up_name, &Region::whole(&[output, rank]))?,
            rank,
            scale,
            transposed,
        })
    }

    /// Reads a region in f32.
    fn floats(&self, source: &dyn TensorSource, name: &str, region: &Region) -> Result<Vec<f32>> {
        let dtype = source.tensor(name)?.dtype;
        let mut bytes = vec![0; region.elements() * dtype.size()];
        source.read(name, region, &mut bytes)?;
        let mut native = vec![0; region.elements() * 4];
        if cast(&bytes, dtype, &mut native, DType::F32).is_none() {
            let reason = format!("{dtype} can't be converted to F32");
            return Err(Error::InvalidRead { tensor: name.to_string(), reason });
        }
        Ok(native.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
    }
}

fn last_of(layer: &str) -> &str {
    layer.rsplit('.').next().unwrap_or_default()
}

fn tied(what: &str) -> String {
    format!(
        "{what} is tied to the base's embedding, and these adapters change one of them: merge them with PEFT's \
         merge_and_unload, and save the model with tie_word_embeddings = false"
    )
}

impl Config {
    fn read(dir: &Path, path: &Path) -> Result<Self> {
        let bad = |item: Option<&str>, reason: String| Error::Malformed {
            path: path.to_path_buf(),
            item: item.map(str::to_string),
            reason,
        };
        let Some(text) = location(dir)?.store()?.read(CONFIG, MAX_CONFIG)? else {
            let looked_for = format!("{CONFIG}; expected a directory that PEFT or `train --export-hf` wrote");
            return Err(Error::NotFound { path: dir.to_path_buf(), looked_for });
        };
        let config: Config =
            serde_json::from_slice(&text).map_err(|error| bad(None, format!("not a LoRA configuration: {error}")))?;
        if config.peft_type != "LORA" {
            return Err(bad(Some("peft_type"), format!("it is {:?}, expected \"LORA\"", config.peft_type)));
        }
        if config.r == 0 {
            return Err(bad(Some("r"), "it is 0, expected at least 1".into()));
        }
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(values) => !values.is_empty(),
            Value::Array(values) => !values.is_empty(),
            _ => true,
        };
        let way_out = "merge it with PEFT's merge_and_unload";
        for key in REFUSED {
            if let Some(value) = config.rest.get(key).filter(|value| is_set(value)) {
                return Err(bad(Some(key), format!("it is {value}, which can't be merged here; {way_out}")));
            }
        }
        // Other initialisations also change the base's weights.
        let kept = ["gaussian", "eva", "orthogonal"];
        match config.rest.get("init_lora_weights") {
            Some(Value::String(name)) if !kept.contains(&name.to_lowercase().as_str()) => {
                let reason = format!("it is {name:?}, which changed the base's weights in training; {way_out}");
                Err(bad(Some("init_lora_weights"), reason))
            }
            _ => Ok(config),
        }
    }

    /// Returns the factor of a layer's adapter: `alpha / r`, or `alpha / sqrt(r)` with `use_rslora`.
    fn scale(&self, layer: &str, path: &Path) -> Result<f32> {
        let ends_with = |key: &str| layer == key || layer.strip_suffix(key).is_some_and(|rest| rest.ends_with('.'));
        let value = |patterns: &BTreeMap<String, f64>, usual: f64| {
            if let Some(key) = patterns.keys().find(|key| key.contains(|c: char| "^$*+?()[]{}|\\".contains(c))) {
                let reason = format!("it has the pattern {key:?}, expected names of layers; merge it with PEFT");
                return Err(Error::Malformed {
                    path: path.to_path_buf(),
                    item: Some("alpha_pattern or rank_pattern".into()),
                    reason,
                });
            }
            Ok(patterns.iter().find(|(key, _)| ends_with(key)).map_or(usual, |(_, value)| *value))
        };
        let ranks = self.rest.get("rank_pattern").and_then(Value::as_object).into_iter().flatten();
        let ranks = ranks.filter_map(|(key, rank)| Some((key.clone(), rank.as_f64()?))).collect();
        let (alpha, rank) = (value(&self.alpha_pattern, self.lora_alpha)?, value(&ranks, self.r as f64)?);
        Ok((alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32)
    }
}

impl Adapter {
    /// Adds the region of the scaled product to `values`.
    fn add(&self, region: &Region, values: &mut [f32]) {
        let ([first_row, first_column], [_, columns]) = (&region.offsets[..], &region.sizes[..]) else { return };
        let (first_row, first_column, columns) = (*first_row, *first_column, *columns);
        if columns == 0 {
            return;
        }
        let inputs = self.down.len() / self.rank;
        let outputs = self.up.len() / self.rank;
        values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| {
            let row = first_row + row;
            let mut sums = vec![0f32; columns];
            for at in 0..self.rank {
                if self.transposed {
                    let factor = self.down[at * inputs + row];
                    let column = self.up.iter().skip(first_column * self.rank + at).step_by(self.rank);
                    sums.iter_mut().zip(column).for_each(|(sum, up)| *sum += factor * up);
                } else {
                    let factor = self.up[row * self.rank + at];
                    let down = &self.down[at * inputs + first_column..];
                    sums.iter_mut().zip(down).for_each(|(sum, down)| *sum += factor * down);
                }
            }
            debug_assert!(columns <= inputs.max(outputs));
            values.iter_mut().zip(sums).for_each(|(value, sum)| *value += self.scale * sum);
        });
    }
}

impl Debug for Merged<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Merged").field("base", &self.base).field("weights", self.weights()).finish_non_exhaustive()
    }
}

impl TensorSource for Merged<'_> {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        let mut values = match (self.replaced.get(fqn), self.adapters.contains_key(fqn)) {
            (None, false) => return self.base.read(fqn, region, into),
            (Some(name), _) => self.floats(self.weights(), name, region)?,
            (None, true) => self.floats(self.base, fqn, region)?,
        };
        if let Some(adapter) = self.adapters.get(fqn) {
            adapter.add(region, &mut values);
        }
        let native: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        match cast(&native, DType::F32, into, tensor.dtype) {
            Some(()) => Ok(()),
            None => {
                let reason = format!("F32 can't be converted to {}", tensor.dtype);
                Err(Error::InvalidRead { tensor: fqn.to_string(), reason })
            }
        }
    }
}
