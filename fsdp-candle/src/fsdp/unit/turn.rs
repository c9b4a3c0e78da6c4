//! Who moves a unit's parameters: one thread at a time, and no lock is held meanwhile. Collectives take their time, and
//! the user's code that takes part in them may look at the model.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// A state that threads take, change and put back.
pub(super) struct Turns<S> {
    held: Mutex<Held<S>>,
    back: Condvar,
}

enum Held<S> {
    Here(S),
    By(ThreadId),
}

/// Why a thread does not get its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It has it already: this call comes from inside of one that moves the same parameters.
    Nested,
    /// Another thread has had it all the time.
    Late,
}

/// A thread's turn. What is left in `state` is put back when it is dropped.
pub(super) struct Turn<'a, S: Default> {
    of: &'a Turns<S>,
    pub(super) state: S,
}

impl<S: Default> Turns<S> {
    pub(super) fn new() -> Self {
        Turns { held: Mutex::new(Held::Here(S::default())), back: Condvar::new() }
    }

    fn held(&self) -> MutexGuard<'_, Held<S>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the state, when no other thread has it. Waits that long for one that has.
    pub(super) fn take(&self, limit: Duration) -> Result<Turn<'_, S>, Refused> {
        let me = std::thread::current().id();
        let elsewhere = |held: &mut Held<S>| matches!(held, Held::By(thread) if *thread != me);
        let (mut held, _) =
            self.back.wait_timeout_while(self.held(), limit, elsewhere).unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *held, Held::By(me)) {
            Held::Here(state) => Ok(Turn { of: self, state }),
            Held::By(thread) => {
                *held = Held::By(thread);
                Err(if thread == me { Refused::Nested } else { Refused::Late })
            }
        }
    }

    /// Looks at the state; nobody knows it while a thread has it.
    pub(super) fn look<T>(&self, look: impl FnOnce(&S) -> T) -> Option<T> {
        match &*self.held() {
            Held::Here(state) => Some(look(state)),
            Held::By(_) => None,
        }
    }
}

impl<S: Default> Drop for Turn<'_, S> {
    fn drop(&mut self) {
        *self.of.held() = Held::Here(std::mem::take(&mut self.state));
        self.of.back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_thread_that_has_its_turn_gets_no_second_one() {
        let turns = Turns::<u32>::new();
        let mut turn = turns.take(LONG).unwrap();
        turn.state = 7;
        assert_eq!(turns.take(LONG).err(), Some(Refused::Nested));
        assert_eq!(turns.look(|state| *state), None);
        drop(turn);
        assert_eq!(turns.look(|state| *state), Some(7));
    }

    #[test]
    fn others_wait_for_their_turn_but_not_for_ever() {
        let turns = Turns::<u32>::new();
        let mut turn = turns.take(LONG).unwrap();
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| turns.take(Duration::from_millis(1)).err());
            assert_eq!(refused.join().unwrap(), Some(Refused::Late));
            let next = scope.spawn(|| turns.take(LONG).unwrap().state);
            turn.state = 3;
            drop(turn);
            assert_eq!(next.join().unwrap(), 3);
        });
        // What the second thread left is there.
        assert_eq!(turns.look(|state| *state), Some(3));
    }

    #[test]
    fn a_panic_ends_the_turn() {
        let turns = Turns::<u32>::new();
        let panicked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _turn = turns.take(LONG).unwrap();
                    panic!("on purpose")
                })
                .join()
        });
        assert!(panicked.is_err());
        assert!(turns.take(Duration::ZERO).is_ok());
    }
}
