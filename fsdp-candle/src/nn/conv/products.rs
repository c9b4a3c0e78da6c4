//! Convolutions on CPUs as matrix products over blocks of positions.

use std::ops::Range;

use candle_core::{Result, Storage, Tensor};

use super::{Sizes, depthwise};
use crate::nn::cpu::matrix::{Mat, MatMut, product};
use crate::nn::cpu::{map_rows, read, small_weight_grad, storage, tensor_like, weight_grad};
use crate::nn::weight::Weight;

/// Elements of the unfolded columns of a block: a part of the cache. Tests have small images in several blocks.
const BLOCK: usize = if cfg!(test) { 1 << 7 } else { 1 << 18 };
/// Fewest columns of a block, for the products' speed.
const FEWEST_COLUMNS: usize = if cfg!(test) { 5 } else { 64 };

pub(super) struct Convolution {
    pub(super) sizes: Sizes,
    pub(super) weight: Weight,
    pub(super) bias: Option<Weight>,
}

/// Positions that are computed together, of one group: some positions of an image, or all of several images.
struct Block {
    group: usize,
    images: Range<usize>,
    /// First position, in each image.
    first: usize,
    /// Positions of an image.
    count: usize,
}

impl Block {
    /// Returns the number of columns.
    fn columns(&self) -> usize {
        self.images.len() * self.count
    }
}

