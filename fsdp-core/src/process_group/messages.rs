//! Messages of bytes between the ranks of a group, whose lengths may differ.
//!
//! [`ProcessGroup::gather_bytes`] gives every rank the messages of all ranks. In a large group, use the others, by which
//! a rank other than the root holds its own message only.

use super::{
    group::ProcessGroup,
    op::{self, Messages, Op},
};
use crate::{Buffer, DType, ReduceOp, Result, hash::Hash};

impl ProcessGroup {
    /// Returns all ranks' messages in rank order. Their lengths may differ. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_gather`].
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
        Ok(cut(&all, &lengths))
    }

    /// Returns all ranks' messages in rank order on rank `root`, and `None` on the others. Collective; blocks.
    ///
    /// # Errors
    /// Errors of a collective.
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let messages = local::run(3, |group| group.gather_bytes_to(1, vec![b'x'; group.rank()]).unwrap());
    /// assert_eq!(messages, [None, Some(vec![b"".to_vec(), b"x".to_vec(), b"xx".to_vec()]), None]);
    /// ```
    pub fn gather_bytes_to(&self, root: usize, message: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>> {
        let is_root = self.rank() == root;
        let longest = self.all_reduce_scalar(message.len() as i64, ReduceOp::Max)? as usize;
        if longest == 0 {
            return Ok(is_root.then(|| vec![Vec::new(); self.size()]));
        }
        let equal = if is_root { vec![LENGTH; self.size()] } else { Vec::new() };
        let lengths = self.gather_to(root, message.len().to_le_bytes().to_vec(), equal, LENGTH)?;
        let counts: Vec<usize> = lengths.chunks_exact(LENGTH).map(length).collect();
        let all = self.gather_to(root, message, counts.clone(), longest)?;
        Ok(is_root.then(|| cut(&all, &counts)))
    }

    /// Returns the message that rank `root` has for this rank. The root passes a message for each rank, the others pass
    /// none. Collective; blocks.
    ///
    /// # Errors
    /// Errors of a collective. [`crate::Error::Argument`] if the root passes another number of messages.
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let messages = local::run(3, |group| {
    ///     let all = if group.rank() == 1 { vec![b"a".to_vec(), b"bb".to_vec(), b"".to_vec()] } else { vec![] };
    ///     group.scatter_bytes(1, all).unwrap()
    /// });
    /// assert_eq!(messages, [b"a".to_vec(), b"bb".to_vec(), b"".to_vec()]);
    /// ```
    pub fn scatter_bytes(&self, root: usize, messages: Vec<Vec<u8>>) -> Result<Vec<u8>> {
        let lengths: Vec<usize> = messages.iter().map(Vec::len).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        // Each rank's length, and the longest.
        let both = lengths.iter().flat_map(|length| [length.to_le_bytes(), longest.to_le_bytes()].concat());
        let equal = vec![2 * LENGTH; lengths.len()];
        let both = self.scatter_from(root, both.collect(), equal, 2 * LENGTH, 2 * LENGTH)?;
        let (own, longest) = (length(&both[..LENGTH]), length(&both[LENGTH..]));
        if longest == 0 {
            return Ok(Vec::new());
        }
        self.scatter_from(root, messages.concat(), lengths, own, longest)
    }

    /// Returns the message of rank `root`. The others pass none. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::broadcast`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let messages = local::run(2, |group| group.broadcast_bytes(1, vec![b'x'; group.rank()]).unwrap());
    /// assert_eq!(messages, [b"x", b"x"]);
    /// ```
    pub fn broadcast_bytes(&self, root: usize, message: Vec<u8>) -> Result<Vec<u8>> {
        let group = self.blocking();
        let sized = group.broadcast(vec![Buffer::I64(vec![message.len() as i64])], root);
        let len = group.elements::<i64>(sized, 1)?[0] as usize;
        let message = if self.rank() == root { Buffer::U8(message) } else { Buffer::try_zeros(DType::U8, len)? };
        group.elements(group.broadcast(vec![message], root), len)
    }

    /// Returns the first message of a rank that has one, with its rank, the same on every rank. The others pass an empty
    /// one. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::broadcast`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let messages = ["", "disk full", "no such file"];
    /// let first = local::run(3, |group| group.first_message(messages[group.rank()].into()).unwrap());
    /// assert_eq!(first, vec![Some((1, "disk full".into())); 3]);
    /// ```
    pub fn first_message(&self, message: String) -> Result<Option<(usize, String)>> {
        let Some(rank) = self.first_rank(!message.is_empty())? else { return Ok(None) };
        let text = self.broadcast_bytes(rank, message.into_bytes())?;
        Ok(Some((rank, String::from_utf8_lossy(&text).into_owned())))
    }

    /// Returns the first rank that passes true, the same on every rank. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_reduce`].
    pub fn first_rank(&self, is_true: bool) -> Result<Option<usize>> {
        let own = if is_true { self.rank() as i64 } else { i64::MAX };
        let first = self.all_reduce_scalar(own, ReduceOp::Min)?;
        Ok((first != i64::MAX).then_some(first as usize))
    }

    /// Returns the ranks whose value differs from this rank's. Compares hashes of 64 bits. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_gather`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// let others = local::run(3, |group| group.differing_ranks(if group.rank() == 1 { b"b" } else { b"a" }).unwrap());
    /// assert_eq!(others, [vec![1], vec![0, 2], vec![1]]);
    /// ```
    pub fn differing_ranks(&self, value: &[u8]) -> Result<Vec<usize>> {
        let mut hash = Hash::default();
        hash.bytes(value);
        let own = hash.value() as i64;
        // The largest value, and the smallest by its complement.
        let bounds = self.all_reduce_values(vec![own, !own], ReduceOp::Max)?;
        if bounds[0] == !bounds[1] {
            return Ok(Vec::new());
        }
        let all = self.gather_values(vec![own])?;
        Ok((0..all.len()).filter(|&rank| all[rank] != own).collect())
    }

    /// Gathers messages whose lengths the root knows. Returns their concatenation on the root.
    fn gather_to(&self, root: usize, input: Vec<u8>, counts: Vec<usize>, longest: usize) -> Result<Vec<u8>> {
        let total = counts.iter().sum();
        let messages = Messages { own: input.len(), input, counts, longest, root };
        let call = op::messages("gather", &messages, self.membership());
        self.elements(self.blocking().issue(call, Op::Gather(messages)), total)
    }

    /// Scatters messages whose lengths the ranks know.
    fn scatter_from(
        &self,
        root: usize,
        input: Vec<u8>,
        counts: Vec<usize>,
        own: usize,
        longest: usize,
    ) -> Result<Vec<u8>> {
        let messages = Messages { input, counts, own, longest, root };
        let call = op::messages("scatter", &messages, self.membership());
        self.elements(self.blocking().issue(call, Op::Scatter(messages)), own)
    }
}

/// Bytes of a length.
const LENGTH: usize = size_of::<usize>();

fn length(bytes: &[u8]) -> usize {
    bytes.first_chunk().map_or(0, |bytes| usize::from_le_bytes(*bytes))
}

/// Cuts a concatenation into messages of these lengths.
fn cut(all: &[u8], lengths: &[usize]) -> Vec<Vec<u8>> {
    let mut rest = all;
    let messages = lengths.iter().map(|&length| {
        let (message, others) = rest.split_at(length);
        rest = others;
        message.to_vec()
    });
    messages.collect()
}
