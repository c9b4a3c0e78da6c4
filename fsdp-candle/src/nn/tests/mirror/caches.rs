use candle_core::{DType, Device, Tensor, Var};
use candle_nn::kv_cache as theirs;

use super::super::super::kv_cache::{
    Cache, ConcatKvCache, InterleavedKvCache, KvCache, RotatingCache, RotatingKvCache,
};
use super::super::random;

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Appends parts of these lengths to both caches, compares the results, and checks that each part gets its gradient.
fn alike<A, B>(
    lengths: &[usize],
    (ours, theirs): (&mut A, &mut B),
    append: impl Fn(&mut A, &Tensor) -> Tensor,
    plain: impl Fn(&mut B, &Tensor) -> Tensor,
) {
    for (i, &length) in lengths.iter().enumerate() {
        let part = random(i as u64 + 1, &[1, 2, length, 3], DType::F32);
        let all = append(ours, &part);
        assert_eq!(values(&all), values(&plain(theirs, &part)), "after {:?}", &lengths[..=i]);
        let weights = random(50, all.dims(), DType::F32).as_detached_tensor();
        let grads = (&all * &weights).unwrap().sum_all().unwrap().backward().unwrap();
        let grad = grads.get(&part).unwrap_or_else(|| panic!("no gradient after {:?}", &lengths[..=i]));
        // Each element of the part has the gradient of its position in the result.
        for (x, g) in values(&part).into_iter().zip(values(grad)) {
            assert!(values(&all).into_iter().zip(values(&weights)).any(|pair| pair == (x, g)) || g == 0.0);
        }
        assert!(values(grad).iter().any(|g| *g != 0.0));
    }
}

#[test]
fn growing_caches() {
    alike(
        &[2, 1, 3, 4],
        (&mut KvCache::new(2, 4), &mut theirs::KvCache::new(2, 4)),
        |cache, x| cache.append(x, x).unwrap().0,
        |cache, x| cache.append(x, x).unwrap().1,
    );
    let mut cache = Cache::new(0, 4);
    let part = Var::new(&[1f32, 2.], &Device::Cpu).unwrap();
    cache.append(&part).unwrap();
    assert_eq!((cache.current_seq_len(), cache.max_seq_len(), cache.dim()), (2, 4, 0));
    assert_eq!(values(cache.all_data().as_ref().unwrap()), [1., 2., 0., 0.]);
    // A constant adds no graph.
    cache.append(&part.as_detached_tensor()).unwrap();
    assert!(!cache.current_data().unwrap().unwrap().track_op());
    cache.reset();
    assert!(cache.current_data().unwrap().is_none());
}

#[test]
fn rotating_caches() {
    for lengths in [&[1usize, 2, 1, 3, 2, 1][..], &[3, 4, 2], &[7, 1, 5], &[2, 3]] {
        alike(
            lengths,
            (&mut RotatingKvCache::new(2, 5), &mut theirs::RotatingKvCache::new(2, 5)),
            |cache, x| cache.append(x, x).unwrap().0,
            |cache, x| cache.append(x, x).unwrap().0,
        );
    }
    let (mut ours, mut candles) = (RotatingCache::new(0, 3), theirs::RotatingCache::new(0, 3));
    for length in [2, 2, 4] {
        let part = random(length as u64, &[length], DType::F32);
        assert_eq!(ours.positions(length), candles.positions(length));
        let mask = |mask: Option<Tensor>| mask.map(|mask| mask.to_vec2::<u8>().unwrap());
        let device = &Device::Cpu;
        assert_eq!(mask(ours.attn_mask(length, device).unwrap()), mask(candles.attn_mask(length, device).unwrap()));
        ours.append(&part).unwrap();
        candles.append(&part).unwrap();
        let data = |data: Option<Tensor>| values(&data.unwrap());
        assert_eq!(data(ours.current_data().unwrap()), data(candles.current_data().unwrap()));
        assert_eq!((ours.offset(), ours.current_seq_len()), (candles.offset(), candles.current_seq_len()));
    }
}

#[test]
fn concatenating_caches() {
    alike(
        &[2, 1, 3],
        (&mut ConcatKvCache::new(2), &mut theirs::ConcatKvCache::new(2)),
        |cache, x| cache.append(x, x).unwrap().0,
        |cache, x| cache.append(x, x).unwrap().1,
    );
    alike(
        &[2, 1],
        (&mut InterleavedKvCache::new(3), &mut theirs::InterleavedKvCache::new(3)),
        |cache, x| cache.append(x, &x.detach()).unwrap(),
        |cache, x| cache.append(x, &x.detach()).unwrap(),
    );
    let mut cache = ConcatKvCache::new(0);
    assert!(cache.is_empty() && cache.into_inner().is_none());
    cache = ConcatKvCache::new(0);
    let part = Var::new(&[1f32, 2.], &Device::Cpu).unwrap();
    cache.append(&part, &part).unwrap();
    assert!(!cache.k().unwrap().track_op() && cache.current_seq_len() == 2);
}
