//! What a pickle makes: values in an arena.

use std::fmt::{Display, Formatter};

/// A value of a pickle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::torch) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// What exceeds an `i64`.
    Unsigned(u64),
    Float(f64),
    /// What is larger is in the arena.
    Node(u32),
}

/// A value that others may refer to.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::torch) enum Node<'a> {
    Str(&'a str),
    Bytes(&'a [u8]),
    /// A whole number of more than 64 bits; so many bytes.
    Long(usize),
    /// Sets are lists as well.
    List(Vec<Value>),
    /// `torch.Size` is a tuple.
    Tuple(Vec<Value>),
    /// `collections.OrderedDict` is a dict. A key may come several times.
    Dict(Vec<(Value, Value)>),
    /// An allowed name.
    Global(&'static str),
    /// What calling `class` would make, had there been a call.
    Object {
        class: &'static str,
        args: Value,
        state: Value,
    },
    /// Something outside of the pickle.
    Persistent(Value),
}

/// What is wrong with a pickle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::torch) enum Flaw {
    /// It uses a name that is not allowed.
    Refused {
        name: String,
    },
    Damaged {
        at: usize,
        reason: String,
    },
}

impl Display for Flaw {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Flaw::Refused { name } => write!(
                f,
                "its pickle uses {name}, which tensors and plain values don't need; it is refused, and was not run. \
                 Save a dict of tensors, numbers, strings, lists and dicts only"
            ),
            Flaw::Damaged { at, reason } => write!(f, "its pickle can't be read at byte {at}: {reason}"),
        }
    }
}

/// A whole pickle.
#[derive(Debug)]
pub(in crate::torch) struct Pickle<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) root: Value,
    pub(super) bytes: usize,
}

impl<'a> Pickle<'a> {
    /// What the pickle is of.
    pub(in crate::torch) fn root(&self) -> Value {
        self.root
    }

    /// Its size in bytes: no honest walk over it takes many more steps.
    pub(in crate::torch) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(in crate::torch) fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    pub(in crate::torch) fn str(&self, value: Value) -> Option<&'a str> {
        match self.node(value) {
            Some(Node::Str(text)) => Some(text),
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub(in crate::torch) fn items(&self, value: Value) -> Option<&[Value]> {
        match self.node(value) {
            Some(Node::List(items) | Node::Tuple(items)) => Some(items),
            _ => None,
        }
    }

    pub(in crate::torch) fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value) {
            Some(Node::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// An allowed name.
    pub(in crate::torch) fn global(&self, value: Value) -> Option<&'static str> {
        match self.node(value) {
            Some(Node::Global(name)) => Some(name),
            _ => None,
        }
    }

    /// The class, arguments and state of an object.
    pub(in crate::torch) fn object(&self, value: Value) -> Option<(&'static str, &[Value], Value)> {
        match self.node(value) {
            Some(Node::Object { class, args, state }) => Some((class, self.items(*args).unwrap_or_default(), *state)),
            _ => None,
        }
    }

    /// A field of an object whose state is a dict of 64 fields at most; `None` where it has none of this name.
    pub(in crate::torch) fn field(&self, value: Value, name: &str) -> Option<Value> {
        let (_, _, state) = self.object(value)?;
        let pairs = self.dict(state).filter(|pairs| pairs.len() <= 64)?;
        pairs.iter().rev().find(|(key, _)| self.str(*key) == Some(name)).map(|(_, value)| *value)
    }

    /// A list or tuple of numbers that are not negative, of at most 64, which is more than any tensor's dimensions.
    pub(in crate::torch) fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        let items = self.items(value).filter(|items| items.len() <= 64)?;
        items.iter().map(|item| self.size(*item)).collect()
    }

    /// A number that is not negative.
    pub(in crate::torch) fn size(&self, value: Value) -> Option<usize> {
        match value {
            Value::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    /// What a value is, for messages.
    pub(in crate::torch) fn describe(&self, value: Value) -> String {
        match value {
            Value::None => "None".into(),
            Value::Bool(value) => value.to_string(),
            Value::Int(value) => value.to_string(),
            Value::Unsigned(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Node(_) => match self.node(value) {
                Some(Node::Str(_)) => "a string".into(),
                Some(Node::Bytes(_)) => "bytes".into(),
                Some(Node::Long(bytes)) => format!("a whole number of {bytes} bytes"),
                Some(Node::List(_)) => "a list".into(),
                Some(Node::Tuple(_)) => "a tuple".into(),
                Some(Node::Dict(_)) => "a dict".into(),
                Some(Node::Global(name)) => (*name).to_string(),
                Some(Node::Object { class, .. }) => format!("an object of {class}"),
                Some(Node::Persistent(_)) => "a storage".into(),
                None => "nothing".into(),
            },
        }
    }
}
