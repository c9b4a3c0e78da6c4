//! Jinja2 as transformers sets it up, on MiniJinja.
//!
//! MiniJinja parses and runs a template. Its operators, filters, tests and methods differ from Python's in details, such
//! as the text of a float or the order of values of different types. `rewrite` replaces each operator by a call of a
//! function of `operators`, and `filters`, `tests` and `methods` replace the built-in ones. `values` has Python's texts,
//! JSON and comparisons. Missing constructs are refused by name, because a model would learn a different text.

use std::collections::BTreeMap;

use minijinja::machinery::{CodeGenerator, Instructions, eval, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};

use self::values::{is_dict, text};

mod filters;
mod format;
mod methods;
mod operators;
mod rewrite;
mod tests;
pub(super) mod values;

/// Instruction limit against endless loops. A conversation of a thousand messages takes a thousandth of it.
const FUEL: u64 = 100_000_000;

const NAME: &str = "chat template";

/// A compiled template.
pub(super) struct Program {
    environment: Environment<'static>,
    instructions: Instructions<'static>,
}

impl Program {
    /// Compiles a template whose source has no line ends but `\n`. Its source stays in memory, as a process has one or
    /// two templates.
    pub(super) fn new(source: &str, globals: impl IntoIterator<Item = (String, String)>) -> Result<Self, Error> {
        let mut environment = Environment::empty();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax.clone());
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_formatter(|out, _, value| out.write_str(&text(value)?).map_err(Error::from));
        environment.set_unknown_method_callback(|_, value, name, args| methods::call(value, name, Args::new(args)?));
        operators::register(&mut environment);
        filters::register(&mut environment);
        tests::register(&mut environment);
        environment.add_function("namespace", minijinja::functions::namespace);
        for name in ["cycler", "joiner", "lipsum"] {
            environment.add_function(name, move |_: Rest<ValueOrKwargs>| -> Result<Value, Error> {
                Err(refused(format!("the function {name} is not supported")))
            });
        }
        environment
            .add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(refused(message)) });
        environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
            jiff::fmt::strtime::format(&format, &jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC))
                .map_err(|error| refused(error.to_string()))
        });
        for (name, token) in globals {
            environment.add_global(name, Value::from(token));
        }
        let source: &'static str = source.to_owned().leak();
        rewrite::check_escapes(source, syntax.clone())?;
        let parsed = parse(source, NAME, syntax)?;
        let mut generator = CodeGenerator::new(NAME, source);
        generator.compile_stmt(&rewrite::template(&parsed)?);
        let (instructions, _) = generator.finish();
        Ok(Program { environment, instructions })
    }

    /// Renders the template with these variables.
    pub(super) fn render(&self, variables: BTreeMap<String, Value>) -> Result<String, Error> {
        let mut out = String::new();
        let no_blocks = BTreeMap::new();
        eval(
            &self.environment,
            &self.instructions,
            Value::from(variables),
            &no_blocks,
            &mut make_string_output(&mut out),
            AutoEscape::None,
        )?;
        Ok(out)
    }
}

/// Makes an error.
fn refused(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Arguments of a filter, test, function or method.
#[derive(Clone)]
struct Args {
    positional: Vec<Value>,
    named: Vec<(String, Value)>,
}

impl Args {
    fn new(args: &[Value]) -> Result<Self, Error> {
        let (positional, named) = match args.split_last() {
            Some((last, before)) if last.is_kwargs() => (before, Kwargs::try_from(last.clone())?),
            _ => (args, Kwargs::from_iter(std::iter::empty::<(&str, Value)>())),
        };
        let named = named.args().map(|name| Ok((name.to_owned(), named.get(name)?))).collect::<Result<_, Error>>()?;
        Ok(Args { positional: positional.to_vec(), named })
    }

    /// Assigns the arguments to parameters of a Python function. The first `required` of them have no default.
    fn bind<const N: usize>(
        self,
        function: &str,
        parameters: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N], Error> {
        let mut bound: [Option<Value>; N] = std::array::from_fn(|_| None);
        if self.positional.len() > N {
            return Err(refused(format!("{function} takes at most {N} arguments, but got {}", self.positional.len())));
        }
        for (to, value) in bound.iter_mut().zip(self.positional) {
            *to = Some(value);
        }
        for (name, value) in self.named {
            match parameters.iter().position(|parameter| *parameter == name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                Some(_) => return Err(refused(format!("{function} got the argument {name} twice"))),
                None => return Err(refused(format!("the argument {name} of {function} is not supported"))),
            }
        }
        match bound[..required].iter().position(Option::is_none) {
            Some(missing) => Err(refused(format!("{function} needs the argument {}", parameters[missing]))),
            None => Ok(bound),
        }
    }

    /// Fails if there are arguments.
    fn none(self, function: &str) -> Result<(), Error> {
        self.bind::<0>(function, [], 0).map(|_| ())
    }
}

/// Collects the arguments of a call.
fn call_args(args: Rest<ValueOrKwargs>) -> Result<Args, Error> {
    Args::new(&args.into_values())
}

/// Returns the Python name of a value's type, for messages.
fn type_of(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "undefined",
        ValueKind::None => "None",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Seq if value.is_tuple() => "tuple",
        ValueKind::Seq => "list",
        ValueKind::Map if is_dict(value) => "dict",
        ValueKind::Iterable => value.downcast_object_ref::<values::View>().map_or("iterator", |view| view.kind),
        _ => "object",
    }
}

/// Returns an argument that is not none.
fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}

/// Returns whether an argument is true.
fn is_set(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// Longest text or list that a template makes.
const LONGEST: usize = 10_000_000;

/// Fails for the length of a text or list that is too long. Doubling in a loop would fill the memory.
fn check_length(length: usize) -> Result<(), Error> {
    if length > LONGEST { Err(refused("a text or list is longer than 10000000")) } else { Ok(()) }
}

/// Returns whether a value can be called in Python.
fn is_callable(value: &Value) -> bool {
    value.is_undefined() || value.kind() == ValueKind::Plain
}
