//! Pooling over two dimensions. Candle's has a backward only if the stride is the kernel's size, and its gradient of the
//! maximum is too small: it is divided by the number of elements under the kernel.

use candle_core::{Result, Shape, Tensor, ToUsize2, bail};

use super::conv::Window;
use super::cpu::{map_rows, read, storage, tensor_like};
use super::weight::has_cpu_kernels;
use crate::graph::graph_op;

/// Returns the largest value under each position of the kernel, as [`Tensor::max_pool2d`]: `[batch, channels, height,
/// width]`, without padding. The stride is the kernel's size.
pub fn max_pool2d(x: &Tensor, kernel: impl ToUsize2) -> Result<Tensor> {
    let kernel = kernel.to_usize2();
    max_pool2d_with_stride(x, kernel, kernel)
}

/// [`max_pool2d`] with a stride, as [`Tensor::max_pool2d_with_stride`]. The gradient goes to the first of several largest
/// values, as in PyTorch.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fsdp_candle::nn::max_pool2d_with_stride;
///
/// let x = Var::ones((1, 3, 9, 9), DType::F32, &Device::Cpu)?;
/// let y = max_pool2d_with_stride(&x, 3, 2)?;
/// assert_eq!(y.dims(), [1, 3, 4, 4]);
/// assert_eq!(y.sum_all()?.backward()?.get(&x).unwrap().sum_all()?.to_scalar::<f32>()?, 48.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn max_pool2d_with_stride(x: &Tensor, kernel: impl ToUsize2, stride: impl ToUsize2) -> Result<Tensor> {
    let pool = Pool::new("max_pool2d", x, kernel, stride)?;
    if !has_cpu_kernels(x) {
        let values = pool.unfolded(x)?;
        return values.gather(&values.argmax_keepdim(2)?, 2)?.reshape(&pool.shape);
    }
    let (size, positions) = (pool.window.size(), pool.window.positions());
    // The elements under each position, plane by plane.
    let indices = pool.window.indices();
    let taps = pool.window.taps();
    let mut y = vec![0f32; pool.planes * positions];
    read!(values, x);
    let largest = map_rows(&mut y, positions, taps, |first, planes| {
        let mut largest = Vec::with_capacity(planes.len());
        for (y, at) in planes.chunks_exact_mut(positions).zip(first..) {
            let plane = &values[at * size..(at + 1) * size];
            for (y, indices) in y.iter_mut().zip(indices.chunks_exact(taps)) {
                let mut most = indices[0];
                *y = plane[most as usize];
                for &index in &indices[1..] {
                    let value = plane[index as usize];
                    // NaN is the largest, as in PyTorch.
                    if value > *y || (value.is_nan() && !y.is_nan()) {
                        (*y, most) = (value, index);
                    }
                }
                largest.push(most);
            }
        }
        largest
    })
    .concat();
    graph_op(pool.function, &[x], storage(y, x.dtype())?, pool.shape, move |x, _, dy| {
        read!(grad, dy);
        let mut dx = vec![0f32; x[0].elem_count()];
        map_rows(&mut dx, size, 1, |first, planes| {
            for (plane, at) in planes.chunks_exact_mut(size).zip(first..) {
                let range = at * positions..(at + 1) * positions;
                for (&index, grad) in largest[range.clone()].iter().zip(&grad[range]) {
                    plane[index as usize] += grad;
                }
            }
        });
        Ok([Some(tensor_like(dx, x[0])?)])
    })
}

/// Returns the mean of the values under each position of the kernel, as [`Tensor::avg_pool2d`]: `[batch, channels,
/// height, width]`, without padding. The stride is the kernel's size.
pub fn avg_pool2d(x: &Tensor, kernel: impl ToUsize2) -> Result<Tensor> {
    let kernel = kernel.to_usize2();
    avg_pool2d_with_stride(x, kernel, kernel)
}

/// [`avg_pool2d`] with a stride, as [`Tensor::avg_pool2d_with_stride`].
pub fn avg_pool2d_with_stride(x: &Tensor, kernel: impl ToUsize2, stride: impl ToUsize2) -> Result<Tensor> {
    let pool = Pool::new("avg_pool2d", x, kernel, stride)?;
    if !has_cpu_kernels(x) {
        return pool.unfolded(x)?.mean(2)?.reshape(&pool.shape);
    }
    let window = pool.window;
    let (size, positions, taps) = (window.size(), window.positions(), window.taps());
    let share = 1. / taps as f32;
    let mut y = vec![0f32; pool.planes * positions];
    read!(values, x);
    map_rows(&mut y, positions, taps, |first, planes| {
        let mut under = vec![0f32; positions];
        for (y, at) in planes.chunks_exact_mut(positions).zip(first..) {
            for tap in 0..taps {
                window.gather(&values[at * size..(at + 1) * size], tap, 0, &mut under);
                y.iter_mut().zip(&under).for_each(|(y, x)| *y += x);
            }
            y.iter_mut().for_each(|y| *y *= share);
        }
    });
    graph_op(pool.function, &[x], storage(y, x.dtype())?, pool.shape, move |x, _, dy| {
        read!(grad, dy);
        let mut dx = vec![0f32; x[0].elem_count()];
        map_rows(&mut dx, size, taps, |first, planes| {
            for (plane, at) in planes.chunks_exact_mut(size).zip(first..) {
                let shares: Vec<f32> = grad[at * positions..(at + 1) * positions].iter().map(|g| g * share).collect();
                (0..taps).for_each(|tap| window.scatter(&shares, tap, 0, plane));
            }
        });
        Ok([Some(tensor_like(dx, x[0])?)])
    })
}

