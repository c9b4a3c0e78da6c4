//! Random numbers of forward, as dropout draws them: a number is a function of a seed, of how many draws came before,
//! and of its place in the tensor, so that backward draws it again and nothing is kept.
//!
//! Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
//!
//! Each thread has a state, of seed 0 at first. What PyTorch's generators do and these don't, or the other way:
//!
//! - Data-parallel ranks that set the same seed draw the same numbers for other rows, as in PyTorch. Ranks that set
//!   seeds of their own draw others. With [`RngState::first_row`] they draw what one rank would that had all rows: the
//!   number of ranks does not matter.
//! - What a checkpointed closure draws it draws again in backward
//!   ([`activation_checkpoint`](crate::activation_checkpoint)).
//! - Ranks that hold the same activations, as tensor-parallel ranks do outside of parallel layers, set the same state
//!   and draw the same numbers. Where each holds a part of its own, [`in_region`] draws apart.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fsdp_candle::{nn, random};
//!
//! let x = Tensor::ones((4, 1000), DType::F32, &Device::Cpu)?;
//! random::manual_seed(7);
//! let first = nn::ops::dropout(&x, 0.1)?;
//! let state = random::get_rng_state(); // to be saved
//! let second = nn::ops::dropout(&x, 0.1)?;
//! random::set_rng_state(state); // after a restart
//! let again = nn::ops::dropout(&x, 0.1)?;
//! let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
//! assert!(values(&second)? == values(&again)? && values(&first)? != values(&second)?);
//! # Ok::<(), candle_core::Error>(())
//! ```

use std::cell::Cell;

use rand_philox::{Philox, splitmix64};

/// The odd number of Weyl sequences: multiples of it are far apart.
const APART: u64 = 0x9e37_79b9_7f4a_7c15;

/// What the next draws follow from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RngState {
    /// What was given to [`manual_seed`].
    pub seed: u64,
    /// Draws since then: each dropout is one.
    pub calls: u64,
    /// The number, among all ranks' rows, of the first row of what is drawn for: of its first dimension.
    pub first_row: u64,
    /// Of [`in_region`]: 0 outside of any.
    pub region: u64,
}

impl RngState {
    /// The state that [`manual_seed`] sets.
    pub fn new(seed: u64) -> Self {
        RngState { seed, ..RngState::default() }
    }
}

thread_local! {
    static STATE: Cell<RngState> = const { Cell::new(RngState { seed: 0, calls: 0, first_row: 0, region: 0 }) };
}

/// Starts this thread's random numbers anew: PyTorch's `torch.manual_seed`.
pub fn manual_seed(seed: u64) {
    set_rng_state(RngState::new(seed));
}

/// This thread's state.
pub fn get_rng_state() -> RngState {
    STATE.get()
}

/// Sets this thread's state.
pub fn set_rng_state(state: RngState) {
    STATE.set(state);
}

/// Runs `f`, which draws other numbers in each region: the number of a tensor-parallel rank, say, where each has other
/// heads. Draws count on as outside, so that ranks stay alike there. Regions do not nest: the inner one counts.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::{nn::ops::dropout, random};
///
/// let x = Tensor::ones((1, 64), DType::F32, &Device::Cpu)?;
/// let drawn = |region: u64| -> candle_core::Result<_> {
///     random::manual_seed(1);
///     let own = random::in_region(region, || dropout(&x, 0.5))?;
///     Ok((own.to_vec2::<f32>()?, dropout(&x, 0.5)?.to_vec2::<f32>()?))
/// };
/// let (first, second) = (drawn(1)?, drawn(2)?);
/// assert!(first.0 != second.0 && first.1 == second.1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn in_region<T>(region: u64, f: impl FnOnce() -> T) -> T {
    struct Guard(u64);
    impl Drop for Guard {
        fn drop(&mut self) {
            STATE.set(RngState { region: self.0, ..STATE.get() });
        }
    }
    let state = STATE.get();
    let _guard = Guard(state.region);
    STATE.set(RngState { region: region.wrapping_add(1), ..state });
    f()
}

