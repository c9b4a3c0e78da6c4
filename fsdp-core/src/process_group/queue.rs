//! A rank's collectives in issue order. The queue counts them, keeps the first error, and records progress for the
//! launcher.
//!
//! The group's thread runs collectives as they are issued. Blocking ones run on the thread that issues them, because
//! waking a thread and being woken takes longer than a small collective.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
};

use parking_lot::{Condvar, Mutex};

use super::{
    backend::{Backend, CollectiveOutput},
    call::Call,
    collective::{Collective, Failure},
    options::Membership,
    work::Completion,
};
use crate::{Error, Result, heartbeat, text};

/// The work of a collective.
pub(super) type Run = Box<dyn FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<CollectiveOutput> + Send>;

/// An entry of the queue.
pub(super) enum Job {
    /// A collective.
    Run { call: Call, run: Run, completion: Completion },
    /// Fails the group, after the collectives issued before.
    Fail(Error),
}

/// State shared by a group's handles, its thread and its works. Locks are taken in the order of the fields.
pub(super) struct Queue {
    /// Whichever thread holds this lock runs jobs. `None` once the group has ended.
    runner: Mutex<Option<Runner>>,
    jobs: Mutex<Jobs>,
    /// Wakes the group's thread.
    wake: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    thread_sleeps: bool,
    is_closed: bool,
}

impl Queue {
    pub(super) fn new(group: Membership, backend: Box<dyn Backend>) -> Self {
        let recorder = heartbeat::collective_recorder(&group.name, group.rank, group.size);
        let runner = Runner { backend, group, sequence: 0, failed: None, recorder };
        Queue { runner: Mutex::new(Some(runner)), jobs: Mutex::default(), wake: Condvar::new() }
    }

    /// Queues a job for the group's thread. Drops the job if the group has ended: its work then fails.
    pub(super) fn push(&self, job: Job) {
        let mut jobs = self.jobs.lock();
        if jobs.is_closed {
            return;
        }
        jobs.waiting.push_back(job);
        let is_asleep = jobs.thread_sleeps;
        drop(jobs);
        if is_asleep {
            self.wake.notify_one();
        }
    }

    /// Ends the group's thread after the queued jobs.
    pub(super) fn close(&self) {
        self.jobs.lock().is_closed = true;
        self.wake.notify_one();
    }

    /// Runs jobs until the queue is closed. Called by the group's thread.
    pub(super) fn serve(&self) {
        let _end = End(self);
        loop {
            let mut jobs = self.jobs.lock();
            while jobs.waiting.is_empty() && !jobs.is_closed {
                jobs.thread_sleeps = true;
                self.wake.wait(&mut jobs);
                jobs.thread_sleeps = false;
            }
            if jobs.waiting.is_empty() {
                return;
            }
            drop(jobs);
            if let Some(runner) = &mut *self.runner.lock() {
                while self.run_next(runner) {}
            }
        }
    }

    /// Runs the next job, if there is one. Returns whether there was.
    fn run_next(&self, runner: &mut Runner) -> bool {
        let job = self.jobs.lock().waiting.pop_front();
        job.map(|job| runner.run(job)).is_some()
    }

    /// Runs the queued jobs and then `f`, on this thread. Returns `None` if the group has ended.
    fn here<T>(&self, f: impl FnOnce(&mut Runner) -> T) -> Option<T> {
        let mut runner = self.runner.lock();
        let runner = runner.as_mut()?;
        while self.run_next(runner) {}
        Some(f(runner))
    }

    /// Runs a collective on this thread, after the queued jobs. Returns `None` if the group has ended.
    pub(super) fn run_here<T>(
        &self,
        call: &Call,
        run: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<T>,
    ) -> Option<Result<T>> {
        self.here(|runner| runner.run_collective(call, run, true))
    }

    /// Runs other work on the backend, which does not count as a collective of the group. Like [`Queue::run_here`]
    /// otherwise.
    pub(super) fn run_uncounted<T>(
        &self,
        call: &Call,
        run: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> T,
    ) -> Option<T> {
        self.here(|runner| run(&mut *runner.backend, &Collective::new(call, &runner.group, runner.sequence, true)))
    }
}

/// Leaves the group and drops remaining jobs when the group's thread ends, for whichever reason.
struct End<'a>(&'a Queue);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let runner = self.0.runner.lock().take();
        let mut jobs = self.0.jobs.lock();
        jobs.is_closed = true;
        let waiting = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        drop((runner, waiting));
    }
}