/// The sizes of a pooling.
struct Pool {
    function: &'static str,
    window: Window,
    /// Channels of all images.
    planes: usize,
    /// Shape of the output.
    shape: Shape,
}

impl Pool {
    fn new(function: &'static str, x: &Tensor, kernel: impl ToUsize2, stride: impl ToUsize2) -> Result<Self> {
        let (batch, channels, height, width) = x.dims4()?;
        let (kernel, stride): ([usize; 2], [usize; 2]) = (kernel.to_usize2().into(), stride.to_usize2().into());
        let large = [height, width];
        if (0..2).any(|axis| kernel[axis] == 0 || stride[axis] == 0 || kernel[axis] > large[axis]) {
            bail!("{function}: a kernel of {kernel:?} with stride {stride:?} does not fit an input of {large:?}");
        }
        let small: [usize; 2] = std::array::from_fn(|axis| (large[axis] - kernel[axis]) / stride[axis] + 1);
        let window = Window { large, small, kernel, padding: [0; 2], stride, dilation: [1; 2] };
        Ok(Pool { function, window, planes: batch * channels, shape: (batch, channels, small[0], small[1]).into() })
    }

    /// Returns the elements under each position, `[planes, positions, taps]`.
    fn unfolded(&self, x: &Tensor) -> Result<Tensor> {
        let (taps, positions) = (self.window.taps(), self.window.positions());
        let indices = Tensor::from_vec(self.window.indices(), positions * taps, x.device())?;
        let planes = x.reshape((self.planes, self.window.size()))?.contiguous()?;
        planes.index_select(&indices, 1)?.reshape((self.planes, positions, taps))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Against the chain of operations that devices use.
    #[test]
    fn outputs_and_gradients_match_a_chain_of_operations() {
        let value = |i: usize| ((i * 7919) % 1009) as f32 / 504.5 - 1.;
        for (size, kernel, stride) in
            [([7, 9], (3, 3), (2, 2)), ([8, 6], (2, 2), (2, 2)), ([5, 8], (1, 4), (3, 1)), ([6, 6], (2, 2), (3, 3))]
        {
            let count = 2 * 3 * size[0] * size[1];
            let x = Tensor::from_vec((0..count).map(value).collect(), (2, 3, size[0], size[1]), &Device::Cpu).unwrap();
            let x = Var::from_tensor(&x).unwrap();
            let of = |y: Tensor| {
                let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                [flat(&y), flat(grads.get(&x).unwrap())]
            };
            let pool = Pool::new("pool", &x, kernel, stride).unwrap();
            let chain = pool.unfolded(&x).unwrap();
            let largest = chain.gather(&chain.argmax_keepdim(2).unwrap(), 2).unwrap().reshape(&pool.shape).unwrap();
            assert_eq!(of(max_pool2d_with_stride(&x, kernel, stride).unwrap()), of(largest));
            let mean = of(chain.mean(2).unwrap().reshape(&pool.shape).unwrap());
            for (ours, mean) in of(avg_pool2d_with_stride(&x, kernel, stride).unwrap()).iter().zip(&mean) {
                assert!(ours.iter().zip(mean).all(|(a, b)| (a - b).abs() < 1e-5), "{ours:?} {mean:?}");
            }
        }
    }

    #[test]
    fn equal_values_give_their_gradient_to_the_first_and_nan_is_kept() {
        let x = Var::new(&[[[[1f32, 2., 2.], [0., 2., f32::NAN]]]], &Device::Cpu).unwrap();
        let y = max_pool2d_with_stride(&x, 2, 1).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0., 1., 0., 0., 0., 1.]);
        let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0] == 2. && y[1].is_nan(), "{y:?}");
    }

    #[test]
    fn refuses_kernels_that_do_not_fit() {
        let x = Tensor::zeros((1, 1, 2, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        for (kernel, stride) in [((3, 1), (1, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 0))] {
            let error = max_pool2d_with_stride(&x, kernel, stride).unwrap_err().to_string();
            assert!(error.contains("max_pool2d") && error.contains("[2, 3]"), "{error}");
            assert!(avg_pool2d_with_stride(&x, kernel, stride).is_err());
        }
    }
}
