//! The nearest orthogonal matrix, roughly: Newton-Schulz iterations as Keller Jordan's Muon has them.

use candle_core::{DType, Result, Tensor};

/// What a matrix is made orthogonal by.
#[derive(Clone, Copy)]
pub(super) struct NewtonSchulz {
    /// `x = a x + (b x x' + c (x x')^2) x`.
    pub(super) coefficients: [f64; 3],
    pub(super) steps: usize,
    /// The least norm that is divided by.
    pub(super) eps: f64,
}

impl NewtonSchulz {
    /// A matrix of BF16 in, one of BF16 out, both contiguous. As PyTorch computes it on CPUs: products are added up in
    /// f32 with what is added to them, and rounded to bf16 once.
    pub(super) fn orthogonal(&self, matrix: &Tensor) -> Result<Tensor> {
        let (rows, columns) = matrix.dims2()?;
        let matrix = matrix.to_dtype(DType::F32)?;
        let matrix = if rows > columns { matrix.t()?.contiguous()? } else { matrix };
        let norm = rounded(&matrix.sqr()?.sum_all()?.sqrt()?)?;
        let least = rounded(&Tensor::new(self.eps as f32, norm.device())?)?;
        let norm = norm.maximum(&least)?;
        let mut x = rounded(&matrix.broadcast_div(&norm)?)?;
        let [a, b, c] = self.coefficients;
        for _ in 0..self.steps {
            let gram = rounded(&x.matmul(&x.t()?)?)?;
            let update = rounded(&((gram.matmul(&gram)? * c)? + (&gram * b)?)?)?;
            x = rounded(&(update.matmul(&x)? + (&x * a)?)?)?;
        }
        let x = if rows > columns { x.t()? } else { x };
        x.contiguous()?.to_dtype(DType::BF16)
    }
}

fn rounded(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const JORDAN: NewtonSchulz = NewtonSchulz { coefficients: [3.4445, -4.7750, 2.0315], steps: 5, eps: 1e-7 };

    fn matrix(rows: usize, columns: usize) -> Tensor {
        let values: Vec<f32> =
            (0..rows * columns).map(|at| ((at * 7919 + at * at * 31) % 1009) as f32 / 1009. - 0.5).collect();
        let matrix = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
        matrix.to_dtype(DType::BF16).unwrap()
    }

    #[test]
    fn singular_values_come_near_one() {
        for (rows, columns) in [(3, 3), (8, 5), (5, 8), (1, 6), (6, 1)] {
            let x = JORDAN.orthogonal(&matrix(rows, columns)).unwrap();
            assert_eq!((x.dims2().unwrap(), x.dtype()), ((rows, columns), DType::BF16));
            // The trace of x x' is the sum of squares of singular values, which are between 0.5 and 1.5.
            let square = x.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            let rank = rows.min(columns) as f32;
            assert!((0.25 * rank..2.25 * rank).contains(&square), "{rows} x {columns}: {square}");
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let zeros = Tensor::zeros((4, 3), DType::BF16, &Device::Cpu).unwrap();
        let x = JORDAN.orthogonal(&zeros).unwrap().to_dtype(DType::F32).unwrap();
        assert!(x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|&x| x == 0.));
    }
}
