//! Methods of Python's texts, lists and dictionaries.

use minijinja::Error;
use minijinja::value::{Tuple, Value, ValueKind};

use super::format::str_format;
use super::operators::indices;
use super::values::{View, equal, integer, is_dict, items, lookup, pairs, string, text};
use super::{Args, check_length, refused, type_of};

const OF_STR: &str = "capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha \
                      isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust \
                      lower lstrip maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit \
                      rstrip split splitlines startswith strip swapcase title translate upper zfill";
const OF_LIST: &str = "append clear copy count extend index insert pop remove reverse sort";
const OF_TUPLE: &str = "count index";
const OF_DICT: &str = "clear copy fromkeys get items keys pop popitem setdefault update values";
const OF_NUMBER: &str = "as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex hex imag is_integer \
                         numerator real to_bytes";
const OF_VIEW: &str = "close count gi_code gi_frame gi_running gi_suspended gi_yieldfrom index isdisjoint mapping send start step stop throw";

/// Lists the names of the methods and attributes of a value in Python.
pub(super) fn methods_of(value: &Value) -> Vec<&'static str> {
    let names = match value.kind() {
        ValueKind::String => OF_STR,
        ValueKind::Seq if value.is_tuple() => OF_TUPLE,
        ValueKind::Seq => OF_LIST,
        ValueKind::Map if is_dict(value) => OF_DICT,
        ValueKind::Number | ValueKind::Bool => OF_NUMBER,
        ValueKind::Iterable => OF_VIEW,
        _ => "",
    };
    names.split_whitespace().collect()
}

/// Returns whether a value has a method or an attribute of this name in Python.
pub(super) fn is_attribute(value: &Value, name: &str) -> bool {
    methods_of(value).contains(&name)
}

/// Calls a method.
pub(super) fn call(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(refused(format!("a value is undefined, so it has no method {name}"))),
        ValueKind::String if value.is_safe() => Err(unsupported(value, name)),
        ValueKind::String => of_text(value, name, args),
        ValueKind::Seq => of_list(value, name, args),
        ValueKind::Map if is_dict(value) => of_dict(value, name, args),
        _ => Err(unsupported(value, name)),
    }
}

fn unsupported(value: &Value, name: &str) -> Error {
    let kind = if value.is_safe() { "escaped str" } else { type_of(value) };
    match is_attribute(value, name) {
        true => refused(format!("the method {name} of {kind} is not supported")),
        false => refused(format!("{kind} has no method {name}")),
    }
}

fn of_list(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    match name {
        "copy" if !value.is_tuple() => args.none(name).map(|()| value.clone()),
        "count" => {
            let [wanted] = required(args.bind(name, ["value"], 1)?);
            let mut count = 0;
            for item in items(value)? {
                count += i64::from(equal(&item, &wanted)?);
            }
            Ok(count.into())
        }
        "index" => {
            let [wanted] = required(args.bind(name, ["value"], 1)?);
            for (at, item) in items(value)?.iter().enumerate() {
                if equal(item, &wanted)? {
                    return Ok(at.into());
                }
            }
            Err(refused(format!("{} is not in the list", text(&wanted)?)))
        }
        _ => Err(unsupported(value, name)),
    }
}

fn of_dict(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    let view = |kind, items: Vec<Value>| Ok(View::value(kind, items));
    match name {
        "copy" => args.none(name).map(|()| value.clone()),
        "get" => {
            let [key, default] = args.bind(name, ["key", "default"], 1)?;
            let found = lookup(value, &key.unwrap_or_default())?;
            Ok(found.or(default).unwrap_or(Value::from(())))
        }
        "items" => args.none(name).and_then(|()| view("dict_items", pair_tuples(value))),
        "keys" => {
            args.none(name).and_then(|()| view("dict_keys", pairs(value).into_iter().map(|pair| pair.0).collect()))
        }
        "values" => {
            args.none(name).and_then(|()| view("dict_values", pairs(value).into_iter().map(|pair| pair.1).collect()))
        }
        _ => match lookup(value, &name.into())? {
            // A value that is called, such as a macro.
            Some(_) if !is_attribute(value, name) => Err(minijinja::ErrorKind::UnknownMethod.into()),
            _ => Err(unsupported(value, name)),
        },
    }
}