/// Runs `f` with a state that was, and goes on with the present one.
pub(crate) fn with_state<T>(state: RngState, f: impl FnOnce() -> T) -> T {
    struct Guard(RngState);
    impl Drop for Guard {
        fn drop(&mut self) {
            STATE.set(self.0);
        }
    }
    let _guard = Guard(STATE.replace(state));
    f()
}

/// Which elements of a tensor are dropped: one draw.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    key: [u32; 2],
    call: u64,
    first_row: u64,
    /// A word below this drops its element.
    threshold: u32,
    /// What the others are multiplied by.
    scale: f32,
}

impl Mask {
    /// The next draw, which drops elements with a probability below 1.
    pub(crate) fn draw(probability: f64) -> Self {
        let state = STATE.get();
        STATE.set(RngState { calls: state.calls.wrapping_add(1), ..state });
        let key = splitmix64(splitmix64(state.seed.wrapping_add(APART)) ^ state.region.wrapping_mul(APART));
        Mask {
            key: [key as u32, (key >> 32) as u32],
            call: state.calls,
            first_row: state.first_row,
            threshold: (probability * 4_294_967_296.) as u32,
            scale: (1. / (1. - probability)) as f32,
        }
    }

    /// Applies it to values that follow one another from `first` on, in a tensor whose rows have `row` elements.
    pub(crate) fn apply(&self, row: usize, first: usize, values: &mut [f32]) {
        const WORDS: usize = 256;
        let mut words = [0; WORDS];
        let mut at = self.first_row.wrapping_mul(row as u64).wrapping_add(first as u64);
        let mut rest = values;
        while !rest.is_empty() {
            let skipped = (at % 4) as usize;
            let len = rest.len().min(WORDS - skipped);
            let (now, later) = rest.split_at_mut(len);
            let counter = u128::from(self.call) << 64 | u128::from(at / 4);
            let words = &mut words[..skipped + len];
            Philox::new(self.key, counter).fill_u32(words);
            for (value, &word) in now.iter_mut().zip(&words[skipped..]) {
                *value = if word < self.threshold { 0. } else { *value * self.scale };
            }
            at = at.wrapping_add(len as u64);
            rest = later;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(row: usize, first: usize, len: usize, state: RngState) -> Vec<f32> {
        set_rng_state(state);
        let mut values = vec![1.; len];
        Mask::draw(0.25).apply(row, first, &mut values);
        values
    }

    #[test]
    fn an_element_depends_on_its_place_alone() {
        let state = RngState { calls: 3, ..RngState::new(9) };
        let whole = mask(7, 0, 7 * 300, state);
        for (first, len) in [(0, 1), (1, 255), (2, 1000), (3, 2097), (255, 513), (2099, 1)] {
            assert_eq!(mask(7, first, len, state), whole[first..first + len], "{first} {len}");
        }
        for rank in 0..3 {
            let own = mask(7, 0, 700, RngState { first_row: 100 * rank, ..state });
            assert_eq!(own, whole[700 * rank as usize..][..700]);
        }
    }

    #[test]
    fn draws_seeds_and_regions_are_apart_and_drop_as_often_as_asked() {
        let states = [
            RngState::new(0),
            RngState::new(1),
            RngState { calls: 1, ..RngState::new(0) },
            RngState { region: 1, ..RngState::new(0) },
            RngState { region: 2, ..RngState::new(0) },
            RngState { region: 1, ..RngState::new(1) },
        ];
        let drawn = states.map(|state| mask(1, 0, 100_000, state));
        for (i, a) in drawn.iter().enumerate() {
            let kept = a.iter().filter(|x| **x != 0.).count() as f64;
            assert!((kept - 75_000.).abs() < 600. && a.iter().all(|x| *x == 0. || *x == 1f32 / 0.75), "{kept}");
            for b in &drawn[..i] {
                let both = a.iter().zip(b).filter(|(a, b)| **a != 0. && **b != 0.).count() as f64;
                assert!((both - 56_250.).abs() < 700., "{both}");
            }
        }
    }
}
