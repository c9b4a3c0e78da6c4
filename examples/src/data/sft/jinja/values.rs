//! Values as Python has them: their text, JSON, equality and order.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::{Args, given, is_set, refused, type_of};

/// An iterable of Python that is neither a list nor a tuple.
#[derive(Debug)]
pub(super) struct View {
    /// Python's name: `generator`, `range` or such as `dict_items`.
    pub(super) kind: &'static str,
    pub(super) items: Vec<Value>,
    read: AtomicBool,
}

impl View {
    pub(super) fn value(kind: &'static str, items: Vec<Value>) -> Value {
        Value::from_object(View { kind, items, read: AtomicBool::new(false) })
    }

    /// Returns whether it is empty after it was read once.
    pub(super) fn is_once(&self) -> bool {
        matches!(self.kind, "generator" | "reversed")
    }

    /// Returns the items.
    pub(super) fn read(&self) -> Result<Vec<Value>, Error> {
        if self.is_once() && self.read.swap(true, Relaxed) {
            return Err(refused(
                "the result of a filter such as map or select is read twice, and is empty the second time in Jinja2: \
                 add | list to the filter",
            ));
        }
        Ok(self.items.clone())
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match self.read() {
            Ok(items) => Enumerator::Values(items),
            Err(error) => Enumerator::Values(vec![Value::from(error)]),
        }
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.is_once() || !self.items.is_empty()
    }

    fn custom_cmp(self: &Arc<Self>, _: &DynObject) -> Option<Ordering> {
        None
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{}>", self.kind)
    }
}

/// A number of Python. Larger integers are refused.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    /// Returns a number or a bool as a number.
    pub(super) fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(value.is_true().into())),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Number::Int(int) => int as f64,
            Number::Float(float) => float,
        }
    }

    fn compare(self, other: Number) -> Option<Ordering> {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            (Number::Float(a), Number::Float(b)) => a.partial_cmp(&b),
            (Number::Int(a), Number::Float(b)) => {
                let near = (a as f64).partial_cmp(&b)?;
                Some(near.then_with(|| a.cmp(&(b as i128))))
            }
            (Number::Float(_), Number::Int(_)) => other.compare(self).map(Ordering::reverse),
        }
    }
}

/// Makes a value of an integer.
pub(super) fn int(int: i128) -> Value {
    i64::try_from(int).map_or_else(|_| Value::from(int), Value::from)
}

/// Returns the integer of a value. Errors begin with `what`, which needs it.
pub(super) fn integer(what: &str, value: &Value) -> Result<i128, Error> {
    match Number::of(value) {
        Some(Number::Int(int)) => Ok(int),
        _ => Err(refused(format!("{what} needs an integer, but got {}", type_of(value)))),
    }
}

/// Returns whether the value is a dictionary, and not a namespace or a loop.
pub(super) fn is_dict(value: &Value) -> bool {
    value.kind() == ValueKind::Map && value.as_object().is_some_and(|object| object.type_name().contains("IndexMap"))
}

/// Returns the keys and values of a dictionary.
pub(super) fn pairs(value: &Value) -> Vec<(Value, Value)> {
    value.as_object().and_then(DynObject::try_iter_pairs).map_or(vec![], Iterator::collect)
}

/// Returns the items of an iterable.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(vec![]),
        ValueKind::String => Ok(string(value)?.chars().map(Value::from).collect()),
        ValueKind::Iterable => match value.downcast_object_ref::<View>() {
            Some(view) => view.read(),
            None => Ok(value.try_iter()?.collect()),
        },
        ValueKind::Seq => Ok(value.try_iter()?.collect()),
        ValueKind::Map if is_dict(value) => Ok(pairs(value).into_iter().map(|(key, _)| key).collect()),
        _ => Err(refused(format!("{} is not iterable", type_of(value)))),
    }
}

/// Returns the length of a value that has one.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::String => Ok(string(value)?.chars().count()),
        ValueKind::Iterable => match value.downcast_object_ref::<View>() {
            Some(view) if view.is_once() => Err(refused(format!("{} has no length: add | list", view.kind))),
            Some(view) => Ok(view.items.len()),
            None => Ok(value.try_iter()?.count()),
        },
        ValueKind::Seq => Ok(value.try_iter()?.count()),
        ValueKind::Map if is_dict(value) => Ok(pairs(value).len()),
        _ => Err(refused(format!("{} has no length", type_of(value)))),
    }
}

/// Returns the characters of a text.
pub(super) fn string(value: &Value) -> Result<&str, Error> {
    value.as_str().ok_or_else(|| refused(format!("expected a str, but got {}", type_of(value))))
}

