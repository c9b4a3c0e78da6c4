//! Which store a path is in.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Where a path leads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    Local(&'a Path),
    Object(&'a str),
}

impl<'a> Place<'a> {
    /// What a path says of itself. Nothing is looked up.
    pub(crate) fn of(path: &'a Path) -> Result<Self> {
        let Some((scheme, rest)) = path.to_str().and_then(|text| text.split_once("://")) else {
            return Ok(Place::Local(path));
        };
        let url = path.display();
        match scheme {
            "file" if rest.starts_with('/') => Ok(Place::Local(Path::new(rest))),
            "file" => Err(Error::Argument(format!("{url} is not on this host; the form is file:///path"))),
            "s3" | "s3a" | "gs" | "az" | "adl" | "azure" | "abfs" | "abfss" => {
                path.to_str().map(Place::Object).ok_or_else(|| Error::Argument(format!("{url} is not text")))
            }
            // A directory's name may hold any text.
            _ if scheme.is_empty() || !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                Ok(Place::Local(path))
            }
            _ => Err(Error::Argument(format!(
                "{url} is of no known kind; use a directory, or a URL that begins with s3://, gs://, az:// or file://"
            ))),
        }
    }

    /// The path in its store.
    pub(crate) fn path(self) -> &'a Path {
        match self {
            Place::Local(path) => path,
            Place::Object(url) => Path::new(url),
        }
    }
}

/// A target's parent directory and file name.
pub(crate) fn split(target: &Path) -> Result<(PathBuf, String)> {
    let name = target.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Error::Argument(format!(
            "{:?} does not end in a name for a checkpoint",
            target.display().to_string()
        )));
    };
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_where_it_leads() {
        let local = |path: &str| match Place::of(Path::new(path)) {
            Ok(Place::Local(local)) => local.to_str().map(str::to_string),
            Ok(Place::Object(_)) | Err(_) => None,
        };
        for path in ["runs/step-1", "/runs", "a b://c", "://"] {
            assert_eq!(local(path).as_deref(), Some(path));
        }
        assert_eq!(local("file:///runs/step 1").as_deref(), Some("/runs/step 1"));
        for url in ["s3://bucket/run", "s3a://b/r", "gs://b/r", "az://c/r", "abfss://c@account.dfs.core.windows.net/r"]
        {
            assert!(matches!(Place::of(Path::new(url)), Ok(Place::Object(same)) if same == url));
        }
        for (url, part) in
            [("ftp://host/run", "s3://"), ("https://host/run", "s3://"), ("file://host/run", "file:///path")]
        {
            assert!(matches!(Place::of(Path::new(url)), Err(error) if error.to_string().contains(part)), "{url}");
        }
    }
}
