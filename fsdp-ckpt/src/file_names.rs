//! Names of a checkpoint's files.

use std::path::Path;

/// File name of the manifest.
pub const MANIFEST: &str = "checkpoint.json";

/// Returns the name that PyTorch DCP gives a rank's file.
pub(crate) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

/// Returns the rank of a file.
pub(crate) fn rank_of_file(name: &str) -> Option<usize> {
    let rank = name.strip_prefix("shard-")?.split('-').next()?.parse::<usize>().ok()?.checked_sub(1)?;
    (file_name(rank) == name).then_some(rank)
}

/// Returns the command that copies another host's directory into the same directory here. The path is absolute, since
/// rsync resolves relative paths from the home directory.
pub(crate) fn copy_command(host: &str, dir: &Path) -> String {
    let is_url = dir.to_str().is_some_and(|text| text.contains("://"));
    let whole = if is_url { None } else { std::path::absolute(dir).ok() };
    let dir = whole.as_deref().unwrap_or(dir).display();
    format!("rsync -a {host}:{dir}/ {dir}/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_the_same_absolute_directory() {
        let here = std::env::current_dir().unwrap();
        for (dir, whole) in [
            ("saved/step-1", here.join("saved/step-1").display().to_string()),
            ("/saved/step-1", "/saved/step-1".into()),
            ("s3://bucket/step-1", "s3://bucket/step-1".into()),
        ] {
            assert_eq!(copy_command("node1", Path::new(dir)), format!("rsync -a node1:{whole}/ {whole}/"));
        }
    }
}
