//! Random numbers of forward, as dropout draws them. A number is a function of a seed, the number of earlier draws, the
//! row of the tensor, and the element's coordinates in the row, so backward draws it again instead of keeping it. Threads,
//! tensor-parallel ranks and blocks of attention draw their own elements, in any order.
//!
//! A row is a sequence of a batch. The numbers of a sequence do not depend on the other rows, nor on the width to which
//! the batch is padded.
//!
//! Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
//!
//! Each thread has a state, of seed 0 at first. Differences to PyTorch's generators:
//!
//! - As in PyTorch, data-parallel ranks with the same seed draw the same numbers for different rows. With
//!   [`RngState::first_row`] ranks draw the numbers that one rank with all rows would draw, at any number of ranks.
//! - A checkpointed closure draws the same numbers in backward
//!   ([`activation_checkpoint`](crate::activation_checkpoint)).
//! - Ranks with the same activations, as tensor-parallel ranks outside of parallel layers, set the same state and draw
//!   the same numbers. A rank with a [`Part`] of a tensor draws by [`in_part`] the numbers of that part of the whole.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fsdp_candle::{nn, random};
//!
//! let x = Tensor::ones((4, 1000), DType::F32, &Device::Cpu)?;
//! random::manual_seed(7);
//! let first = nn::ops::dropout(&x, 0.1)?;
//! let state = random::get_rng_state(); // a value of a `TrainState`
//! let second = nn::ops::dropout(&x, 0.1)?;
//! random::set_rng_state(state); // after a restart
//! let again = nn::ops::dropout(&x, 0.1)?;
//! let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
//! assert!(values(&second)? == values(&again)? && values(&first)? != values(&second)?);
//! # Ok::<(), candle_core::Error>(())
//! ```

use std::cell::Cell;
use std::ops::Range;

use candle_core::{Result, bail};
use rand_philox::{Philox, splitmix64};
use scopeguard::defer;
use serde::{Deserialize, Serialize};

use crate::context_parallel::{self, Positions};
use crate::kernels::Draw;

/// Increment of a Weyl sequence, whose multiples are far apart.
const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// The state of a thread's random numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngState {
    /// Seed of [`manual_seed`].
    pub seed: u64,
    /// Number of draws since then; a dropout is one draw.
    pub calls: u64,
    /// Index, among all ranks' rows, of the first row of the tensors drawn for.
    pub first_row: u64,
    /// Part of a tensor that is drawn for, set by [`in_part`]; `None` for whole tensors.
    pub part: Option<Part>,
}

/// The part of a tensor that a rank holds: one of `count` equal parts along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Split dimension.
    pub dim: usize,
    /// Index of the part: the rank in the group that splits the tensor.
    pub index: usize,
    /// Number of parts.
    pub count: usize,
}

impl RngState {
    /// Returns the state that [`manual_seed`] sets.
    pub fn new(seed: u64) -> Self {
        RngState { seed, ..RngState::default() }
    }
}

thread_local! {
    static STATE: Cell<RngState> = const { Cell::new(RngState { seed: 0, calls: 0, first_row: 0, part: None }) };
}

/// Seeds this thread's random numbers: PyTorch's `torch.manual_seed`.
pub fn manual_seed(seed: u64) {
    set_rng_state(RngState::new(seed));
}

/// Returns this thread's state.
pub fn get_rng_state() -> RngState {
    STATE.get()
}

/// Sets this thread's state.
pub fn set_rng_state(state: RngState) {
    STATE.set(state);
}

/// Runs `f`, in which tensors are parts of larger ones. A draw for a part returns the numbers of a draw for the whole
/// tensor. Tensor-parallel ranks use it for their heads or tokens. Counts draws as outside. The inner of nested parts
/// applies.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::ops::dropout;
/// use fsdp_candle::random::{self, Part};
///
/// let whole = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
/// random::manual_seed(1);
/// let want = dropout(&whole, 0.5)?.narrow(1, 32, 32)?;
/// random::manual_seed(1);
/// let second = Part { dim: 1, index: 1, count: 2 };
/// let own = random::in_part(second, || dropout(&whole.narrow(1, 32, 32)?, 0.5))?;
/// assert_eq!(own.to_vec2::<f32>()?, want.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn in_part<T>(part: Part, f: impl FnOnce() -> T) -> T {
    let before = STATE.get();
    STATE.set(RngState { part: Some(part), ..before });
    defer!(STATE.set(RngState { part: before.part, ..STATE.get() }));
    f()
}

