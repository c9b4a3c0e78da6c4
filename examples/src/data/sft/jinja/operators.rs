//! Python's operators, as functions that `rewrite` calls, and the functions `range` and `dict`.

use std::cmp::Ordering;

use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error};

use super::format::printf;
use super::methods::{is_attribute, methods_of};
use super::values::{Number, View, compare, equal, int, integer, is_dict, is_unhashable, items, lookup, string, text};
use super::{call_args, check_length, refused, type_of};

pub(super) const ITER: &str = "__iter";
pub(super) const SLICE: &str = "__slice";
pub(super) const NEG: &str = "__neg";
pub(super) const EQ: &str = "__eq";
pub(super) const NE: &str = "__ne";
pub(super) const LT: &str = "__lt";
pub(super) const LE: &str = "__le";
pub(super) const GT: &str = "__gt";
pub(super) const GE: &str = "__ge";
pub(super) const IN: &str = "__contains";
pub(super) const NOT_IN: &str = "__not_contains";
pub(super) const ADD: &str = "__add";
pub(super) const SUB: &str = "__sub";
pub(super) const MUL: &str = "__mul";
pub(super) const DIV: &str = "__truediv";
pub(super) const FLOOR_DIV: &str = "__floordiv";
pub(super) const REM: &str = "__mod";
pub(super) const POW: &str = "__pow";
pub(super) const CONCAT: &str = "__concat";
pub(super) const ATTR: &str = "__getattr";
pub(super) const ITEM: &str = "__getitem";
/// Several comparisons in one expression: their names, then the operands.
pub(super) const CHAIN: &str = "__chain";
/// An argument of a macro with defaults: the macro's name, then the value.
pub(super) const GIVEN: &str = "__given";
/// A new list or dict.
pub(super) const NESTED: &str = "__nested";

/// Deepest nesting of lists and dicts that a template makes, and most values in one.
const DEPTH: usize = 200;
const VALUES: usize = 1_000_000;
/// Integers up to this are exact as floats.
const EXACT: u128 = 1 << 53;

type Operator = fn(&Value, &Value) -> Result<Value, Error>;

/// Adds the functions to an environment.
pub(super) fn register(environment: &mut Environment<'static>) {
    let operators: [(&str, Operator); 18] = [
        (EQ, |a, b| Ok(equal(a, b)?.into())),
        (NE, |a, b| Ok((!equal(a, b)?).into())),
        (LT, |a, b| Ok((compare(a, b)? == Some(Ordering::Less)).into())),
        (LE, |a, b| Ok(compare(a, b)?.is_some_and(Ordering::is_le).into())),
        (GT, |a, b| Ok((compare(a, b)? == Some(Ordering::Greater)).into())),
        (GE, |a, b| Ok(compare(a, b)?.is_some_and(Ordering::is_ge).into())),
        (IN, |a, b| Ok(contains(b, a)?.into())),
        (NOT_IN, |a, b| Ok((!contains(b, a)?).into())),
        (ADD, add),
        (SUB, |a, b| arithmetic("-", a, b, i128::checked_sub, |a, b| a - b)),
        (MUL, mul),
        (DIV, div),
        (FLOOR_DIV, floor_div),
        (REM, rem),
        (POW, pow),
        (CONCAT, concat),
        (ATTR, attribute),
        (ITEM, item),
    ];
    for (name, operator) in operators {
        environment.add_function(name, move |a: Value, b: Value| operator(&a, &b));
    }
    environment.add_function(CHAIN, move |args: Rest<Value>| {
        let (names, operands) = args.split_first().ok_or_else(|| refused("a comparison has no operands"))?;
        for (name, pair) in string(names)?.split(' ').zip(operands.windows(2)) {
            let compare = operators.iter().find(|(known, _)| *known == name).map(|(_, operator)| operator);
            let compare = compare.ok_or_else(|| refused("a comparison is not known"))?;
            if !compare(&pair[0], &pair[1])?.is_true() {
                return Ok(false);
            }
        }
        Ok::<_, Error>(true)
    });
    environment.add_function(GIVEN, |name: Value, value: Value| match value.is_undefined() {
        true => Err(refused(format!(
            "an argument of the macro {} is undefined, which is not supported beside defaults: write | default(none)",
            string(&name)?
        ))),
        false => Ok(value),
    });
    environment.add_function(NESTED, |made: Value| check_nesting(&made, 0, &mut VALUES.clone()).map(|()| made));
    environment.add_function(NEG, |a: Value| match Number::of(&a) {
        Some(Number::Int(a)) => a.checked_neg().map(int).ok_or_else(too_large),
        Some(Number::Float(a)) => Ok(Value::from(-a)),
        None => Err(refused(format!("the operator - does not apply to {}", type_of(&a)))),
    });
    environment.add_function(ITER, |a: Value| match a.kind() {
        ValueKind::Undefined | ValueKind::String => Ok(Value::from(items(&a)?)),
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(refused(format!("{} is not iterable", type_of(&a))))
        }
        _ => Ok(a),
    });
    environment.add_function(SLICE, |value: Value, start: Value, stop: Value, step: Value| {
        slice(&value, [&start, &stop, &step])
    });
    environment.add_function("range", |args: Rest<ValueOrKwargs>| {
        let [first, second, step] = call_args(args)?.bind("range", ["start", "stop", "step"], 1)?;
        let bound = |value: &Value| integer("range", value);
        let step = step.as_ref().map_or(Ok(1), bound)?;
        let (start, stop) = match (first, second) {
            (Some(start), Some(stop)) => (bound(&start)?, bound(&stop)?),
            (first, _) => (0, first.as_ref().map_or(Ok(0), bound)?),
        };
        if step == 0 {
            return Err(refused("the step of range is 0"));
        }
        let mut items = vec![];
        let mut at = start;
        while if step > 0 { at < stop } else { at > stop } {
            // Jinja2's sandbox has the same limit.
            if items.len() == 100_000 {
                return Err(refused("a range is longer than 100000"));
            }
            items.push(int(at));
            let Some(next) = at.checked_add(step) else { break };
            at = next;
        }
        Ok(View::value("range", items))
    });
    environment.add_function("dict", |args: Rest<ValueOrKwargs>| {
        let args = call_args(args)?;
        let mut all = match &args.positional[..] {
            [] => vec![],
            [from] if is_dict(from) => super::values::pairs(from),
            [from] => items(from)?
                .iter()
                .map(|pair| match &items(pair)?[..] {
                    [key, value] => Ok((key.clone(), value.clone())),
                    _ => Err(refused("dict needs pairs")),
                })
                .collect::<Result<_, Error>>()?,
            _ => return Err(refused("dict takes at most one argument without a name")),
        };
        all.extend(args.named.into_iter().map(|(name, value)| (Value::from(name), value)));
        let made = Value::from_pairs(all);
        check_nesting(&made, 0, &mut VALUES.clone()).map(|()| made)
    });
}

