//! Prefixes of object stores: S3, Google Cloud Storage, Azure.
//!
//! A store of objects has no rename and no lock: an object appears as a whole, under its final name, when its upload is
//! complete. So:
//!
//! - The manifest is the commit point. It is written last, with put-if-absent: of two saves to one prefix one gets
//!   [`Error::AlreadyExists`](crate::Error::AlreadyExists).
//! - Each attempt has a tag, which is in the names of its tensor files, and the manifest names the files with the tag:
//!   what a slow or dead attempt still uploads can't replace what another attempt's manifest names. Readers go by the
//!   manifest alone.
//! - What dead attempts left is deleted after a commit to the same prefix, and only then. Nothing tells a dead attempt
//!   from a slow one on another host, and clocks differ; but once there is a manifest, no other attempt to this prefix
//!   can succeed any more, so nobody will ever name those files. Until then they stay: a prefix without a manifest is
//!   an unfinished checkpoint, to readers as to people. Objects that no save names so are never deleted, and a prefix
//!   that holds any is refused, as a directory that exists is.
//! - A failed attempt deletes its own files, unless its manifest may have arrived without an answer: then they stay,
//!   for they may be a checkpoint.
//! - Formats with fixed names (Hugging Face, PyTorch DCP) have no tags: they need an empty prefix, and what a dead
//!   writer of such a format left is to be deleted by hand.
//!
//! An upload that is not completed is no object; a store removes it if its bucket has a rule for that, as it should
//! have.

mod dir;
mod metadata;
mod request;
mod staging;
mod transfer;

pub(super) use self::staging::ObjectPath;
