//! A pool of buffers. Fresh memory costs page faults, which cost more than the copy into it.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use fsdp_core::{Allocator, Buffer, DType, DeviceId, Readable, Result, View};
use parking_lot::Mutex;

use crate::kernels::Kernels;

/// A pool of free buffers by dtype and length, first in, first out.
///
/// The next training step reuses the buffers of the last one. A unit that gives its parameters' buffers back in order
/// gets the same buffers again.
///
/// The free and taken buffers together never exceed the peak of taken bytes, so units of different sizes do not keep a
/// buffer each.
pub(crate) struct Pool {
    kernels: &'static dyn Kernels,
    buffers: Mutex<Buffers>,
}

type Key = (DType, usize);

#[derive(Default)]
struct Buffers {
    free: HashMap<Key, VecDeque<Buffer>>,
    free_bytes: usize,
    taken: HashMap<Key, usize>,
    taken_bytes: usize,
    peak_bytes: usize,
    /// Elements that new buffers of a length have room for, where that is more than their length.
    rooms: HashMap<usize, usize>,
}

fn bytes((dtype, len): Key) -> usize {
    dtype.size().saturating_mul(len)
}

impl Buffers {
    fn returned(&mut self, key: Key) {
        if let Some(count) = self.taken.get_mut(&key).filter(|count| **count > 0) {
            *count -= 1;
            self.taken_bytes -= bytes(key);
        }
    }

    /// Frees buffers until free and taken bytes fit into the peak. Sizes that are taken least go first.
    fn trim(&mut self) {
        while self.free_bytes > 0 && self.taken_bytes + self.free_bytes > self.peak_bytes {
            let taken = &self.taken;
            let victim = self.free.iter().filter(|(_, queue)| !queue.is_empty()).min_by_key(|(key, queue)| {
                (taken.get(*key).copied().unwrap_or(0), std::cmp::Reverse(queue.len()), key.1)
            });
            let Some(key) = victim.map(|(key, _)| *key) else { break };
            if let Some(buffer) = self.free.get_mut(&key).and_then(VecDeque::pop_back) {
                self.free_bytes -= bytes((buffer.dtype(), buffer.len()));
            }
        }
    }
}

impl Pool {
    /// Makes an empty pool of the memory of these kernels.
    pub(crate) fn new(kernels: &'static dyn Kernels) -> Self {
        Pool { kernels, buffers: Mutex::default() }
    }

    /// Returns the bytes of taken buffers, now and at most.
    pub(crate) fn taken_bytes(&self) -> [usize; 2] {
        let buffers = self.buffers.lock();
        [buffers.taken_bytes, buffers.peak_bytes]
    }

    /// Returns the bytes of free buffers.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.buffers.lock().free_bytes
    }

    /// Returns the kernels of its memory's device.
    pub(crate) fn kernels(&self) -> &'static dyn Kernels {
        self.kernels
    }

    /// Frees all free buffers.
    pub(crate) fn clear(&self) {
        let mut buffers = self.buffers.lock();
        buffers.free.clear();
        buffers.free_bytes = 0;
    }

    /// Gives buffers of a device that are allocated from now on, of `len` elements, room for `room` elements: collectives
    /// pad the shares of ranks to equal lengths. Byte counts of the pool leave the padding out.
    pub(crate) fn make_room(&self, len: usize, room: usize) {
        let mut buffers = self.buffers.lock();
        let known = buffers.rooms.entry(len).or_default();
        *known = room.max(*known);
    }

    /// Allocates zeros outside the pool.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let room = self.buffers.lock().rooms.get(&len).copied();
        match room {
            Some(room) => self.kernels.zeros_with_room(dtype, len, room),
            None => self.kernels.zeros(dtype, len),
        }
    }

    /// Allocates because no buffer of this length is free.
    fn grow(&self, dtype: DType, len: usize) -> Result<Buffer> {
        tracing::trace!(%dtype, len, "new buffer");
        self.zeros(dtype, len)
    }

    /// Takes a buffer that never returns to the pool.
    pub(crate) fn take_unpooled(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let mut buffers = self.buffers.lock();
        let free = buffers.free.get_mut(&(dtype, len)).and_then(VecDeque::pop_front);
        if free.is_some() {
            buffers.free_bytes -= bytes((dtype, len));
        }
        drop(buffers);
        free.map_or_else(|| self.grow(dtype, len), Ok)
    }

    /// Records that a taken buffer will not return, because it became the user's tensor.
    pub(crate) fn leave(&self, buffer: &Buffer) {
        self.buffers.lock().returned((buffer.dtype(), buffer.len()));
    }
}