/// Fails for values that are nested too deep, or share parts until they are huge when written.
pub(super) fn check_nesting(value: &Value, depth: usize, left: &mut usize) -> Result<(), Error> {
    let inner = match value.kind() {
        ValueKind::Seq => value.try_iter()?.collect(),
        ValueKind::Map if is_dict(value) => super::values::pairs(value).into_iter().map(|(_, value)| value).collect(),
        ValueKind::Iterable => value.downcast_object_ref::<View>().map_or(vec![], |view| view.items.clone()),
        _ => vec![],
    };
    *left = match left.checked_sub(1 + inner.len()) {
        Some(left) if depth <= DEPTH => left,
        _ => {
            return Err(refused(format!(
                "a list or dict is nested more than {DEPTH} deep, or has more than {VALUES} values"
            )));
        }
    };
    inner.iter().try_for_each(|inner| check_nesting(inner, depth + 1, left))
}

fn too_large() -> Error {
    refused("an integer of more than 127 bits is not supported")
}

fn impossible(operator: &str, a: &Value, b: &Value) -> Error {
    refused(format!("the operator {operator} does not apply to {} and {}", type_of(a), type_of(b)))
}

fn arithmetic(
    operator: &str,
    a: &Value,
    b: &Value,
    ints: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    match (Number::of(a), Number::of(b)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => ints(a, b).map(int).ok_or_else(too_large),
        (Some(a), Some(b)) => Ok(floats(a.float(), b.float()).into()),
        _ => Err(impossible(operator, a, b)),
    }
}

/// Returns `a + b`.
pub(super) fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    match (a.kind(), b.kind()) {
        (ValueKind::String, ValueKind::String) if a.is_safe() || b.is_safe() => {
            Err(refused("the operator + with an escaped text is not supported: use ~"))
        }
        (ValueKind::String, ValueKind::String) => {
            let (a, b) = (string(a)?, string(b)?);
            check_length(a.len() + b.len())?;
            Ok(Value::from([a, b].concat()))
        }
        (ValueKind::Seq, ValueKind::Seq) if a.is_tuple() == b.is_tuple() => {
            let (first, second) = (items(a)?, items(b)?);
            check_length(first.len() + second.len())?;
            Ok(sequence(a.is_tuple(), [first, second].concat()))
        }
        _ => arithmetic("+", a, b, i128::checked_add, |a, b| a + b),
    }
}

