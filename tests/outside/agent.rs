//! A process that runs during a test.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// Much longer than a test takes, even with PyTorch on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// A launcher whose output goes to a file.
pub(crate) struct Agent {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Agent {
    pub(crate) fn start(mut command: Command) -> Self {
        let output = tempfile::NamedTempFile::new().unwrap();
        let file = fs::OpenOptions::new().append(true).open(output.path()).unwrap();
        let child = command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        Agent { child, output }
    }

    /// Returns the output so far.
    pub(crate) fn text(&self) -> String {
        fs::read_to_string(self.output.path()).unwrap()
    }

    /// Waits until the output contains `part` `count` times.
    pub(crate) fn wait_for(&self, part: &str, count: usize) {
        let began = Instant::now();
        while self.text().matches(part).count() < count {
            assert!(began.elapsed() < LIMIT, "{part:?} did not come {count} times:\n{}", self.text());
            sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process and returns its exit code and output.
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.text());
            }
            assert!(began.elapsed() < LIMIT, "the launcher did not end:\n{}", self.text());
            sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
