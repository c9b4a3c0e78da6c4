//! Small values over a group: numbers that are reduced, messages that are gathered, and what all ranks must agree
//! about.

use std::sync::Arc;

use super::{group::ProcessGroup, parts::GatherPart, work::Work};
use crate::{Buffer, Element, Error, Heap, ReduceOp, Result, hash::Hash};

impl ProcessGroup {
    /// The reduction of each rank's values, one by one. Collective; blocks.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    pub fn all_reduce_values<T: Element>(&self, values: Vec<T>, op: ReduceOp) -> Result<Vec<T>> {
        let len = values.len();
        self.elements(self.deferred().all_reduce(vec![Buffer::from(values)], op), len)
    }

    /// The reduction of each rank's value. Collective; blocks.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    ///
    /// ```
    /// use fsdp_core::{ReduceOp, process_group::local};
    /// local::run(3, |group| {
    ///     assert_eq!(group.all_reduce_scalar(group.rank() as f64, ReduceOp::Avg).unwrap(), 1.0);
    ///     assert_eq!(group.all_reduce_scalar(group.rank() as u32, ReduceOp::Max).unwrap(), 2);
    /// });
    /// ```
    pub fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T> {
        Ok(self.all_reduce_values(vec![value], op)?[0])
    }

    /// Every rank's values, of which each rank has as many, in rank order. Collective; blocks.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_gather`].
    pub fn gather_values<T: Element>(&self, values: Vec<T>) -> Result<Vec<T>> {
        let counts = vec![values.len(); self.size()];
        self.gather(values, counts)
    }

    /// Every rank's message, in rank order. They may differ in length. Collective; blocks.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_gather`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let messages = local::run(3, |group| group.gather_bytes(vec![b'x'; group.rank()]).unwrap());
    /// assert_eq!(messages[0], [&b""[..], b"x", b"xx"]);
    /// ```
    pub fn gather_bytes(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let lengths: Vec<usize> =
            self.gather_values(vec![message.len() as i64])?.into_iter().map(|length| length as usize).collect();
        if lengths.iter().all(|&length| length == 0) {
            return Ok(vec![Vec::new(); self.size()]);
        }
        let all = self.gather(message, lengths.clone())?;
        let mut rest = &all[..];
        let messages = lengths.into_iter().map(|length| {
            let (message, others) = rest.split_at(length);
            rest = others;
            message.to_vec()
        });
        Ok(messages.collect())
    }

    /// The ranks whose value is not this rank's: none where all agree. Values are compared by a hash of 64 bits.
    /// Collective; blocks.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_gather`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let others = local::run(3, |group| group.agree(if group.rank() == 1 { b"b" } else { b"a" }).unwrap());
    /// assert_eq!(others, [vec![1], vec![0, 2], vec![1]]);
    /// ```
    pub fn agree(&self, value: &[u8]) -> Result<Vec<usize>> {
        let mut hash = Hash::default();
        hash.bytes(value);
        let own = hash.value() as i64;
        let all = self.gather_values(vec![own])?;
        Ok((0..all.len()).filter(|&rank| all[rank] != own).collect())
    }

    fn gather<T: Element>(&self, values: Vec<T>, counts: Vec<usize>) -> Result<Vec<T>> {
        let len = counts.iter().sum();
        let part = GatherPart { input: Arc::new(Buffer::from(values)), counts };
        self.elements(self.deferred().all_gather(vec![part], Heap::shared()), len)
    }

    /// The output of a collective of one part.
    pub(crate) fn only_output(&self, work: Work) -> Result<Buffer> {
        work.wait()?.pop().ok_or_else(|| Error::Internal {
            rank: self.rank(),
            what: format!("group \"{}\" returned no output for a collective of one part", self.name()),
        })
    }

    /// The `len` elements of a collective's only output.
    fn elements<T: Element>(&self, work: Work, len: usize) -> Result<Vec<T>> {
        let found = match self.only_output(work)?.into_vec() {
            Ok(values) if values.len() == len => return Ok(values),
            Ok(values) => format!("{} {}", values.len(), T::DTYPE),
            Err(other) => format!("{} {}", other.len(), other.dtype()),
        };
        Err(Error::Internal {
            rank: self.rank(),
            what: format!("a collective of group \"{}\" gave {found} instead of {len} {}", self.name(), T::DTYPE),
        })
    }
}
