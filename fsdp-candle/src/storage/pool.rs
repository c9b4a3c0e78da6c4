//! Buffers that outlive one use: fresh memory costs page faults, which cost more than the copy into it.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use fsdp_core::{Allocator, Buffer, DType, Result};

use crate::kernels::Kernels;

/// Free buffers by dtype and length, first in, first out. What a training step takes and gives back, the next step
/// takes again; a unit that gives its parameters' buffers back in order gets the same ones again.
///
/// The pool and what is taken from it never come to more than the most that was taken at once: units of different sizes
/// do not keep a buffer each.
pub(crate) struct Pool {
    kernels: &'static dyn Kernels,
    shelves: Mutex<Shelves>,
}

type Key = (DType, usize);

#[derive(Default)]
struct Shelves {
    free: HashMap<Key, VecDeque<Buffer>>,
    free_bytes: usize,
    taken: HashMap<Key, usize>,
    taken_bytes: usize,
    most_bytes: usize,
}

fn bytes((dtype, len): Key) -> usize {
    dtype.size().saturating_mul(len)
}

impl Shelves {
    fn returned(&mut self, key: Key) {
        if let Some(count) = self.taken.get_mut(&key).filter(|count| **count > 0) {
            *count -= 1;
            self.taken_bytes -= bytes(key);
        }
    }

    /// Frees buffers until everything fits into the most that was ever taken; those of the sizes that are taken least
    /// go first.
    fn trim(&mut self) {
        while self.free_bytes > 0 && self.taken_bytes + self.free_bytes > self.most_bytes {
            let taken = &self.taken;
            let victim = self.free.iter().filter(|(_, shelf)| !shelf.is_empty()).min_by_key(|(key, shelf)| {
                (taken.get(*key).copied().unwrap_or(0), std::cmp::Reverse(shelf.len()), key.1)
            });
            let Some(key) = victim.map(|(key, _)| *key) else { break };
            if let Some(buffer) = self.free.get_mut(&key).and_then(VecDeque::pop_back) {
                self.free_bytes -= bytes((buffer.dtype(), buffer.len()));
            }
        }
    }
}

impl Pool {
    /// An empty pool of the memory that these kernels work on.
    pub(crate) fn new(kernels: &'static dyn Kernels) -> Self {
        Pool { kernels, shelves: Mutex::default() }
    }

    fn shelves(&self) -> std::sync::MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Frees what is not in use.
    pub(crate) fn clear(&self) {
        let mut shelves = self.shelves();
        shelves.free.clear();
        shelves.free_bytes = 0;
    }

    /// Zeros that are not the pool's.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.kernels.zeros(dtype, len)
    }

    /// New memory, because none of this length is free.
    fn grow(&self, dtype: DType, len: usize) -> Result<Buffer> {
        tracing::trace!(%dtype, len, "a new buffer");
        self.zeros(dtype, len)
    }

    /// A buffer that is not the pool's: it never goes back.
    pub(crate) fn take_unpooled(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let mut shelves = self.shelves();
        let free = shelves.free.get_mut(&(dtype, len)).and_then(VecDeque::pop_front);
        if free.is_some() {
            shelves.free_bytes -= bytes((dtype, len));
        }
        drop(shelves);
        free.map_or_else(|| self.grow(dtype, len), Ok)
    }

    /// Notes that a buffer will not come back: it became a tensor of the user's.
    pub(crate) fn leave(&self, buffer: &Buffer) {
        self.shelves().returned((buffer.dtype(), buffer.len()));
    }
}

impl Allocator for Pool {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let key = (dtype, len);
        if bytes(key) > isize::MAX as usize {
            return self.zeros(dtype, len);
        }
        let (free, most_before) = {
            let mut shelves = self.shelves();
            let most_before = shelves.most_bytes;
            let free = shelves.free.get_mut(&key).and_then(VecDeque::pop_front);
            if free.is_some() {
                shelves.free_bytes -= bytes(key);
            }
            *shelves.taken.entry(key).or_default() += 1;
            shelves.taken_bytes += bytes(key);
            shelves.most_bytes = shelves.most_bytes.max(shelves.taken_bytes);
            shelves.trim();
            (free, most_before)
        };
        match free.map_or_else(|| self.grow(dtype, len), Ok) {
            Ok(buffer) => Ok(buffer),
            Err(error) => {
                let mut shelves = self.shelves();
                shelves.returned(key);
                shelves.most_bytes = most_before.max(shelves.taken_bytes);
                Err(error)
            }
        }
    }

    fn give(&self, buffer: Buffer) {
        let key = (buffer.dtype(), buffer.len());
        let mut shelves = self.shelves();
        shelves.returned(key);
        if !buffer.is_empty() {
            shelves.free_bytes += bytes(key);
            shelves.free.entry(key).or_default().push_back(buffer);
            shelves.trim();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    fn pool() -> Pool {
        Pool::new(kernels::of_device_or_cpu(&candle_core::Device::Cpu))
    }

    #[test]
    fn a_buffer_given_is_taken_again() {
        let pool = pool();
        let buffer = pool.take(DType::F32, 8).unwrap();
        let at = buffer.bytes().as_ptr();
        pool.give(buffer);
        assert_eq!(pool.take(DType::F32, 8).unwrap().bytes().as_ptr(), at);
    }

    #[test]
    fn different_sizes_do_not_keep_a_buffer_each() {
        let pool = pool();
        for _ in 0..3 {
            for len in 100..110 {
                let (a, b) = (pool.take(DType::F32, len).unwrap(), pool.take(DType::F32, len).unwrap());
                pool.give(a);
                pool.give(b);
            }
        }
        let shelves = pool.shelves();
        assert_eq!(shelves.taken_bytes, 0);
        assert!(shelves.free_bytes <= 2 * 109 * 4, "{} bytes are kept", shelves.free_bytes);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_not_counted() {
        let pool = pool();
        // More than any address space, and than any length.
        for len in [1 << 48, 1 << 61, usize::MAX] {
            for take in [Pool::take, Pool::take_unpooled] {
                let error = take(&pool, DType::F32, len).unwrap_err().to_string();
                assert!(error.contains(&format!("no memory for {len} elements of F32")), "{error}");
            }
        }
        let shelves = pool.shelves();
        assert_eq!((shelves.taken_bytes, shelves.most_bytes), (0, 0));
        drop(shelves);
        pool.give(pool.take(DType::F32, 8).unwrap());
        assert_eq!(pool.shelves().free_bytes, 32);
    }
}