impl Allocator for Pool {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let key = (dtype, len);
        if bytes(key) > isize::MAX as usize {
            return self.zeros(dtype, len);
        }
        let (free, peak_before) = {
            let mut buffers = self.buffers.lock();
            let peak_before = buffers.peak_bytes;
            let free = buffers.free.get_mut(&key).and_then(VecDeque::pop_front);
            if free.is_some() {
                buffers.free_bytes -= bytes(key);
            }
            *buffers.taken.entry(key).or_default() += 1;
            buffers.taken_bytes += bytes(key);
            buffers.peak_bytes = buffers.peak_bytes.max(buffers.taken_bytes);
            buffers.trim();
            (free, peak_before)
        };
        match free.map_or_else(|| self.grow(dtype, len), Ok) {
            Ok(buffer) => Ok(buffer),
            Err(error) => {
                let mut buffers = self.buffers.lock();
                buffers.returned(key);
                buffers.peak_bytes = peak_before.max(buffers.taken_bytes);
                Err(error)
            }
        }
    }

    fn give(&self, buffer: Buffer) {
        let key = (buffer.dtype(), buffer.len());
        let mut buffers = self.buffers.lock();
        buffers.returned(key);
        if !buffer.is_empty() {
            buffers.free_bytes += bytes(key);
            buffers.free.entry(key).or_default().push_back(buffer);
            buffers.trim();
        }
    }
}

/// A buffer of a pool, to which it returns when it is dropped.
pub(crate) struct PooledBuffer {
    buffer: Buffer,
    pool: Arc<Pool>,
}

impl PooledBuffer {
    pub(crate) fn new(buffer: Buffer, pool: &Arc<Pool>) -> Self {
        PooledBuffer { buffer, pool: pool.clone() }
    }

    /// Takes the buffer, which will not return to the pool.
    pub(crate) fn leave(&mut self) -> Buffer {
        self.pool.leave(&self.buffer);
        self.take()
    }

    fn take(&mut self) -> Buffer {
        std::mem::replace(&mut self.buffer, Buffer::U8(vec![]))
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let buffer = self.take();
        self.pool.give(buffer);
    }
}

impl Deref for PooledBuffer {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl Readable for PooledBuffer {
    fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn device(&self) -> DeviceId {
        Readable::device(&self.buffer)
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.buffer.read(f)
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> Result<(), String> {
        self.buffer.view(f)
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
    fn given_buffers_are_reused() {
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
        let buffers = pool.buffers.lock();
        assert_eq!(buffers.taken_bytes, 0);
        assert!(buffers.free_bytes <= 2 * 109 * 4, "{} bytes are kept", buffers.free_bytes);
    }

    #[test]
    fn failed_allocations_are_not_counted() {
        let pool = pool();
        // More than any address space, and more than any length.
        for len in [1 << 48, 1 << 61, usize::MAX] {
            for take in [Pool::take, Pool::take_unpooled] {
                let error = take(&pool, DType::F32, len).unwrap_err().to_string();
                assert!(error.contains(&format!("no memory for {len} elements of F32")), "{error}");
            }
        }
        let buffers = pool.buffers.lock();
        assert_eq!((buffers.taken_bytes, buffers.peak_bytes), (0, 0));
        drop(buffers);
        pool.give(pool.take(DType::F32, 8).unwrap());
        assert_eq!(pool.buffers.lock().free_bytes, 32);
    }
}