/// Returns Python's `str(value)`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(string(value)?.to_owned()),
        _ => {
            let mut out = String::new();
            represent(value, &mut out)?;
            Ok(out)
        }
    }
}

/// Appends Python's `repr(value)`.
fn represent(value: &Value, out: &mut String) -> Result<(), Error> {
    let separate = |out: &mut String, i: usize| out.push_str(if i > 0 { ", " } else { "" });
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match Number::of(value) {
            Some(Number::Float(float)) => out.push_str(&float_text(float)),
            Some(Number::Int(int)) => out.push_str(&int.to_string()),
            None => return Err(refused("an integer of more than 127 bits is not supported")),
        },
        ValueKind::String if value.is_safe() => return Err(refused("an escaped text in a list is not supported")),
        ValueKind::String => quote(string(value)?, out),
        ValueKind::Seq => {
            let items = items(value)?;
            out.push(if value.is_tuple() { '(' } else { '[' });
            for (i, item) in items.iter().enumerate() {
                separate(out, i);
                represent(item, out)?;
            }
            out.push_str(match (value.is_tuple(), items.len()) {
                (true, 1) => ",)",
                (true, _) => ")",
                _ => "]",
            });
        }
        ValueKind::Map if is_dict(value) => {
            out.push('{');
            for (i, (key, value)) in pairs(value).iter().enumerate() {
                separate(out, i);
                represent(key, out)?;
                out.push_str(": ");
                represent(value, out)?;
            }
            out.push('}');
        }
        ValueKind::Invalid => return Err(refused(value.to_string())),
        _ => return Err(refused(format!("a {} can't be made a text", type_of(value)))),
    }
    Ok(())
}

