//! Formatting of texts by `%` and `str.format`.

use minijinja::Error;
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Value, ValueKind};

use super::values::{Number, is_dict, items, string, text};
use super::{Args, refused, type_of};

/// Returns `format % args`.
pub(super) fn printf(pattern: &Value, args: &Value) -> Result<Value, Error> {
    let pattern_text = plain(pattern)?;
    let args = match args.is_tuple() {
        true => items(args)?,
        false if is_dict(args) => return Err(refused("% with a dictionary is not supported: use ~")),
        false => vec![args.clone()],
    };
    let mut conversions = vec![];
    let mut rest = pattern_text;
    while let Some(at) = rest.find('%') {
        rest = &rest[at + 1..];
        let end = rest.find(|c: char| c.is_ascii_alphabetic() || c == '%').unwrap_or(rest.len());
        match rest[end..].chars().next() {
            Some('%') if end == 0 => {}
            Some(c @ ('s' | 'd' | 'i' | 'f' | 'x' | 'X' | 'o')) if !rest[..end].contains(['*', '(', '#']) => {
                let flags = rest[..end].to_owned();
                if flags.split(|c: char| !c.is_ascii_digit()).any(|number| number.len() > 4) {
                    return Err(refused(format!("the format %{flags}{c} is wider than is supported")));
                }
                // A precision has no effect on how MiniJinja writes integers.
                if c != 's' && c != 'f' && flags.contains('.') {
                    return Err(refused(format!("the format %{flags}{c} is not supported")));
                }
                conversions.push((flags, c));
            }
            c => return Err(refused(format!("the format %{}{} is not supported", &rest[..end], c.unwrap_or(' ')))),
        }
        rest = rest.get(end + 1..).unwrap_or("");
    }
    if conversions.len() != args.len() {
        let (wanted, got) = (conversions.len(), args.len());
        return Err(refused(format!("a format has {wanted} places, but got {got} values")));
    }
    let converted = conversions.iter().zip(&args).map(|((flags, conversion), value)| match conversion {
        's' => match text(value)? {
            // MiniJinja counts the bytes.
            text if !flags.is_empty() && !text.is_ascii() => {
                Err(refused(format!("the format %{flags}s of text beyond ASCII is not supported")))
            }
            text => Ok(Value::from(text)),
        },
        'f' => match Number::of(value) {
            Some(number) if number.float().is_finite() => Ok(Value::from(number.float())),
            _ => Err(refused(format!("the format %{flags}f does not apply to {}", type_of(value)))),
        },
        _ => match Number::of(value) {
            Some(Number::Int(int)) if int >= 0 || *conversion == 'd' || *conversion == 'i' => {
                Ok(super::values::int(int))
            }
            Some(Number::Float(float)) if "di".contains(*conversion) && float.abs() < 1e15 => {
                Ok(super::values::int(float as i128))
            }
            _ => Err(refused(format!("the format %{flags}{conversion} does not apply to {}", type_of(value)))),
        },
    });
    let converted = converted.collect::<Result<Vec<_>, Error>>()?;
    format(FormatStyle::Printf, pattern_text, &converted).map(Value::from)
}

/// Returns `pattern.format(*args)`.
pub(super) fn str_format(pattern: &Value, args: Args) -> Result<Value, Error> {
    let pattern = plain(pattern)?;
    let mut rest = pattern;
    while let Some(at) = rest.find(['{', '}']) {
        rest = match rest[at..].get(..2) {
            Some("{{" | "}}") => &rest[at + 2..],
            _ => {
                let end = rest[at..].find('}').map_or(rest.len(), |end| at + end);
                let field = &rest[at..end];
                // Values are texts by then, except numbers.
                if field.contains(['.', '[', '!', ':']) {
                    return Err(refused(format!(
                        "the format {field}}} is not supported: a field may be {{}} or a name"
                    )));
                }
                rest.get(end + 1..).unwrap_or("")
            }
        };
    }
    let mut values =
        args.positional.iter().map(|value| Ok(Value::from(text(value)?))).collect::<Result<Vec<_>, Error>>()?;
    if !args.named.is_empty() {
        let named = args.named.iter().map(|(name, value)| Ok((name.clone(), Value::from(text(value)?))));
        let named = named.collect::<Result<Vec<_>, Error>>()?;
        values.push(minijinja::value::Kwargs::from_iter(named).into());
    }
    format(FormatStyle::StrFormat, pattern, &values).map(Value::from)
}

/// Returns a text that is not escaped, because formatting escapes by the format otherwise.
fn plain(value: &Value) -> Result<&str, Error> {
    match value.kind() {
        ValueKind::String if value.is_safe() => Err(refused("formatting by an escaped text is not supported")),
        _ => string(value),
    }
}
