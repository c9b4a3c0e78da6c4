//! The inputs under a kernel.

use std::ops::Range;

/// Sizes of a convolution over height and width, for one channel. A convolution over one dimension has the height 1.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) struct Window {
    /// Height and width of the larger side, which is padded.
    pub(in crate::nn) large: [usize; 2],
    /// Height and width of the smaller side: the kernel's positions.
    pub(in crate::nn) small: [usize; 2],
    pub(in crate::nn) kernel: [usize; 2],
    pub(in crate::nn) padding: [usize; 2],
    pub(in crate::nn) stride: [usize; 2],
    pub(in crate::nn) dilation: [usize; 2],
}

impl Window {
    /// Returns the elements of one channel of the larger side.
    pub(in crate::nn) fn size(&self) -> usize {
        self.large[0] * self.large[1]
    }

    /// Returns the positions of the smaller side.
    pub(in crate::nn) fn positions(&self) -> usize {
        self.small[0] * self.small[1]
    }

    /// Returns the elements under the kernel in one channel.
    pub(in crate::nn) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Returns whether each position sees the element at the same place, and nothing else.
    pub(in crate::nn) fn is_pointwise(&self) -> bool {
        self.taps() == 1 && self.large == self.small && self.stride == [1; 2] && self.padding == [0; 2]
    }

    /// Calls `f(position, tap, index)` for each element of the larger side under the kernel, without the padding.
    fn for_each_tap(&self, mut f: impl FnMut(usize, usize, usize)) {
        let at = |axis: usize, position: usize, tap: usize, size: usize| {
            let padded = position * self.stride[axis] + tap * self.dilation[axis];
            padded.checked_sub(self.padding[axis]).filter(|index| *index < size)
        };
        for y in 0..self.small[0] {
            for tap_y in 0..self.kernel[0] {
                let Some(row) = at(0, y, tap_y, self.large[0]) else { continue };
                for x in 0..self.small[1] {
                    for tap_x in 0..self.kernel[1] {
                        if let Some(col) = at(1, x, tap_x, self.large[1]) {
                            f(y * self.small[1] + x, tap_y * self.kernel[1] + tap_x, row * self.large[1] + col);
                        }
                    }
                }
            }
        }
    }

    /// Copies the elements under one tap of the kernel, for `out.len()` positions from `first` on. Padding is zero.
    pub(in crate::nn) fn gather(&self, plane: &[f32], tap: usize, first: usize, out: &mut [f32]) {
        self.for_each_run(tap, first, out.len(), |range, run| {
            let out = &mut out[range];
            let Some(Run { skipped, index, count }) = run else { return out.fill(0.) };
            out[..skipped].fill(0.);
            out[skipped + count..].fill(0.);
            let out = &mut out[skipped..skipped + count];
            match self.stride[1] {
                1 => out.copy_from_slice(&plane[index..index + count]),
                stride => out.iter_mut().zip(plane[index..].iter().step_by(stride)).for_each(|(to, from)| *to = *from),
            }
        });
    }

    /// Adds to the elements under one tap of the kernel: the adjoint of [`Self::gather`].
    pub(in crate::nn) fn scatter(&self, from: &[f32], tap: usize, first: usize, plane: &mut [f32]) {
        self.for_each_run(tap, first, from.len(), |range, run| {
            let Some(Run { skipped, index, count }) = run else { return };
            let from = &from[range][skipped..skipped + count];
            match self.stride[1] {
                1 => plane[index..index + count].iter_mut().zip(from).for_each(|(to, from)| *to += from),
                stride => plane[index..].iter_mut().step_by(stride).zip(from).for_each(|(to, from)| *to += from),
            }
        });
    }

    /// Calls `f(range, run)` for each part of the positions `first..first + count` that is in one row. `range` is
    /// relative to `first`.
    fn for_each_run(&self, tap: usize, first: usize, count: usize, mut f: impl FnMut(Range<usize>, Option<Run>)) {
        let [tap_y, tap_x] = [tap / self.kernel[1], tap % self.kernel[1]];
        let width = self.small[1];
        let mut at = first;
        while at < first + count {
            let (y, x) = (at / width, at % width);
            let part = (width - x).min(first + count - at);
            f(at - first..at - first + part, self.run(tap_y, tap_x, y, x..x + part));
            at += part;
        }
    }

    /// Returns the elements under a tap for positions of a row, or `None` if all are padding.
    fn run(&self, tap_y: usize, tap_x: usize, y: usize, positions: Range<usize>) -> Option<Run> {
        let [height, width] = self.large;
        let row = (y * self.stride[0] + tap_y * self.dilation[0]).checked_sub(self.padding[0])?;
        if row >= height {
            return None;
        }
        // The columns are `position * stride + tap - padding`.
        let (stride, tap, padding) = (self.stride[1], tap_x * self.dilation[1], self.padding[1]);
        let start = positions.start.max(padding.saturating_sub(tap).div_ceil(stride));
        let end = positions.end.min((width + padding).saturating_sub(tap).div_ceil(stride));
        (start < end).then(|| Run {
            skipped: start - positions.start,
            index: row * width + start * stride + tap - padding,
            count: end - start,
        })
    }

    /// Returns indices for Candle's `index_select`: for each position and tap the element in one channel, or `size` for
    /// padding.
    pub(in crate::nn) fn indices(&self) -> Vec<u32> {
        let mut indices = vec![self.size() as u32; self.positions() * self.taps()];
        self.for_each_tap(|position, tap, index| indices[position * self.taps() + tap] = index as u32);
        indices
    }
}

/// Elements of a row of the larger side, at a distance of the stride.
struct Run {
    /// Positions before them, which see padding.
    skipped: usize,
    /// Index of the first one.
    index: usize,
    count: usize,
}