/// Runs the jobs, on the group's thread or on one that issues a blocking collective.
struct Runner {
    backend: Box<dyn Backend>,
    group: Membership,
    sequence: u64,
    /// The first error, which all later collectives return.
    failed: Option<Error>,
    /// Records the running collective for the launcher.
    recorder: Option<heartbeat::CollectiveRecorder>,
}

impl Runner {
    fn run(&mut self, job: Job) {
        match job {
            Job::Fail(error) => self.fail(error),
            Job::Run { call, run, completion } => completion.complete_with(self.run_collective(&call, run, false)),
        }
    }

    fn run_collective<T>(
        &mut self,
        call: &Call,
        run: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<T>,
        is_awaited: bool,
    ) -> Result<T> {
        let outcome = match &self.failed {
            Some(error) => Err(error.clone()),
            None => {
                let (op, group) = (call.name, &*self.group.name);
                tracing::debug_span!("collective", op, group, bytes = call.bytes)
                    .in_scope(|| self.attempt(call, run, is_awaited))
            }
        };
        if let Err(error) = &outcome {
            self.fail(error.clone());
        }
        self.sequence += 1;
        outcome
    }

    fn attempt<T>(
        &mut self,
        call: &Call,
        run: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<T>,
        is_awaited: bool,
    ) -> Result<T> {
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(call.name, self.sequence);
        }
        let collective = Collective::new(call, &self.group, self.sequence, is_awaited);
        // Inputs and allocators are the caller's code. If they panic, the peers must learn of it.
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&mut *self.backend, &collective))).unwrap_or_else(|panic| {
            let text = text::of_panic(&*panic);
            Err(Error::Argument { rank: self.group.rank, message: format!("{} panicked: {text}", call.name) })
        });
        if let Some(recorder) = &mut self.recorder {
            recorder.end(&outcome);
        }
        outcome
    }

    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            self.backend.fail(&Failure::of(&error));
            self.failed = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::{
        super::{single_rank::SingleRank, work::Work},
        *,
    };

    fn queue() -> Arc<Queue> {
        Arc::new(Queue::new(
            Membership::world(0, 1, Duration::from_secs(60)),
            Box::new(SingleRank(crate::DeviceId::Host)),
        ))
    }

    fn call() -> Call {
        Call::without_parts("test", "")
    }

    fn push(queue: &Queue, run: impl FnOnce() + Send + 'static) -> Work {
        let (completion, work) = Work::pending(0);
        let run: Run = Box::new(|_, _| {
            run();
            Ok(CollectiveOutput::default())
        });
        queue.push(Job::Run { call: call(), run, completion });
        work
    }

    #[test]
    fn a_blocking_collective_runs_here_after_those_issued_before() {
        let queue = queue();
        let ran = Arc::new(Mutex::new(vec![]));
        let log = |number| {
            let (ran, here) = (ran.clone(), std::thread::current().id());
            move || {
                assert_eq!(std::thread::current().id(), here);
                ran.lock().push(number);
            }
        };
        let [first, second] = [1, 2].map(|number| push(&queue, log(number)));
        let third = queue.run_here(&call(), |_, collective| {
            log(3)();
            Ok(collective.sequence())
        });
        assert_eq!((third.unwrap().unwrap(), &ran.lock()[..]), (2, &[1, 2, 3][..]));
        assert_eq!((first.wait().unwrap(), second.wait().unwrap()), (vec![], vec![]));
        // Uncounted work has no place in the order.
        let next = queue.run_uncounted(&call(), |_, collective| collective.sequence());
        assert_eq!((next, queue.run_uncounted(&call(), |_, collective| collective.sequence())), (Some(3), Some(3)));
    }

    #[test]
    fn a_blocking_collective_waits_for_the_groups_thread() {
        let queue = queue();
        std::thread::scope(|scope| {
            scope.spawn(|| queue.serve());
            let (begin, begun) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let slow = push(&queue, move || {
                begin.send(()).unwrap();
                ended.recv().unwrap();
            });
            begun.recv().unwrap();
            let blocking = scope.spawn(|| queue.run_here(&call(), |_, collective| Ok(collective.sequence())));
            end.send(()).unwrap();
            assert_eq!(slow.wait().unwrap(), []);
            assert_eq!(blocking.join().unwrap().unwrap().unwrap(), 1);
            queue.close();
        });
    }

    #[test]
    fn jobs_queued_before_the_end_run_and_later_ones_fail() {
        let queue = queue();
        let work = push(&queue, || ());
        queue.close();
        queue.serve();
        assert_eq!(work.wait().unwrap(), []);
        let error = push(&queue, || ()).wait().unwrap_err().to_string();
        assert!(error.contains("ended without an outcome"), "{error}");
        assert!(queue.run_here(&call(), |_, _| Ok(())).is_none());
    }
}