impl Convolution {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Storage> {
        read!(values, x);
        let shape = &self.sizes.shape;
        let mut y = vec![0f32; shape.elem_count()];
        {
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.to_large(&values, &kernel, &mut y),
                false => self.to_small(&values, &kernel, &mut y),
            }
        }
        if let Some(bias) = &self.bias {
            read!(bias, bias.value()?);
            let run: usize = shape.dims()[2..].iter().product();
            for (run, bias) in y.chunks_mut(run.max(1)).zip(bias.iter().cycle()) {
                run.iter_mut().for_each(|y| *y += bias);
            }
        }
        storage(y, x.dtype())
    }

    pub(super) fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        read!(grad, dy);
        let dx = if x.track_op() {
            let mut dx = vec![0f32; values.len()];
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.to_small(&grad, &kernel, &mut dx),
                false => self.to_large(&grad, &kernel, &mut dx),
            }
            Some(tensor_like(dx, x)?)
        } else {
            None
        };
        let (of_small, of_large) = if self.sizes.transposed { (&values, &grad) } else { (&grad, &values) };
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            if !accumulate {
                buffer.fill(0.0);
            }
            self.add_weight_grad(of_small, of_large, buffer);
            Ok(())
        })?;
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => {
                let mut sums = vec![0f32; self.sizes.out_channels()];
                let run: usize = self.sizes.shape.dims()[2..].iter().product();
                for (i, run) in grad.chunks(run.max(1)).enumerate() {
                    sums[i % self.sizes.out_channels()] += run.iter().sum::<f32>();
                }
                small_weight_grad(bias, &sums)?
            }
            _ => None,
        };
        Ok([dx, dw, db])
    }

    /// Maps the larger side to the smaller one.
    fn to_small(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        if self.is_depthwise() {
            return depthwise::to_small(&self.sizes, from, kernel, to);
        }
        let (small, _) = self.sizes.group_channels();
        let positions = self.sizes.window.positions();
        let (mut columns, mut several) = (vec![], vec![]);
        self.for_each_block(|block| {
            let kernel = Mat::new(&kernel[self.kernel_range(block.group)], small, self.width());
            let rhs = self.unfolded(from, block, &mut columns);
            if block.images.len() == 1 {
                let start = self.small_range(block, block.images.start).start + block.first;
                let to = MatMut::strided(&mut to[start..], small, block.count, positions);
                return product(to, false, kernel, rhs);
            }
            several.resize(small * block.columns(), 0.);
            product(MatMut::new(&mut several, small, block.columns()), false, kernel, rhs);
            for (at, image) in block.images.clone().enumerate() {
                let to = to[self.small_range(block, image)].chunks_exact_mut(positions);
                let rows = several.chunks_exact(block.columns());
                to.zip(rows).for_each(|(to, row)| to.copy_from_slice(&row[at * positions..][..positions]));
            }
        });
    }

    /// Maps the smaller side to the larger one, which must be zero.
    fn to_large(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        if self.is_depthwise() {
            return depthwise::to_large(&self.sizes, from, kernel, to);
        }
        let (small, large) = self.sizes.group_channels();
        let window = self.sizes.window;
        let (taps, size) = (window.taps(), window.size());
        let (mut columns, mut several) = (vec![], vec![]);
        self.for_each_block(|block| {
            let kernel = Mat::new(&kernel[self.kernel_range(block.group)], small, self.width()).t();
            let rhs = self.small_side(from, block, &mut several);
            if window.is_pointwise() {
                let start = self.large_range(block, block.images.start).start + block.first;
                return product(MatMut::strided(&mut to[start..], large, block.count, size), false, kernel, rhs);
            }
            let n = block.columns();
            columns.resize(self.width() * n, 0.);
            product(MatMut::new(&mut columns, self.width(), n), false, kernel, rhs);
            for (at, image) in block.images.clone().enumerate() {
                let cost = (taps * block.count).div_ceil(size.max(1));
                map_rows(&mut to[self.large_range(block, image)], size, cost, |first, planes| {
                    for (channel, plane) in (first..).zip(planes.chunks_exact_mut(size)) {
                        for tap in 0..taps {
                            let row = (channel * taps + tap) * n + at * block.count;
                            window.scatter(&columns[row..row + block.count], tap, block.first, plane);
                        }
                    }
                });
            }
        });
    }

    /// Adds the kernel's gradient to `to`.
    fn add_weight_grad(&self, of_small: &[f32], of_large: &[f32], to: &mut [f32]) {
        if self.is_depthwise() {
            return depthwise::add_weight_grad(&self.sizes, of_small, of_large, to);
        }
        let (small, _) = self.sizes.group_channels();
        let (mut columns, mut several) = (vec![], vec![]);
        self.for_each_block(|block| {
            let lhs = self.small_side(of_small, block, &mut several);
            let rhs = self.unfolded(of_large, block, &mut columns).t();
            let to = MatMut::new(&mut to[self.kernel_range(block.group)], small, self.width());
            product(to, true, lhs, rhs);
        });
    }

    /// Returns whether groups have one channel. Their products would have one row.
    fn is_depthwise(&self) -> bool {
        self.sizes.group_channels() == (1, 1)
    }

    /// Returns the elements of a column: those under the kernel, in all channels of a group.
    fn width(&self) -> usize {
        self.sizes.group_channels().1 * self.sizes.window.taps()
    }

    fn kernel_range(&self, group: usize) -> Range<usize> {
        let size = self.sizes.group_channels().0 * self.width();
        group * size..(group + 1) * size
    }

    /// Returns the elements of an image's group on the smaller side.
    fn small_range(&self, block: &Block, image: usize) -> Range<usize> {
        let len = self.sizes.group_channels().0 * self.sizes.window.positions();
        let at = image * self.sizes.groups + block.group;
        at * len..(at + 1) * len
    }

    /// Returns the elements of an image's group on the larger side.
    fn large_range(&self, block: &Block, image: usize) -> Range<usize> {
        let len = self.sizes.group_channels().1 * self.sizes.window.size();
        let at = image * self.sizes.groups + block.group;
        at * len..(at + 1) * len
    }

    /// Calls `f` with all blocks, in order.
    fn for_each_block(&self, mut f: impl FnMut(&Block)) {
        let Sizes { batch, groups, window, .. } = self.sizes;
        let positions = window.positions();
        // Nothing is unfolded for a pointwise convolution.
        let most = if window.is_pointwise() { positions } else { (BLOCK / self.width().max(1)).max(FEWEST_COLUMNS) };
        let together = if window.is_pointwise() { 1 } else { (most / positions.max(1)).max(1) };
        // Blocks of about one size.
        let most = positions.div_ceil(positions.div_ceil(most.max(1)).max(1)).max(1);
        for group in 0..groups {
            for image in (0..batch).step_by(together) {
                let images = image..(image + together).min(batch);
                for first in (0..positions).step_by(most) {
                    let count = most.min(positions - first);
                    f(&Block { group, images: images.clone(), first, count });
                }
            }
        }
    }

    /// Returns a block of the smaller side, `[channels, columns]`. `several` holds it if it is of several images.
    fn small_side<'a>(&self, from: &'a [f32], block: &Block, several: &'a mut Vec<f32>) -> Mat<'a> {
        let (small, _) = self.sizes.group_channels();
        let positions = self.sizes.window.positions();
        if block.images.len() == 1 {
            let start = self.small_range(block, block.images.start).start + block.first;
            return Mat::strided(&from[start..], small, block.count, positions, 1);
        }
        several.resize(small * block.columns(), 0.);
        for (at, image) in block.images.clone().enumerate() {
            let from = from[self.small_range(block, image)].chunks_exact(positions);
            let rows = several.chunks_exact_mut(block.columns());
            rows.zip(from).for_each(|(row, from)| row[at * positions..][..positions].copy_from_slice(from));
        }
        Mat::new(several, small, block.columns())
    }

    /// Returns a block of the larger side, unfolded to columns.
    fn unfolded<'a>(&self, from: &'a [f32], block: &Block, columns: &'a mut Vec<f32>) -> Mat<'a> {
        let (_, large) = self.sizes.group_channels();
        let window = self.sizes.window;
        let (taps, size, n) = (window.taps(), window.size(), block.columns());
        if window.is_pointwise() {
            let start = self.large_range(block, block.images.start).start + block.first;
            return Mat::strided(&from[start..], large, block.count, size, 1);
        }
        columns.resize(self.width() * n, 0.);
        map_rows(columns, n, 1, |first, rows| {
            for (at, row) in (first..).zip(rows.chunks_exact_mut(n)) {
                for (image, part) in block.images.clone().zip(row.chunks_exact_mut(block.count)) {
                    let plane = self.large_range(block, image).start + at / taps * size;
                    window.gather(&from[plane..plane + size], at % taps, block.first, part);
                }
            }
        });
        Mat::new(columns, self.width(), n)
    }
}
