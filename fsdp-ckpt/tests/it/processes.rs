//! Ranks as processes: the test program starts itself for each rank, to run a role.

use std::io::BufRead;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_core::process_group::{Options, shm};
use fsdp_core::{ProcessGroup, RankEnv};
use fsdp_test_support::ranks::{self, Job, ROLE};

use crate::{async_save, disk_full, kills};

/// Runs a role in a rank's process; without a role, does nothing.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let root = std::env::var("FSDP_TEST_DIR").unwrap();
    let options = Options::default().with_timeout(Duration::from_secs(30));
    let group: ProcessGroup = shm::connect(&RankEnv::from_env().unwrap(), options).unwrap();
    match role.as_str() {
        "saves_repeatedly" => kills::saves_repeatedly(group, Path::new(&root)),
        "dies_while_saving" => async_save::dies_while_saving(group, Path::new(&root)),
        "saves_too_much" => disk_full::saves_too_much(&group, Path::new(&root)),
        other => panic!("no role {other}"),
    }
}

/// Returns the commands of two ranks in a role, which works in `root`.
pub(crate) fn two_ranks(role: &str, root: &Path) -> [Command; 2] {
    let port = ranks::port();
    [0, 1].map(|rank| {
        let mut command = ranks::command("processes::run_as_a_rank", role, (rank, 2), port);
        command.env("FSDP_TEST_DIR", root);
        command
    })
}

/// Starts two ranks in a role.
pub(crate) fn start(role: &str, root: &Path) -> Job {
    Job::start(two_ranks(role, root))
}

/// Returns the number at the end of the next line with `word`; `None` at the end of the output.
pub(crate) fn next_number(lines: &mut impl BufRead, word: &str) -> Option<usize> {
    let mut lines = lines.lines().map(|line| line.unwrap());
    lines.find_map(|line| Some(line.split_once(word)?.1.trim().parse().unwrap()))
}
