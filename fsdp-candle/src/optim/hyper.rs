//! Hyper-parameters by PyTorch's names, as state dicts have them.

use serde_json::{Map, Value};

/// A number of these, or `now` where it is missing. What is wrong is told in words.
pub(super) fn number(values: &Map<String, Value>, name: &str, now: f64) -> Result<f64, String> {
    of_value(name, values.get(name).unwrap_or(&Value::Null), now)
}

/// So many numbers of these.
pub(super) fn numbers<const N: usize>(
    values: &Map<String, Value>,
    name: &str,
    now: [f64; N],
) -> Result<[f64; N], String> {
    let Some(value) = values.get(name).filter(|value| !value.is_null()) else { return Ok(now) };
    let found = value.as_array().filter(|found| found.len() == N);
    let found = found.ok_or_else(|| format!("hold `{name}` as {value}, which is not {N} numbers"))?;
    let mut numbers = now;
    for (number, value) in numbers.iter_mut().zip(found) {
        *number = of_value(name, value, *number)?;
    }
    Ok(numbers)
}

fn of_value(name: &str, value: &Value, now: f64) -> Result<f64, String> {
    match value {
        Value::Null => Ok(now),
        value => value.as_f64().ok_or_else(|| format!("hold `{name}` as {value}, which is no number")),
    }
}

/// A switch of these, or `now` where it is missing.
pub(super) fn switch(values: &Map<String, Value>, name: &str, now: bool) -> Result<bool, String> {
    match values.get(name) {
        None | Some(Value::Null) => Ok(now),
        Some(value) => value.as_bool().ok_or_else(|| format!("hold `{name}` as {value}, which is neither on nor off")),
    }
}

/// An error where one of PyTorch's switches is on that stands for something else than what is computed here.
pub(super) fn all_off(values: &Map<String, Value>, names: &[&str]) -> Result<(), String> {
    match names.iter().find(|name| values.get(**name) == Some(&Value::Bool(true))) {
        Some(name) => Err(format!("have `{name}` on, which is not computed here")),
        None => Ok(()),
    }
}

/// An error unless the number is in range.
pub(super) fn check(name: &str, number: f64, is_right: bool, range: &str) -> Result<(), String> {
    if is_right { Ok(()) } else { Err(format!("`{name}` is {number}: it must be {range}")) }
}

/// An error unless the numbers are at least zero.
pub(super) fn at_least_zero(numbers: &[(&str, f64)]) -> Result<(), String> {
    numbers.iter().try_for_each(|&(name, number)| check(name, number, number >= 0., "at least 0"))
}

/// Names with their values.
pub(super) fn map<const N: usize>(values: [(&str, Value); N]) -> Map<String, Value> {
    values.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}
