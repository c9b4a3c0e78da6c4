//! A rank's collectives in issue order. The queue counts them, keeps the first error, and records progress for the
//! launcher.
//!
//! The group's thread runs collectives as they are issued. Deferred ones run on the thread that waits for them, because
//! waking a thread and being woken takes longer than a small collective.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::ThreadId,
};

use parking_lot::{Condvar, Mutex, MutexGuard};

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

/// Other work on the backend.
type RunUncounted = Box<dyn FnOnce(&mut dyn Backend, &Collective<'_>) + Send>;

/// An entry of the queue.
pub(super) enum Job {
    /// A collective.
    Run { call: Call, run: Run, completion: Completion },
    /// Fails the group, after the collectives issued before.
    Fail(Error),
    /// Work on the backend that does not count as a collective of the group.
    Uncounted { call: Call, run: RunUncounted },
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
    /// Thread that runs jobs now.
    runs: Option<ThreadId>,
    thread_sleeps: bool,
    is_closed: bool,
}

impl Queue {
    pub(super) fn new(group: Membership, backend: Box<dyn Backend>) -> Self {
        let recorder = heartbeat::collective_recorder(&group.name, group.rank, group.size);
        let runner = Runner { backend, group, sequence: 0, failed: None, recorder };
        Queue { runner: Mutex::new(Some(runner)), jobs: Mutex::default(), wake: Condvar::new() }
    }

    /// Queues a job, and wakes the group's thread if `at_once`. Drops the job if the group has ended: its work then
    /// fails.
    pub(super) fn push(&self, job: Job, at_once: bool) {
        let mut jobs = self.jobs.lock();
        if !jobs.is_closed {
            jobs.waiting.push_back(job);
            self.wake(jobs, at_once);
        }
    }

    fn wake(&self, jobs: MutexGuard<'_, Jobs>, if_asleep: bool) {
        let is_asleep = jobs.thread_sleeps;
        drop(jobs);
        if is_asleep && if_asleep {
            self.wake.notify_one();
        }
    }

    /// Ends the group's thread after the queued jobs.
    pub(super) fn close(&self) {
        self.jobs.lock().is_closed = true;
        self.wake.notify_one();
    }

    /// Returns whether the calling thread is running a job.
    pub(super) fn is_run_here(&self) -> bool {
        self.jobs.lock().runs == Some(std::thread::current().id())
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
            self.run(self.runner.lock(), false, || false);
        }
    }

    fn run(&self, mut runner: MutexGuard<'_, Option<Runner>>, is_awaited: bool, mut is_done: impl FnMut() -> bool) {
        let Some(runner) = &mut *runner else { return };
        while !is_done() {
            let mut jobs = self.jobs.lock();
            let job = jobs.waiting.pop_front();
            jobs.runs = job.is_some().then(|| std::thread::current().id());
            drop(jobs);
            let Some(job) = job else { return };
            runner.run(job, is_awaited);
        }
        self.jobs.lock().runs = None;
    }

    /// Runs queued jobs on this thread until `is_done`, or has the group's thread run them if another thread runs jobs.
    pub(super) fn help(&self, is_done: &mut dyn FnMut() -> bool) {
        match self.runner.try_lock() {
            Some(runner) => self.run(runner, true, is_done),
            // The thread that runs jobs now may stop before it comes to the caller's job.
            None => self.start(),
        }
    }

    /// Runs queued jobs on this thread until `is_done`, once no other thread runs jobs.
    pub(super) fn run_here(&self, is_done: &mut dyn FnMut() -> bool) {
        self.run(self.runner.lock(), true, is_done);
    }

    /// Has the group's thread run the queued jobs.
    pub(super) fn start(&self) {
        self.wake(self.jobs.lock(), true);
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

/// Runs the jobs, on the group's thread or on a thread that waits.
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
    fn run(&mut self, job: Job, is_awaited: bool) {
        match job {
            Job::Fail(error) => self.fail(error),
            Job::Uncounted { call, run } => {
                run(&mut *self.backend, &Collective::new(&call, &self.group, self.sequence, is_awaited));
            }
            Job::Run { call, run, completion } => {
                let outcome = match &self.failed {
                    Some(error) => Err(error.clone()),
                    None => {
                        let (op, group) = (call.name, &*self.group.name);
                        tracing::debug_span!("collective", op, group, bytes = call.bytes)
                            .in_scope(|| self.attempt(&call, run, is_awaited))
                    }
                };
                if let Err(error) = &outcome {
                    self.fail(error.clone());
                }
                self.sequence += 1;
                completion.complete_with(outcome);
            }
        }
    }

    fn attempt(&mut self, call: &Call, run: Run, is_awaited: bool) -> Result<CollectiveOutput> {
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

    fn push(queue: &Arc<Queue>, at_once: bool, run: impl FnOnce() + Send + 'static) -> Work {
        let (completion, work) = Work::pending(0);
        let run: Run = Box::new(|_, _| {
            run();
            Ok(CollectiveOutput::default())
        });
        let call = Call::new("test", "", std::iter::empty());
        queue.push(Job::Run { call, run, completion }, at_once);
        if at_once { work } else { work.deferred(queue.clone()) }
    }

    #[test]
    fn waiting_runs_earlier_deferred_jobs_and_no_later_ones() {
        let queue = queue();
        let ran = Arc::new(Mutex::new(vec![]));
        let issue = |number| {
            let (queue, ran, here) = (queue.clone(), ran.clone(), std::thread::current().id());
            push(&queue.clone(), false, move || {
                assert!(queue.is_run_here() && std::thread::current().id() == here);
                ran.lock().push(number);
            })
        };
        let [_first, second, third] = [1, 2, 3].map(issue);
        second.wait().unwrap();
        assert_eq!(*ran.lock(), [1, 2]);
        assert!(!queue.is_run_here());
        third.wait().unwrap();
        assert_eq!(*ran.lock(), [1, 2, 3]);
    }

    // Polled, dropped, followed by another job, and while another thread runs an earlier job.
    #[test]
    fn deferred_jobs_run_without_a_wait() {
        let queue = queue();
        std::thread::scope(|scope| {
            scope.spawn(|| queue.serve());
            let (tell, told) = std::sync::mpsc::channel();
            let told_by = |tell: &std::sync::mpsc::Sender<()>| {
                let tell = tell.clone();
                move || tell.send(()).unwrap()
            };
            drop(push(&queue, false, told_by(&tell)));
            told.recv().unwrap();

            let mut asked = push(&queue, false, told_by(&tell));
            while !asked.is_done() {
                std::thread::yield_now();
            }
            told.recv().unwrap();

            let _behind = (push(&queue, false, told_by(&tell)), push(&queue, true, || ()).wait().unwrap());
            told.recv().unwrap();

            let (begin, begun) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let slow = push(&queue, false, move || {
                begin.send(()).unwrap();
                ended.recv().unwrap();
            });
            let other = scope.spawn(|| slow.wait());
            begun.recv().unwrap();
            let next = push(&queue, false, told_by(&tell));
            let waits = scope.spawn(|| next.wait());
            end.send(()).unwrap();
            assert_eq!((other.join().unwrap().unwrap(), waits.join().unwrap().unwrap()), (vec![], vec![]));
            queue.close();
        });
    }

    #[test]
    fn jobs_queued_before_the_end_run_and_later_ones_fail() {
        let queue = queue();
        let works = [true, false].map(|at_once| push(&queue, at_once, || ()));
        queue.close();
        queue.serve();
        works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap(), []));
        for at_once in [true, false] {
            let error = push(&queue, at_once, || ()).wait().unwrap_err().to_string();
            assert!(error.contains("ended without an outcome"), "{error}");
        }
    }
}
