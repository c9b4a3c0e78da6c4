//! Jinja2's filters.

use std::cmp::Ordering;

use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error};

use super::format::printf;
use super::methods::{capitalized, is_space, padded, pair_tuples, replaced, split_lines, strip};
use super::operators::{add, check_nesting, item};
use super::tests::call as test;
use super::values::{
    Json, Number, View, compare, equal, int, integer, is_dict, is_unhashable, items, length, pairs, sort, string, text,
};
use super::{Args, call_args, check_length, given, is_set, refused, type_of};

const FILTERS: &str = "abs batch capitalize center count d default dictsort e escape first float format indent int items join last \
                       length list lower map max min reject rejectattr replace reverse round safe select selectattr sort \
                       string sum title tojson trim truncate unique upper";

/// Filters that accept an escaped text.
const OF_ESCAPED: &str = "count d default e escape first length list safe string tojson trim";

/// Adds the filters to an environment.
pub(super) fn register(environment: &mut Environment<'static>) {
    for name in FILTERS.split_whitespace() {
        environment
            .add_filter(name, move |value: Value, args: Rest<ValueOrKwargs>| call(name, &value, call_args(args)?));
    }
}

fn call(name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    if !FILTERS.split_whitespace().any(|known| known == name) {
        return Err(refused(format!("the filter {name} is not supported")));
    }
    if value.is_safe() && !OF_ESCAPED.split_whitespace().any(|known| known == name) {
        return Err(refused(format!("the filter {name} of an escaped text is not supported")));
    }
    match name {
        "tojson" => Json::filter(value, args),
        "d" | "default" => {
            let [default, falsy] = args.bind(name, ["default_value", "boolean"], 0)?;
            let is_missing = value.is_undefined() || falsy.is_some_and(|falsy| falsy.is_true()) && !value.is_true();
            Ok(if is_missing { default.unwrap_or_else(|| "".into()) } else { value.clone() })
        }
        "length" | "count" => args.none(name).and_then(|()| Ok(length(value)?.into())),
        "map" | "select" | "reject" | "selectattr" | "rejectattr" => of_items(name, value, args),
        "dictsort" | "items" | "sort" | "unique" | "min" | "max" | "sum" | "first" | "last" | "list" | "batch"
        | "reverse" | "join" => of_iterable(name, value, args),
        "abs" | "int" | "float" | "round" => of_number(name, value, args),
        _ => of_text(name, value, args),
    }
}

fn of_text(name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    if matches!(name, "safe" | "e" | "escape" | "string") {
        args.none(name)?;
        return match name {
            _ if value.is_safe() => Ok(value.clone()),
            "string" => Ok(text(value)?.into()),
            "safe" => Ok(Value::from_safe_string(text(value)?)),
            _ => {
                let escaped = text(value)?.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
                Ok(Value::from_safe_string(escaped.replace('\'', "&#39;").replace('"', "&#34;")))
            }
        };
    }
    if name == "indent" && value.is_undefined() {
        return Err(refused("the filter indent does not apply to undefined"));
    }
    if matches!(name, "indent" | "truncate") && value.as_str().is_none() && !value.is_undefined() {
        return Err(refused(format!("the filter {name} needs a str, but got {}", type_of(value))));
    }
    let text = text(value)?;
    match name {
        "upper" => args.none(name).map(|()| text.to_uppercase().into()),
        "lower" => args.none(name).map(|()| text.to_lowercase().into()),
        "capitalize" => args.none(name).and_then(|()| Ok(capitalized(&text)?.into())),
        "title" => {
            args.none(name)?;
            let is_edge = |c: char| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
            let mut out = String::new();
            for part in text.split_inclusive(is_edge) {
                let word = part.trim_end_matches(is_edge);
                let mut chars = word.chars();
                if let Some(first) = chars.next() {
                    out.extend(first.to_uppercase());
                    out.push_str(&chars.as_str().to_lowercase());
                }
                out.push_str(&part[word.len()..]);
            }
            Ok(out.into())
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let trimmed = strip(&text, chars.as_ref(), (true, true))?;
            Ok(if value.is_safe() { Value::from_safe_string(trimmed.to_owned()) } else { trimmed.into() })
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let part = |part: Option<Value>| match part {
                Some(part) if part.is_safe() => Ok(part),
                part => Ok::<_, Error>(Value::from(super::values::text(&part.unwrap_or_default())?)),
            };
            replaced(&text, &part(old)?, &part(new)?, count)
        }
        "format" => {
            if !args.named.is_empty() {
                return Err(refused("format with named arguments is not supported"));
            }
            printf(&text.into(), &Value::from(Tuple::from(args.positional)))
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            let width = width.map_or(Ok(80), |width| integer(name, &width))?;
            Ok(padded(&text, width.clamp(0, 100_000) as usize, ' ', name).into())
        }
        "indent" => {
            let [width, first, blank] = args.bind(name, ["width", "first", "blank"], 0)?;
            let indention = match width {
                Some(width) if width.as_str().is_some() => string(&width)?.to_owned(),
                width => " ".repeat(width.map_or(Ok(4), |width| integer(name, &width))?.clamp(0, 1000) as usize),
            };
            let blank = is_set(blank);
            let mut out = String::new();
            for (i, line) in split_lines(&(text + "\n"), false).into_iter().enumerate() {
                if i > 0 {
                    out.push('\n');
                    out.push_str(if blank || !line.is_empty() { &indention } else { "" });
                }
                out.push_str(line);
            }
            Ok(if is_set(first) { indention + &out } else { out }.into())
        }
        _ => {
            let [length, kill, end, leeway] = args.bind(name, ["length", "killwords", "end", "leeway"], 0)?;
            let number = |value: Option<Value>, default: i128| {
                let value = given(value).map_or(Ok(default), |value| integer("truncate", &value))?;
                Ok::<_, Error>(value.clamp(0, 1 << 40) as usize)
            };
            let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
            let end = end.unwrap_or_else(|| "...".into());
            let end = string(&end)?;
            let chars: Vec<char> = text.chars().collect();
            let Some(kept) = length.checked_sub(end.chars().count()) else {
                return Err(refused("the filter truncate needs a length of at least its end"));
            };
            if chars.len() <= length + leeway {
                return Ok(value.clone());
            }
            let kept: String = chars[..kept].iter().collect();
            let kept = if is_set(kill) { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(kept, _)| kept) };
            Ok(format!("{kept}{end}").into())
        }
    }
}

