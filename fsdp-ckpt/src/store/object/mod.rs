//! Prefixes of object stores: S3, Google Cloud Storage, Azure.
//!
//! Object stores have no rename and no locks. An object appears under its final name when its upload is complete. So:
//!
//! - The manifest is the commit point. It is written last, if absent: of two saves to one prefix, one gets
//!   [`Error::AlreadyExists`](crate::Error::AlreadyExists).
//! - Each save has a tag in the names of its tensor files, and its manifest names these files. So a slow or dead save
//!   can't replace files of another save. Readers use only the files in the manifest.
//! - Files of unfinished saves are deleted after another save to the same prefix has committed, and never before. A
//!   dead save can't be told from a slow save on another host. But once there is a manifest, no other save to this
//!   prefix can commit. Objects without a tag are never deleted, and a prefix with such objects is refused.
//! - A failed save deletes its own files, unless its manifest may have been written.
//! - Formats with fixed names (Hugging Face, PyTorch DCP) need an empty prefix. Delete what a killed writer left by
//!   hand.
//!
//! Unfinished multipart uploads are not objects. Give the bucket a lifecycle rule that removes them.

mod dir;
mod metadata;
mod request;
mod staging;
mod transfer;

pub(super) use self::staging::ObjectPath;
