//! Boxes a block at a time.

use fsdp_core::layout::Region;

/// Cuts a box into boxes of `most` bytes at most, or of one element. One after another they are the box in row-major order.
pub(super) fn blocks(region: &Region, size: usize, most: usize) -> impl Iterator<Item = Region> + use<> {
    let dims = region.sizes.len();
    let below = |dim: usize| region.sizes[dim + 1..].iter().product::<usize>() * size;
    // The first dimension whose slices are small enough; those before it go one index at a time.
    let cut = (0..dims).find(|&dim| below(dim) <= most).unwrap_or(dims.saturating_sub(1));
    let step = if dims == 0 { 1 } else { (most / below(cut).max(1)).clamp(1, region.sizes[cut].max(1)) };
    let counts: Vec<usize> = (0..dims)
        .map(|dim| match dim.cmp(&cut) {
            std::cmp::Ordering::Less => region.sizes[dim],
            std::cmp::Ordering::Equal => region.sizes[dim].div_ceil(step),
            std::cmp::Ordering::Greater => 1,
        })
        .collect();
    let whole = region.clone();
    let count = if whole.is_empty() { 0 } else { counts.iter().product() };
    (0..count).map(move |index| {
        let (mut rest, mut block) = (index, whole.clone());
        for dim in (0..dims.min(cut + 1)).rev() {
            let at = rest % counts[dim] * if dim == cut { step } else { 1 };
            rest /= counts[dim];
            block.offsets[dim] += at;
            block.sizes[dim] = if dim == cut { step.min(whole.sizes[dim] - at) } else { 1 };
        }
        block
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_are_the_box_in_order(
            dims in prop::collection::vec((0usize..3, 0usize..5), 0..4),
            most in 1usize..80,
        ) {
            let region = Region {
                offsets: dims.iter().map(|dim| dim.0).collect(),
                sizes: dims.iter().map(|dim| dim.1).collect(),
            };
            // Every element's index in a tensor of 8 elements in each dimension.
            let indices = |of: &Region| -> Vec<usize> {
                (0..of.elements()).map(|i| {
                    let (mut rest, mut index, mut stride) = (i, 0, 1);
                    for dim in (0..of.sizes.len()).rev() {
                        index += (of.offsets[dim] + rest % of.sizes[dim]) * stride;
                        rest /= of.sizes[dim];
                        stride *= 8;
                    }
                    index
                }).collect()
            };
            let cut: Vec<Region> = blocks(&region, 4, most).collect();
            for block in &cut {
                prop_assert!(block.elements() * 4 <= most.max(4) && !block.is_empty());
            }
            let all: Vec<usize> = cut.iter().flat_map(indices).collect();
            prop_assert_eq!(all, indices(&region));
        }
    }
}