fn of_number(name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    let impossible = || refused(format!("the filter {name} does not apply to {}", type_of(value)));
    let number = Number::of(value);
    match name {
        "abs" => match args.none(name).map(|()| number)? {
            Some(Number::Int(a)) => {
                a.checked_abs().map(int).ok_or_else(|| refused("an integer of more than 127 bits is not supported"))
            }
            Some(Number::Float(a)) => Ok(a.abs().into()),
            None => Err(impossible()),
        },
        "round" => {
            let [precision, method] = args.bind(name, ["precision", "method"], 0)?;
            let precision = precision.map_or(Ok(0), |precision| integer(name, &precision))?;
            if method.is_some_and(|method| method.as_str() != Some("common")) || !(0..=15).contains(&precision) {
                return Err(refused("the filter round is only supported with method common and precision 0 to 15"));
            }
            match number.ok_or_else(impossible)? {
                Number::Int(a) => Ok(int(a)),
                Number::Float(a) if a.is_finite() => {
                    let rounded = format!("{a:.*}", precision as usize);
                    Ok(rounded.parse::<f64>().map_err(|_| impossible())?.into())
                }
                Number::Float(_) => Err(impossible()),
            }
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            let default = default.unwrap_or_else(|| Value::from(0.));
            match (number, value.as_str()) {
                (Some(number), _) => Ok(number.float().into()),
                (None, Some(text)) => Ok(parse_float(text)?.map_or(default, Value::from)),
                (None, None) if value.is_undefined() => Err(impossible()),
                (None, None) => Ok(default),
            }
        }
        _ => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            let default = default.unwrap_or_else(|| Value::from(0));
            let base = base.map_or(Ok(10), |base| integer(name, &base))?;
            if base != 10 {
                return Err(refused("the filter int is only supported with base 10"));
            }
            match (number, value.as_str()) {
                (Some(Number::Int(a)), _) => Ok(int(a)),
                (Some(Number::Float(a)), _) => truncated(a, default),
                (None, Some(text)) => match parse_int(text)? {
                    Some(a) => Ok(int(a)),
                    None => parse_float(text)?.map_or(Ok(default.clone()), |a| truncated(a, default)),
                },
                (None, None) if value.is_undefined() => Err(impossible()),
                (None, None) => Ok(default),
            }
        }
    }
}

fn truncated(float: f64, default: Value) -> Result<Value, Error> {
    match float {
        float if float.is_nan() => Ok(default),
        float if float.abs() < 1e38 => Ok(int(float as i128)),
        _ => Err(refused("a float beyond 127 bits can't be made an integer")),
    }
}

