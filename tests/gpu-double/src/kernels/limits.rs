//! What a launch may ask for, as on compute capability 9.0.

/// Threads of a block.
pub(crate) const THREADS: u32 = 1024;
/// Threads of a block along each axis.
const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Blocks of a grid along each axis.
const GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Shared memory of a block, in bytes, unless its kernel asks for more.
pub(crate) const SHARED_BYTES: u32 = 48 << 10;
/// Shared memory of a block that a kernel may ask for.
pub(crate) const MOST_SHARED_BYTES: u32 = 227 << 10;
/// Of a multiprocessor: blocks, threads, and shared memory with what the system takes of it for each block.
const BLOCKS_AT_ONCE: u32 = 32;
const THREADS_AT_ONCE: u32 = 2048;
const SHARED_AT_ONCE: u32 = 228 << 10;
const SHARED_OF_SYSTEM: u32 = 1 << 10;
/// Multiprocessors of a device.
pub(crate) const MULTIPROCESSORS: u32 = 132;

/// Why a launch would be refused.
pub(crate) fn refusal(grid: [u32; 3], block: [u32; 3], shared: u32, most_shared: u32) -> Option<String> {
    let outside = |of: [u32; 3], most: [u32; 3]| of.iter().zip(most).any(|(one, most)| *one == 0 || *one > most);
    if outside(grid, GRID) {
        return Some(format!("a grid of {grid:?} blocks: each axis has at least one and at most {GRID:?}"));
    }
    if outside(block, BLOCK) || block.iter().product::<u32>() > THREADS {
        return Some(format!(
            "a block of {block:?} threads: it has at least one, and at most {BLOCK:?}, {THREADS} in all"
        ));
    }
    (shared > most_shared).then(|| {
        format!(
            "{shared} bytes of dynamic shared memory: {most_shared} are allowed, more after \
             CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES is set"
        )
    })
}

/// How many blocks a multiprocessor runs at once.
pub(crate) fn blocks_at_once(threads: u32, shared: u32) -> u32 {
    let warps = threads.max(1).next_multiple_of(32);
    (THREADS_AT_ONCE / warps).min(SHARED_AT_ONCE / (shared + SHARED_OF_SYSTEM)).min(BLOCKS_AT_ONCE)
}

/// Dynamic shared memory that each of so many blocks of a multiprocessor can have.
pub(crate) fn shared_for(blocks: u32) -> u32 {
    (SHARED_AT_ONCE / blocks.max(1)).saturating_sub(SHARED_OF_SYSTEM).min(MOST_SHARED_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_stays_in_its_limits() {
        let plain = |grid, block, shared| refusal(grid, block, shared, SHARED_BYTES);
        assert_eq!(plain([1, 1, 1], [1024, 1, 1], 48 << 10), None);
        assert!(plain([0, 1, 1], [32, 1, 1], 0).is_some());
        assert!(plain([1, 65_536, 1], [32, 1, 1], 0).is_some());
        assert!(plain([1, 1, 1], [32, 33, 1], 0).is_some_and(|why| why.contains("[32, 33, 1]")));
        assert!(plain([1, 1, 1], [1, 1, 65], 0).is_some());
        assert!(plain([1, 1, 1], [32, 1, 1], (48 << 10) + 1).is_some());
    }

    #[test]
    fn a_multiprocessor_holds_what_fits() {
        assert_eq!(blocks_at_once(1024, 0), 2);
        assert_eq!(blocks_at_once(33, 0), 32);
        assert_eq!(blocks_at_once(32, 100 << 10), 2);
        assert_eq!(shared_for(1), MOST_SHARED_BYTES);
        assert_eq!(shared_for(2), 113 << 10);
    }
}
