//! The caller's values in a checkpoint, as JSON.

use fsdp_core::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::agree::agree;
use crate::error::{Error, Result};

/// A value of any type that JSON can hold.
pub(super) trait JsonValue {
    fn to_json(&self) -> Result<Value, String>;

    /// Reads a value, and returns a function that assigns it.
    fn parse<'s>(&'s mut self, json: &Value) -> Result<Assign<'s>, String>;
}

/// Assigns a value that was read.
pub(super) type Assign<'s> = Box<dyn FnOnce() + 's>;

impl<T: Serialize + DeserializeOwned> JsonValue for T {
    fn to_json(&self) -> Result<Value, String> {
        let json = serde_json::to_value(self).map_err(|error| error.to_string())?;
        // JSON has no NaN and no infinity: a save must fail, not the resume.
        match T::deserialize(&json) {
            Ok(_) => Ok(json),
            Err(error) => Err(format!("it would be saved as {json}, which cannot be read again: {error}")),
        }
    }

    fn parse<'s>(&'s mut self, json: &Value) -> Result<Assign<'s>, String> {
        let value = T::deserialize(json).map_err(|error| error.to_string())?;
        Ok(Box::new(move || *self = value))
    }
}

/// A value by its name in the checkpoint.
pub(super) struct NamedValue<'a> {
    pub(super) name: String,
    /// Whether each rank has a value of its own, in an array by rank.
    pub(super) per_rank: bool,
    pub(super) value: &'a mut dyn JsonValue,
}

impl NamedValue<'_> {
    fn to_json(&self) -> Result<Value> {
        let failed = |why| Error::Argument(format!("the value `{}` cannot be saved: {why}", self.name));
        self.value.to_json().map_err(failed)
    }

    /// Reads this rank's value from a checkpoint's.
    pub(super) fn parse<'s>(&'s mut self, json: &Value, group: &ProcessGroup) -> Result<Assign<'s>, String> {
        let NamedValue { name, per_rank, value } = self;
        let mut own = json;
        if *per_rank {
            let all = json.as_array().ok_or_else(|| {
                format!("`{name}` is {}, expected an array with a value of each rank: read it by `value`", shown(json))
            })?;
            if all.len() != group.size() {
                return Err(format!(
                    "`{name}` has the values of {} ranks, and this run has {}: read all of them by `value` into a Vec, \
                     and choose",
                    all.len(),
                    group.size()
                ));
            }
            own = &all[group.rank()];
        }
        value
            .parse(own)
            .map_err(|why| format!("`{name}` is {}, which the value of that name is not: {why}", shown(own)))
    }
}

/// Returns the values to save, those of each rank in an array. Only rank 0 has all. Fails if a value that is not
/// `per_rank` differs between ranks. Collective.
pub(super) fn to_save(values: &[NamedValue<'_>], group: &ProcessGroup) -> Result<Map<String, Value>> {
    let own = values.iter().map(|value| Ok((value.name.clone(), value.to_json()?))).collect::<Result<Map<_, _>>>();
    let mut own = agree(group, "save its values", own)?;
    if own.is_empty() {
        return Ok(own);
    }
    let of_first = read(0, &group.broadcast_bytes(0, write(&own)?)?)?;
    let differs = values.iter().filter(|value| !value.per_rank).find_map(|NamedValue { name, .. }| {
        let (own, first) = (&own[name], of_first.get(name).unwrap_or(&Value::Null));
        (own != first).then(|| {
            let (rank, own, first) = (group.rank(), shown(own), shown(first));
            format!(
                "the value `{name}` is {own} on rank {rank} and {first} on rank 0: pass it by `rank_value`, which saves \
                 the value of each rank"
            )
        })
    });
    if let Some((_, why)) = group.first_message(differs.unwrap_or_default())? {
        return Err(Error::Argument(why));
    }
    if values.iter().any(|value| value.per_rank)
        && let Some(all) = group.gather_bytes_to(0, write(&own)?)?
    {
        let all = all.iter().enumerate().map(|(rank, own)| read(rank, own)).collect::<Result<Vec<_>>>()?;
        for NamedValue { name, .. } in values.iter().filter(|value| value.per_rank) {
            let of_rank = |values: &Map<String, Value>| values.get(name).cloned().unwrap_or_default();
            own.insert(name.clone(), all.iter().map(of_rank).collect());
        }
    }
    Ok(own)
}

fn write(values: &Map<String, Value>) -> Result<Vec<u8>> {
    serde_json::to_vec(values).map_err(|error| Error::Argument(format!("the values cannot be written: {error}")))
}

fn read(rank: usize, message: &[u8]) -> Result<Map<String, Value>> {
    serde_json::from_slice(message)
        .map_err(|error| Error::Argument(format!("rank {rank}'s values cannot be read: {error}")))
}

/// Shows the beginning of a value.
fn shown(json: &Value) -> String {
    let text = json.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
