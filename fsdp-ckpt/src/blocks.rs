//! Boxes of any size cut into blocks, so that they are read with little memory.

use fsdp_core::layout::Region;

/// Cuts a box with elements of `size` bytes into boxes of `most` bytes at most (one element at least), whose bytes one
/// after another are its own, row-major. An empty box has none.
pub fn blocks(region: &Region, size: usize, most: usize) -> impl Iterator<Item = Region> + use<> {
    // Dimensions after `dim` are taken whole, `dim` in steps, and those before it an index at a time.
    let mut dim = region.sizes.len();
    let mut row = size;
    while dim > 0 && row.saturating_mul(region.sizes[dim - 1]) <= most {
        dim -= 1;
        row *= region.sizes[dim];
    }
    let outer = region.sizes[..dim.saturating_sub(1)].to_vec();
    let (extent, step) = match dim {
        0 => (1, 1),
        _ => (region.sizes[dim - 1], (most / row.max(1)).max(1)),
    };
    let each = extent.div_ceil(step);
    let count = if region.is_empty() { 0 } else { outer.iter().product::<usize>() * each };
    let region = region.clone();
    (0..count).map(move |index| {
        let mut block = region.clone();
        if dim > 0 {
            let at = index % each * step;
            block.offsets[dim - 1] += at;
            block.sizes[dim - 1] = step.min(extent - at);
        }
        let mut rest = index / each;
        for dim in (0..outer.len()).rev() {
            block.offsets[dim] += rest % outer[dim];
            block.sizes[dim] = 1;
            rest /= outer[dim];
        }
        block
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_one_after_another_are_the_box(
            sizes in prop::collection::vec(0usize..6, 0..4),
            offset in 0usize..3,
            most in 1usize..200,
        ) {
            let region = Region { offsets: vec![offset; sizes.len()], sizes: sizes.clone() };
            let strides: Vec<usize> = (0..sizes.len()).map(|dim| sizes[dim + 1..].iter().product()).collect();
            let mut next = 0;
            for block in blocks(&region, 4, most) {
                prop_assert!(block.elements() * 4 <= most.max(4) && !block.is_empty());
                let first: usize = (0..sizes.len()).map(|dim| (block.offsets[dim] - offset) * strides[dim]).sum();
                let last: usize = (0..sizes.len())
                    .map(|dim| (block.offsets[dim] - offset + block.sizes[dim] - 1) * strides[dim])
                    .sum();
                // It begins where the last one ended, and has no holes.
                prop_assert_eq!((first, last + 1 - first), (next, block.elements()));
                next += block.elements();
            }
            prop_assert_eq!(next, region.elements());
        }
    }
}