/// Returns `a ~ b`.
fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    let (a, b) = (text(a)?, text(b)?);
    check_length(a.len() + b.len())?;
    Ok(Value::from(a + &b))
}

/// Makes a tuple or a list.
fn sequence(is_tuple: bool, items: Vec<Value>) -> Value {
    if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

fn mul(a: &Value, b: &Value) -> Result<Value, Error> {
    let is_sequence = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq);
    let (repeated, times) = match (is_sequence(a), is_sequence(b)) {
        (true, false) => (a, b),
        (false, true) => (b, a),
        _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| a * b),
    };
    let Some(Number::Int(times)) = Number::of(times) else { return Err(impossible("*", a, b)) };
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    let length = repeated.as_str().map_or_else(|| items(repeated).map(|items| items.len()), |text| Ok(text.len()))?;
    check_length(length.saturating_mul(times))?;
    match repeated.as_str() {
        Some(_) if repeated.is_safe() => Err(refused("the operator * with an escaped text is not supported")),
        Some(text) => Ok(Value::from(text.repeat(times))),
        None => Ok(sequence(repeated.is_tuple(), vec![items(repeated)?; times].concat())),
    }
}

fn div(a: &Value, b: &Value) -> Result<Value, Error> {
    match (Number::of(a), Number::of(b)) {
        (Some(_), Some(b)) if b.float() == 0. => Err(refused("division by zero")),
        (Some(Number::Int(a)), Some(Number::Int(b))) if a.unsigned_abs() > EXACT || b.unsigned_abs() > EXACT => {
            Err(refused("the operator / with an integer of more than 53 bits is not supported"))
        }
        (Some(a), Some(b)) => Ok((a.float() / b.float()).into()),
        _ => Err(impossible("/", a, b)),
    }
}

/// Returns quotient and remainder of floats as Python's `divmod`.
fn float_divmod(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest != 0. {
        if (b < 0.) != (rest < 0.) {
            rest += b;
            quotient -= 1.;
        }
    } else {
        rest = 0f64.copysign(b);
    }
    let floor = if quotient != 0. {
        let floor = quotient.floor();
        if quotient - floor > 0.5 { floor + 1. } else { floor }
    } else {
        0f64.copysign(a / b)
    };
    (floor, rest)
}

/// Returns quotient and remainder of integers as Python's `divmod`.
fn int_divmod(a: i128, b: i128) -> Option<(i128, i128)> {
    let (quotient, rest) = (a.checked_div(b)?, a.checked_rem(b)?);
    if rest != 0 && (rest < 0) != (b < 0) { Some((quotient - 1, rest + b)) } else { Some((quotient, rest)) }
}

fn floor_div(a: &Value, b: &Value) -> Result<Value, Error> {
    match Number::of(b) {
        Some(b) if b.float() == 0. => Err(refused("division by zero")),
        _ => arithmetic("//", a, b, |a, b| Some(int_divmod(a, b)?.0), |a, b| float_divmod(a, b).0),
    }
}

/// Returns `a % b`, which formats if `a` is a text.
pub(super) fn rem(a: &Value, b: &Value) -> Result<Value, Error> {
    if a.as_str().is_some() {
        return printf(a, b);
    }
    match Number::of(b) {
        Some(b) if b.float() == 0. => Err(refused("division by zero")),
        _ => arithmetic("%", a, b, |a, b| Some(int_divmod(a, b)?.1), |a, b| float_divmod(a, b).1),
    }
}

fn pow(a: &Value, b: &Value) -> Result<Value, Error> {
    let (Some(x), Some(y)) = (Number::of(a), Number::of(b)) else { return Err(impossible("**", a, b)) };
    if let (Number::Int(x), Number::Int(y @ 0..)) = (x, y) {
        return u32::try_from(y).ok().and_then(|y| x.checked_pow(y)).map(int).ok_or_else(too_large);
    }
    let (x, y) = (x.float(), y.float());
    let result = x.powf(y);
    if x == 0. && y < 0. || x < 0. && y.fract() != 0. || result.is_infinite() && x.is_finite() && y.is_finite() {
        return Err(refused(format!("{x} ** {y} is not a float")));
    }
    Ok(result.into())
}

