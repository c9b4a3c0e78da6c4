//! Redistributions that run asynchronously.

use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};

use super::*;

/// Rank 1 issues its collectives only after rank 0 has issued its own and gone on, and completes them while rank 0
/// waits for nothing. A call that blocked, or one that did nothing until waited for, would time out.
#[test]
fn collectives_run_without_their_callers() {
    for (from, to) in [(Shard(0), Replicate), (Shard(0), Shard(1)), (SUM, Replicate), (SUM, Shard(0))] {
        let ((tell, told), (done, is_done)) = (channel(), channel());
        let ends = Mutex::new((Some((tell, is_done)), Some((told, done))));
        on_mesh(&[2], |mesh| {
            let full = numbers(&[5, 3], DType::F32);
            let tensor = laid_out(&full, mesh, &[from]);
            if mesh.rank() == 0 {
                let (tell, is_done) = ends.lock().unwrap().0.take().unwrap();
                let moving = tensor.redistribute_async(&[to]).unwrap();
                let whole = tensor.full_tensor_async().unwrap();
                // Other work while they run.
                let twice = tensor.mul(2.).unwrap();
                tell.send(()).unwrap();
                is_done.recv().unwrap();
                assert_is(&moving.wait().unwrap(), &full, "moved");
                assert_eq!(values(&whole.wait().unwrap()), values(&full));
                assert_eq!(values(&twice.full_tensor().unwrap()), values(&(full * 2.).unwrap()));
            } else {
                let (told, done) = ends.lock().unwrap().1.take().unwrap();
                told.recv().unwrap();
                let moved = tensor.redistribute(&[to]).unwrap();
                let whole = tensor.full_tensor().unwrap();
                done.send(()).unwrap();
                assert_is(&moved, &full, "moved");
                assert_eq!(values(&whole), values(&full));
                assert_eq!(values(&tensor.mul(2.).unwrap().full_tensor().unwrap()), values(&(full * 2.).unwrap()));
            }
        });
    }
}

#[test]
fn waits_in_any_order() {
    let together = Barrier::new(4);
    on_mesh(&[2, 2], |mesh| {
        let full = numbers(&[5, 3], DType::F32);
        let tensor = laid_out(&full, mesh, &[Shard(0), Shard(1)]);
        let mut columns = tensor.redistribute_async(&[Shard(1), Shard(0)]).unwrap();
        let whole = tensor.full_tensor_async().unwrap();
        drop(tensor.redistribute_async(&[Replicate, Shard(0)]).unwrap());
        together.wait();
        // Two ranks wait for one of them first, two for the other.
        if mesh.rank() % 2 == 0 {
            let columns = columns.wait().unwrap();
            assert_eq!(values(columns.to_local()), part(&full, columns.spec(), mesh.rank()));
            assert_eq!(values(&whole.wait().unwrap()), values(&full));
        } else {
            let whole = whole.wait().unwrap();
            while !columns.is_done() {
                std::thread::yield_now();
            }
            assert_eq!(values(&whole), values(&full));
            let columns = columns.wait().unwrap();
            assert_eq!(values(columns.to_local()), part(&full, columns.spec(), mesh.rank()));
        }
        // Nothing is left that could disturb the next collective.
        assert_eq!(values(&tensor.full_tensor().unwrap()), values(&full));
    });
}
