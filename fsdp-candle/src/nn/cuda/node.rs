//! An operation whose result is there before its node of the graph is.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail,
};

use crate::storage::take;

/// The gradients of an operation's inputs, of which there are three at most.
pub(in crate::nn) type Gradients = [Option<Tensor>; 3];

/// What such an operation does in backward.
pub(in crate::nn) trait Backward: Send + Sync + 'static {
    /// Its name in Candle's messages.
    fn name(&self) -> &'static str;

    /// The gradients of the inputs, in order. `x` is the first of them; the others are read through what stands behind
    /// them.
    fn backward(&self, x: &Tensor, gradient: &Tensor) -> Result<Gradients>;
}

/// The result, which nobody else holds and no graph made, as a node after these inputs.
pub(in crate::nn) fn node(inputs: &[&Tensor], result: Tensor, backward: impl Backward) -> Result<Tensor> {
    let is_whole = result.is_contiguous() && result.layout().start_offset() == 0;
    let result = if is_whole { result } else { result.force_contiguous()? };
    let shape = result.shape().clone();
    let operation = Operation { result: Mutex::new(Some((take(&result)?, shape))), backward };
    match inputs {
        [x] => x.apply_op1(operation),
        [x, a] => x.apply_op2(a, operation),
        [x, a, b] => x.apply_op3(a, b, operation),
        _ => bail!("{}: an operation of {} inputs", operation.backward.name(), inputs.len()),
    }
}

struct Operation<B> {
    result: Mutex<Option<(Storage, Shape)>>,
    backward: B,
}

impl<B: Backward> Operation<B> {
    fn result(&self) -> Result<(CudaStorage, Shape)> {
        match self.result.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some((Storage::Cuda(storage), shape)) => Ok((storage, shape)),
            Some(_) => bail!("{}: the result is not on a CUDA device", self.backward.name()),
            None => bail!("{} ran twice", self.backward.name()),
        }
    }

    fn elsewhere<T>(&self) -> Result<T> {
        bail!("{}: an input is in the memory of the host", self.backward.name())
    }
}

impl<B: Backward> CustomOp1 for Operation<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.elsewhere()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _, _] = self.backward.backward(x, gradient)?;
        Ok(dx)
    }
}

impl<B: Backward> CustomOp2 for Operation<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.elsewhere()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, da, _] = self.backward.backward(x, gradient)?;
        Ok((dx, da))
    }
}

impl<B: Backward> CustomOp3 for Operation<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.elsewhere()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(
        &self,
        x: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, da, db] = self.backward.backward(x, gradient)?;
        Ok((dx, da, db))
    }
}