/// Returns `value in container`.
pub(super) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        return match value.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => Err(refused(format!("a str can't contain {}", type_of(value)))),
        };
    }
    if is_dict(container) {
        return Ok(lookup(container, value)?.is_some());
    }
    for item in items(container)? {
        if equal(&item, value)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the attribute of a value as Jinja2's `value.name`.
fn attribute(value: &Value, name: &Value) -> Result<Value, Error> {
    let name = string(name)?;
    match value.kind() {
        ValueKind::Undefined => Err(refused(format!("a value is undefined, so it has no attribute {name}"))),
        ValueKind::Map | ValueKind::Plain if !is_dict(value) => value.get_attr(name),
        _ => {
            refuse_method(value, name)?;
            match is_dict(value) {
                true => Ok(lookup(value, &name.into())?.unwrap_or_default()),
                false => Ok(Value::UNDEFINED),
            }
        }
    }
}

/// Fails for the name of a method, which is a value in Python.
fn refuse_method(value: &Value, name: &str) -> Result<(), Error> {
    if is_attribute(value, name) {
        let kind = type_of(value);
        return Err(refused(format!(
            "{name} is a method or an attribute of every {kind}, which is only supported in a call: for a key of this \
             name, write ['{name}'] and test first whether it is there. Methods of {kind}: {}",
            methods_of(value).join(", ")
        )));
    }
    if name.starts_with("__") {
        return Err(refused(format!("the attribute {name} is not supported")));
    }
    Ok(())
}

/// Returns an item, or the attribute of this name, as Jinja2's `value[key]`.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::Undefined => return Err(refused("a value is undefined, so it has no items")),
        ValueKind::Map if is_dict(value) && !is_unhashable(key) => lookup(value, key)?,
        ValueKind::String | ValueKind::Seq => index(value, key)?,
        ValueKind::Iterable if type_of(value) == "range" => index(value, key)?,
        ValueKind::Map | ValueKind::Plain if !is_dict(value) => return value.get_item(key),
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => refuse_method(value, name).map(|()| Value::UNDEFINED),
        (None, None) => Ok(Value::UNDEFINED),
    }
}

fn index(value: &Value, key: &Value) -> Result<Option<Value>, Error> {
    let Some(Number::Int(at)) = Number::of(key) else { return Ok(None) };
    let items = items(value)?;
    let at = if at < 0 { at + items.len() as i128 } else { at };
    Ok(usize::try_from(at).ok().and_then(|at| items.get(at).cloned()))
}

/// Returns the positions of Python's `range(*slice(start, stop, step).indices(length))`.
pub(super) fn indices(length: usize, [start, stop, step]: [Option<i128>; 3]) -> Result<Vec<usize>, Error> {
    let (length, step) = (length as i128, step.unwrap_or(1));
    if step == 0 {
        return Err(refused("the step of a slice is 0"));
    }
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(bound) if bound < 0 => bound.saturating_add(length).max(lowest),
        Some(bound) => bound.min(highest),
    };
    let (mut at, stop) = match step > 0 {
        true => (bound(start, 0), bound(stop, length)),
        false => (bound(start, length - 1), bound(stop, -1)),
    };
    let mut all = vec![];
    while if step > 0 { at < stop } else { at > stop } {
        all.push(at as usize);
        at = at.saturating_add(step);
    }
    Ok(all)
}

fn slice(value: &Value, bounds: [&Value; 3]) -> Result<Value, Error> {
    let is_range = type_of(value) == "range";
    match value.kind() {
        ValueKind::Undefined => return Err(refused("a value is undefined, so it can't be sliced")),
        ValueKind::String if value.is_safe() => return Err(refused("a slice of an escaped text is not supported")),
        ValueKind::String | ValueKind::Seq => {}
        ValueKind::Iterable if is_range => {}
        _ => return Err(refused(format!("{} can't be sliced", type_of(value)))),
    }
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(bounds) {
        match Number::of(bound) {
            Some(Number::Int(bound)) => *number = Some(bound),
            _ if !bound.is_none() => return Err(refused(format!("{} can't bound a slice", type_of(bound)))),
            _ => {}
        }
    }
    if numbers[2] == Some(0) {
        return Err(refused("the step of a slice is 0"));
    }
    let items = items(value)?;
    let taken = indices(items.len(), numbers)?.into_iter().map(|at| items[at].clone());
    match value.kind() {
        ValueKind::String => Ok(Value::from(taken.map(|c| c.to_string()).collect::<String>())),
        ValueKind::Seq => Ok(sequence(value.is_tuple(), taken.collect())),
        _ => Ok(View::value("range", taken.collect())),
    }
}