/// Fails for digits in other scripts and for underscores, which Python reads too.
fn plain_number(text: &str) -> Result<&str, Error> {
    let text = text.trim_matches(is_space);
    match text.chars().any(|c| c == '_' || !c.is_ascii() && c.is_numeric()) {
        true => Err(refused("a number with underscores or with digits beyond 0 to 9 is not supported")),
        false => Ok(text),
    }
}

fn parse_int(text: &str) -> Result<Option<i128>, Error> {
    let text = plain_number(text)?;
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| refused("an integer of more than 127 bits is not supported"))
}

fn parse_float(text: &str) -> Result<Option<f64>, Error> {
    Ok(plain_number(text)?.parse().ok())
}

/// Returns the value of an attribute such as `a.b`, or of an index.
fn path(value: &Value, attribute: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let mut found = value.clone();
    let parts: Vec<Value> = match attribute.as_str() {
        Some(path) => path
            .split('.')
            .map(|part| match part.parse::<i64>() {
                Ok(index) if part.bytes().all(|b| b.is_ascii_digit()) => Value::from(index),
                _ => part.into(),
            })
            .collect(),
        None => vec![attribute.clone()],
    };
    for part in parts {
        found = item(&found, &part)?;
        if let (true, Some(default)) = (found.is_undefined(), default) {
            found = default.clone();
        }
    }
    Ok(found)
}

fn of_items(name: &str, value: &Value, mut args: Args) -> Result<Value, Error> {
    let all =
        match value.is_undefined() || value.is_true() || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            true => items(value)?,
            // `map` and the others test whether the value is true first.
            false => vec![],
        };
    let first = |args: &mut Args| match args.positional.is_empty() {
        true => Err(refused(format!("the filter {name} needs an argument"))),
        false => Ok(args.positional.remove(0)),
    };
    if name == "map" {
        if args.positional.is_empty() {
            let [attribute, default] = args.bind(name, ["attribute", "default"], 1)?;
            let (attribute, default) = (attribute.unwrap_or_default(), given(default));
            let found = all.iter().map(|item| path(item, &attribute, default.as_ref()));
            return Ok(View::value("generator", found.collect::<Result<_, Error>>()?));
        }
        let filter = first(&mut args)?;
        let filter = string(&filter)?;
        let mapped = all.iter().map(|item| call(filter, item, args.clone()));
        return Ok(View::value("generator", mapped.collect::<Result<_, Error>>()?));
    }
    let attribute = if name.ends_with("attr") { Some(first(&mut args)?) } else { None };
    let named = match args.positional.is_empty() {
        true => None,
        false => Some(first(&mut args)?),
    };
    let mut kept = vec![];
    for one in all {
        let tested = attribute.as_ref().map_or_else(|| Ok(one.clone()), |attribute| path(&one, attribute, None))?;
        let holds = match &named {
            Some(named) => test(string(named)?, &tested, args.clone())?,
            None => tested.is_true(),
        };
        if holds == name.starts_with("select") {
            kept.push(one);
        }
    }
    Ok(View::value("generator", kept))
}

/// Returns the key by which items are compared: an attribute of them, in lower case.
fn sort_key(value: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let key = attribute.map_or_else(|| Ok(value.clone()), |attribute| path(value, attribute, None))?;
    Ok(match key.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => key,
    })
}

