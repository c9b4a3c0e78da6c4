//! Flattening nested dicts to dotted names, and converting plain values to JSON.
//!
//! Parts of a pickle may be shared or contain themselves, so depth and steps are limited.

use serde_json::{Map, Number, Value as Json};

use crate::torch::pickle::{Node, Pickle, Value};
use crate::torch::tensor::is_tensor;

/// Deepest nesting.
pub(super) const DEPTH: usize = 64;
/// Longest name.
pub(super) const NAME: usize = 4096;

/// A value at the end of a name.
pub(super) enum Leaf {
    Tensor(Value),
    Plain(Json),
    /// Description of a value that is neither.
    Other(String),
}

/// Takes the keys that lead to a leaf, and the leaf.
pub(super) type OnLeaf<'a> = dyn FnMut(&[String], Leaf) -> Result<(), String> + 'a;

/// Passes all leaves of a value to `leaf`, with the keys of the dicts that lead to them. A list is a leaf if JSON can hold
/// it.
pub(super) fn flatten(pickle: &Pickle<'_>, value: Value, leaf: &mut OnLeaf<'_>) -> Result<(), String> {
    let mut flattener = Flattener::new(pickle);
    flattener.flatten(value, &mut vec![], leaf)
}

/// Converts a value to JSON, or describes why JSON can't hold it.
pub(super) fn json(pickle: &Pickle<'_>, value: Value) -> Result<Json, String> {
    Flattener::new(pickle).json(value, 0).map_err(|stop| match stop {
        NotJson::Tensor => "a value with a tensor in it".into(),
        NotJson::Value(what) => what,
        NotJson::TooLarge => too_large(),
    })
}

fn too_large() -> String {
    format!("it is nested more than {DEPTH} deep, or repeats itself until it is far larger than its pickle")
}

/// Why JSON can't hold a value.
enum NotJson {
    Tensor,
    Value(String),
    TooLarge,
}

struct Flattener<'p, 'a> {
    pickle: &'p Pickle<'a>,
    /// Steps left. Shared parts are visited repeatedly, but valid pickles share little.
    left: usize,
}

impl<'p, 'a> Flattener<'p, 'a> {
    fn new(pickle: &'p Pickle<'a>) -> Self {
        Flattener { pickle, left: pickle.bytes().saturating_mul(64).saturating_add(1 << 12) }
    }

    fn spend(&mut self, count: usize, depth: usize) -> Result<(), NotJson> {
        match self.left.checked_sub(count) {
            Some(left) if depth <= DEPTH => {
                self.left = left;
                Ok(())
            }
            _ => Err(NotJson::TooLarge),
        }
    }

    fn flatten(&mut self, value: Value, path: &mut Vec<String>, leaf: &mut OnLeaf<'_>) -> Result<(), String> {
        let (depth, bytes) = (path.len(), path.iter().map(|key| key.len() + 1).sum::<usize>());
        self.spend(1 + bytes + 48 * depth, depth).map_err(|_| too_large())?;
        if bytes > NAME {
            return Err(format!("a name has {bytes} bytes, expected at most {NAME}"));
        }
        if is_tensor(self.pickle, value) {
            return leaf(path, Leaf::Tensor(value));
        }
        let pickle = self.pickle;
        if let Some(pairs) = pickle.dict(value)
            && !pairs.is_empty()
        {
            for &(key, value) in pairs {
                let key = self.key(key).map_err(|what| format!("\"{}\" has the key {what}", path.join(".")))?;
                self.below(key, value, path, leaf)?;
            }
            return Ok(());
        }
        match self.json(value, depth) {
            Ok(json) => leaf(path, Leaf::Plain(json)),
            Err(NotJson::TooLarge) => Err(too_large()),
            Err(NotJson::Value(_) | NotJson::Tensor) if pickle.items(value).is_some_and(|items| !items.is_empty()) => {
                for (at, item) in pickle.items(value).unwrap_or_default().iter().enumerate() {
                    self.below(at.to_string(), *item, path, leaf)?;
                }
                Ok(())
            }
            Err(NotJson::Value(what)) => leaf(path, Leaf::Other(what)),
            Err(NotJson::Tensor) => leaf(path, Leaf::Other(pickle.describe(value))),
        }
    }

    fn below(
        &mut self,
        key: String,
        value: Value,
        path: &mut Vec<String>,
        leaf: &mut OnLeaf<'_>,
    ) -> Result<(), String> {
        path.push(key);
        let done = self.flatten(value, path, leaf);
        path.pop();
        done
    }

    fn key(&self, key: Value) -> Result<String, String> {
        match (self.pickle.str(key), key) {
            (Some(text), _) if text.len() <= NAME => Ok(text.to_string()),
            (None, Value::Int(number)) => Ok(number.to_string()),
            (None, Value::Bool(value)) => Ok(value.to_string()),
            _ => Err(self.pickle.describe(key)),
        }
    }

    fn json(&mut self, value: Value, depth: usize) -> Result<Json, NotJson> {
        self.spend(1, depth)?;
        let pickle = self.pickle;
        let other = || Err(NotJson::Value(pickle.describe(value)));
        match value {
            Value::None => return Ok(Json::Null),
            Value::Bool(value) => return Ok(value.into()),
            Value::Int(number) => return Ok(number.into()),
            Value::Unsigned(number) => return Ok(number.into()),
            Value::Float(number) => return Number::from_f64(number).map(Json::Number).map_or_else(other, Ok),
            Value::Node(_) if is_tensor(pickle, value) => return Err(NotJson::Tensor),
            Value::Node(_) => {}
        }
        match pickle.node(value) {
            Some(Node::Str(text)) => {
                self.spend(text.len(), depth)?;
                Ok((*text).into())
            }
            Some(Node::List(items) | Node::Tuple(items)) => {
                let items: Result<Vec<Json>, NotJson> = items.iter().map(|item| self.json(*item, depth + 1)).collect();
                Ok(Json::Array(items?))
            }
            Some(Node::Dict(pairs)) => {
                let mut map = Map::new();
                for &(key, value) in pairs {
                    let key = self.key(key).map_err(|what| NotJson::Value(format!("a dict with the key {what}")))?;
                    self.spend(key.len(), depth)?;
                    map.insert(key, self.json(value, depth + 1)?);
                }
                Ok(Json::Object(map))
            }
            Some(Node::Global(name)) => Ok((*name).into()),
            Some(Node::Object { class, .. }) if *class == "torch.device" || class.starts_with("pathlib.") => {
                let separator = if *class == "torch.device" { ":" } else { "/" };
                let mut text = String::new();
                for &arg in pickle.object(value).map(|(_, args, _)| args).unwrap_or_default() {
                    let part = self.key(arg).map_err(|_| NotJson::Value(pickle.describe(value)))?;
                    self.spend(part.len(), depth)?;
                    if !text.is_empty() && !text.ends_with(separator) {
                        text.push_str(separator);
                    }
                    text.push_str(&part);
                }
                Ok(text.into())
            }
            _ => other(),
        }
    }
}
