//! The counts of a process's operations, and the report of its faults.
//!
//! # Counts
//! `GPU_DOUBLE_REPORT=DIRECTORY` writes `rank-<RANK>.json` there when the process ends (`RANK` of the environment, or
//! 0):
//!
//! ```json
//! {"rank": 0, "seed": 0, "peak_bytes": 4096, "in_use_bytes": 0, "pinned_peak_bytes": 0, "pinned_bytes": 0,
//!  "counts": {"allocation": {"cuMemAllocAsync": 2}, "host synchronisation": {"cuStreamSynchronize": 1},
//!             "operation": {"kernel badd_f32": 1}}}
//! ```
//!
//! Bytes are of device memory, for all devices together, or of pinned memory. Categories: `operation` (queued
//! operations by name), `host synchronisation` (calls, by function, that may make the host wait; queries are not
//! counted), `allocation` and `free` (by function), `growth of the pool` (allocations that made the driver's pool take
//! memory from the device), `copy bytes` (by direction), `pageable copy` (copies from host memory that is not pinned, by
//! function and size), `loaded after a collective` (kernels, and modules by their count), and the categories of the
//! double's other libraries.
//!
//! # Faults
//! A fault is one line on stderr that begins with `gpu double: `, and the end of the process with exit code 86.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde_json::{Value, json};

/// Exit code of a process with a fault.
pub(crate) const FAULT_CODE: i32 = 86;

#[derive(Default)]
struct Bytes {
    current: u64,
    peak: u64,
}

impl Bytes {
    fn change(&mut self, by: i64) {
        self.current = self.current.saturating_add_signed(by);
        self.peak = self.peak.max(self.current);
    }
}

#[derive(Default)]
struct Report {
    counts: BTreeMap<String, BTreeMap<String, u64>>,
    device: Bytes,
    pinned: Bytes,
}

static REPORT: Mutex<Option<Report>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Report) -> T) -> T {
    f(REPORT.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Counts one. `what` is `category: name`, as in `host synchronisation: cuStreamSynchronize`.
pub(crate) fn count(what: &str) {
    count_many(what, 1);
}

pub(crate) fn count_many(what: &str, by: u64) {
    let (category, name) = what.split_once(": ").unwrap_or((what, what));
    with(|report| *report.counts.entry(category.into()).or_default().entry(name.into()).or_default() += by);
}

/// Counts what is loaded after the first collective. CUDA may then wait for the device, and thus for other ranks.
pub(crate) fn count_loaded(what: &str) {
    if with(|report| report.counts.contains_key("nccl")) {
        count(&format!("loaded after a collective: {what}"));
    }
}

/// Records a change of the device memory in use.
pub(crate) fn device_bytes(change: i64) {
    with(|report| report.device.change(change));
}

pub(crate) fn pinned_bytes(change: i64) {
    with(|report| report.pinned.change(change));
}

/// Reports a fault and ends the process.
pub(crate) fn fault(message: String) -> ! {
    eprintln!("gpu double: {message}");
    // SAFETY: no memory of this process is used afterwards. Destructors must not run: they would call the driver.
    unsafe { libc::_exit(FAULT_CODE) }
}

/// Returns the report.
fn json(seed: u64) -> Value {
    with(|report| {
        json!({
            "rank": rank(),
            "seed": seed,
            "peak_bytes": report.device.peak,
            "in_use_bytes": report.device.current,
            "pinned_peak_bytes": report.pinned.peak,
            "pinned_bytes": report.pinned.current,
            "counts": report.counts,
        })
    })
}

/// Returns the rank of this process.
pub(crate) fn rank() -> u64 {
    std::env::var("RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0)
}

/// Writes the report if `GPU_DOUBLE_REPORT` is set.
pub(crate) fn write(seed: u64) {
    let Some(directory) = std::env::var_os("GPU_DOUBLE_REPORT") else { return };
    let path = std::path::Path::new(&directory).join(format!("rank-{}.json", rank()));
    let written = std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&path, json(seed).to_string()));
    if let Err(error) = written {
        eprintln!("gpu double: cannot write {}: {error}", path.display());
    }
}
