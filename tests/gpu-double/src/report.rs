//! The counts of a process's operations, and the report of its faults.
//!
//! # Counts
//! `GPU_DOUBLE_REPORT=DIRECTORY` writes `rank-<RANK>.json` there when the process ends (`RANK` of the environment, or
//! 0):
//!
//! ```json
//! {"rank": 0, "seed": 0, "peak_bytes": 4096, "in_use_bytes": 0,
//!  "sections": [{"name": "start", "peak_bytes": 4096, "in_use_bytes": 0,
//!                "counts": {"allocation": {"cuMemAllocAsync": 2}, "host synchronisation": {"cuStreamSynchronize": 1},
//!                           "operation": {"kernel badd_f32": 1}}}]}
//! ```
//!
//! `in_use_bytes` of a section is the value at its end. Bytes are of device memory, for all devices together. Pinned
//! memory is counted separately, as `pinned_bytes` and `pinned_peak_bytes` of the whole process. Categories:
//! `operation` (queued operations by name), `host synchronisation` (calls, by function, that may make the host wait;
//! queries are not counted), `allocation` and `free` (by function), `growth of the pool` (allocations that made the
//! driver's pool take memory from the device), `copy bytes` (by direction), and the categories of the double's other
//! libraries.
//!
//! A test may link weakly against, or look up by `dlsym`:
//!
//! ```c
//! void gpu_double_mark(const char *name);           /* begins a section */
//! uint64_t gpu_double_peak(void);                   /* most bytes in use since the section began */
//! uint64_t gpu_double_in_use(void);                 /* bytes in use now */
//! uint64_t gpu_double_count(const char *category);  /* what was counted in it since the section began */
//! int gpu_double_name_stream(CUstream, const char *name);  /* messages call the stream so */
//! ```
//!
//! # Faults
//! A fault is one line on stderr that begins with `gpu double: `, and the end of the process with exit code 86.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::{Value, json};

/// Exit code of a process with a fault.
pub(crate) const FAULT_CODE: i32 = 86;

#[derive(Default)]
struct Section {
    name: String,
    counts: BTreeMap<String, BTreeMap<String, u64>>,
    peak: u64,
    in_use: u64,
}

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
    /// Sections that have ended.
    ended: Vec<Section>,
    section: Section,
    device: Bytes,
    pinned: Bytes,
}

static REPORT: Mutex<Option<Report>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Report) -> T) -> T {
    let mut report: MutexGuard<'_, Option<Report>> = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
    f(report.get_or_insert_with(|| Report {
        section: Section { name: "start".into(), ..Section::default() },
        ..Report::default()
    }))
}

/// Counts one. `what` is `category: name`, as in `host synchronisation: cuStreamSynchronize`.
pub(crate) fn count(what: &str) {
    count_many(what, 1);
}

pub(crate) fn count_many(what: &str, by: u64) {
    let (category, name) = what.split_once(": ").unwrap_or((what, what));
    with(|report| *report.section.counts.entry(category.into()).or_default().entry(name.into()).or_default() += by);
}

/// Records a change of the device memory in use.
pub(crate) fn device_bytes(change: i64) {
    with(|report| {
        report.device.change(change);
        report.section.peak = report.section.peak.max(report.device.current);
    });
}

pub(crate) fn pinned_bytes(change: i64) {
    with(|report| report.pinned.change(change));
}

/// Returns the bytes of device memory in use.
pub(crate) fn in_use() -> u64 {
    with(|report| report.device.current)
}

/// Returns the most bytes of device memory in use since the section began.
pub(crate) fn peak() -> u64 {
    with(|report| report.section.peak)
}

/// Returns the counts of a category since the section began.
pub(crate) fn counted(category: &str) -> u64 {
    with(|report| report.section.counts.get(category).map_or(0, |names| names.values().sum()))
}

/// Begins a section.
pub(crate) fn mark(name: &str) {
    with(|report| {
        let in_use = report.device.current;
        let next = Section { name: name.into(), peak: in_use, ..Section::default() };
        let ended = std::mem::replace(&mut report.section, next);
        report.ended.push(Section { in_use, ..ended });
    });
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
        let section = |one: &Section, in_use: u64| {
            let (name, counts, peak) = (&one.name, &one.counts, one.peak);
            json!({"name": name, "counts": counts, "peak_bytes": peak, "in_use_bytes": in_use})
        };
        let mut sections: Vec<_> = report.ended.iter().map(|one| section(one, one.in_use)).collect();
        sections.push(section(&report.section, report.device.current));
        json!({
            "rank": rank(),
            "seed": seed,
            "peak_bytes": report.device.peak,
            "in_use_bytes": report.device.current,
            "pinned_peak_bytes": report.pinned.peak,
            "pinned_bytes": report.pinned.current,
            "sections": sections,
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
