//! Products against plain sums.

use half::{bf16, f16};

use super::*;

/// Values from -2 to 2 in steps of 1/8, which all types have, for any place.
fn value(place: usize) -> f64 {
    ((place * 7919 + 13) % 33) as f64 / 8.0 - 2.0
}

trait Number: Copy + PartialEq + std::fmt::Debug {
    const TYPE: c_int;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
}

macro_rules! number {
    ($type:ty, $cuda:expr, $of:expr, $value:expr) => {
        impl Number for $type {
            const TYPE: c_int = $cuda;
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn value(self) -> f64 {
                $value(self)
            }
        }
    };
}
number!(f32, 0, |value| value as f32, f64::from);
number!(f64, 1, |value| value, |value| value);
number!(f16, 2, f16::from_f64, f16::to_f64);
number!(bf16, 14, bf16::from_f64, bf16::to_f64);

/// One product with all transpositions, leading dimensions with room, and a batch.
fn check<A: Number, C: Number, S: Number>(compute: c_int, alpha: f64, beta: f64) {
    let (m, n, k, batch) = (5usize, 7, 9, 3);
    for transposed in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        let [ta, tb] = transposed.map(|one| one == 1);
        let (lda, ldb, ldc) = (if ta { k } else { m } + 2, if tb { n } else { k } + 1, m + 3);
        let (a_stride, b_stride, c_stride) = (lda * m.max(k), ldb * n.max(k), ldc * n);
        let a: Vec<A> = (0..batch * a_stride).map(|place| A::of(value(place))).collect();
        let b: Vec<A> = (0..batch * b_stride).map(|place| A::of(value(place + 5))).collect();
        let old: Vec<C> =
            (0..batch * c_stride).map(|place| C::of(if beta == 0.0 { f64::NAN } else { value(place + 9) })).collect();
        let mut c = old.clone();
        let (given_alpha, given_beta) = (S::of(alpha), S::of(beta));
        let operand = |at: u64, element, leading: usize, stride: usize| Operand {
            at,
            element,
            leading: leading as i32,
            stride: stride as i64,
        };
        let call = Call {
            name: "product",
            transposed,
            sizes: [m as i32, n as i32, k as i32],
            alpha: (&raw const given_alpha).cast(),
            beta: (&raw const given_beta).cast(),
            a: operand(a.as_ptr() as u64, A::TYPE, lda, a_stride),
            b: operand(b.as_ptr() as u64, A::TYPE, ldb, b_stride),
            c: operand(c.as_mut_ptr() as u64, C::TYPE, ldc, c_stride),
            batch: batch as i32,
            compute,
        };
        // SAFETY: the scalars are of the type that goes with `compute`.
        let mut work = unsafe { operation(call) }.unwrap().unwrap();
        assert_eq!(work.touches.iter().filter(|touch| touch.access == Access::Write).count(), 1);
        assert_eq!((work.run)(), Progress::Done);
        for which in 0..batch {
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let sum: f64 = (0..k)
                    .map(|l| {
                        let a = a[which * a_stride + if ta { l + row * lda } else { row + l * lda }];
                        let b = b[which * b_stride + if tb { col + l * ldb } else { l + col * ldb }];
                        a.value() * b.value()
                    })
                    .sum();
                let place = which * c_stride + row + col * ldc;
                let before = if beta == 0.0 { 0.0 } else { beta * old[place].value() };
                // The values are such that a float has the sum exactly: what is left is one rounding.
                assert_eq!(c[place], C::of(alpha * sum + before), "{transposed:?} {row} {col}");
            }
            let gap = which * c_stride + m;
            assert!(c[gap] == old[gap] || old[gap].value().is_nan() && c[gap].value().is_nan(), "beyond the rows");
        }
    }
}

#[test]
fn products_match_plain_sums() {
    for (alpha, beta) in [(1.0, 0.0), (0.5, 0.0), (1.0, 1.0), (-2.0, 0.25)] {
        check::<f32, f32, f32>(68, alpha, beta);
        check::<f32, f32, f32>(77, alpha, beta);
        check::<f64, f64, f64>(70, alpha, beta);
        check::<f16, f16, f32>(68, alpha, beta);
        check::<f16, f16, f16>(64, alpha, beta);
        check::<bf16, bf16, f32>(68, alpha, beta);
        check::<bf16, f32, f32>(68, alpha, beta);
        check::<f16, f32, f32>(68, alpha, beta);
    }
}

#[test]
fn rejects_invalid_calls() {
    let one = 1f32;
    let scalar: *const c_void = (&raw const one).cast();
    let operand = |element, leading| Operand { at: 256, element, leading, stride: 0 };
    let good = Call {
        name: "product",
        transposed: [0, 0],
        sizes: [4, 3, 2],
        alpha: scalar,
        beta: scalar,
        a: operand(0, 4),
        b: operand(0, 2),
        c: operand(0, 4),
        batch: 1,
        compute: 68,
    };
    // SAFETY: the scalars are floats; the work is not done.
    let status = |call| unsafe { operation(call) }.err().map(|(status, _)| status);
    assert_eq!(status(good), None);
    assert_eq!(status(Call { a: operand(0, 3), ..good }), Some(INVALID_VALUE));
    assert_eq!(status(Call { transposed: [0, 1], ..good }), Some(INVALID_VALUE));
    assert_eq!(status(Call { sizes: [-1, 3, 2], ..good }), Some(INVALID_VALUE));
    assert_eq!(status(Call { compute: 70, ..good }), Some(NOT_SUPPORTED));
    assert_eq!(status(Call { c: operand(14, 4), ..good }), Some(NOT_SUPPORTED));
    assert_eq!(status(Call { c: operand(3, 4), ..good }), Some(NOT_SUPPORTED));
    // SAFETY: as above.
    assert!(unsafe { operation(Call { sizes: [0, 3, 2], ..good }) }.unwrap().is_none());
}
