//! The conformance suite over threads and processes. `processes` has the ranks for `shm`.

use std::{cell::Cell, sync::Mutex};

use crate::processes;
use fsdp_core::{
    Buffer, ProcessGroup, ReduceOp, Result,
    process_group::{Backend, Collective, CollectiveOutput, Failure, Guarantees, Membership, Op, Options, local},
};
use fsdp_test_support::{
    conformance::{self, Trial},
    ranks::port,
};

/// Runs a trial on threads. The first rank to join a world creates it.
fn threads(trial: &Trial, make: &(dyn Fn(usize, Options) -> Result<Vec<ProcessGroup>> + Sync)) -> Vec<String> {
    let worlds = Mutex::new(Vec::new());
    local::run(trial.size, |first| {
        let joined = Cell::new(0);
        conformance::take_part(&trial.name, &|options| {
            let (mut worlds, at) = (worlds.lock().unwrap(), joined.replace(joined.get() + 1));
            if worlds.len() == at {
                worlds.push(make(trial.size, options)?.into_iter().map(Some).collect::<Vec<_>>());
            }
            Ok(worlds[at][first.rank()].take().unwrap())
        })
    })
}

#[test]
fn threads_conform() {
    let guarantees = Guarantees { detects_death: false, ..Guarantees::ALL };
    conformance::run(guarantees, &|trial| threads(trial, &local::world));
}

#[test]
fn processes_conform_and_leave_nothing_behind() {
    let listed = || {
        let entries = std::fs::read_dir("/dev/shm").into_iter().flatten();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("fsdp"))
            .count()
    };
    let before = listed();
    conformance::run(Guarantees::ALL, &|trial| {
        processes::start(&format!("conforms {}", trial.name), port(), processes::all(trial.size)).outcomes()
    });
    assert_eq!(listed(), before);
}

/// A wrapper of a backend with the fault `odd`.
struct Around {
    inner: Box<dyn Backend>,
    odd: Odd,
}

#[derive(Clone, Copy, PartialEq)]
enum Odd {
    /// Guarantees nothing, and rounds sums differently.
    Modest,
    /// Flips a bit of every output on all ranks except rank 0.
    Wrong,
    /// Rounds sums differently than it guarantees.
    Rough,
    /// Guarantees nothing, and sums differ by more than any order of additions explains.
    Off,
    /// Guarantees more than the inner backend.
    Boastful,
}

impl Backend for Around {
    fn device(&self) -> fsdp_core::DeviceId {
        self.inner.device()
    }
    fn guarantees(&self) -> Guarantees {
        match self.odd {
            Odd::Modest | Odd::Off => Guarantees { fixed_order: false, f32_accumulation: false, detects_death: false },
            Odd::Boastful => Guarantees::ALL,
            Odd::Wrong | Odd::Rough => self.inner.guarantees(),
        }
    }
    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        // Minimum and maximum do not depend on order or rounding.
        let adds = matches!(op, Op::AllReduce { op: ReduceOp::Sum | ReduceOp::Avg, .. });
        let mut output = self.inner.run(collective, op)?;
        let is_hit = match self.odd {
            Odd::Wrong => collective.group().rank > 0,
            Odd::Rough | Odd::Modest | Odd::Off => adds,
            Odd::Boastful => false,
        };
        for buffer in output.outputs.iter_mut().filter(|_| is_hit) {
            match (self.odd, buffer) {
                (Odd::Wrong, buffer) => buffer.bytes_mut().iter_mut().take(1).for_each(|byte| *byte ^= 1),
                (Odd::Off, Buffer::F32(values)) => values.iter_mut().for_each(|x| *x += 0.5),
                (_, Buffer::F32(values)) => values.iter_mut().for_each(|x| *x += *x * f32::EPSILON),
                _ => {}
            }
        }
        Ok(output)
    }
    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let inner = self.inner.split(collective, ranks, group)?;
        Ok(Box::new(Around { inner, odd: self.odd }))
    }
    fn fail(&mut self, why: &Failure) {
        self.inner.fail(why);
    }
}

fn around(odd: Odd) -> impl Fn(usize, Options) -> Result<Vec<ProcessGroup>> + Sync {
    move |size, options| {
        if size == 1 {
            return local::world(size, options);
        }
        let backends = local::backends(size, &options)?.into_iter().enumerate();
        let member = |(rank, inner)| {
            let membership = Membership::world(rank, size, options.timeout);
            ProcessGroup::new(membership, Box::new(Around { inner, odd }))
        };
        backends.map(member).collect()
    }
}

#[test]
fn a_backend_with_fewer_guarantees_conforms() {
    let guarantees = Guarantees { fixed_order: false, f32_accumulation: false, detects_death: false };
    conformance::run(guarantees, &|trial| threads(trial, &around(Odd::Modest)));
}

#[test]
fn backends_that_do_not_conform_fail() {
    let all = Guarantees { detects_death: false, ..Guarantees::ALL };
    let none = Guarantees { fixed_order: false, f32_accumulation: false, detects_death: false };
    for (odd, guarantees, found) in [
        (Odd::Wrong, all, "all_gather: part "),
        (Odd::Rough, all, "all_reduce: part "),
        (Odd::Off, none, "all_reduce: part "),
        (Odd::Boastful, all, "detects_death: true"),
    ] {
        let outcome = std::panic::catch_unwind(|| conformance::run(guarantees, &|trial| threads(trial, &around(odd))));
        let text = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert!(text.contains(found), "{text}");
    }
}
