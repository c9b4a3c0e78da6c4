//! `train` under launchers that are installed. Two jobs run at the same time, to detect jobs that cannot tell each other
//! apart.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::need::Mpi;
use fsdp_test_support::two_jobs::{expected, flags, losses, without_launcher};
use fsdp_test_support::{Run, program, run};
use libtest_mimic::Trial;

use crate::need::{Need, python, trials};

const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn trials() -> Vec<Trial> {
    let mpi = trials![&[Need::Mpi] => open_mpi_starts_train, mpich_starts_train];
    mpi.into_iter().chain(trials![&[Need::Pytorch] => torchrun_starts_train]).collect()
}

fn open_mpi_starts_train() {
    starts_train(&Mpi::Open.mpirun().unwrap(), &["--allow-run-as-root", "--oversubscribe", "-np", "2"]);
}

fn mpich_starts_train() {
    starts_train(&Mpi::Mpich.mpirun().unwrap(), &["-np", "2"]);
}

fn torchrun_starts_train() {
    // As `torchrun`, whose script need not be on PATH.
    let words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"];
    starts_train(&python(), &words);
}

fn starts_train(launcher: &PathBuf, words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let expected = expected(dir.path());
    let names = ["first", "second"];
    let runs: Vec<Run> = std::thread::scope(|scope| {
        let started = names.map(|name| {
            let mut command = without_launcher(Command::new(launcher));
            command.args(words).arg(program("train")).args(flags(name)).current_dir(dir.path());
            scope.spawn(move || run(command, LIMIT))
        });
        started.into_iter().map(|job| job.join().unwrap()).collect()
    });
    for (name, run) in names.into_iter().zip(runs) {
        assert_eq!(run.ok().stdout.matches("checkpoint: ").count(), 1, "{name}");
        assert_eq!(losses(name, dir.path()), expected, "{name}");
    }
}