/// Returns the keys and values of a dictionary as tuples.
pub(super) fn pair_tuples(dict: &Value) -> Vec<Value> {
    pairs(dict).into_iter().map(|(key, value)| Value::from(Tuple::from([key, value]))).collect()
}

fn required<const N: usize>(args: [Option<Value>; N]) -> [Value; N] {
    args.map(Option::unwrap_or_default)
}

/// Whitespace of Python's `str.strip`.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Removes characters at the start, the end, or both: `chars`, or whitespace.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&Value>, (start, end): (bool, bool)) -> Result<&'a str, Error> {
    let chars = chars.filter(|chars| !chars.is_none()).map(string).transpose()?;
    let removed = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(removed) } else { text };
    Ok(if end { text.trim_end_matches(removed) } else { text })
}

fn is_line_end(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Splits at Python's line ends.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let (mut lines, mut rest) = (vec![], text);
    while !rest.is_empty() {
        let end = rest.find(is_line_end).unwrap_or(rest.len());
        let after = match &rest[end..] {
            tail if tail.starts_with("\r\n") => end + 2,
            tail => end + tail.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keep_ends { after } else { end }]);
        rest = &rest[after..];
    }
    lines
}

/// Returns the first letter in title case and the others in lower case.
pub(super) fn capitalized(text: &str) -> Result<String, Error> {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return Ok(String::new()) };
    // `to_lowercase` of the whole text knows the form of a sigma at the end.
    let lower = text.to_lowercase();
    let skipped = first.to_lowercase().map(char::len_utf8).sum::<usize>();
    Ok(title_case(first)? + lower.get(skipped..).unwrap_or(""))
}

fn title_case(c: char) -> Result<String, Error> {
    let upper: String = c.to_uppercase().collect();
    // Characters such as ß and ǆ have a title case of their own.
    match c.is_alphabetic()
        && (upper.chars().count() > 1
            || ('\u{1c4}'..='\u{1cc}').contains(&c)
            || ('\u{1f1}'..='\u{1f3}').contains(&c)
            || ('\u{10d0}'..='\u{10ff}').contains(&c))
    {
        true => Err(refused(format!("the title case of {c} is not supported"))),
        false => Ok(upper),
    }
}

/// Returns the value of a test of all characters for ASCII, and refuses letters and digits beyond it.
fn of_class(value: &Value, name: &str, is_class: fn(&char) -> bool) -> Result<Value, Error> {
    let text = string(value)?;
    match text.chars().find(|c| !c.is_ascii() && c.is_alphanumeric()) {
        Some(c) => Err(refused(format!("the method {name} of a text with {c} is not supported"))),
        None => Ok((!text.is_empty() && text.chars().all(|c| is_class(&c))).into()),
    }
}

/// Returns the start of the first or last occurrence between two positions, counted in characters.
fn found(haystack: &str, args: [Option<Value>; 3], last: bool) -> Result<Option<usize>, Error> {
    let [part, start, end] = args;
    let part = part.unwrap_or_default();
    let part: Vec<char> = string(&part)?.chars().collect();
    let (chars, first) = part_of(haystack, start, end)?;
    let at = |at: &usize| chars[*at..].starts_with(&part);
    let Some(starts) = chars.len().checked_sub(part.len()) else { return Ok(None) };
    let found = if last { (0..=starts).rev().find(at) } else { (0..=starts).find(at) };
    Ok(found.map(|at| at + first))
}

/// Returns the characters between two positions, and the first position.
fn part_of(text: &str, start: Option<Value>, end: Option<Value>) -> Result<(Vec<char>, usize), Error> {
    let chars: Vec<char> = text.chars().collect();
    let bound = |value: Option<Value>| {
        value.filter(|value| !value.is_none()).map(|value| integer("a position", &value)).transpose()
    };
    let bounds = [bound(start)?, bound(end)?, None];
    if bounds[0].is_some_and(|start| start > chars.len() as i128) {
        return Err(refused("a position after the end of a text is not supported"));
    }
    let taken = indices(chars.len(), bounds)?;
    let first = match (taken.first(), bounds[0]) {
        (Some(first), _) => *first,
        (None, Some(start)) if start < 0 => (start + chars.len() as i128).max(0) as usize,
        (None, start) => start.unwrap_or(0) as usize,
    };
    Ok((taken.into_iter().map(|at| chars[at]).collect(), first))
}

