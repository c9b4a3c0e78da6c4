//! Unpickling without running code.
//!
//! A machine builds values, and never imports or calls anything. Names of classes and functions come from a list and
//! stay names. Values are in an arena and refer to each other by index. So a pickle that repeats its parts stays as
//! small as its bytes, and cycles do not leak. Callers must limit their walks over values.

use std::collections::HashMap;
use std::fmt::{Display, Formatter};

/// A value of a pickle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::torch) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond `i64`.
    Unsigned(u64),
    Float(f64),
    /// Index of a larger value in the arena.
    Node(u32),
}

/// A value in the arena.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::torch) enum Node<'a> {
    Str(&'a str),
    Bytes(&'a [u8]),
    /// An integer of this many bytes, more than 8.
    Long(usize),
    /// A list or a set.
    List(Vec<Value>),
    /// A tuple or `torch.Size`.
    Tuple(Vec<Value>),
    /// A dict or `collections.OrderedDict`. Keys may repeat.
    Dict(Vec<(Value, Value)>),
    /// An allowed name.
    Global(&'static str),
    /// A call of `class` that was not executed.
    Object {
        class: &'static str,
        args: Value,
        state: Value,
    },
    /// A persistent ID: a storage outside of the pickle.
    Persistent(Value),
}

/// Why a pickle can't be read.
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
                "its pickle uses {name}, which tensors and plain values don't need; it was refused and was not run. \
                 Save a dict of tensors, numbers, strings, lists and dicts only"
            ),
            Flaw::Damaged { at, reason } => write!(f, "its pickle can't be read at byte {at}: {reason}"),
        }
    }
}

/// A parsed pickle.
#[derive(Debug)]
pub(in crate::torch) struct Pickle<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) root: Value,
    pub(super) bytes: usize,
}

impl<'a> Pickle<'a> {
    /// Returns the pickled value.
    pub(in crate::torch) fn root(&self) -> Value {
        self.root
    }

    /// Returns the size of the pickle in bytes, to limit walks.
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

    /// Returns the items of a list or tuple.
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

