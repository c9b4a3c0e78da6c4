//! Reading boxes of tensors that are views of storages.

use fsdp_core::layout::Region;

use super::tensor::Stored;
use crate::Result;
use crate::region::{Run, runs};
use crate::scattered::read_runs;
use crate::store::ReadAt;

/// Reads `part` of the box `chunk`, which is what `stored` holds of a tensor, to its place in `into`, which is the box
/// `region` of the same tensor. All three are checked by the caller. `seen` gets what is read, in the file's order
/// where the elements are.
pub(super) fn read_part(
    file: &dyn ReadAt,
    stored: &Stored,
    [chunk, region, part]: [&Region; 3],
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    let size = stored.dtype.size();
    if stored.is_contiguous() {
        return read_runs(file, stored.start, runs(chunk, region, part, size), into, seen);
    }
    read_runs(file, stored.start, strided_runs(stored, [chunk, region, part]), into, seen)
}

/// A dimension of a box to copy: its size, and the bytes from one index to the next on both sides.
struct Dim {
    size: usize,
    src: usize,
    dst: usize,
}

/// The runs in the order of the file, for views that don't overlap themselves.
fn strided_runs(stored: &Stored, [chunk, region, part]: [&Region; 3]) -> impl Iterator<Item = Run> + use<> {
    let size = stored.dtype.size();
    let mut dims = Vec::with_capacity(part.sizes.len());
    let (mut src_start, mut dst_start, mut dst) = (0, 0, size);
    for at in (0..part.sizes.len()).rev() {
        // The stride of a dimension of one index leads nowhere, and may be any number.
        let src = if stored.shape[at] > 1 { stored.strides[at] * size } else { 0 };
        src_start += (part.offsets[at] - chunk.offsets[at]) * src;
        dst_start += (part.offsets[at] - region.offsets[at]) * dst;
        if part.sizes[at] > 1 {
            dims.push(Dim { size: part.sizes[at], src, dst });
        }
        dst *= region.sizes[at];
    }
    dims.reverse();
    dims.sort_by_key(|dim| std::cmp::Reverse(dim.src));
    let mut len = size;
    while let Some(last) = dims.last()
        && (last.src, last.dst) == (len, len)
    {
        len *= last.size;
        dims.pop();
    }
    let count: usize = dims.iter().map(|dim| dim.size).product();
    (0..count).map(move |index| {
        let (mut rest, mut run) = (index, Run { src: src_start, dst: dst_start, len });
        for dim in dims.iter().rev() {
            let at = rest % dim.size;
            rest /= dim.size;
            run.src += at * dim.src;
            run.dst += at * dim.dst;
        }
        run
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::LocalFile;
    use crate::torch::archive::Storage;
    use fsdp_core::DType;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_box_of_any_view_is_read(
            sizes in prop::collection::vec(1usize..5, 3),
            mut strides in prop::collection::vec(0usize..12, 3),
            cut in prop::collection::vec((0usize..4, 1usize..5), 3),
        ) {
            // Nothing is reached by the stride of one index.
            strides.iter_mut().zip(&sizes).filter(|(_, size)| **size == 1).for_each(|(stride, _)| *stride = usize::MAX);
            let reach: usize = sizes.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
            let memory: Vec<u8> = (0..4 + 2 * (reach + 1)).map(|i| (i * 7 + 3) as u8).collect();
            let root = tempfile::tempdir().unwrap();
            std::fs::write(root.path().join("f"), &memory).unwrap();
            let file = LocalFile::open(&root.path().join("f")).unwrap();
            let storage = Storage { start: 0, bytes: memory.len() as u64, crc32: 0 };
            let (shape, dtype) = (sizes.clone(), DType::BF16);
            let stored = Stored { dtype, shape, strides: strides.clone(), start: 4, storage };
            let offsets: Vec<usize> = cut.iter().zip(&sizes).map(|(cut, &size)| cut.0.min(size - 1)).collect();
            let counts: Vec<usize> =
                cut.iter().zip(&sizes).zip(&offsets).map(|((cut, size), at)| cut.1.min(size - at)).collect();
            let part = Region { offsets: offsets.clone(), sizes: counts.clone() };
            let mut into = vec![0; part.elements() * 2];
            read_part(&file, &stored, [&Region::whole(&sizes), &part, &part], &mut into, &mut |_| ()).unwrap();
            let mut at = 0;
            for x in 0..counts[0] {
                for y in 0..counts[1] {
                    for z in 0..counts[2] {
                        let steps = [x, y, z].into_iter().zip(&offsets).zip(&strides);
                        let index: usize = steps.map(|((step, offset), stride)| (offset + step) * stride).sum();
                        prop_assert_eq!(&into[at..at + 2], &memory[4 + 2 * index..6 + 2 * index]);
                        at += 2;
                    }
                }
            }
        }
    }
}
