//! Dropout, whose random numbers are drawn on the device.

use candle_core::Result;
use fsdp_core::Buffer;

use super::super::layers::Draw;
use super::super::slice::{Slice, SliceMut};
use super::compiler::Module;
use super::device::{Arg, float_suffix, of_slice};

impl Draw {
    /// Returns the kernel's arguments (`DRAW_PARAMETERS`). The scale is an argument of its own.
    pub(super) fn args(&self) -> [Arg; 8] {
        let [row, plane, line, column] = self.first;
        let [key, row, plane, line, column, gap_at, gap] =
            [self.key, row, plane, line, column, self.gap_at, self.gap].map(Arg::Long);
        [key, row, plane, line, column, gap_at, gap, self.threshold.into()]
    }
}

/// Returns the elements with the dropped ones set to 0, and the others multiplied by the draw's scale.
pub(crate) fn drop_elements(x: Slice<'_>, draw: &Draw) -> Result<Buffer> {
    let (cuda, dtype, len) = (of_slice(&x)?, x.dtype(), x.len());
    let kernel = format!("dropout_{}", float_suffix(dtype)?);
    let mut y = cuda.uninit(dtype, len)?;
    let mut args = vec![cuda.view(x)?.into(), cuda.view_mut(SliceMut::from(&mut y))?.into(), len.into()];
    args.extend(draw.args());
    args.extend(draw.extents.map(|extent| Arg::Long(extent.max(1))));
    args.push(Arg::Float(draw.scale));
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.run_elementwise(Module::Dropout.kernel(&kernel), len.div_ceil(4), &args)? };
    Ok(y)
}
