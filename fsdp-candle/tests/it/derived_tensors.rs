//! `#[derive(Tensors)]`.

use candle_core::{DType, Device, Result, Tensor};
use fsdp_candle::Tensors;

#[derive(Tensors)]
struct Pair<T>(T, #[tensors(skip)] &'static str);

#[derive(Tensors)]
enum Output<T>
where
    T: Clone,
{
    Nothing,
    One(Tensor),
    Many { first: Pair<T>, rest: Vec<(Tensor, T)> },
}

fn ones(count: usize) -> Tensor {
    Tensor::ones(count, DType::F32, &Device::Cpu).unwrap()
}

/// Returns a value after its tensors were doubled, and the number of elements of each, in the order of the fields.
fn doubled<T: Tensors>(value: T) -> (T, Vec<usize>) {
    let mut seen = vec![];
    let value = value.map_tensors(&mut |tensor| {
        seen.push(tensor.elem_count());
        tensor * 2.
    });
    (value.unwrap(), seen)
}

#[test]
fn maps_the_tensors_of_each_field_in_order() {
    assert!(matches!(doubled(Output::<Tensor>::Nothing), (Output::Nothing, seen) if seen.is_empty()));
    assert!(matches!(doubled(Output::<Tensor>::One(ones(3))), (Output::One(_), seen) if seen == [3]));
    let many =
        Output::Many { first: Pair(Some(ones(1)), "kept"), rest: vec![(ones(2), None), (ones(4), Some(ones(5)))] };
    let (many, seen) = doubled(many);
    assert_eq!(seen, [1, 2, 4, 5]);
    let Output::Many { first: Pair(Some(first), name), rest } = many else { panic!("another variant") };
    assert_eq!((first.to_vec1::<f32>().unwrap(), name), (vec![2.], "kept"));
    assert_eq!(rest[1].0.to_vec1::<f32>().unwrap(), [2.; 4]);
    assert!(rest[0].1.is_none());
}

#[test]
fn stops_at_the_first_error() {
    let mut calls = 0;
    let refused: Result<_> = (ones(1), Pair(ones(2), "")).map_tensors(&mut |_| {
        calls += 1;
        candle_core::bail!("refused")
    });
    assert!(refused.is_err());
    assert_eq!(calls, 1);
}
