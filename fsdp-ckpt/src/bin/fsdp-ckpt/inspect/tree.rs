//! The tree of tensors by the parts of their names.

use std::collections::BTreeSet;
use std::io::{Result, Write};

use bytesize::ByteSize;
use fsdp_ckpt::{TensorEntry, TensorSource, escape};

/// A part of a name: a tensor, or the prefix of longer names, or both.
#[derive(Default)]
struct Node<'a> {
    name: String,
    tensor: Option<&'a TensorEntry>,
    children: Vec<Node<'a>>,
}

/// A line before alignment.
struct Line {
    name: String,
    dtype: String,
    shape: String,
    placement: String,
    bytes: String,
}

/// Returns the dimensions that a tensor is sharded on, with the numbers of shards.
pub(super) fn sharded(tensor: &TensorEntry) -> Vec<(usize, usize)> {
    (0..tensor.shape.len())
        .filter_map(|dim| {
            let starts: BTreeSet<usize> = tensor.chunks.iter().map(|chunk| chunk.offsets[dim]).collect();
            (starts.len() > 1).then_some((dim, starts.len()))
        })
        .collect()
}

pub(super) fn print(source: &dyn TensorSource, full: bool, out: &mut dyn Write) -> Result<()> {
    let mut root = Node::default();
    for (fqn, tensor) in source.tensors() {
        let mut node = &mut root;
        for part in fqn.split('.') {
            let at = node.children.iter().position(|child| child.name == part).unwrap_or_else(|| {
                node.children.push(Node { name: part.to_string(), ..Node::default() });
                node.children.len() - 1
            });
            node = &mut node.children[at];
        }
        node.tensor = Some(tensor);
    }
    // Placement of a tensor in one chunk.
    let whole = if source.mesh().map_or(source.files().len(), |mesh| mesh.size()) > 1 { "replicated" } else { "whole" };
    root.tidy();
    let mut lines = Vec::new();
    root.lines("  ", full, whole, &mut lines);
    let widest =
        |part: &dyn Fn(&Line) -> &String| lines.iter().map(|line| part(line).chars().count()).max().unwrap_or(0);
    let (name, dtype, shape) = (widest(&|line| &line.name), widest(&|line| &line.dtype), widest(&|line| &line.shape));
    let (placement, bytes) = (widest(&|line| &line.placement), widest(&|line| &line.bytes));
    for line in &lines {
        writeln!(
            out,
            "{:<name$}  {:<dtype$}  {:<shape$}  {:<placement$}  {:>bytes$}",
            line.name, line.dtype, line.shape, line.placement, line.bytes
        )?;
    }
    Ok(())
}

impl<'a> Node<'a> {
    /// Sorts layer 10 after layer 9, and merges nodes with a single child.
    fn tidy(&mut self) {
        self.children.sort_by_cached_key(|child| (child.name.parse::<u64>().ok(), child.name.clone()));
        for child in &mut self.children {
            while child.tensor.is_none() && child.children.len() == 1 && child.name.parse::<u64>().is_err() {
                let Some(only) = child.children.pop() else { break };
                *child = Node { name: format!("{}.{}", child.name, only.name), ..only };
            }
            child.tidy();
        }
    }

    fn bytes(&self) -> u64 {
        let own = self.tensor.map_or(0, TensorEntry::bytes);
        self.children.iter().map(Node::bytes).fold(own, u64::saturating_add)
    }

    fn tensors(&self) -> usize {
        usize::from(self.tensor.is_some()) + self.children.iter().map(Node::tensors).sum::<usize>()
    }

    /// Returns whether two layers have the same tensors.
    fn is_like(&self, other: &Node<'a>) -> bool {
        let about = |node: &Node<'a>| node.tensor.map(|tensor| (tensor.dtype, tensor.shape.clone(), sharded(tensor)));
        about(self) == about(other)
            && self.children.len() == other.children.len()
            && self.children.iter().zip(&other.children).all(|(a, b)| a.name == b.name && a.is_like(b))
    }

    fn lines(&self, indent: &str, full: bool, whole: &str, into: &mut Vec<Line>) {
        let mut at = 0;
        while at < self.children.len() {
            let child = &self.children[at];
            let numbered = |node: &Node<'a>| node.name.parse::<u64>().is_ok();
            let alike = self.children[at..].iter().take_while(|node| numbered(node) && child.is_like(node)).count();
            let alike = if full { 1 } else { alike.max(1) };
            let last = at + alike == self.children.len();
            let name = match alike {
                1 => escape(&child.name).to_string(),
                n => format!("{}..{} ({n} alike)", child.name, self.children[at + n - 1].name),
            };
            let (branch, below) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            // Top-level names have no branches.
            let (branch, below) = if indent.len() == 2 { ("", "") } else { (branch, below) };
            let group = &self.children[at..at + alike];
            let tensors: usize = group.iter().map(Node::tensors).sum();
            let mut line = Line {
                name: format!("{indent}{branch}{name}"),
                dtype: String::new(),
                shape: String::new(),
                placement: if child.children.is_empty() { String::new() } else { format!("{tensors} tensors") },
                bytes: ByteSize(group.iter().map(Node::bytes).fold(0, u64::saturating_add)).to_string(),
            };
            if let Some(tensor) = child.tensor {
                line.dtype = tensor.dtype.name().to_string();
                line.shape = format!("{:?}", tensor.shape);
                let shards: Vec<String> =
                    sharded(tensor).iter().map(|(dim, count)| format!("Shard({dim}) x {count}")).collect();
                line.placement = if shards.is_empty() { whole.to_string() } else { shards.join(", ") };
            }
            into.push(line);
            let deeper = if indent.len() == 2 { format!("{indent} ") } else { format!("{indent}{below}") };
            child.lines(&deeper, full, whole, into);
            at += alike;
        }
    }
}