/// Returns Python's `repr` of a float.
pub(super) fn float_text(float: f64) -> String {
    if !float.is_finite() {
        return if float.is_nan() { "nan".into() } else { if float > 0. { "inf" } else { "-inf" }.into() };
    }
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// Appends Python's `repr` of a text.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => {
                out.push('\\');
                out.push(c);
            }
            // In Rust as in Python, what is printable depends on the character's category.
            c if c == ' '
                || ['a', c].iter().collect::<String>().escape_debug().count() == 2
                || c == '"'
                || c == '\'' =>
            {
                out.push(c);
            }
            c => out.push_str(&match c as u32 {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x10000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(mark);
}

/// Returns Python's `a == b`.
pub(super) fn equal(a: &Value, b: &Value) -> Result<bool, Error> {
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return Ok(a.compare(b) == Some(Ordering::Equal));
    }
    if matches!(a.kind(), ValueKind::Iterable | ValueKind::Plain)
        || matches!(b.kind(), ValueKind::Iterable | ValueKind::Plain)
    {
        return Err(refused(format!("{} and {} can't be compared", type_of(a), type_of(b))));
    }
    match (a.kind(), b.kind()) {
        (ValueKind::Seq, ValueKind::Seq) => {
            let (a_items, b_items) = (items(a)?, items(b)?);
            if a.is_tuple() != b.is_tuple() || a_items.len() != b_items.len() {
                return Ok(false);
            }
            for (a, b) in a_items.iter().zip(&b_items) {
                if !equal(a, b)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (ValueKind::Map, ValueKind::Map) if is_dict(a) && is_dict(b) => {
            let (a_pairs, b_pairs) = (pairs(a), pairs(b));
            if a_pairs.len() != b_pairs.len() {
                return Ok(false);
            }
            for (key, value) in a_pairs {
                match lookup(b, &key)? {
                    Some(other) if equal(&value, &other)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(true)
        }
        (a_kind, b_kind) if a_kind == b_kind => match a_kind {
            ValueKind::Undefined | ValueKind::None => Ok(true),
            ValueKind::String => Ok(a.as_str() == b.as_str()),
            _ => Err(refused(format!("two values of type {} can't be compared", type_of(a)))),
        },
        _ => Ok(false),
    }
}

/// Returns whether a value can't be a key.
pub(super) fn is_unhashable(value: &Value) -> bool {
    is_dict(value) || value.kind() == ValueKind::Seq && !value.is_tuple()
}

/// Returns the value of a key in a dictionary. Equal numbers are the same key.
pub(super) fn lookup(dict: &Value, key: &Value) -> Result<Option<Value>, Error> {
    if is_unhashable(key) {
        return Err(refused(format!("a {} can't be a key", type_of(key))));
    }
    if key.as_str().is_some() {
        return Ok(dict.as_object().and_then(|object| object.get_value(key)));
    }
    for (other, value) in pairs(dict) {
        if equal(&other, key)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Returns the order of two values of one type, or fails as Python does. `None` if one is not a number.
pub(super) fn compare(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return Ok(a.compare(b));
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if a.kind() == ValueKind::Seq && b.kind() == ValueKind::Seq && a.is_tuple() == b.is_tuple() {
        let (a, b) = (items(a)?, items(b)?);
        for (a, b) in a.iter().zip(&b) {
            if !equal(a, b)? {
                return compare(a, b);
            }
        }
        return Ok(Some(a.len().cmp(&b.len())));
    }
    Err(refused(format!("{} and {} have no order", type_of(a), type_of(b))))
}

/// How JSON is written.
pub(super) struct Json {
    pub(super) ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) separators: (String, String),
    pub(super) sorted: bool,
}

impl Json {
    /// Filter `tojson` of transformers' templates: Python's `json.dumps` without ASCII and HTML escapes.
    pub(super) fn filter(value: &Value, args: Args) -> Result<Value, Error> {
        let [ascii, indent, separators, sorted] =
            args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
        let indent = match given(indent) {
            None => None,
            Some(indent) if indent.as_str().is_some() => Some(text(&indent)?),
            Some(indent) => Some(" ".repeat(integer("tojson(indent=...)", &indent)?.clamp(0, 64) as usize)),
        };
        let separators = match given(separators) {
            None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
            Some(pair) => match &items(&pair)?[..] {
                [item, key] => (string(item)?.to_owned(), string(key)?.to_owned()),
                _ => return Err(refused("tojson(separators=...) needs two texts")),
            },
        };
        let json = Json { ascii: is_set(ascii), indent, separators, sorted: is_set(sorted) };
        let mut out = String::new();
        json.write(value, 0, &mut out)?;
        Ok(Value::from(out))
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number_in_json(value)?),
            ValueKind::String => self.quote(string(value)?, out),
            ValueKind::Seq => {
                let items = items(value)?;
                self.container(['[', ']'], items.len(), depth, out, |i, out| self.write(&items[i], depth + 1, out))?;
            }
            ValueKind::Map if is_dict(value) => {
                let mut pairs = pairs(value);
                if self.sorted {
                    pairs = sort(pairs, &|a, b| compare(&a.0, &b.0))?;
                }
                self.container(['{', '}'], pairs.len(), depth, out, |i, out| {
                    let (key, value) = &pairs[i];
                    let key = match key.kind() {
                        ValueKind::String => string(key)?.to_owned(),
                        ValueKind::None => "null".into(),
                        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
                        ValueKind::Number => number_in_json(key)?,
                        _ => return Err(refused(format!("JSON has no keys of type {}", type_of(key)))),
                    };
                    self.quote(&key, out);
                    out.push_str(&self.separators.1);
                    self.write(value, depth + 1, out)
                })?;
            }
            _ => return Err(Error::new(ErrorKind::BadSerialization, format!("{} has no JSON", type_of(value)))),
        }
        Ok(())
    }

    fn container(
        &self,
        [open, close]: [char; 2],
        count: usize,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for i in 0..count {
            if i > 0 {
                out.push_str(&self.separators.0);
            }
            line(out, depth + 1);
            write(i, out)?;
        }
        if count > 0 {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn quote(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number_in_json(value: &Value) -> Result<String, Error> {
    Ok(match Number::of(value) {
        Some(Number::Float(float)) if float.is_nan() => "NaN".into(),
        Some(Number::Float(float)) if float.is_infinite() => if float > 0. { "Infinity" } else { "-Infinity" }.into(),
        _ => text(value)?,
    })
}

/// Sorts stably by an order that may fail. The standard library's sort may panic when a comparison fails.
pub(super) fn sort<T>(
    mut items: Vec<T>,
    compare: &impl Fn(&T, &T) -> Result<Option<Ordering>, Error>,
) -> Result<Vec<T>, Error> {
    if items.len() < 2 {
        return Ok(items);
    }
    let second = items.split_off(items.len() / 2);
    let mut first = sort(items, compare)?.into_iter().peekable();
    let mut second = sort(second, compare)?.into_iter().peekable();
    let mut sorted = Vec::with_capacity(first.len() + second.len());
    while let (Some(a), Some(b)) = (first.peek(), second.peek()) {
        let is_second = compare(b, a)?.ok_or_else(|| refused("NaN has no order"))? == Ordering::Less;
        sorted.extend(if is_second { second.next() } else { first.next() });
    }
    sorted.extend(first.chain(second));
    Ok(sorted)
}
