//! Writing pickles of protocol 2, which PyTorch's own reader of tensors accepts.

use std::collections::HashMap;

use serde_json::Value;

/// A pickle in progress.
pub(super) struct Pickler {
    out: Vec<u8>,
    /// Memo entries of names and repeated strings.
    memo: HashMap<String, u32>,
}

impl Pickler {
    pub(super) fn new() -> Self {
        Pickler { out: b"\x80\x02".to_vec(), memo: HashMap::new() }
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// Writes operations without arguments.
    pub(super) fn ops(&mut self, ops: &[u8]) {
        self.out.extend(ops);
    }

    /// Writes a class or function.
    pub(super) fn global(&mut self, module: &str, name: &str) {
        let line = format!("c{module}\n{name}\n");
        self.remembered(line.clone(), |out| out.extend(line.as_bytes()));
    }

    /// Writes a string that repeats.
    pub(super) fn key(&mut self, text: &str) {
        self.remembered(format!("X{text}"), |out| string(out, text));
    }

    pub(super) fn text(&mut self, text: &str) {
        string(&mut self.out, text);
    }

    pub(super) fn int(&mut self, number: u64) {
        int(&mut self.out, number.into());
    }

    pub(super) fn ints(&mut self, numbers: &[usize]) {
        self.ops(b"(");
        for &number in numbers {
            self.int(number as u64);
        }
        self.ops(b"t");
    }

    /// Writes a `torch.Size`.
    pub(super) fn size(&mut self, sizes: &[usize]) {
        self.global("torch", "Size");
        self.ints(sizes);
        self.ops(b"\x85R");
    }

    /// Writes a JSON value. Arrays become lists or tuples.
    pub(super) fn json(&mut self, value: &Value, tuples: bool) {
        match value {
            Value::Null => self.ops(b"N"),
            Value::Bool(true) => self.ops(b"\x88"),
            Value::Bool(false) => self.ops(b"\x89"),
            Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(number), _) => int(&mut self.out, number.into()),
                (None, Some(number)) => int(&mut self.out, number.into()),
                // A float.
                (None, None) => {
                    self.out.push(b'G');
                    self.out.extend(number.as_f64().unwrap_or(f64::NAN).to_be_bytes());
                }
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.ops(if tuples { b"(" } else { b"](" });
                for item in items {
                    self.json(item, tuples);
                }
                self.ops(if tuples { b"t" } else { b"e" });
            }
            Value::Object(map) => {
                self.ops(b"}(");
                for (key, value) in map {
                    self.text(key);
                    self.json(value, tuples);
                }
                self.ops(b"u");
            }
        }
    }

    fn remembered(&mut self, key: String, write: impl FnOnce(&mut Vec<u8>)) {
        let next = self.memo.len() as u32;
        match self.memo.get(&key) {
            Some(known) => {
                self.out.push(b'j');
                self.out.extend(known.to_le_bytes());
            }
            None => {
                write(&mut self.out);
                self.out.push(b'r');
                self.out.extend(next.to_le_bytes());
                self.memo.insert(key, next);
            }
        }
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn int(out: &mut Vec<u8>, number: i128) {
    if let Ok(number) = u8::try_from(number) {
        out.extend([b'K', number]);
    } else if let Ok(number) = i32::try_from(number) {
        out.push(b'J');
        out.extend(number.to_le_bytes());
    } else {
        // LONG1: nine bytes hold every 64-bit integer with its sign.
        out.extend([0x8a, 9]);
        out.extend(&number.to_le_bytes()[..9]);
    }
}
