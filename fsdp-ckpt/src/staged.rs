//! A copy of a state in host memory that is kept from one save to the next.

use std::sync::Arc;

use fsdp_core::{Buffer, Readable};
use rayon::prelude::*;

use crate::safetensors::read_bytes;
use crate::{Error, Result, TensorShard};

/// What one core copies at a time: large enough for the copy to be one that goes around the caches.
const PIECE: usize = 8 << 20;

/// Buffers that are used again.
#[derive(Debug, Default)]
pub(crate) struct StagedTensors {
    buffers: Vec<Arc<Buffer>>,
}

impl StagedTensors {
    /// Copies of the shards. Buffers of the copies before that nobody has any more are written to again; what fits no
    /// shard is freed.
    pub(crate) fn copy(&mut self, shards: &[TensorShard]) -> Result<Vec<TensorShard>> {
        let mut free = std::mem::take(&mut self.buffers);
        let mut copies = Vec::with_capacity(shards.len());
        for shard in shards {
            let mut buffer = take(&mut free, shard)?;
            // It is ours alone.
            if let Some(buffer) = Arc::get_mut(&mut buffer) {
                let into = buffer.bytes_mut();
                read_bytes(&shard.fqn, &*shard.data, into.len(), &mut |bytes| {
                    copy(into, bytes);
                    Ok(())
                })?;
            }
            self.buffers.push(Arc::clone(&buffer));
            copies.push(TensorShard { data: buffer as Arc<dyn Readable>, ..shard.clone() });
        }
        Ok(copies)
    }

    /// Allocates, and touches, what [`StagedTensors::copy`] of the same shards needs.
    pub(crate) fn reserve(&mut self, shards: &[TensorShard]) {
        let mut free = std::mem::take(&mut self.buffers);
        for shard in shards {
            // Where there is no memory the save says so.
            let Ok(mut buffer) = take(&mut free, shard) else { continue };
            if let Some(buffer) = Arc::get_mut(&mut buffer) {
                // Fresh zeros are no memory yet.
                buffer.bytes_mut().par_chunks_mut(PIECE).for_each(|piece| piece.fill(1));
            }
            self.buffers.push(buffer);
        }
    }
}

/// A buffer that nobody else has. In most states the first free one is it.
fn take(free: &mut Vec<Arc<Buffer>>, shard: &TensorShard) -> Result<Arc<Buffer>> {
    let (dtype, len) = (shard.data.dtype(), shard.data.len());
    let fits =
        |buffer: &mut Arc<Buffer>| buffer.dtype() == dtype && buffer.len() == len && Arc::get_mut(buffer).is_some();
    match free.iter_mut().position(fits) {
        Some(at) => Ok(free.remove(at)),
        None => {
            // A buffer that can't be allocated ends the process: it is asked for before, where that can be told.
            let bytes = len.saturating_mul(dtype.size());
            if Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
                let reason = format!("there is no memory for a copy of its {bytes} bytes");
                return Err(Error::Unreadable { tensor: shard.fqn.clone(), reason });
            }
            Ok(Arc::new(Buffer::zeros(dtype, len)))
        }
    }
}

/// With all cores that this process may use.
fn copy(into: &mut [u8], from: &[u8]) {
    if from.len() <= PIECE || rayon::current_num_threads() == 1 {
        into.copy_from_slice(from);
    } else {
        into.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE)).for_each(|(into, from)| into.copy_from_slice(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(fqn: &str, data: Buffer) -> TensorShard {
        TensorShard::whole(fqn, &[data.len()], Arc::new(data))
    }

    /// Memory of a size that there is not.
    struct Huge;

    impl Readable for Huge {
        fn dtype(&self) -> fsdp_core::DType {
            fsdp_core::DType::F32
        }
        fn len(&self) -> usize {
            1 << 60
        }
        fn read(&self, _: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
            Err("nobody gets here".into())
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let shards = [TensorShard::whole("a", &[1 << 60], Arc::new(Huge))];
        let mut staged = StagedTensors::default();
        staged.reserve(&shards);
        let message = staged.copy(&shards).unwrap_err().to_string();
        let want = "tensor \"a\" can't be read: there is no memory for a copy of its 4611686018427387904 bytes";
        assert_eq!(message, want);
    }

    #[test]
    fn buffers_are_used_again_when_nobody_has_them() {
        let large = 3 * PIECE / 4 + 5;
        let state = |value: f32| [shard("a", Buffer::F32(vec![value; large])), shard("b", Buffer::I64(vec![7; 3]))];
        let mut staged = StagedTensors::default();
        staged.reserve(&state(0.0));
        let places = |staged: &StagedTensors| -> Vec<*const u8> {
            staged.buffers.iter().map(|buffer| buffer.bytes().as_ptr()).collect()
        };
        let first = places(&staged);
        let copies = staged.copy(&state(1.0)).unwrap();
        assert_eq!(places(&staged), first);
        let kept = Arc::clone(&staged.buffers[0]);
        assert!(*kept == Buffer::F32(vec![1.0; large]) && *staged.buffers[1] == Buffer::I64(vec![7; 3]));
        // Still in use: what is being written does not change.
        let more = staged.copy(&state(2.0)).unwrap();
        assert!(places(&staged)[0] != first[0] && *kept == Buffer::F32(vec![1.0; large]));
        assert_eq!(more[0].data.len(), large);
        drop((copies, kept));
    }
}