    /// Returns an allowed name.
    pub(in crate::torch) fn global(&self, value: Value) -> Option<&'static str> {
        match self.node(value) {
            Some(Node::Global(name)) => Some(name),
            _ => None,
        }
    }

    /// Returns the class, arguments and state of an object.
    pub(in crate::torch) fn object(&self, value: Value) -> Option<(&'static str, &[Value], Value)> {
        match self.node(value) {
            Some(Node::Object { class, args, state }) => Some((class, self.items(*args).unwrap_or_default(), *state)),
            _ => None,
        }
    }

    /// Returns a field of an object whose state is a dict of at most 64 fields.
    pub(in crate::torch) fn field(&self, value: Value, name: &str) -> Option<Value> {
        let (_, _, state) = self.object(value)?;
        let pairs = self.dict(state).filter(|pairs| pairs.len() <= 64)?;
        pairs.iter().rev().find(|(key, _)| self.str(*key) == Some(name)).map(|(_, value)| *value)
    }

    /// Returns a list or tuple of at most 64 non-negative integers, such as a shape.
    pub(in crate::torch) fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        let items = self.items(value).filter(|items| items.len() <= 64)?;
        items.iter().map(|item| self.size(*item)).collect()
    }

    /// Returns a non-negative integer.
    pub(in crate::torch) fn size(&self, value: Value) -> Option<usize> {
        match value {
            Value::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    /// Describes a value for messages.
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

impl<'a> Pickle<'a> {
    /// Parses a pickle of protocol 2 to 5. Needs at most about 100 times the memory of `bytes`, and 5 times for files
    /// that PyTorch writes.
    pub(in crate::torch) fn parse(bytes: &'a [u8]) -> Result<Self, Flaw> {
        let mut machine = Machine {
            bytes,
            at: 0,
            start: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        loop {
            machine.start = machine.at;
            let op = machine.byte()?;
            if op == b'.' {
                let root = machine.pop()?;
                return Ok(Pickle { nodes: machine.nodes, root, bytes: bytes.len() });
            }
            machine.step(op)?;
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of the current operation.
    start: usize,
    nodes: Vec<Node<'a>>,
    stack: Vec<Value>,
    /// Stack heights at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    fn step(&mut self, op: u8) -> Result<(), Flaw> {
        match op {
            // PROTO
            0x80 => match self.byte()? {
                2..=5 => {}
                other => return self.fail(format!("its protocol is {other}, expected 2 to 5")),
            },
            // FRAME: its contents follow
            0x95 => drop(self.length(8)?),
            // MARK
            b'(' => self.marks.push(self.stack.len()),
            // POP, POP_MARK, DUP
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.pop()?;
                self.stack.extend([top, top]);
            }
            b'N' => self.stack.push(Value::None),
            0x88 => self.stack.push(Value::Bool(true)),
            0x89 => self.stack.push(Value::Bool(false)),
            // BININT, BININT1, BININT2, LONG1, LONG4
            b'J' => {
                let number = i32::from_le_bytes(self.array()?);
                self.stack.push(Value::Int(number.into()));
            }
            b'K' => {
                let number = self.byte()?;
                self.stack.push(Value::Int(number.into()));
            }
            b'M' => {
                let number = u16::from_le_bytes(self.array()?);
                self.stack.push(Value::Int(number.into()));
            }
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            // BINFLOAT
            b'G' => {
                let number = f64::from_be_bytes(self.array()?);
                self.stack.push(Value::Float(number));
            }
            // BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
            b'X' => self.text(4)?,
            0x8c => self.text(1)?,
            0x8d => self.text(8)?,
            // BINSTRING, SHORT_BINSTRING: Python 2's strings
            b'T' => self.string(4)?,
            b'U' => self.string(1)?,
            // BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8
            b'B' => self.binary(4)?,
            b'C' => self.binary(1)?,
            0x8e | 0x96 => self.binary(8)?,
            // EMPTY_LIST, EMPTY_TUPLE, EMPTY_DICT, EMPTY_SET
            b']' | 0x8f => self.push(Node::List(Vec::new()))?,
            b')' => self.push(Node::Tuple(Vec::new()))?,
            b'}' => self.push(Node::Dict(Vec::new()))?,
            // TUPLE, TUPLE1, TUPLE2, TUPLE3
            b't' => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items))?;
            }
            0x85..=0x87 => {
                let items = self.pop_many(usize::from(op - 0x84))?;
                self.push(Node::Tuple(items))?;
            }
            // LIST, FROZENSET, DICT
            b'l' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(Node::List(items))?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = self.pairs(&items)?;
                self.push(Node::Dict(pairs))?;
            }
            // APPEND, APPENDS, ADDITEMS
            b'a' => {
                let items = self.pop_many(1)?;
                self.append(items)?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            // SETITEM, SETITEMS
            b's' => {
                let items = self.pop_many(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            // BINGET, LONG_BINGET, BINPUT, LONG_BINPUT, MEMOIZE
            b'h' => {
                let key = self.byte()?;
                self.get(key.into())?;
            }
            b'j' => {
                let key = u32::from_le_bytes(self.array()?);
                self.get(key)?;
            }
            b'q' => {
                let key = self.byte()?;
                self.put(key.into())?;
            }
            b'r' => {
                let key = u32::from_le_bytes(self.array()?);
                self.put(key)?;
            }
            0x94 => self.put(self.memo.len() as u32)?,
            // GLOBAL, STACK_GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => {
                let names = self.pop_many(2)?;
                match (self.text_of(names[0]), self.text_of(names[1])) {
                    (Some(module), Some(name)) => self.global(module, name)?,
                    _ => return self.fail("a name is not a string"),
                }
            }
            // REDUCE, NEWOBJ
            b'R' | 0x81 => {
                let args = self.pop()?;
                let class = self.pop()?;
                self.object(class, args)?;
            }
            // NEWOBJ_EX: no allowed class has keyword arguments
            0x92 => {
                let keywords = self.pop()?;
                if !matches!(self.node(keywords), Some(Node::Dict(pairs)) if pairs.is_empty()) {
                    return self.fail("an object with keyword arguments");
                }
                let args = self.pop()?;
                let class = self.pop()?;
                self.object(class, args)?;
            }
            b'b' => self.build()?,
            // BINPERSID
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }
            other => return self.fail(format!("operation 0x{other:02x} is not supported")),
        }
        Ok(())
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, Flaw> {
        Err(Flaw::Damaged { at: self.start, reason: reason.into() })
    }

    // Reading bytes.

    fn take(&mut self, count: usize) -> Result<&'a [u8], Flaw> {
        let left = self.bytes.len() - self.at;
        if count > left {
            return self.fail(format!("it needs {count} more bytes, but has {left}"));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, Flaw> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Flaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Reads a length in `width` bytes. A length beyond `usize` is also beyond the pickle.
    fn length(&mut self, width: usize) -> Result<usize, Flaw> {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(self.take(width)?);
        Ok(usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX))
    }

    fn counted(&mut self, width: usize) -> Result<&'a [u8], Flaw> {
        let count = self.length(width)?;
        self.take(count)
    }

    fn line(&mut self) -> Result<&'a str, Flaw> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|&byte| byte == b'\n') else { return self.fail("a name does not end") };
        self.at += end + 1;
        match std::str::from_utf8(&rest[..end]) {
            Ok(line) => Ok(line),
            Err(_) => self.fail("a name is not UTF-8"),
        }
    }

    fn long(&mut self, width: usize) -> Result<(), Flaw> {
        let bytes = self.counted(width)?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let fill = if negative { 0xff } else { 0 };
        let mut number = [fill; 8];
        let (low, high) = bytes.split_at(bytes.len().min(8));
        number[..low.len()].copy_from_slice(low);
        let signed = i64::from_le_bytes(number);
        let is_small = high.iter().all(|&byte| byte == fill);
        match (is_small, signed < 0) {
            (true, sign) if sign == negative => self.stack.push(Value::Int(signed)),
            (true, true) => self.stack.push(Value::Unsigned(u64::from_le_bytes(number))),
            _ => self.push(Node::Long(bytes.len()))?,
        }
        Ok(())
    }

    fn text(&mut self, width: usize) -> Result<(), Flaw> {
        let bytes = self.counted(width)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => self.push(Node::Str(text)),
            Err(_) => self.fail("a string is not UTF-8"),
        }
    }

    fn string(&mut self, width: usize) -> Result<(), Flaw> {
        let bytes = self.counted(width)?;
        self.push(std::str::from_utf8(bytes).map_or(Node::Bytes(bytes), Node::Str))
    }

    fn binary(&mut self, width: usize) -> Result<(), Flaw> {
        let bytes = self.counted(width)?;
        self.push(Node::Bytes(bytes))
    }

    // The stack, the arena and the memo.

    fn push(&mut self, node: Node<'a>) -> Result<(), Flaw> {
        let Ok(at) = u32::try_from(self.nodes.len()) else { return self.fail("too many values") };
        self.nodes.push(node);
        self.stack.push(Value::Node(at));
        Ok(())
    }

    /// Returns the stack height below which operations may not take.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value, Flaw> {
        if self.stack.len() > self.floor()
            && let Some(value) = self.stack.pop()
        {
            return Ok(value);
        }
        self.fail("the stack is empty")
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Value>, Flaw> {
        if self.stack.len() - self.floor() < count {
            return self.fail("the stack is empty");
        }
        Ok(self.stack.split_off(self.stack.len() - count))
    }

    fn pop_mark(&mut self) -> Result<Vec<Value>, Flaw> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => self.fail("the stack has no mark"),
        }
    }

    /// Returns the value on top without removing it.
    fn top(&mut self) -> Result<&mut Node<'a>, Flaw> {
        let start = self.start;
        let top = if self.stack.len() > self.floor() { self.stack.last().copied() } else { None };
        match top {
            Some(Value::Node(at)) => Ok(&mut self.nodes[at as usize]),
            _ => Err(Flaw::Damaged { at: start, reason: "the value on the stack can't be changed".into() }),
        }
    }

    fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    fn text_of(&self, value: Value) -> Option<&'a str> {
        match self.node(value) {
            Some(Node::Str(text)) => Some(text),
            _ => None,
        }
    }

    fn get(&mut self, key: u32) -> Result<(), Flaw> {
        match self.memo.get(&key) {
            Some(value) => self.stack.push(*value),
            None => return self.fail(format!("the memo has no entry {key}")),
        }
        Ok(())
    }

    fn put(&mut self, key: u32) -> Result<(), Flaw> {
        let top = self.pop()?;
        self.stack.push(top);
        self.memo.insert(key, top);
        Ok(())
    }

    // Containers and objects.

    fn append(&mut self, items: Vec<Value>) -> Result<(), Flaw> {
        match self.top()? {
            Node::List(list) => list.extend(items),
            _ => return self.fail("items are appended to a value that is not a list"),
        }
        Ok(())
    }

    fn pairs(&self, items: &[Value]) -> Result<Vec<(Value, Value)>, Flaw> {
        match items.as_chunks() {
            (pairs, []) => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
            _ => self.fail("a key has no value"),
        }
    }

    fn set(&mut self, items: &[Value]) -> Result<(), Flaw> {
        let more = self.pairs(items)?;
        match self.top()? {
            Node::Dict(pairs) => pairs.extend(more),
            _ => return self.fail("items are set in a value that is not a dict"),
        }
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), Flaw> {
        match allowed(module, name) {
            Some(name) => self.push(Node::Global(name)),
            None => {
                let shown: String = format!("{module}.{name}").escape_debug().take(200).collect();
                Err(Flaw::Refused { name: shown })
            }
        }
    }

    fn object(&mut self, class: Value, args: Value) -> Result<(), Flaw> {
        let Some(Node::Global(class)) = self.node(class) else { return self.fail("the called value is not a name") };
        let class = *class;
        let Some(Node::Tuple(items)) = self.node(args) else {
            return self.fail(format!("the arguments of {class} are not a tuple"));
        };
        match (class, &items[..]) {
            ("collections.OrderedDict", []) => self.push(Node::Dict(Vec::new())),
            ("torch.Size", &[sizes]) if matches!(self.node(sizes), Some(Node::Tuple(_) | Node::List(_))) => {
                self.stack.push(sizes);
                Ok(())
            }
            _ => self.push(Node::Object { class, args, state: Value::None }),
        }
    }

    fn build(&mut self) -> Result<(), Flaw> {
        let new = self.pop()?;
        match self.top()? {
            Node::Object { state, .. } if *state == Value::None => *state = new,
            // Attributes of a dict, such as the versions in a module's state dict.
            Node::Dict(_) => {}
            _ => return self.fail("a state is set on a value that can't have one or already has one"),
        }
        Ok(())
    }
}