/// Runs `f` with an earlier state, then restores the current state.
pub(crate) fn with_state<T>(state: RngState, f: impl FnOnce() -> T) -> T {
    let before = STATE.replace(state);
    defer!(STATE.set(before));
    f()
}

/// Number of bits of a column, and of a line, in an element's place.
const COORDINATE_BITS: u32 = 24;

/// One draw: the elements of a tensor that are dropped.
///
/// The coordinates of an element are its row, plane, line and column, in the order of the tensor's dimensions. They are
/// those of the whole tensor, of all ranks. The row is the upper half of Philox's counter. The others make up the
/// element's place, of which the lower half of the counter is a quarter: a counter has four words.
#[derive(Clone, Copy)]
pub(crate) struct Mask(pub(crate) Draw);

impl Mask {
    /// Draws for a tensor of this shape. The probability of a drop is below 1. Fails if the tensor cannot be the
    /// [`Part`] of another tensor, or if a row is too large.
    ///
    /// In a context-parallel forward, the tensor is a part `[batch, T, width]` of sequences.
    pub(crate) fn draw(probability: f64, dims: &[usize]) -> Result<Self> {
        let Some(scope) = context_parallel::current() else { return Self::draw_at(probability, dims, None) };
        let part = STATE.get().part.filter(|part| part.dim == 1 && part.count > 1);
        let &[_, steps, _] = dims else {
            bail!("random: in a context-parallel forward, dropout takes [batch, T, width], found {dims:?}")
        };
        let (index, count) = part.map_or((0, 1), |part| (part.index, part.count));
        let positions = scope.context().positions_of(steps * count).skip(index * steps);
        Self::draw_at(probability, dims, Some(positions))
    }

    /// [`Mask::draw`] for lines at these positions. Then a part of the dimension of the lines is not looked at.
    pub(crate) fn draw_at(probability: f64, dims: &[usize], lines: Option<Positions>) -> Result<Self> {
        let state = STATE.get();
        let mut first = [state.first_row, 0, 0, 0];
        let split = match state.part {
            Some(Part { dim, index, count }) if dim >= dims.len() || index >= count => {
                bail!("random: a tensor of shape {dims:?} is not part {index} of {count} along dimension {dim}")
            }
            Some(Part { dim, .. }) if lines.is_some() && dim + 2 == dims.len() => None,
            Some(Part { dim, index, count }) if count > 1 => Some((dim, (index * dims[dim]) as u64)),
            _ => None,
        };
        let coordinate = |dim: usize| match (dim, dims.len() - dim) {
            (_, 1) => 3,
            (0, _) => 0,
            (_, 2) => 2,
            _ => 1,
        };
        let product = |dims: &[usize]| dims.iter().product::<usize>() as u64;
        let extents = match dims {
            [] => [1; 3],
            [columns] => {
                // Elements are the rows, of one column each.
                first = [0, 0, 0, state.first_row];
                [1, 1, *columns as u64]
            }
            [_, columns] => [1, 1, *columns as u64],
            [_, planes @ .., lines, columns] => [product(planes), *lines as u64, *columns as u64],
        };
        if let Some((dim, before)) = split {
            // If several dimensions make up the planes, only the first of them can be split.
            if dim >= 2 && dim + 2 < dims.len() {
                bail!("random: a tensor of shape {dims:?} cannot be part of another along dimension {dim}")
            }
            let planes = if dim == 1 && dims.len() > 4 { product(&dims[2..dims.len() - 2]) } else { 1 };
            first[coordinate(dim)] += before * planes;
        }
        let Positions { first: first_line, gap_at, gap } = lines.unwrap_or(Positions::from(0));
        first[2] += first_line as u64;
        let [planes, lines, columns] = [0, 1, 2].map(|at| first[at + 1] + extents[at]);
        let lines = lines + gap as u64;
        let most = 1u64 << COORDINATE_BITS;
        let is_flat = planes <= 1 && lines <= 1;
        if !(is_flat || columns <= most && (planes <= 1 || lines <= most) && planes <= 1 << 16) {
            bail!(
                "random: a row of a tensor of shape {dims:?} is too large for dropout. The last two dimensions are at \
                 most {most}, those between them and the first at most {}",
                1 << 16
            )
        }
        STATE.set(RngState { calls: state.calls.wrapping_add(1), ..state });
        let of_seed = splitmix64(state.seed.wrapping_add(WEYL));
        Ok(Mask(Draw {
            key: splitmix64(of_seed.wrapping_add(state.calls.wrapping_mul(WEYL))),
            first,
            extents,
            gap_at: gap_at as u64,
            gap: gap as u64,
            threshold: (probability * 4_294_967_296.) as u32,
            scale: (1. / (1. - probability)) as f32,
        }))
    }