fn list(parts: impl IntoIterator<Item = impl Into<Value>>) -> Value {
    Value::from(parts.into_iter().map(Into::into).collect::<Vec<Value>>())
}

fn split(text: &str, args: Args, name: &str, from_end: bool) -> Result<Value, Error> {
    let [separator, most] = args.bind(name, ["sep", "maxsplit"], 0)?;
    let most = most.map_or(Ok(-1), |most| integer(name, &most))?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let Some(separator) = separator.filter(|separator| !separator.is_none()) else {
        return Ok(list(words(text, most, from_end)));
    };
    let separator = string(&separator)?;
    if separator.is_empty() {
        return Err(refused(format!("{name} needs a separator that is not empty")));
    }
    let most = most.saturating_add(1);
    if from_end {
        let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
        parts.reverse();
        return Ok(list(parts));
    }
    Ok(list(text.splitn(most, separator)))
}

/// Splits at whitespace, at most `most` times.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let (mut parts, mut rest) = (vec![], text);
    loop {
        rest = if from_end { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        if rest.is_empty() {
            break;
        }
        let end = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        match end {
            Some(at) if parts.len() < most => {
                let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                parts.push(if from_end { &rest[after..] } else { &rest[..at] });
                rest = if from_end { &rest[..at] } else { &rest[after..] };
            }
            _ => {
                parts.push(rest);
                break;
            }
        }
    }
    if from_end {
        parts.reverse();
    }
    parts
}

fn justified(text: &str, args: Args, name: &str) -> Result<Value, Error> {
    let [width, fill] = args.bind(name, ["width", "fillchar"], 1)?;
    let width = integer(name, &width.unwrap_or_default())?.clamp(0, 100_000) as usize;
    let fill = fill.unwrap_or_else(|| " ".into());
    let mut fill = string(&fill)?.chars();
    let (Some(fill), None) = (fill.next(), fill.next()) else {
        return Err(refused(format!("{name} needs one character to fill with")));
    };
    Ok(Value::from(padded(text, width, fill, name)))
}

/// Fills a text to a width as `ljust`, `rjust` or `center`.
pub(super) fn padded(text: &str, width: usize, fill: char, name: &str) -> String {
    let space = width.saturating_sub(text.chars().count());
    let left = match name {
        "ljust" => 0,
        "rjust" => space,
        _ => space / 2 + (space & width & 1),
    };
    let filled = |count: usize| std::iter::repeat_n(fill, count).collect::<String>();
    filled(left) + text + &filled(space - left)
}

