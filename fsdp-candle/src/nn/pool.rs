//! Pooling over two dimensions. Candle's has a backward only if the stride is the kernel's size, and its gradient of the
//! maximum is too small: it is divided by the number of elements under the kernel.

use candle_core::{Result, Shape, Tensor, ToUsize2, bail};

use super::conv::Window;
use super::cpu::simd::kernel;
use super::cpu::{map_rows, read, storage, tensor_of};
use super::empty::if_empty;
use super::weight::has_cpu_kernels;
use crate::graph::{Reads, graph_op};

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
    if let Some(empty) = if_empty(pool.function, x, &[x], pool.shape.clone())? {
        return Ok(empty);
    }
    if !has_cpu_kernels(x) {
        let values = pool.unfolded(x)?;
        return values.gather(&values.argmax_keepdim(2)?, 2)?.reshape(&pool.shape);
    }
    let window = pool.window;
    let (size, positions, taps) = (window.size(), window.positions(), window.taps());
    let mut y = vec![0f32; pool.planes * positions];
    read!(values, x);
    let largest = map_rows(&mut y, positions, taps, |first, planes| {
        let mut largest = vec![0; planes.len()];
        let mut under = vec![0f32; positions];
        let planes = planes.chunks_exact_mut(positions).zip(largest.chunks_exact_mut(positions));
        for ((y, largest), at) in planes.zip(first..) {
            let plane = &values[at * size..(at + 1) * size];
            window.gather(plane, 0, 0, y);
            for tap in 1..taps {
                window.gather(plane, tap, 0, &mut under);
                keep_largest(y, largest, &under, tap as u32);
            }
        }
        largest
    })
    .concat();
    let (shape, count) = (x.shape().clone(), x.elem_count());
    graph_op(pool.function, &[x], storage(y, x.dtype())?, pool.shape, Reads::Nothing, move |_, _, dy| {
        read!(grad, dy);
        let mut dx = vec![0f32; count];
        // The elements under each position of a plane.
        let indices = window.indices();
        map_rows(&mut dx, size, 1, |first, planes| {
            for (plane, at) in planes.chunks_exact_mut(size).zip(first..) {
                let range = at * positions..(at + 1) * positions;
                let taps = largest[range.clone()].iter().zip(indices.chunks_exact(taps));
                for ((&tap, indices), grad) in taps.zip(&grad[range]) {
                    plane[indices[tap as usize] as usize] += grad;
                }
            }
        });
        Ok([Some(tensor_of(dx, &shape, dy.dtype())?)])
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
    let Window { large: [_, width], small, kernel: [height, across], stride: [down, right], .. } = pool.window;
    let (size, positions, taps) = (pool.window.size(), pool.window.positions(), pool.window.taps());
    let share = 1. / taps as f32;
    let mut y = vec![0f32; pool.planes * positions];
    read!(values, x);
    map_rows(&mut y, positions, taps, |first, planes| {
        let mut sums = vec![0f32; width];
        for (plane, at) in planes.chunks_exact_mut(positions).zip(first..) {
            for (i, y) in plane.chunks_exact_mut(small[1]).enumerate() {
                sums.fill(0.);
                for row in values[at * size + i * down * width..].chunks_exact(width).take(height) {
                    add(&mut sums, row);
                }
                for tap in 0..across {
                    y.iter_mut().zip(sums[tap..].iter().step_by(right)).for_each(|(y, sum)| *y += sum);
                }
                y.iter_mut().for_each(|y| *y *= share);
            }
        }
    });
    let (shape, count) = (x.shape().clone(), x.elem_count());
    graph_op(pool.function, &[x], storage(y, x.dtype())?, pool.shape, Reads::Nothing, move |_, _, dy| {
        read!(grad, dy);
        let mut dx = vec![0f32; count];
        map_rows(&mut dx, size, taps, |first, planes| {
            let mut shares = vec![0f32; width];
            for (plane, at) in planes.chunks_exact_mut(size).zip(first..) {
                for (i, grad) in grad[at * positions..(at + 1) * positions].chunks_exact(small[1]).enumerate() {
                    shares.fill(0.);
                    for tap in 0..across {
                        shares[tap..].iter_mut().step_by(right).zip(grad).for_each(|(to, grad)| *to += grad * share);
                    }
                    for row in plane[i * down * width..].chunks_exact_mut(width).take(height) {
                        add(row, &shares);
                    }
                }
            }
        });
        Ok([Some(tensor_of(dx, &shape, dy.dtype())?)])
    })
}

kernel! {
    fn add(to: &mut [f32], values: &[f32]) {
        to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
    }

    /// Keeps the larger of `y` and the elements under a tap, and its tap. NaN is the largest, as in PyTorch.
    fn keep_largest(y: &mut [f32], largest: &mut [u32], under: &[f32], tap: u32) {
        for ((y, largest), &value) in y.iter_mut().zip(largest).zip(under) {
            let is_larger = value > *y || (value.is_nan() && !y.is_nan());
            *y = if is_larger { value } else { *y };
            *largest = if is_larger { tap } else { *largest };
        }
    }
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
