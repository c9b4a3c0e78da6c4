//! The library in a process: exit code, message, report.

use std::{ffi::c_void, process::Command};

use crate::{
    machine::{machine, set_current},
    report,
    streams::{self, Access, Operation, Progress, Touch},
};

/// Runs this test in a separate process, with a program to run.
fn run(name: &str, program: &str, report: &std::path::Path) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("tests::library::{name}"), "--nocapture", "--test-threads=1"]);
    let vars = [("GPU_DOUBLE_TEST", program), ("GPU_DOUBLE_REPORT", report.to_str().unwrap()), ("RANK", "3")];
    command.envs(vars).env("GPU_DOUBLE_SEED", "11").output().unwrap()
}

fn fill(stream: usize, at: u64) -> i32 {
    let touches = vec![Touch { at, access: Access::Write }];
    let run = Box::new(|| Progress::Done);
    streams::enqueue(stream as *mut c_void, Operation { name: "kernel fill".into(), touches, run })
}

fn program(racy: bool) {
    set_current(Some(1));
    let (one, two) = (machine().create_stream(true).unwrap(), machine().create_stream(true).unwrap());
    let memory = machine().allocate(4096, Some(one), "cuMemAllocAsync").unwrap();
    assert_eq!(crate::memory::base_of(memory + 100), Some((memory, 4096)));
    assert_eq!(fill(one, memory), 0);
    if !racy {
        assert_eq!(streams::synchronize(one as *mut c_void, "cuStreamSynchronize"), 0);
    }
    assert_eq!(fill(two, memory), 0);
    assert_eq!(fill(12345, memory), crate::status::INVALID_HANDLE);
    machine().free(memory, Some(two), "cuMemFreeAsync").unwrap();
    std::process::exit(0);
}

#[test]
fn faults_end_the_process_and_reports_are_written() {
    match std::env::var("GPU_DOUBLE_TEST").as_deref() {
        Ok("racy") => program(true),
        Ok(_) => program(false),
        Err(_) => {}
    }
    let directory = std::env::temp_dir().join(format!("gpu-double-{}", std::process::id()));
    let name = "faults_end_the_process_and_reports_are_written";
    let racy = run(name, "racy", &directory);
    let told = String::from_utf8_lossy(&racy.stderr);
    assert_eq!(racy.status.code(), Some(report::FAULT_CODE), "{told}");
    assert!(told.contains("gpu double: race on 4096 bytes of device memory"), "{told}");
    assert!(!directory.exists());

    let right = run(name, "right", &directory);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stderr));
    let text = std::fs::read(directory.join("rank-3.json")).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let expected = serde_json::json!({
        "rank": 3, "seed": 11, "peak_bytes": 4096, "in_use_bytes": 0, "pinned_peak_bytes": 0, "pinned_bytes": 0,
        "counts": {
            "allocation": {"cuMemAllocAsync": 1}, "free": {"cuMemFreeAsync": 1},
            "growth of the pool": {"cuMemAllocAsync": 1}, "host synchronisation": {"cuStreamSynchronize": 1},
            "operation": {"kernel fill": 2},
        },
    });
    assert_eq!(report, expected);
}