fn of_text(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    let text = string(value)?;
    let sides = (name != "rstrip", name != "lstrip");
    match name {
        "upper" => args.none(name).map(|()| text.to_uppercase().into()),
        "lower" => args.none(name).map(|()| text.to_lowercase().into()),
        "capitalize" => args.none(name).and_then(|()| Ok(capitalized(text)?.into())),
        "title" => {
            args.none(name)?;
            let (mut out, mut after_letter) = (String::new(), false);
            for c in text.chars() {
                if after_letter {
                    // A sigma's form depends on the letters around it.
                    if c == 'Σ' {
                        return Err(refused("the title case of Σ is not supported"));
                    }
                    out.extend(c.to_lowercase());
                } else {
                    out.push_str(&title_case(c)?);
                }
                after_letter = c.is_lowercase() || c.is_uppercase();
            }
            Ok(out.into())
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            Ok(strip(text, chars.as_ref(), sides)?.into())
        }
        "split" => split(text, args, name, false),
        "rsplit" => split(text, args, name, true),
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"], 0)?;
            Ok(list(split_lines(text, keep.is_some_and(|keep| keep.is_true()))))
        }
        "partition" | "rpartition" => {
            let [separator] = required(args.bind(name, ["sep"], 1)?);
            let separator = string(&separator)?;
            if separator.is_empty() {
                return Err(refused(format!("{name} needs a separator that is not empty")));
            }
            let parts = match name {
                "partition" => text.split_once(separator).map_or([text, "", ""], |(a, b)| [a, separator, b]),
                _ => text.rsplit_once(separator).map_or(["", "", text], |(a, b)| [a, separator, b]),
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "startswith" | "endswith" => {
            let [part, start, end] = args.bind(name, ["prefix", "start", "end"], 1)?;
            let part = part.unwrap_or_default();
            let parts = if part.is_tuple() { items(&part)? } else { vec![part] };
            let text: String = part_of(text, start, end)?.0.into_iter().collect();
            for part in parts {
                let part = string(&part)?;
                if if name == "startswith" { text.starts_with(part) } else { text.ends_with(part) } {
                    return Ok(true.into());
                }
            }
            Ok(false.into())
        }
        "removeprefix" | "removesuffix" => {
            let [part] = required(args.bind(name, ["part"], 1)?);
            let part = string(&part)?;
            let rest = if name == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Ok(rest.unwrap_or(text).into())
        }
        "find" | "rfind" | "index" | "rindex" => {
            let at = found(text, args.bind(name, ["sub", "start", "end"], 1)?, name.starts_with('r'))?;
            match at {
                Some(at) => Ok(at.into()),
                None if name.ends_with("find") => Ok((-1).into()),
                None => Err(refused(format!("{name}: the part is not in the text"))),
            }
        }
        "count" => {
            let [part, start, end] = args.bind(name, ["sub", "start", "end"], 1)?;
            let part = part.unwrap_or_default();
            let text: String = part_of(text, start, end)?.0.into_iter().collect();
            Ok(text.matches(string(&part)?).count().into())
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            replaced(text, &old.unwrap_or_default(), &new.unwrap_or_default(), count)
        }
        "join" => {
            let [parts] = required(args.bind(name, ["iterable"], 1)?);
            let parts = items(&parts)?;
            if parts.iter().any(Value::is_safe) {
                return Err(refused("join of an escaped text is not supported"));
            }
            let parts = parts.iter().map(string).collect::<Result<Vec<_>, Error>>()?;
            check_length(parts.iter().map(|part| part.len() + text.len()).sum())?;
            Ok(parts.join(text).into())
        }
        "format" => str_format(value, args),
        "ljust" | "rjust" | "center" => justified(text, args, name),
        "zfill" => {
            let [width] = required(args.bind(name, ["width"], 1)?);
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let width = integer(name, &width)?.clamp(0, 100_000) as usize;
            Ok((sign.to_owned() + &padded(digits, width.saturating_sub(sign.len()), '0', "rjust")).into())
        }
        "isdigit" | "isdecimal" | "isnumeric" => {
            args.none(name)?;
            of_class(value, name, char::is_ascii_digit)
        }
        "isalpha" => args.none(name).and_then(|()| of_class(value, name, char::is_ascii_alphabetic)),
        "isalnum" => args.none(name).and_then(|()| of_class(value, name, char::is_ascii_alphanumeric)),
        "isascii" => args.none(name).map(|()| text.is_ascii().into()),
        "isspace" => args.none(name).map(|()| (!text.is_empty() && text.chars().all(is_space)).into()),
        "islower" => args.none(name).map(|()| is_lower(text).into()),
        "isupper" => args.none(name).map(|()| is_upper(text).into()),
        _ => Err(unsupported(value, name)),
    }
}

/// Returns Python's `text.islower()`.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Returns Python's `text.isupper()`.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Returns `text.replace(old, new, count)`.
pub(super) fn replaced(text: &str, old: &Value, new: &Value, count: Option<Value>) -> Result<Value, Error> {
    if old.is_safe() || new.is_safe() {
        return Err(refused("replace with an escaped text is not supported"));
    }
    let (old, new) = (string(old)?, string(new)?);
    let count = count.filter(|count| !count.is_none()).map_or(Ok(-1), |count| integer("replace", &count))?;
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(text.matches(old).count());
    check_length(text.len().saturating_add(count.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, count).into())
}