fn of_iterable(name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    match name {
        "list" => args.none(name).and_then(|()| Ok(items(value)?.into())),
        "first" => args.none(name).and_then(|()| Ok(items(value)?.into_iter().next().unwrap_or_default())),
        "last" => {
            args.none(name)?;
            match value.downcast_object_ref::<View>() {
                Some(view) if view.is_once() => Err(refused(format!("{} has no last item: add | list", view.kind))),
                _ => Ok(items(value)?.pop().unwrap_or_default()),
            }
        }
        "items" => {
            args.none(name)?;
            match value.is_undefined() || is_dict(value) {
                true => Ok(View::value("generator", pair_tuples(value))),
                false => Err(refused(format!("the filter items needs a dict, but got {}", type_of(value)))),
            }
        }
        "reverse" => {
            args.none(name)?;
            if let Some(text) = value.as_str() {
                return Ok(text.chars().rev().collect::<String>().into());
            }
            let mut all = items(value)?;
            all.reverse();
            Ok(View::value("reversed", all))
        }
        "join" => {
            let [separator, attribute] = args.bind(name, ["d", "attribute"], 0)?;
            let separator = text(&separator.unwrap_or_else(|| "".into()))?;
            let parts = items(value)?.into_iter().map(|item| match given(attribute.clone()) {
                Some(attribute) => text(&path(&item, &attribute, None)?),
                None => text(&item),
            });
            let parts = parts.collect::<Result<Vec<_>, Error>>()?;
            check_length(parts.iter().map(|part| part.len() + separator.len()).sum())?;
            Ok(parts.join(&separator).into())
        }
        "batch" => {
            let [size, fill] = args.bind(name, ["linecount", "fill_with"], 1)?;
            let size = integer(name, &size.unwrap_or_default())?;
            let Some(size) = usize::try_from(size).ok().filter(|size| *size > 0) else {
                return Err(refused("the filter batch needs a size of at least 1"));
            };
            let mut batches: Vec<Vec<Value>> = items(value)?.chunks(size).map(<[Value]>::to_vec).collect();
            if let (Some(fill), Some(last)) = (given(fill), batches.last_mut()) {
                check_length(size)?;
                last.resize(size, fill);
            }
            check_nesting(value, 0, &mut LARGEST_BATCHES.clone())?;
            Ok(View::value("generator", batches.into_iter().map(Value::from).collect()))
        }
        "dictsort" => {
            let [case_sensitive, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
            if !is_dict(value) {
                return Err(refused(format!("the filter dictsort needs a dict, but got {}", type_of(value))));
            }
            let case_sensitive = is_set(case_sensitive);
            let by_value = match by.as_ref().map_or(Some("key"), Value::as_str) {
                Some("key") => false,
                Some("value") => true,
                _ => return Err(refused("the filter dictsort sorts by key or by value")),
            };
            let keyed = pairs(value).into_iter().map(|(key, value)| {
                let by = sort_key(if by_value { &value } else { &key }, None, case_sensitive)?;
                Ok((by, Value::from(Tuple::from([key, value]))))
            });
            sorted(keyed.collect::<Result<_, Error>>()?, is_set(reverse))
        }
        "sort" => {
            let [reverse, case_sensitive, attribute] =
                args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let (attribute, case_sensitive) = (given(attribute), is_set(case_sensitive));
            if attribute.as_ref().and_then(Value::as_str).is_some_and(|attribute| attribute.contains(',')) {
                return Err(refused("the filter sort by several attributes is not supported"));
            }
            let keyed =
                items(value)?.into_iter().map(|item| Ok((sort_key(&item, attribute.as_ref(), case_sensitive)?, item)));
            sorted(keyed.collect::<Result<_, Error>>()?, is_set(reverse))
        }
        "unique" => {
            let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let (attribute, case_sensitive) = (given(attribute), is_set(case_sensitive));
            let (mut seen, mut kept) = (Vec::<Value>::new(), vec![]);
            'items: for item in items(value)? {
                let key = sort_key(&item, attribute.as_ref(), case_sensitive)?;
                if is_unhashable(&key) {
                    return Err(refused(format!("the filter unique does not apply to {}", type_of(&key))));
                }
                for other in &seen {
                    if equal(other, &key)? {
                        continue 'items;
                    }
                }
                if seen.len() == MOST_UNIQUE {
                    return Err(refused(format!("the filter unique is only supported for up to {MOST_UNIQUE} values")));
                }
                seen.push(key);
                kept.push(item);
            }
            Ok(View::value("generator", kept))
        }
        "min" | "max" => {
            let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let (attribute, case_sensitive) = (given(attribute), is_set(case_sensitive));
            let better = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best: Option<(Value, Value)> = None;
            for item in items(value)? {
                let key = sort_key(&item, attribute.as_ref(), case_sensitive)?;
                let is_better = match &best {
                    Some((other, _)) => compare(&key, other)? == Some(better),
                    None => true,
                };
                if is_better {
                    best = Some((key, item));
                }
            }
            Ok(best.map(|(_, item)| item).unwrap_or_default())
        }
        _ => {
            let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
            let mut sum = start.unwrap_or_else(|| Value::from(0));
            if sum.as_str().is_some() {
                return Err(refused("the filter sum does not apply to texts"));
            }
            for item in items(value)? {
                let item =
                    given(attribute.clone()).map_or_else(|| Ok(item.clone()), |path_of| path(&item, &path_of, None))?;
                sum = add(&sum, &item)?;
            }
            Ok(sum)
        }
    }
}

/// Most values in a list of batches.
const LARGEST_BATCHES: usize = 100_000;

/// Each value is compared with all before it.
const MOST_UNIQUE: usize = 10_000;

fn sorted(keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Value, Error> {
    let keyed = sort(keyed, &|a, b| if reverse { compare(&b.0, &a.0) } else { compare(&a.0, &b.0) })?;
    Ok(keyed.into_iter().map(|(_, item)| item).collect::<Vec<_>>().into())
}