    /// Returns the draw of some of a row's planes, which are heads in attention.
    pub(crate) fn of_planes(mut self, planes: &Range<usize>) -> Self {
        let Draw { first, extents, .. } = &mut self.0;
        first[1] += planes.start as u64;
        extents[0] = planes.len() as u64;
        self
    }

    /// Applies the draw to consecutive values from element `first` of the tensor on.
    pub(crate) fn apply(&self, first: usize, values: &mut [f32]) {
        const WORDS: usize = 256;
        let mut words = [0; WORDS];
        let key = [self.0.key as u32, (self.0.key >> 32) as u32];
        let [planes, lines, columns] = self.0.extents.map(|extent| extent.max(1));
        let at = first as u64;
        let mut column = at % columns;
        let mut line = at / columns % lines;
        let mut plane = at / columns / lines % planes;
        let mut row = at / columns / lines / planes;
        let mut rest = values;
        while !rest.is_empty() {
            let [_, first_plane, first_line, first_column] = self.0.first;
            let skipped_lines = if line >= self.0.gap_at { self.0.gap } else { 0 };
            let lines_before = ((first_plane + plane) << COORDINATE_BITS) + first_line + line + skipped_lines;
            let place = (lines_before << COORDINATE_BITS) + first_column + column;
            let skipped = (place % 4) as usize;
            let until_border = usize::try_from(columns - column).unwrap_or(usize::MAX);
            let len = rest.len().min(WORDS - skipped).min(until_border);
            let (now, later) = rest.split_at_mut(len);
            let counter = u128::from(self.0.first[0].wrapping_add(row)) << 64 | u128::from(place / 4);
            let words = &mut words[..skipped + len];
            Philox::new(key, counter).fill_u32(words);
            for (value, &word) in now.iter_mut().zip(&words[skipped..]) {
                *value = if word < self.0.threshold { 0. } else { *value * self.0.scale };
            }
            rest = later;
            column += len as u64;
            let carry = |value: &mut u64, extent: u64| {
                let is_full = *value == extent;
                *value = if is_full { 0 } else { *value };
                u64::from(is_full)
            };
            line += carry(&mut column, columns);
            plane += carry(&mut line, lines);
            row += carry(&mut plane, planes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies a draw for a tensor of this shape to `len` ones from element `first` on.
    fn mask(dims: &[usize], first: usize, len: usize, state: RngState) -> Vec<f32> {
        set_rng_state(state);
        let mut values = vec![1.; len];
        Mask::draw(0.25, dims).unwrap().apply(first, &mut values);
        values
    }

    #[test]
    fn elements_depend_on_their_position_only() {
        let state = RngState { calls: 3, ..RngState::new(9) };
        let whole = mask(&[300, 7], 0, 7 * 300, state);
        for (first, len) in [(0, 1), (1, 255), (2, 1000), (3, 2097), (255, 513), (2099, 1)] {
            assert_eq!(mask(&[300, 7], first, len, state), whole[first..first + len], "{first} {len}");
        }
        for rank in 0..3 {
            let own = mask(&[100, 7], 0, 700, RngState { first_row: 100 * rank, ..state });
            assert_eq!(own, whole[700 * rank as usize..][..700]);
        }
    }

    /// A sequence has the same numbers in a batch that is padded more, and no numbers of another sequence.
    #[test]
    fn sequences_draw_the_same_numbers_at_any_width() {
        let state = RngState { calls: 3, ..RngState::new(11) };
        // Activations [rows, width, 6], and probabilities [rows, 3, width, width].
        let (narrow, wide) = (5, 9);
        let activations = |width| mask(&[2, width, 6], 0, 2 * width * 6, state);
        let (few, many) = (activations(narrow), activations(wide));
        for row in 0..2 {
            assert_eq!(few[row * narrow * 6..][..narrow * 6], many[row * wide * 6..][..narrow * 6]);
        }
        let probabilities = |width| mask(&[2, 3, width, width], 0, 2 * 3 * width * width, state);
        let (few, many) = (probabilities(narrow), probabilities(wide));
        for line in 0..2 * 3 * narrow {
            let (head, query) = (line / narrow, line % narrow);
            assert_eq!(few[line * narrow..][..narrow], many[(head * wide + query) * wide..][..narrow]);
        }
    }

    #[test]
    fn steps_of_any_width_never_repeat_a_mask() {
        let mut seen = std::collections::HashSet::new();
        let (rows, mut drawn) = (2, 0);
        for step in 0..1000 {
            let state = RngState { first_row: step * rows as u64, ..RngState::new(1) };
            for (calls, width) in [(0, 16 + step as usize % 13), (1, 16 + step as usize % 7)] {
                let state = RngState { calls, ..state };
                let of_step = mask(&[rows, width, 16], 0, rows * width * 16, state);
                // In windows, since a mask of another width could repeat a part.
                for window in of_step.chunks_exact(128) {
                    drawn += 1;
                    seen.insert(window.iter().map(|value| *value != 0.).collect::<Vec<_>>());
                }
            }
        }
        assert_eq!(seen.len(), drawn);
    }

    #[test]
    fn rows_that_are_too_large_are_refused() {
        for dims in [&[1, 1, 2, 1 << 25][..], &[1, 2, 1 << 25, 1], &[1, 1 << 17, 1, 1]] {
            let error = Mask::draw(0.5, dims).err().unwrap().to_string();
            assert!(error.contains("too large for dropout"), "{error}");
        }
        assert!(Mask::draw(0.5, &[1, 1 << 30, 64]).is_ok() && Mask::draw(0.5, &[4, 1 << 40]).is_ok());
        set_rng_state(RngState::default());
    }

    /// Along any dimension, in any number of parts, and on ranks with other rows.
    #[test]
    fn parts_draw_the_numbers_of_the_whole() {
        let (dims, rows) = ([4, 6, 10, 12], 2);
        let state = RngState { calls: 2, ..RngState::new(5) };
        let elements = dims.iter().product();
        let whole = mask(&dims, 0, elements, state);
        let is_in = |place: usize, dim: usize, (index, count): (usize, usize), first_row: usize| {
            let row = elements / dims[0];
            let inner: usize = dims[dim + 1..].iter().product();
            let along = place / inner % dims[dim];
            let own = dims[dim] / count;
            (along / own == index || dim == 0) && (first_row..first_row + rows).contains(&(place / row))
        };
        for (dim, counts) in [(0, &[1][..]), (1, &[1, 2, 3, 6]), (2, &[2, 5, 10]), (3, &[1, 2, 3, 4, 6, 12])] {
            for &count in counts {
                for (index, first_row) in (0..count).flat_map(|index| [(index, 0), (index, rows)]) {
                    let mut own = dims;
                    own[0] = rows;
                    own[dim] /= count;
                    let part = Some(Part { dim, index, count });
                    let state = RngState { first_row: first_row as u64, part, ..state };
                    let drawn = mask(&own, 0, own.iter().product(), state);
                    let want = whole.iter().enumerate();
                    let want = want.filter(|(place, _)| is_in(*place, dim, (index, count), first_row));
                    let want: Vec<f32> = want.map(|(_, value)| *value).collect();
                    assert_eq!(drawn, want, "dimension {dim}, part {index} of {count}, rows from {first_row}");
                    // From any element on.
                    assert_eq!(mask(&own, 3, drawn.len() - 5, state), drawn[3..drawn.len() - 2]);
                }
            }
        }
        // The first dimension may be split without `first_row`.
        let part = Some(Part { dim: 0, index: 1, count: 2 });
        assert_eq!(mask(&[2, 6, 10, 12], 0, 1440, RngState { part, ..state }), whole[1440..]);
        for part in [Part { dim: 2, index: 0, count: 1 }, Part { dim: 0, index: 2, count: 2 }] {
            set_rng_state(RngState { part: Some(part), ..state });
            let error = Mask::draw(0.5, &[3, 4]).err().unwrap().to_string();
            assert!(error.contains("shape [3, 4] is not part"), "{error}");
        }
        set_rng_state(RngState::default());
    }

    #[test]
    fn draws_are_independent_with_the_requested_probability() {
        let states = [RngState::new(0), RngState::new(1), RngState { calls: 1, ..RngState::new(0) }];
        let drawn = states.map(|state| mask(&[100_000], 0, 100_000, state));
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
