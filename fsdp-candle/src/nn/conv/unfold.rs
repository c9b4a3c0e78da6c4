//! Convolutions as matrix products.
//!
//! [`Window`] says which inputs an output sees. Unfolding lays them side by side: a row for each output position, in it
//! channel by channel the inputs under the kernel. Folding is the adjoint, and adds. With `U` unfolding and the kernel
//! `W` `[out, in * kernel]`: a convolution is `y = U(x) W^T`, so `dx = U^T(dy W)` and `dW = dy^T U(x)`; a transposed
//! convolution is the adjoint, `y = U^T(x W)`, so `dx = U(dy) W^T` and `dW = x^T U(dy)`.

/// Sizes of a convolution over height and width (of height 1 where there is but one dimension), for one group.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) struct Window {
    /// Of the larger side, which is padded.
    pub(in crate::nn) height: usize,
    pub(in crate::nn) width: usize,
    pub(in crate::nn) kernel: [usize; 2],
    pub(in crate::nn) padding: [usize; 2],
    pub(in crate::nn) stride: [usize; 2],
    pub(in crate::nn) dilation: [usize; 2],
    /// Of the smaller side: the places at which the kernel lies.
    pub(in crate::nn) places: [usize; 2],
}

impl Window {
    /// Elements of one channel of the larger side.
    pub(in crate::nn) fn size(&self) -> usize {
        self.height * self.width
    }

    /// Positions of the smaller side.
    pub(in crate::nn) fn positions(&self) -> usize {
        self.places[0] * self.places[1]
    }

    /// Elements under the kernel in one channel.
    pub(in crate::nn) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Calls `f(place, tap, index)` for each element of the larger side under the kernel; what is padding has none.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let at = |axis: usize, place: usize, tap: usize, size: usize| {
            let padded = place * self.stride[axis] + tap * self.dilation[axis];
            padded.checked_sub(self.padding[axis]).filter(|index| *index < size)
        };
        for y in 0..self.places[0] {
            for tap_y in 0..self.kernel[0] {
                let Some(row) = at(0, y, tap_y, self.height) else { continue };
                for x in 0..self.places[1] {
                    for tap_x in 0..self.kernel[1] {
                        if let Some(col) = at(1, x, tap_x, self.width) {
                            f(y * self.places[1] + x, tap_y * self.kernel[1] + tap_x, row * self.width + col);
                        }
                    }
                }
            }
        }
    }

    /// The unfolded `channels` of `x`: `[positions, channels * taps]`, over `rows`, whose padding must be zero.
    pub(in crate::nn) fn unfold(&self, x: &[f32], channels: usize, rows: &mut [f32]) {
        let (taps, size) = (self.taps(), self.size());
        self.each(|place, tap, index| {
            for channel in 0..channels {
                rows[(place * channels + channel) * taps + tap] = x[channel * size + index];
            }
        });
    }

    /// Adds unfolded rows to where they came from.
    pub(in crate::nn) fn fold(&self, rows: &[f32], channels: usize, x: &mut [f32]) {
        let (taps, size) = (self.taps(), self.size());
        self.each(|place, tap, index| {
            for channel in 0..channels {
                x[channel * size + index] += rows[(place * channels + channel) * taps + tap];
            }
        });
    }

    /// For Candle's `index_select`: for each position and tap its place in one channel, and `size` for padding.
    pub(in crate::nn) fn indices(&self) -> Vec<u32> {
        let mut indices = vec![self.size() as u32; self.positions() * self.taps()];
        self.each(|place, tap, index| indices[place * self.taps() + tap] = index as u32);
        indices
    }
}
