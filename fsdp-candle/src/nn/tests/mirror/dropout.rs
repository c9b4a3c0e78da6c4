use candle_core::{Device, Tensor};

use super::super::super::attention::Documents;
use super::super::super::{self as nn, AttentionOptions, ops};
use super::check;
use crate::random::manual_seed;

#[test]
fn dropout() {
    for p in [0.25, 0.9] {
        check(
            "dropout",
            &[&[3, 37]],
            &|a| {
                manual_seed(5);
                ops::dropout(&a[0], p)
            },
            None,
        );
    }
    // Candle's values, where nothing is random.
    let x = Tensor::new(&[1f32, -2., 3.], &Device::Cpu).unwrap();
    for (p, train) in [(0., true), (0.5, false)] {
        let [ours, theirs] =
            [nn::Dropout::new(p).forward(&x, train), candle_nn::Dropout::new(p).forward(&x, train)].map(Result::unwrap);
        assert_eq!(ours.to_vec1::<f32>().unwrap(), theirs.to_vec1::<f32>().unwrap());
    }
    for p in [-0.1, 1., f32::NAN] {
        let error = ops::dropout(&x, p).unwrap_err().to_string();
        assert!(error.contains("dropping an element must be in [0, 1), found"), "{error}");
        assert!(candle_nn::ops::dropout(&x, p).is_err());
    }
}

#[test]
fn attention_that_drops_weights() {
    let documents = Documents::new(vec![vec![2, 3], vec![5]]).unwrap();
    for (causal, window, softcap) in [(true, None, None), (false, Some(2), None), (true, None, Some(2.))] {
        let options = AttentionOptions { scale: 0.6, causal, window, softcap, dropout: 0.3 };
        check(
            "attention with dropout",
            &[&[2, 5, 16], &[2, 5, 8], &[2, 5, 8]],
            &|a| {
                manual_seed(5);
                nn::attention(&a[0], &a[1], &a[2], 4, 2, &options)
            },
            None,
        );
        check(
            "attention in documents with dropout",
            &[&[2, 5, 32]],
            &|a| {
                manual_seed(5);
                nn::attention_qkv_in_documents(&a[0], 4, 2, &options, &documents)
            },
            None,
        );
    }
    let q = Tensor::zeros((1, 2, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    let options = AttentionOptions { dropout: 1., ..AttentionOptions::causal(1.) };
    let error = nn::attention(&q, &q, &q, 1, 1, &options).unwrap_err().to_string();
    assert!(error.contains("attention: the probability of dropping an element"), "{error}");
}
