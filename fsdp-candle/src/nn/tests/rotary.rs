use candle_core::{Device, Tensor};

use super::super::{Documents, Rotary, RotaryOptions};
use super::{DTYPES, check, message, positions, random};

#[test]
fn heads_that_turn_in_part_match_the_composite() {
    for (head_dim, factor) in [(Some(7), 1.0), (Some(4), 1.5), (None, 0.5)] {
        let options = RotaryOptions { head_dim, factor };
        let rotary = Rotary::with_options(&[1.0, 0.25], options, 9, &Device::Cpu).unwrap();
        let width = head_dim.unwrap_or(4);
        assert_eq!(rotary.head_dim(), width);
        for dtype in DTYPES {
            for (shape, offset) in [(vec![2, 5, 3, width], 0), (vec![1, 2, 3 * width], 7)] {
                let x = random(1, &shape, dtype);
                check("rotary", &[&x], || rotary.apply(&x, offset), || rotary.composite(&x, &positions(offset, &x)));
            }
        }
    }
    // Of a head of three, two are turned by half a radian and doubled, and one stays.
    let options = RotaryOptions { head_dim: Some(3), factor: 2.0 };
    let rotary = Rotary::with_options(&[0.5], options, 4, &Device::Cpu).unwrap();
    let x = Tensor::new(&[[[1f32, 0., 5.]]], &Device::Cpu).unwrap();
    let y = rotary.apply(&x, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(y, [2. * 0.5f32.cos(), 2. * 0.5f32.sin(), 5.]);
}

#[test]
fn a_head_has_what_turns() {
    let options = RotaryOptions { head_dim: Some(3), factor: 1.0 };
    let m = Rotary::with_options(&[1.0, 0.5], options, 4, &Device::Cpu).unwrap_err().to_string();
    assert!(m.contains("2 frequencies turn 4 elements, but a head has 3"), "{m}");
    let rotary = Rotary::with_options(&[1.0], options, 4, &Device::Cpu).unwrap();
    let x = Tensor::zeros((1, 1, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    assert!(message(rotary.apply(&x, 0)).contains("heads * 3"));
}

#[test]
fn each_document_begins_at_position_0() {
    let rotary = Rotary::new(100.0, 4, 4, &Device::Cpu).unwrap();
    let documents = Documents::new(vec![vec![2, 4], vec![3, 3]]).unwrap();
    for dtype in DTYPES {
        let x = random(1, &[2, 6, 8], dtype);
        let alone = |row: usize, first: usize, count: usize| {
            rotary.apply(&x.narrow(0, row, 1)?.narrow(1, first, count)?.contiguous()?, 0)
        };
        check(
            "rotary in documents",
            &[&x],
            || rotary.apply_in_documents(&x, &documents),
            || {
                let first = Tensor::cat(&[alone(0, 0, 2)?, alone(0, 2, 4)?], 1)?;
                Tensor::cat(&[first, Tensor::cat(&[alone(1, 0, 3)?, alone(1, 3, 3)?], 1)?], 0)
            },
        );
    }
    let x = Tensor::zeros((1, 5, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    let of = |lengths: &[usize]| Documents::new(vec![lengths.to_vec()]).unwrap();
    assert!(message(rotary.apply_in_documents(&x, &of(&[5]))).contains("5 tokens exceeds the tables' 4"));
    assert!(message(rotary.apply_in_documents(&x, &of(&[2, 2]))).contains("1 rows of 4 tokens"));
}
