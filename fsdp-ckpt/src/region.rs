//! Regions of tensors as byte ranges: copying between regions, checking that regions tile
//! a tensor.

use fsdp_core::layout::Region;

use crate::{Error, Result};

/// A range of bytes that is contiguous in both regions of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRun {
    /// Offset in the source region, in bytes.
    pub(crate) src: usize,
    /// Offset in the destination region, in bytes.
    pub(crate) dst: usize,
    /// Length in bytes.
    pub(crate) len: usize,
}

/// Returns the runs that copy `part` from a row-major region `src` to a row-major region `dst`, in the order of both.
/// All are regions of one tensor with elements of `size` bytes, and `part` is within both others.
pub(crate) fn runs(src: &Region, dst: &Region, part: &Region, size: usize) -> impl Iterator<Item = CopyRun> + use<> {
    let dims = part.sizes.len();
    // Dimensions from `inner` on are contiguous on both sides.
    let mut inner = dims;
    let mut len = size;
    while inner > 0 {
        inner -= 1;
        len *= part.sizes[inner];
        if part.sizes[inner] != src.sizes[inner] || part.sizes[inner] != dst.sizes[inner] {
            break;
        }
    }
    let (src_strides, dst_strides) = (strides(&src.sizes, size), strides(&dst.sizes, size));
    let start = |of: &Region, strides: &[usize]| -> usize {
        (0..dims).map(|dim| (part.offsets[dim] - of.offsets[dim]) * strides[dim]).sum()
    };
    let (src_start, dst_start) = (start(src, &src_strides), start(dst, &dst_strides));
    let outer = part.sizes[..inner].to_vec();
    let count = if len == 0 { 0 } else { outer.iter().product::<usize>() };
    (0..count).map(move |index| {
        let (mut rest, mut run) = (index, CopyRun { src: src_start, dst: dst_start, len });
        for dim in (0..outer.len()).rev() {
            let at = rest % outer[dim];
            rest /= outer[dim];
            run.src += at * src_strides[dim];
            run.dst += at * dst_strides[dim];
        }
        run
    })
}

/// Returns the distances in bytes between successive indices of each dimension.
fn strides(sizes: &[usize], size: usize) -> Vec<usize> {
    let mut strides = vec![size; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim] * sizes[dim];
    }
    strides
}

/// Returns the bytes of a row-major region of this shape; `None` if they overflow.
pub(crate) fn checked_bytes(sizes: &[usize], size: usize) -> Option<usize> {
    // A zero would hide an overflow of the dimensions after it, and strides are their products.
    sizes.iter().try_fold(size, |bytes, &n| bytes.checked_mul(n.max(1)))?;
    sizes.iter().try_fold(size, |bytes, &n| bytes.checked_mul(n))
}

/// Returns whether `region` is within a tensor of this shape.
pub(crate) fn fits(region: &Region, shape: &[usize]) -> bool {
    region.offsets.len() == shape.len()
        && region.sizes.len() == shape.len()
        && (0..shape.len())
            .all(|dim| region.offsets[dim].checked_add(region.sizes[dim]).is_some_and(|end| end <= shape[dim]))
}

/// Checks that `region` is within `shape`, and that a buffer of `bytes` bytes holds it.
pub(crate) fn check_request(tensor: &str, shape: &[usize], size: usize, region: &Region, bytes: usize) -> Result<()> {
    let fail = |reason| Err(Error::InvalidRead { tensor: tensor.to_string(), reason });
    if !fits(region, shape) {
        return fail(format!("{} is not within its shape {shape:?}", Bounds(region)));
    }
    // Does not overflow: the tensor's own size does not.
    let need = region.elements() * size;
    if need != bytes {
        return fail(format!("{} needs {need} bytes, but the buffer has {bytes}", Bounds(region)));
    }
    Ok(())
}

/// Displays a region as `[0..2, 0..3]`.
pub(crate) struct Bounds<'a>(pub(crate) &'a Region);

impl std::fmt::Display for Bounds<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (dim, (&offset, &size)) in self.0.offsets.iter().zip(&self.0.sizes).enumerate() {
            write!(f, "{}{offset}..{}", if dim == 0 { "" } else { ", " }, offset.saturating_add(size))?;
        }
        f.write_str("]")
    }
}

/// Why regions do not tile a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TilingError {
    /// The regions at these indices overlap.
    Overlap(usize, usize),
    /// This many elements are in no region.
    Gap(usize),
}