/// Classes and functions that state dicts and DCP metadata use. None is ever called.
const NAMES: &[&str] = &[
    "collections.OrderedDict",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "torch.BFloat16Storage",
    "torch.BoolStorage",
    "torch.ByteStorage",
    "torch.CharStorage",
    "torch.ComplexDoubleStorage",
    "torch.ComplexFloatStorage",
    "torch.DoubleStorage",
    "torch.FloatStorage",
    "torch.HalfStorage",
    "torch.IntStorage",
    "torch.LongStorage",
    "torch.ShortStorage",
    "torch.Size",
    "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.bfloat16",
    "torch.bool",
    "torch.complex128",
    "torch.complex64",
    "torch.device",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.float16",
    "torch.float32",
    "torch.float64",
    "torch.float8_e4m3fn",
    "torch.float8_e4m3fnuz",
    "torch.float8_e5m2",
    "torch.float8_e5m2fnuz",
    "torch.float8_e8m0fnu",
    "torch.int16",
    "torch.int32",
    "torch.int64",
    "torch.int8",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.uint8",
];

/// Returns the full name of an allowed global.
pub(super) fn allowed(module: &str, name: &str) -> Option<&'static str> {
    NAMES.iter().copied().find(|allowed| {
        allowed.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_only_listed_names() {
        assert_eq!(allowed("torch", "Size"), Some("torch.Size"));
        assert_eq!(allowed("torch._utils", "_rebuild_tensor_v2"), Some("torch._utils._rebuild_tensor_v2"));
        for (module, name) in [("os", "system"), ("torch", "load"), ("torch.Size", ""), ("", "torch.Size")] {
            assert_eq!(allowed(module, name), None, "{module}.{name}");
        }
        assert!(NAMES.is_sorted());
    }
}
