//! Signatures of collectives: which parameters a collective is about, since buffers of equal size may differ in that.

use std::sync::Arc;

use crate::hash::Hash;

/// A list of names that collectives can be about, such as the parameters of a unit. The same list on every rank.
#[derive(Debug)]
pub struct Subject {
    name: String,
    members: Vec<String>,
    hash: u64,
}

impl Subject {
    /// Creates a list that messages call `name`.
    pub fn new(name: impl Into<String>, members: impl IntoIterator<Item = String>) -> Arc<Self> {
        let (name, members): (String, Vec<String>) = (name.into(), members.into_iter().collect());
        let mut hash = Hash::default();
        hash.bytes(name.as_bytes());
        members.iter().for_each(|member| hash.bytes(member.as_bytes()));
        Arc::new(Subject { name, members, hash: hash.value() })
    }

    /// Returns the names of its members.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// Returns a hash that is equal on ranks with the same list.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

/// The members of a [`Subject`] that a collective is about. [`crate::ProcessGroup::signed`] makes ranks compare it.
///
/// ```
/// use fsdp_core::process_group::{Signature, Subject, local};
/// use fsdp_core::{Buffer, ReduceOp};
///
/// let heads = Subject::new("unit `heads`", ["a".to_string(), "b".to_string()]);
/// let errors = local::run(2, |group| {
///     // Rank 0 reduces the gradient of `a` and rank 1 the gradient of `b`, which have the same size.
///     let signature = Signature::new(&heads, [group.rank()]).with_advice("Use the same head on every rank");
///     let work = group.signed(signature).all_reduce(vec![Buffer::F32(vec![1.; 4])], ReduceOp::Sum);
///     work.wait().unwrap_err().to_string()
/// });
/// assert!(errors[0].contains("`a` is on rank(s) [0] only, `b` on rank(s) [1] only"), "{}", errors[0]);
/// assert!(errors[1].ends_with("Use the same head on every rank"), "{}", errors[1]);
/// ```
#[derive(Clone, Debug)]
pub struct Signature {
    subject: Arc<Subject>,
    /// A bit for each member of the subject.
    members: Vec<u8>,
    how: String,
    advice: &'static str,
}

impl Signature {
    /// Creates the signature of a collective about members with these positions in the subject.
    pub fn new(subject: &Arc<Subject>, members: impl IntoIterator<Item = usize>) -> Self {
        let mut bits = vec![0; subject.members.len().div_ceil(8)];
        for member in members {
            if let Some(byte) = bits.get_mut(member / 8) {
                *byte |= 1 << (member % 8);
            }
        }
        Signature { subject: subject.clone(), members: bits, how: String::new(), advice: "" }
    }

    /// Adds further text that ranks must agree on, shown after the subject's name.
    pub fn with_how(mut self, how: impl Into<String>) -> Self {
        self.how = how.into();
        self
    }

    /// Adds advice for ranks that disagree: sentences without the last full stop.
    pub fn with_advice(mut self, advice: &'static str) -> Self {
        self.advice = advice;
        self
    }

    pub(super) fn subject(&self) -> &Subject {
        &self.subject
    }

    pub(super) fn bits(&self) -> &[u8] {
        &self.members
    }

    pub(super) fn advice(&self) -> &'static str {
        self.advice
    }

    /// Adds the signature to a fingerprint.
    pub(super) fn hash_into(&self, hash: &mut Hash) {
        hash.number(self.subject.hash);
        hash.bytes(&self.members);
        hash.bytes(self.how.as_bytes());
    }

    /// Writes the signature for messages, with at most `most` members.
    pub(super) fn spell(&self, most: usize, to: &mut String) {
        to.push_str(&self.subject.name);
        to.push_str(&self.how);
        let all = self.subject.members.iter().enumerate().filter(|(member, _)| has(&self.members, *member));
        let mut count = 0;
        for (_, name) in all {
            if count < most {
                to.push_str(if count == 0 { ": " } else { ", " });
                to.push_str(name);
            }
            count += 1;
        }
        if count > most {
            to.push_str(&format!(" and {} more", count - most));
        }
    }
}

/// Returns whether a member's bit is set.
pub(super) fn has(bits: &[u8], member: usize) -> bool {
    bits.get(member / 8).is_some_and(|byte| byte & 1 << (member % 8) != 0)
}
