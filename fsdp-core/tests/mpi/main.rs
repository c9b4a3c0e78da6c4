//! The MPI backend, with ranks that an MPI's own launcher starts: under each MPI that is there.
//!
//! A machine without MPI ignores these tests, with the reason. With `FSDP_TESTS_REQUIRE=all`, as CI runs them, they
//! fail.
#![allow(clippy::unwrap_used, missing_docs)]

mod installed;
mod ranks;
mod roles;

use std::{path::Path, process::Command};

use fsdp_core::process_group::Guarantees;
use fsdp_test_support::{conformance, need::missing, ranks::ROLE};
use installed::{Interfaces, Mpi};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        return roles::play(&role);
    }
    let trials = TRIALS.iter().map(|&(name, test)| {
        // The other tests do not depend on the interface.
        let interfaces = if ["mpi_conforms", BITS].contains(&name) { Interfaces::All } else { Interfaces::First };
        Trial::ignorable_test(name, move || installed::each(test, interfaces))
    });
    let between_hosts = Trial::ignorable_test("mpi_conforms_between_hosts", conforms_between_hosts);
    libtest_mimic::run(&Arguments::from_args(), trials.chain([between_hosts]).collect()).exit()
}

type Test = fn(&Mpi);

const BITS: &str = "sums_have_the_bits_of_shared_memory";
const TRIALS: [(&str, Test); 13] = [
    ("mpi_conforms", conforms),
    ("a_hierarchy_conforms", hierarchy_conforms),
    ("a_hierarchy_has_the_bits_of_shared_memory", hierarchy_bits),
    ("all_ranks_have_to_want_a_hierarchy", hierarchy_is_wanted),
    ("groups_of_one_host_see_a_killed_rank", killed_within),
    (BITS, bits),
    ("a_killed_rank_ends_the_job", killed),
    ("a_stopped_rank_is_named_by_who_waits_for_its_relay_too", stopped),
    ("groups_of_several_threads_run_side_by_side", side_by_side),
    ("the_environment_chooses_the_backend", chosen),
    ("a_rank_that_another_launcher_started_is_told", alone),
    ("a_rank_that_comes_late_is_named_meanwhile", late),
    ("ranks_of_different_backends_are_told", mixed),
];

const PROMISES: Guarantees = Guarantees { fixed_order: true, f32_accumulation: true, detects_death: false };

fn conforms(mpi: &Mpi) {
    conformance::run(PROMISES, &|trial| ranks::start(mpi, &format!("conforms {}", trial.name), trial.size).said);
}

/// The same on two hosts with up to two ranks each: this program starts there again.
fn conforms_between_hosts() -> Result<Completion, Failed> {
    let hosts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hosts/hosts");
    let made = Command::new(&hosts).args(["each", "true"]).output().unwrap();
    if !made.status.success() {
        return missing(String::from_utf8_lossy(&made.stderr));
    }
    let mut again = Command::new(&hosts);
    again.arg("first").arg(std::env::current_exe().unwrap()).args(["--exact", "mpi_conforms"]);
    let output = again.output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    if said.contains("1 passed") { Ok(Completion::Completed) } else { Ok(Completion::ignored_with(said)) }
}

fn bits(mpi: &Mpi) {
    for size in [2, 3, 4] {
        assert_eq!(ranks::start(mpi, "bits", size).said, vec!["done"; size], "{mpi:?}");
    }
}

/// Hosts of two ranks, of which the last may have one; and every second rank on another one.
const HOSTS: [&str; 2] = ["pairs", "turns"];

fn hierarchy_conforms(mpi: &Mpi) {
    for hosts in HOSTS {
        let world = |trial: &conformance::Trial| {
            ranks::start(mpi, &format!("{hosts} conforms {}", trial.name), trial.size).said
        };
        conformance::run(PROMISES, &world);
    }
}

fn hierarchy_bits(mpi: &Mpi) {
    for (hosts, size) in [("pairs", 3), ("pairs", 4), ("turns", 4), ("pairs", 6), ("fours", 6), ("fours", 8)] {
        assert_eq!(ranks::start(mpi, &format!("{hosts} bits"), size).said, vec!["done"; size], "{mpi:?}, {hosts}");
    }
}

fn hierarchy_is_wanted(mpi: &Mpi) {
    for (role, expected) in [("share hosts", "true"), ("share no hosts", "false")] {
        assert_eq!(ranks::start(mpi, &format!("pairs {role}"), 4).said, vec![expected; 4], "{mpi:?}, {role}");
    }
}

fn killed_within(mpi: &Mpi) {
    let job = ranks::start(mpi, "pairs loses one within", 4);
    assert!(!job.is_well, "{mpi:?}: the job ended well: {:?}", job.said);
    let said = &job.said[2];
    assert!(said.contains("ended by its launcher") || said.contains("rank 1 died"), "{mpi:?}: {said}");
}

fn killed(mpi: &Mpi) {
    let job = ranks::start(mpi, "loses one", 3);
    assert!(!job.is_well, "{mpi:?}: the job ended well: {:?}", job.said);
    // Where the launcher lets the others live, they name it.
    for said in [&job.said[0], &job.said[2]] {
        let is_it =
            said.contains("ended by its launcher") || said.contains("rank 1 died") || said.contains("rank 1 can't be");
        assert!(is_it, "{mpi:?}: {said}");
    }
}

fn stopped(mpi: &Mpi) {
    let job = ranks::start(mpi, "pairs stops one", 3);
    assert!(!job.is_well, "{mpi:?}: the job ended well: {:?}", job.said);
    for said in &job.said[..2] {
        assert!(said.contains("rank(s) [2]"), "{mpi:?}: {said}");
    }
}

fn side_by_side(mpi: &Mpi) {
    assert_eq!(ranks::start(mpi, "side by side", 3).said, vec!["done"; 3], "{mpi:?}");
}

fn chosen(mpi: &Mpi) {
    let job = ranks::start(mpi, "init", 2);
    assert_eq!(job.said, vec!["3"; 2], "{mpi:?}");
    assert!(job.is_well, "{mpi:?}: a job that did its work did not end well");
}

fn alone(mpi: &Mpi) {
    let said = ranks::start_without(mpi, "init");
    let is_it = said.contains("says that this process is rank 0 of 1, but its environment says rank 0 of 2")
        && said.contains("mpirun");
    assert!(is_it, "{mpi:?}: {said}");
}

fn late(mpi: &Mpi) {
    let job = ranks::start(mpi, "comes late", 3);
    for rank in [0, 2] {
        let said = &job.said[rank];
        let waits = format!("rank {rank} has waited ");
        let is_it = said.contains(&waits) && said.contains("s in MPI_Init: rank(s) [1] have not reached MPI_Init");
        assert!(is_it && said.ends_with("; met 3"), "{mpi:?}: {said}");
    }
    assert!(job.is_well, "{mpi:?}: all ranks have met, and the job did not end well");
}

fn mixed(mpi: &Mpi) {
    let job = ranks::start(mpi, "mixes backends", 2);
    // Where the launcher lets the other one live, both say so.
    let own = |rank: usize, other: &str| format!("rank(s) [{rank}] wait with the {other} backend");
    let (first, second) = (&job.said[0], &job.said[1]);
    assert!(first.contains(&own(1, "mpi")) || second.contains(&own(0, "shm")), "{mpi:?}: {first}; {second}");
}
