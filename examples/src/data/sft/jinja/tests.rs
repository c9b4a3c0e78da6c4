//! Jinja2's tests.

use std::cmp::Ordering;

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error};

use super::methods::{is_lower, is_upper};
use super::operators::{contains, rem};
use super::values::{compare, equal, is_dict, text};
use super::{Args, call_args, is_callable, refused, type_of};

const TESTS: &str = "boolean callable defined undefined none true false integer float number string mapping iterable sequence \
                     sameas lower upper odd even divisibleby in eq ne lt le gt ge escaped";
/// Other names of tests.
const ALIASES: [(&str, &str); 9] = [
    ("==", "eq"),
    ("equalto", "eq"),
    ("!=", "ne"),
    ("<", "lt"),
    ("lessthan", "lt"),
    ("<=", "le"),
    (">", "gt"),
    ("greaterthan", "gt"),
    (">=", "ge"),
];

/// Adds the tests to an environment.
pub(super) fn register(environment: &mut Environment<'static>) {
    for name in TESTS.split_whitespace().chain(ALIASES.map(|(alias, _)| alias)) {
        environment.add_test(name, move |value: Value, args: Rest<ValueOrKwargs>| call(name, &value, call_args(args)?));
    }
}

/// Performs a test by its name in a template.
pub(super) fn call(name: &str, value: &Value, args: Args) -> Result<bool, Error> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| *name);
    let kind = value.kind();
    let is_int = kind == ValueKind::Number && value.is_integer();
    let with_one = ["sameas", "divisibleby", "in", "eq", "ne", "lt", "le", "gt", "ge"];
    let other = match with_one.contains(&name) {
        true => {
            let [other] = args.bind(name, ["other"], 1)?;
            other.unwrap_or_default()
        }
        false => args.none(name).map(|()| Value::UNDEFINED)?,
    };
    let remainder = |by: &Value| match value.as_str() {
        Some(_) => Err(refused(format!("the test {name} does not apply to a str"))),
        None => rem(value, by),
    };
    Ok(match name {
        "boolean" => kind == ValueKind::Bool,
        "callable" => is_callable(value),
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => value.is_none(),
        "true" => kind == ValueKind::Bool && value.is_true(),
        "false" => kind == ValueKind::Bool && !value.is_true(),
        "integer" => is_int,
        "float" => kind == ValueKind::Number && !is_int,
        "number" => matches!(kind, ValueKind::Number | ValueKind::Bool),
        "string" => kind == ValueKind::String,
        "mapping" => is_dict(value),
        "iterable" => {
            matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable)
                || is_dict(value)
        }
        "sequence" => {
            matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq)
                || is_dict(value)
                || type_of(value) == "range"
        }
        "sameas" => match other.kind() {
            ValueKind::None | ValueKind::Bool => kind == other.kind() && value.is_true() == other.is_true(),
            _ => return Err(refused("the test sameas is only supported for none, true and false")),
        },
        "lower" => is_lower(&text(value)?),
        "upper" => is_upper(&text(value)?),
        "odd" => equal(&remainder(&Value::from(2))?, &Value::from(1))?,
        "even" => equal(&remainder(&Value::from(2))?, &Value::from(0))?,
        "divisibleby" => equal(&remainder(&other)?, &Value::from(0))?,
        "in" => contains(&other, value)?,
        "eq" => equal(value, &other)?,
        "ne" => !equal(value, &other)?,
        "lt" => compare(value, &other)? == Some(Ordering::Less),
        "le" => compare(value, &other)?.is_some_and(Ordering::is_le),
        "gt" => compare(value, &other)? == Some(Ordering::Greater),
        "ge" => compare(value, &other)?.is_some_and(Ordering::is_ge),
        "escaped" => value.is_safe(),
        _ => return Err(refused(format!("the test {name} is not supported"))),
    })
}
