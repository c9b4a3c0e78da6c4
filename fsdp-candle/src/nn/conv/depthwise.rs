//! Convolutions of single channels on CPUs. Their larger side is copied to a padded plane, so that no loop asks for the
//! borders.

use super::Sizes;
use super::window::Window;
use crate::nn::cpu::map_rows;
use crate::nn::cpu::simd::{kernel, sum};

/// Positions of a row that are computed together. Positions beyond the row's end see padding or other elements, and
/// count as 0.
const LANES: usize = 16;

/// A channel's larger side within its padding.
struct Padded {
    values: Vec<f32>,
    width: usize,
}

impl Padded {
    fn new(window: &Window) -> Self {
        let extent = |axis: usize, positions: usize| {
            let reach = positions.saturating_sub(1) * window.stride[axis];
            let seen = reach + window.dilation[axis] * (window.kernel[axis] - 1) + 1;
            seen.max(window.padding[axis] + window.large[axis])
        };
        let width = extent(1, window.small[1].next_multiple_of(LANES));
        Padded { values: vec![0.; extent(0, window.small[0]) * width], width }
    }

    /// Returns each row of the larger side in the padded plane, and its range in a plane without padding.
    fn rows(&mut self, window: &Window) -> impl Iterator<Item = (&mut [f32], std::ops::Range<usize>)> {
        let ([height, width], [top, left]) = (window.large, window.padding);
        let rows = self.values.chunks_exact_mut(self.width).skip(top).take(height).enumerate();
        rows.map(move |(y, row)| (&mut row[left..left + width], y * width..(y + 1) * width))
    }

    fn set(&mut self, window: &Window, plane: &[f32]) {
        self.rows(window).for_each(|(row, range)| row.copy_from_slice(&plane[range]));
    }
}

/// Maps the larger side to the smaller one.
pub(super) fn to_small(sizes: &Sizes, from: &[f32], weights: &[f32], to: &mut [f32]) {
    let Sizes { groups, window, .. } = sizes;
    let (taps, size, positions) = (window.taps(), window.size(), window.positions());
    map_rows(to, positions, taps, |first, planes| {
        let mut padded = Padded::new(window);
        for (at, plane) in (first..).zip(planes.chunks_exact_mut(positions)) {
            padded.set(window, &from[at * size..(at + 1) * size]);
            add_up(&padded.values, padded.width, &weights[at % groups * taps..][..taps], window, plane);
        }
    });
}

/// Maps the smaller side to the larger one.
pub(super) fn to_large(sizes: &Sizes, from: &[f32], weights: &[f32], to: &mut [f32]) {
    let Sizes { groups, window, .. } = sizes;
    let (taps, size, positions) = (window.taps(), window.size(), window.positions());
    map_rows(to, size, (taps * positions).div_ceil(size.max(1)), |first, planes| {
        let mut padded = Padded::new(window);
        for (at, plane) in (first..).zip(planes.chunks_exact_mut(size)) {
            padded.values.fill(0.);
            let from = &from[at * positions..(at + 1) * positions];
            spread(&mut padded.values, padded.width, &weights[at % groups * taps..][..taps], window, from);
            padded.rows(window).for_each(|(row, range)| plane[range].copy_from_slice(row));
        }
    });
}

/// Adds the kernels' gradients to `to`. The images are added up in order, whatever the number of threads.
pub(super) fn add_weight_grad(sizes: &Sizes, of_small: &[f32], of_large: &[f32], to: &mut [f32]) {
    let Sizes { batch, groups, window, .. } = sizes;
    let (taps, size, positions) = (window.taps(), window.size(), window.positions());
    map_rows(to, taps, batch * positions, |first, kernels| {
        let mut padded = Padded::new(window);
        let mut sums = vec![[0f32; LANES]; taps];
        for (channel, kernel) in (first..).zip(kernels.chunks_exact_mut(taps)) {
            sums.fill([0.; LANES]);
            for image in 0..*batch {
                let at = image * groups + channel;
                padded.set(window, &of_large[at * size..(at + 1) * size]);
                let of_small = &of_small[at * positions..(at + 1) * positions];
                add_products(&padded.values, padded.width, of_small, window, &mut sums);
            }
            kernel.iter_mut().zip(&sums).for_each(|(to, lanes)| *to += sum(lanes));
        }
    });
}

