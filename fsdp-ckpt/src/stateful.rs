//! State that is no tensor: a data loader's position, a scheduler, a random number generator.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Something with state beside the tensors that goes into a checkpoint, as PyTorch's `Stateful`.
///
/// ```
/// use fsdp_ckpt::{Stateful, collect_state, restore_state};
/// use serde_json::Value;
///
/// struct Position(u64);
///
/// impl Stateful for Position {
///     fn state_dict(&self) -> Value {
///         self.0.into()
///     }
///     fn load_state_dict(&mut self, state: &Value) -> Result<(), String> {
///         self.0 = state.as_u64().ok_or_else(|| format!("{state} is no position"))?;
///         Ok(())
///     }
/// }
///
/// let values = collect_state(&[("data", &Position(7))])?; // for SaveState::values
/// let mut position = Position(0);
/// restore_state(&values, &mut [("data", &mut position)])?; // from TensorSource::values
/// assert_eq!(position.0, 7);
/// # Ok::<_, fsdp_ckpt::Error>(())
/// ```
pub trait Stateful {
    /// The state as JSON. Numbers come back to the last bit.
    fn state_dict(&self) -> Value;

    /// Takes on a state that [`Stateful::state_dict`] has given, perhaps in another process.
    ///
    /// # Errors
    /// Says what is wrong with it; then nothing should have changed.
    fn load_state_dict(&mut self, state: &Value) -> Result<(), String>;
}

/// The states of several, under their names, for [`crate::SaveState::values`].
///
/// # Errors
/// [`Error::Argument`] when a name is given twice.
pub fn collect_state(parts: &[(&str, &dyn Stateful)]) -> Result<Map<String, Value>> {
    let mut values = Map::new();
    for (name, part) in parts {
        if values.insert((*name).to_string(), part.state_dict()).is_some() {
            return Err(Error::Argument(format!("two states are named \"{name}\"")));
        }
    }
    Ok(values)
}

/// Gives states back to their owners. None is touched unless all are there; values of other names are not looked at.
///
/// # Errors
/// [`Error::State`] when one is not there or its owner refuses it.
pub fn restore_state(values: &Map<String, Value>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
    let fail = |name: &str, reason: String| Error::State { name: name.to_string(), reason };
    let missing = parts.iter().find(|(name, _)| !values.contains_key(*name));
    if let Some((name, _)) = missing {
        let there: Vec<&str> = values.keys().map(String::as_str).collect();
        return Err(fail(name, format!("the checkpoint has no value of that name, it has {there:?}")));
    }
    for (name, part) in parts {
        if let Some(state) = values.get(*name) {
            part.load_state_dict(state).map_err(|reason| fail(name, reason))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count(u64);

    impl Stateful for Count {
        fn state_dict(&self) -> Value {
            self.0.into()
        }
        fn load_state_dict(&mut self, state: &Value) -> Result<(), String> {
            self.0 = state.as_u64().ok_or("no count")?;
            Ok(())
        }
    }

    #[test]
    fn what_is_missing_or_refused_is_named() {
        let mut values = collect_state(&[("a", &Count(1)), ("b", &Count(2))]).unwrap();
        let twice = collect_state(&[("a", &Count(1)), ("a", &Count(2))]).unwrap_err().to_string();
        assert_eq!(twice, "two states are named \"a\"");
        let (mut a, mut c) = (Count(0), Count(0));
        let error = restore_state(&values, &mut [("a", &mut a), ("c", &mut c)]).unwrap_err().to_string();
        assert!(error.contains("\"c\"") && error.contains("[\"a\", \"b\"]"), "{error}");
        assert_eq!(a.0, 0, "nothing was touched");
        values.insert("c".into(), "x".into());
        let error = restore_state(&values, &mut [("c", &mut c)]).unwrap_err().to_string();
        assert_eq!(error, "the state \"c\" can't be restored: no count");
    }
}
