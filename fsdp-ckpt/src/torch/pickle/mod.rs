//! Pickles as data: a machine that builds values, and can do nothing else.
//!
//! The names of classes and functions come from a list; they stay names, and nothing is called. Values lie in an arena
//! and refer to each other by position, so a pickle that repeats its own parts stays as small as its bytes, and one
//! that contains itself is no leak. Whoever walks over values must bound the walk: parts may be shared, and may contain
//! themselves.

mod globals;
mod machine;
mod value;

pub(super) use value::{Flaw, Node, Pickle, Value};
