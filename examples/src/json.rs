//! JSON as Python reads and writes it: with `NaN` and `Infinity`, and with integers beyond 64 bits.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail};
use jiter::JsonValue;
use minijinja::Value;

/// Reads an object of a line. The last value of a repeated key wins.
pub(crate) fn fields(text: &str) -> Result<BTreeMap<String, Value>> {
    match JsonValue::parse(text.as_bytes(), true) {
        Ok(JsonValue::Object(fields)) => {
            fields.iter().map(|(name, field)| Ok((name.to_string(), value(field)?))).collect()
        }
        Ok(_) => bail!("it is not a JSON object"),
        Err(error) => Err(anyhow!("it is not a JSON object ({})", error.description(text.as_bytes()))),
    }
}

/// Reads a whole file. The last value of a repeated key wins. Python also writes `NaN` and `Infinity`,
/// which are refused with their line, because a file's copy in an export must be JSON.
pub(crate) fn parse(text: &str) -> Result<serde_json::Value> {
    let has_nan = |line: usize| {
        let line = text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        ["NaN", "Infinity"].iter().any(|number| line.contains(number))
    };
    serde_json::from_str(text).map_err(|error| match JsonValue::parse(text.as_bytes(), true) {
        Ok(_) if has_nan(error.line()) => anyhow!(
            "line {} has NaN or Infinity, which Python writes but JSON does not have: write a number, or remove the key",
            error.line()
        ),
        _ => anyhow!(error),
    })
}

fn value(json: &JsonValue<'_>) -> Result<Value> {
    Ok(match json {
        JsonValue::Null => Value::from(()),
        JsonValue::Bool(bool) => Value::from(*bool),
        JsonValue::Int(int) => Value::from(*int),
        JsonValue::BigInt(int) => {
            let int = int.to_string();
            let known = int.parse::<i128>().map_err(|_| {
                anyhow!("it has the integer {int}, but at most 127 bits are supported: write it as text, in quotes")
            })?;
            Value::from(known)
        }
        JsonValue::Float(float) => Value::from(*float),
        JsonValue::Str(text) => Value::from(text.as_ref()),
        JsonValue::Array(items) => Value::from(items.iter().map(value).collect::<Result<Vec<_>>>()?),
        JsonValue::Object(fields) => {
            let fields = fields.iter().map(|(name, field)| Ok((name.to_string(), value(field)?)));
            Value::from_pairs(fields.collect::<Result<Vec<_>>>()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of Python's `json.loads`.
    #[test]
    fn json_of_python_is_read() {
        let read =
            fields("{\"a\": NaN, \"b\": [-Infinity, 18446744073709551616, -1e-07], \"a\": {\"c\": null}}").unwrap();
        assert_eq!(read["a"], Value::from_pairs([("c", Value::from(()))]));
        let items: Vec<Value> = read["b"].try_iter().unwrap().collect();
        assert_eq!(f64::try_from(items[0].clone()).unwrap(), f64::NEG_INFINITY);
        assert_eq!(i128::try_from(items[1].clone()).unwrap(), 1 << 64);
        assert_eq!(f64::try_from(items[2].clone()).unwrap(), -1e-7);
        for (text, expected) in [
            ("[1]", "it is not a JSON object"),
            ("{\"a\": ", "it is not a JSON object (EOF"),
            ("{\"a\": nan}", "it is not a JSON object ("),
            (&format!("{{\"a\": 1{}}}", "0".repeat(40)), "at most 127 bits are supported: write it as text"),
        ] {
            let error = fields(text).unwrap_err().to_string();
            assert!(error.starts_with(expected) || error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn files_with_nan_are_refused_by_line() {
        assert_eq!(parse("{\"a\": 1, \"a\": 2}").unwrap()["a"], 2);
        for bad in ["NaN", "Infinity", "[1, -Infinity]"] {
            let error = parse(&format!("{{\"a\": 1,\n\"b\": {bad}}}")).unwrap_err().to_string();
            assert!(error.starts_with("line 2 has NaN or Infinity") && error.contains("remove the key"), "{error}");
        }
        assert!(parse("{").unwrap_err().to_string().contains("EOF"));
    }
}
