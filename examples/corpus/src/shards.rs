//! x
use std::path::Path;
pub(crate) const INDEX: &str = "index.json";
pub(crate) fn is_prepared(path: &Path) -> bool { path.join(INDEX).exists() }
