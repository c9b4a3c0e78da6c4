//! The GPUs that ranks may use.

use std::{env, path::Path};

/// Variables that limit the visible GPUs. The first that is set applies, as in `torchrun`.
const VISIBLE: [&str; 2] = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"];

/// Returns the number of NVIDIA GPUs that this process may use.
pub(crate) fn count() -> usize {
    count_in(Path::new("/dev"), visible().map(|(_, devices)| devices).as_deref())
}

fn count_in(dev: &Path, visible: Option<&[String]>) -> usize {
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u16>().is_ok());
    let entries = dev.read_dir().into_iter().flatten().flatten();
    let devices = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
    match visible {
        Some(list) if devices > 0 => seen(list).len(),
        _ => devices,
    }
}

/// Returns the visible GPUs, if a variable names them.
pub(crate) fn visible_devices() -> Option<Vec<String>> {
    visible().map(|(_, devices)| seen(&devices).to_vec())
}

/// As CUDA does, ignores the GPUs after an invalid entry.
fn seen(list: &[String]) -> &[String] {
    let invalid = list.iter().position(|it| it.is_empty() || it.starts_with('-'));
    &list[..invalid.unwrap_or(list.len())]
}

/// Returns the variable that limits the GPUs, and its entries.
fn visible() -> Option<(&'static str, Vec<String>)> {
    let (name, list) = VISIBLE.into_iter().find_map(|name| Some((name, env::var(name).ok()?)))?;
    Some((name, list.split(',').map(|device| device.trim().to_owned()).collect()))
}

/// Returns the GPU of a rank under `--virtual-local-rank`, or the reason why it has none.
pub(crate) fn only_device_of(local_rank: usize) -> Result<String, String> {
    match visible() {
        None => Ok(local_rank.to_string()),
        Some((name, devices)) => devices.get(local_rank).cloned().ok_or_else(|| {
            format!(
                "local rank {local_rank} needs a GPU of its own, but {name}={} names only {}",
                devices.join(","),
                devices.len()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_visible_device_files() {
        let dev = tempfile::tempdir().unwrap();
        let list = |text: &str| -> Vec<String> { text.split(',').map(str::to_owned).collect() };
        assert_eq!(count_in(dev.path(), None), 0);
        assert_eq!(count_in(dev.path(), Some(&list("0,1"))), 0);
        for name in ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"] {
            std::fs::write(dev.path().join(name), "").unwrap();
        }
        assert_eq!(count_in(dev.path(), None), 3);
        assert_eq!(count_in(dev.path(), Some(&list("1,0"))), 2);
        assert_eq!(count_in(dev.path(), Some(&list("1,-1,0"))), 1);
        assert_eq!(count_in(dev.path(), Some(&list(""))), 0);
        assert_eq!(count_in(Path::new("/no/such/directory"), None), 0);
    }
}
