//! A rank's rows of a batch, and means over ranks.

use std::ops::Range;

use candle_core::{DType, Tensor};
use fsdp_core::ReduceOp;

use super::World;
use crate::error::{Error, Result};

impl World {
    /// Returns the mean over the ranks of a scalar: of each rank's loss, for example. Collective, and waits for the
    /// scalar on a device. It weighs all ranks alike: see [`World::row_weight`] for ranks with different numbers of
    /// rows. Fails for a tensor of several elements.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fsdp_candle::World;
    /// use fsdp_core::process_group::local;
    ///
    /// local::try_run(2, |group| {
    ///     let world = World::of(group);
    ///     let loss = Tensor::new(world.rank() as f32, &Device::Cpu)?;
    ///     assert_eq!(world.mean(&loss)?, 0.5);
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn mean(&self, scalar: &Tensor) -> Result<f32> {
        if scalar.elem_count() != 1 {
            return Err(Error::Argument(format!(
                "World::mean: expected a scalar, found shape {:?}: call `mean_all()` of the loss first",
                scalar.dims()
            )));
        }
        let own = scalar.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        Ok(self.all_reduce(&own, ReduceOp::Avg)?[0] as f32)
    }

    /// Returns this rank's rows of a batch of `rows` rows: consecutive rows, in the order of ranks, whose counts
    /// differ by at most one. Does not communicate. Do not use it with tensor parallelism: there the ranks of one model
    /// take the same rows.
    ///
    /// ```
    /// # use fsdp_candle::World;
    /// use fsdp_core::process_group::local;
    ///
    /// local::run(3, |group| {
    ///     let world = World::of(group);
    ///     assert_eq!(world.rows(8), [0..3, 3..6, 6..8][world.rank()]);
    /// });
    /// ```
    pub fn rows(&self, rows: usize) -> Range<usize> {
        let (size, rank) = (self.size(), self.rank());
        let start = |rank: usize| rank * (rows / size) + rank.min(rows % size);
        start(rank)..start(rank + 1)
    }

    /// Returns the weight of this rank's mean loss over its [`rows`](World::rows) of a batch: its number of rows,
    /// relative to the mean number. 1 if the rows divide evenly. `backward` averages the gradients of all ranks alike,
    /// so `loss * weight` gives the gradient of the mean over the whole batch, and [`World::mean`] of it that mean. The
    /// mean of no rows is NaN: skip batches with fewer rows than ranks, as [`World::batches`] does.
    ///
    /// ```
    /// # use fsdp_candle::World;
    /// use fsdp_core::process_group::local;
    ///
    /// local::run(2, |group| {
    ///     let world = World::of(group);
    ///     assert_eq!(world.row_weight(3), [4. / 3., 2. / 3.][world.rank()]);
    /// });
    /// ```
    pub fn row_weight(&self, rows: usize) -> f64 {
        self.rows(rows).len() as f64 * self.size() as f64 / rows.max(1) as f64
    }

    /// Returns this rank's rows of each batch of a data set with `rows` rows, in order: the same number of batches on
    /// every rank. A batch has `batch` rows over all ranks. The last one may have fewer. It is left out if some rank
    /// would get no row of it. Shuffle indices with the same seed on every rank. Ranks with uneven rows have the same
    /// weight, unless you multiply the loss by [`World::row_weight`] of the batch's rows. Fails if a batch has fewer
    /// rows than there are ranks.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fsdp_candle::World;
    /// let world = World::single()?;
    /// let x = Tensor::zeros((10, 3), DType::F32, &Device::Cpu)?;
    /// let mut sizes = vec![];
    /// for rows in world.batches(10, 4)? {
    ///     let x = x.narrow(0, rows.start, rows.len())?;
    ///     sizes.push(x.dim(0)?);
    /// }
    /// assert_eq!(sizes, [4, 4, 2]);
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn batches(&self, rows: usize, batch: usize) -> Result<impl Iterator<Item = Range<usize>> + use<>> {
        if batch < self.size() {
            return Err(Error::Argument(format!(
                "World::batches: expected batches of at least a row for each of {} ranks, found {batch} rows",
                self.size()
            )));
        }
        let own = |start: usize| {
            let size = batch.min(rows - start);
            let own = self.rows(size);
            (size >= self.size()).then(|| start + own.start..start + own.end)
        };
        let batches: Vec<_> = (0..rows).step_by(batch).filter_map(own).collect();
        Ok(batches.into_iter())
    }
}
