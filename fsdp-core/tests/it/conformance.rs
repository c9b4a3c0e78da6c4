//! The backends against the suite that every backend passes: threads here; `processes` has the ranks for `shm`.

use std::{cell::Cell, sync::Mutex};

use crate::processes;
use fsdp_core::{
    Buffer, ProcessGroup, ReduceOp, Result,
    process_group::{
        Backend, Collective, Failure, CollectiveOutput, Membership, Op, Options, Promises,
        conformance::{self, Trial},
        local,
    },
};

/// Ranks as threads, which make worlds one after the other: the first to ask for one makes it.
fn threads(trial: &Trial, make: &(dyn Fn(usize, Options) -> Result<Vec<ProcessGroup>> + Sync)) -> Vec<String> {
    let worlds = Mutex::new(Vec::new());
    local::run(trial.size, |first| {
        let joined = Cell::new(0);
        conformance::take_part(trial.name, &|options| {
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
    let promises = Promises { sees_death: false, ..Promises::ALL };
    conformance::run(promises, &|trial| threads(trial, &local::world));
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
    conformance::run(Promises::ALL, &|trial| {
        processes::start(&format!("conforms {}", trial.name), processes::port(), processes::all(trial.size)).outcomes()
    });
    assert_eq!(listed(), before);
}

/// A backend around another, which reverses what `odd` says.
struct Around {
    inner: Box<dyn Backend>,
    odd: Odd,
}

#[derive(Clone, Copy, PartialEq)]
enum Odd {
    /// Promises nothing, as it may.
    Modest,
    /// The first element of every output of a rank but the first has a bit too many.
    Wrong,
    /// Sums are off by little.
    Rough,
    /// Promises nothing, and sums are off by more than any order of additions makes them.
    Off,
    /// Promises what the one within it does not.
    Boastful,
}

impl Backend for Around {
    fn device(&self) -> fsdp_core::DeviceId {
        self.inner.device()
    }
    fn promises(&self) -> Promises {
        match self.odd {
            Odd::Modest | Odd::Off => Promises { fixed_order: false, f32_sums: false, sees_death: false },
            Odd::Boastful => Promises::ALL,
            Odd::Wrong | Odd::Rough => self.inner.promises(),
        }
    }
    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        // The least and the greatest have no order and no rounding.
        let adds = matches!(op, Op::AllReduce { op: ReduceOp::Sum | ReduceOp::Avg, .. });
        let mut landing = self.inner.run(collective, op)?;
        let is_hit = match self.odd {
            Odd::Wrong => collective.group().rank > 0,
            Odd::Rough | Odd::Modest | Odd::Off => adds,
            Odd::Boastful => false,
        };
        for output in landing.outputs.iter_mut().filter(|_| is_hit) {
            match (self.odd, output) {
                (Odd::Wrong, output) => output.bytes_mut().iter_mut().take(1).for_each(|byte| *byte ^= 1),
                (Odd::Off, Buffer::F32(values)) => values.iter_mut().for_each(|x| *x += 0.5),
                (_, Buffer::F32(values)) => values.iter_mut().for_each(|x| *x += *x * f32::EPSILON),
                _ => {}
            }
        }
        Ok(landing)
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

/// What it promises not it need not keep: sums in another order have other bits.
#[test]
fn a_backend_that_promises_less_conforms_all_the_same() {
    let promises = Promises { fixed_order: false, f32_sums: false, sees_death: false };
    conformance::run(promises, &|trial| threads(trial, &around(Odd::Modest)));
}

#[test]
fn a_backend_that_does_not_conform_is_found_out() {
    let all = Promises { sees_death: false, ..Promises::ALL };
    let none = Promises { fixed_order: false, f32_sums: false, sees_death: false };
    for (odd, promises, found) in [
        (Odd::Wrong, all, "all_gather: part "),
        (Odd::Rough, all, "all_reduce: part "),
        (Odd::Off, none, "all_reduce: part "),
        (Odd::Boastful, all, "promises"),
    ] {
        let outcome = std::panic::catch_unwind(|| conformance::run(promises, &|trial| threads(trial, &around(odd))));
        let text = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert!(text.contains(found), "{text}");
    }
}
