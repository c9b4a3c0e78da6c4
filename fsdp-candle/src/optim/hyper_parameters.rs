//! Hyper-parameters by PyTorch's names, as state dicts hold them.

use std::fmt::Debug;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The hyper-parameters of one group.
pub trait HyperParameters: Copy + Debug + Default + PartialEq + Send + 'static {
    /// Name of the optimizer.
    const NAME: &'static str;

    /// Returns the values by PyTorch's names, with PyTorch's other names.
    fn hyper(&self) -> Map<String, Value>;

    /// Returns the hyper-parameters with the named values changed. The error describes an unsupported value.
    fn with(&self, hyper: &Map<String, Value>) -> Result<Self, String>;

    /// Checks the ranges. The error describes a value that is out of range.
    fn check(&self) -> Result<(), String>;

    /// Returns the learning rate, to change it.
    fn lr(&mut self) -> &mut f64;
}

/// Checks the ranges.
pub(super) fn validate<C: HyperParameters>(config: &C) -> Result<()> {
    config.check().map_err(|why| Error::Argument(format!("{}: {why}", C::NAME)))
}

/// Returns the groups with other hyper-parameters.
pub(super) fn set_hyper<C: HyperParameters>(now: &[C], groups: &[Map<String, Value>]) -> Result<Vec<C>> {
    if groups.len() != now.len() {
        return Err(Error::Argument(format!(
            "{} groups of hyper-parameters, expected {} for this optimizer",
            groups.len(),
            now.len()
        )));
    }
    let with = |(at, (now, hyper)): (usize, (&C, &Map<String, Value>))| {
        let fail = |why: String| Error::Argument(format!("the hyper-parameters of group {at} ({}) {why}", C::NAME));
        let new = now.with(hyper).map_err(fail)?;
        new.check().map_err(|why| fail(format!("are out of range: {why}")))?;
        Ok(new)
    };
    now.iter().zip(groups).enumerate().map(with).collect()
}

/// Returns a number, or `now` if it is missing. The error continues "the hyper-parameters of group ..".
pub(super) fn number(values: &Map<String, Value>, name: &str, now: f64) -> Result<f64, String> {
    of_value(name, values.get(name).unwrap_or(&Value::Null), now)
}

/// Returns `N` numbers, or `now` if they are missing.
pub(super) fn numbers<const N: usize>(
    values: &Map<String, Value>,
    name: &str,
    now: [f64; N],
) -> Result<[f64; N], String> {
    let Some(value) = values.get(name).filter(|value| !value.is_null()) else { return Ok(now) };
    let found = value.as_array().filter(|found| found.len() == N);
    let found = found.ok_or_else(|| format!("hold `{name}` as {value}, expected {N} numbers"))?;
    let mut numbers = now;
    for (number, value) in numbers.iter_mut().zip(found) {
        *number = of_value(name, value, *number)?;
    }
    Ok(numbers)
}

fn of_value(name: &str, value: &Value, now: f64) -> Result<f64, String> {
    match value {
        Value::Null => Ok(now),
        value => value.as_f64().ok_or_else(|| format!("hold `{name}` as {value}, expected a number")),
    }
}

/// Returns a flag, or `now` if it is missing.
pub(super) fn flag(values: &Map<String, Value>, name: &str, now: bool) -> Result<bool, String> {
    match values.get(name) {
        None | Some(Value::Null) => Ok(now),
        Some(value) => value.as_bool().ok_or_else(|| format!("hold `{name}` as {value}, expected true or false")),
    }
}

/// Returns an error if one of PyTorch's flags is on that this crate does not implement.
pub(super) fn check_off(values: &Map<String, Value>, names: &[&str]) -> Result<(), String> {
    match names.iter().find(|name| values.get(**name) == Some(&Value::Bool(true))) {
        Some(name) => Err(format!("have `{name}` on, which is not implemented")),
        None => Ok(()),
    }
}

/// Returns an error unless the number is in range.
pub(super) fn check_range(name: &str, number: f64, is_right: bool, range: &str) -> Result<(), String> {
    if is_right { Ok(()) } else { Err(format!("`{name}` is {number}, expected {range}")) }
}

/// Returns an error unless the numbers are at least zero.
pub(super) fn at_least_zero(numbers: &[(&str, f64)]) -> Result<(), String> {
    numbers.iter().try_for_each(|&(name, number)| check_range(name, number, number >= 0., "at least 0"))
}

/// Makes a map of names and values.
pub(super) fn map<const N: usize>(values: [(&str, Value); N]) -> Map<String, Value> {
    values.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}