kernel! {
    /// Computes the smaller side from a padded plane.
    fn add_up(padded: &[f32], width: usize, weights: &[f32], window: &Window, to: &mut [f32]) {
        let ([taps_y, taps_x], [down, right]) = (window.kernel, window.dilation);
        for (y, to) in to.chunks_exact_mut(window.small[1]).enumerate() {
            for (part, to) in to.chunks_mut(LANES).enumerate() {
                // Two sums, so that an addition need not wait for the last one.
                let mut sums = [[0f32; LANES]; 2];
                for tap_y in 0..taps_y {
                    let row = (y * window.stride[0] + tap_y * down) * width + part * LANES * window.stride[1];
                    for tap_x in 0..taps_x {
                        let (from, weight) = (&padded[row + tap_x * right..], weights[tap_y * taps_x + tap_x]);
                        let sums = &mut sums[tap_x % 2];
                        match window.stride[1] {
                            1 => {
                                let from = &from[..LANES];
                                for lane in 0..LANES {
                                    sums[lane] = from[lane].mul_add(weight, sums[lane]);
                                }
                            }
                            stride => {
                                for lane in 0..LANES {
                                    sums[lane] = from[lane * stride].mul_add(weight, sums[lane]);
                                }
                            }
                        }
                    }
                }
                let sums: [f32; LANES] = std::array::from_fn(|lane| sums[0][lane] + sums[1][lane]);
                to.copy_from_slice(&sums[..to.len()]);
            }
        }
    }

    /// Adds the smaller side, spread by the kernel, to a padded plane.
    fn spread(padded: &mut [f32], width: usize, weights: &[f32], window: &Window, from: &[f32]) {
        let ([taps_y, taps_x], [down, right]) = (window.kernel, window.dilation);
        for (y, from) in from.chunks_exact(window.small[1]).enumerate() {
            for (part, from) in from.chunks(LANES).enumerate() {
                let from = lanes_or_zero(from);
                for tap_y in 0..taps_y {
                    let row = (y * window.stride[0] + tap_y * down) * width + part * LANES * window.stride[1];
                    for tap_x in 0..taps_x {
                        let (to, weight) = (&mut padded[row + tap_x * right..], weights[tap_y * taps_x + tap_x]);
                        match window.stride[1] {
                            1 => {
                                let to = &mut to[..LANES];
                                for lane in 0..LANES {
                                    to[lane] = from[lane].mul_add(weight, to[lane]);
                                }
                            }
                            stride => {
                                for lane in 0..LANES {
                                    to[lane * stride] = from[lane].mul_add(weight, to[lane * stride]);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Adds the products of the smaller side and the elements under each tap to the tap's sums.
    fn add_products(padded: &[f32], width: usize, of_small: &[f32], window: &Window, sums: &mut [[f32; LANES]]) {
        let ([taps_y, taps_x], [down, right]) = (window.kernel, window.dilation);
        for (y, of_small) in of_small.chunks_exact(window.small[1]).enumerate() {
            for (part, of_small) in of_small.chunks(LANES).enumerate() {
                let of_small = lanes_or_zero(of_small);
                for tap_y in 0..taps_y {
                    let row = (y * window.stride[0] + tap_y * down) * width + part * LANES * window.stride[1];
                    for tap_x in 0..taps_x {
                        let (from, sums) = (&padded[row + tap_x * right..], &mut sums[tap_y * taps_x + tap_x]);
                        match window.stride[1] {
                            1 => {
                                let from = &from[..LANES];
                                for lane in 0..LANES {
                                    sums[lane] = from[lane].mul_add(of_small[lane], sums[lane]);
                                }
                            }
                            stride => {
                                for lane in 0..LANES {
                                    sums[lane] = from[lane * stride].mul_add(of_small[lane], sums[lane]);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Returns the elements, followed by zeros.
#[inline(always)]
fn lanes_or_zero(from: &[f32]) -> [f32; LANES] {
    let mut all = [0f32; LANES];
    all[..from.len()].copy_from_slice(from);
    all
}
