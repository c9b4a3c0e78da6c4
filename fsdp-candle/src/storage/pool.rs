//! Buffers that outlive one use: fresh memory costs page faults, which cost more than the copy into it.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use fsdp_core::{Allocator, Buffer, DType};

/// Free buffers by dtype and length, first in, first out. What a training step takes and gives back, the next step takes again; a unit that gives its
/// parameters' buffers back in order gets the same ones again.
#[derive(Default)]
pub(crate) struct Pool {
    free: Mutex<HashMap<(DType, usize), VecDeque<Buffer>>>,
}

impl Pool {
    fn free(&self) -> std::sync::MutexGuard<'_, HashMap<(DType, usize), VecDeque<Buffer>>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Frees what is not in use.
    pub(crate) fn clear(&self) {
        self.free().clear();
    }
}

impl Allocator for Pool {
    fn take(&self, dtype: DType, len: usize) -> Buffer {
        let free = self.free().get_mut(&(dtype, len)).and_then(VecDeque::pop_front);
        free.unwrap_or_else(|| Buffer::zeros(dtype, len))
    }

    fn give(&self, buffer: Buffer) {
        if !buffer.is_empty() {
            self.free().entry((buffer.dtype(), buffer.len())).or_default().push_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_given_is_taken_again() {
        let pool = Pool::default();
        let buffer = pool.take(DType::F32, 8);
        let at = buffer.bytes().as_ptr();
        pool.give(buffer);
        assert_eq!(pool.take(DType::F32, 8).bytes().as_ptr(), at);
    }
}
