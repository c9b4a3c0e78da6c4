//! Reports a rank's error to the launcher, in the file that `TORCHELASTIC_ERROR_FILE` names.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Records why this rank fails, in the format of PyTorch's `torch.distributed.elastic` `record`, for the summary of
/// `fsdp-launch` or `torchrun`. The launcher treats the error that was recorded first as the cause. So call this as
/// soon as the error is known, before dropping process groups makes other ranks fail.
///
/// Without a launcher (`TORCHELASTIC_ERROR_FILE` unset), it does nothing. If the file can't be written, it logs a debug
/// event; the caller still reports the error.
///
/// ```
/// let outcome: Result<(), String> = Err("no data in ./texts".into());
/// if let Err(error) = outcome {
///     fsdp_core::record_error(&error);
///     eprintln!("Error: {error}");
/// }
/// ```
pub fn record_error(message: &str) {
    if let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") {
        record_at(&path, message);
    }
}

fn record_at(path: &OsStr, message: &str) {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // PyTorch's files also hold the time as a string.
    let content = serde_json::json!({"message": {"message": message, "extraInfo": {"timestamp": seconds.to_string()}}});
    if let Err(error) = std::fs::write(Path::new(path), content.to_string()) {
        tracing::debug!("can't record the error in {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_pytorchs() {
        let path = std::env::temp_dir().join(format!("fsdp-core-error-file-{}.json", std::process::id()));
        record_at(path.as_os_str(), "no \"data\"\nin it");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"]["message"], "no \"data\"\nin it");
        assert!(value["message"]["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().unwrap() > 1_600_000_000);
    }

    #[test]
    fn a_file_that_cant_be_written_is_no_failure() {
        record_at(OsStr::new("/no/such/directory/error.json"), "x");
    }
}