/// Checks that non-empty regions within `shape` cover each element exactly once.
pub(crate) fn check_tiling(shape: &[usize], regions: &[&Region]) -> Result<(), TilingError> {
    // Sweep along the dimension with the most distinct offsets, and compare only neighbours in it.
    let distinct = |dim: usize| {
        let mut offsets: Vec<usize> = regions.iter().map(|region| region.offsets[dim]).collect();
        offsets.sort_unstable();
        offsets.dedup();
        offsets.len()
    };
    let sweep = (0..shape.len()).max_by_key(|&dim| distinct(dim));
    let mut order: Vec<usize> = (0..regions.len()).collect();
    if let Some(dim) = sweep {
        order.sort_by_key(|&i| regions[i].offsets[dim]);
    }
    for (at, &i) in order.iter().enumerate() {
        for &j in &order[at + 1..] {
            if let Some(dim) = sweep
                && regions[j].offsets[dim] >= regions[i].offsets[dim] + regions[i].sizes[dim]
            {
                break;
            }
            if regions[i].intersect(regions[j]).is_some() {
                return Err(TilingError::Overlap(i.min(j), i.max(j)));
            }
        }
    }
    let covered: usize = regions.iter().map(|region| region.elements()).sum();
    let all: usize = shape.iter().product();
    if covered == all { Ok(()) } else { Err(TilingError::Gap(all - covered)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    fn region(offsets: &[usize], sizes: &[usize]) -> Region {
        Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() }
    }

    #[test]
    fn merges_whole_rows_into_one_run() {
        let shape = Region::whole(&[4, 3]);
        let rows = region(&[1, 0], &[2, 3]);
        assert_eq!(runs(&shape, &rows, &rows, 4).collect::<Vec<_>>(), [CopyRun { src: 12, dst: 0, len: 24 }]);
        let scalar = Region::whole(&[]);
        assert_eq!(runs(&scalar, &scalar, &scalar, 8).collect::<Vec<_>>(), [CopyRun { src: 0, dst: 0, len: 8 }]);
    }

    #[test]
    fn detects_gaps_and_overlaps() {
        let (a, b) = (region(&[0, 0], &[2, 2]), region(&[0, 2], &[2, 1]));
        assert_eq!(check_tiling(&[2, 3], &[&a, &b]), Ok(()));
        assert_eq!(check_tiling(&[2, 4], &[&a, &b]), Err(TilingError::Gap(2)));
        assert_eq!(check_tiling(&[2, 3], &[&a, &b, &region(&[1, 1], &[1, 2])]), Err(TilingError::Overlap(0, 2)));
        let scalar = Region::whole(&[]);
        assert_eq!(check_tiling(&[], &[&scalar]), Ok(()));
        assert_eq!(check_tiling(&[], &[&scalar, &scalar]), Err(TilingError::Overlap(0, 1)));
        assert_eq!(check_tiling(&[], &[]), Err(TilingError::Gap(1)));
    }

    /// A region within `n` indices in each of three dimensions.
    fn any_box(n: usize) -> impl Strategy<Value = Region> {
        prop::collection::vec((0..n).prop_flat_map(move |at| (Just(at), 0..=n - at)), 3).prop_map(|dims| Region {
            offsets: dims.iter().map(|dim| dim.0).collect(),
            sizes: dims.iter().map(|dim| dim.1).collect(),
        })
    }

    proptest! {
        #[test]
        fn runs_copy_the_intersection(src in any_box(4), dst in any_box(4)) {
            // Each element's value is its index in the whole tensor.
            let index = |of: &Region, i: usize| {
                let (x, y, z) = (i / (of.sizes[1] * of.sizes[2]), i / of.sizes[2] % of.sizes[1], i % of.sizes[2]);
                (((of.offsets[0] + x) * 4 + of.offsets[1] + y) * 4 + of.offsets[2] + z) as u8
            };
            let memory: Vec<u8> = (0..src.elements()).map(|i| index(&src, i)).collect();
            let mut copy = vec![255u8; dst.elements()];
            let part = src.intersect(&dst);
            if let Some(part) = &part {
                for run in runs(&src, &dst, part, 1) {
                    copy[run.dst..run.dst + run.len].copy_from_slice(&memory[run.src..run.src + run.len]);
                }
            }
            let shared: Vec<u8> = memory.clone();
            for (i, &got) in copy.iter().enumerate() {
                let want = index(&dst, i);
                prop_assert_eq!(got, if shared.contains(&want) { want } else { 255 });
            }
        }
    }
}
