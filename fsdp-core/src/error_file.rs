//! Telling the launcher why a rank failed, in the file that `TORCHELASTIC_ERROR_FILE` names.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Records why this rank fails, in the format of `torch.distributed.elastic`'s `record`, for the summary that
/// `fsdp-launch` or `torchrun` prints. The launcher takes the error that was recorded first for the cause of the
/// others: call it as soon as the error is known, before the process groups are dropped and the other ranks fail
/// because of that.
///
/// Without a launcher (`TORCHELASTIC_ERROR_FILE` unset) it does nothing, and where the file can't be written the error
/// to tell is still the caller's.
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
    // The time is a string in PyTorch's files too.
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
