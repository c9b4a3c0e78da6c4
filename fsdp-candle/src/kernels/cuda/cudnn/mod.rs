//! Attention by cuDNN, where it is installed and covers the case. Otherwise attention uses this crate's kernels.

mod attention;
mod graph;
mod library;
mod names;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Once};

use candle_core::{Result, bail};
use fsdp_core::DType;
use fsdp_core::device::cuda::{CudaView, failed};
use parking_lot::Mutex;

use self::attention::{
    D_K, D_OUT, D_Q, D_Q_SUMS, D_V, FILL, K, LEFT, LOG_SUMS, ONE, OUT, Q, ROW_SUMS, SCALE, SHIFT, Shape, V,
};
use self::graph::{Plan, Target};
use self::library::{Handle, Library, Refused, library};
use super::attention_backend::{VARIABLE, wants_cudnn};
use super::device::CudaKernels;
use super::flash_attention::FlashAttention;
use crate::error::Error;
use crate::warning::warn;

/// Compute capabilities of Hopper and Blackwell, where cuDNN is faster than this crate's kernels.
const CAPABILITIES: std::ops::RangeInclusive<i32> = 9..=10;
/// Fewest queries, unless the environment asks for cuDNN. With less, attention takes little of a step, and models whose
/// sequences differ would make a plan for each length.
const FEWEST_QUERIES: usize = 512;
/// Plans that are kept, in each direction.
const MOST_PLANS: usize = 256;

/// A device's cuDNN.
pub(in crate::kernels) struct Cudnn {
    library: &'static Library,
    /// Locked while a plan is enqueued.
    handle: Mutex<Handle>,
    capability: (i32, i32),
    fewest_queries: usize,
    forward: Mutex<Plans>,
    backward: Mutex<Plans>,
}

/// An attention of tensors on a device.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub(super) flash: &'a FlashAttention<'a>,
    pub(super) dtype: DType,
    /// q, k and v, from their first elements on.
    pub(super) operands: [CudaView<'a>; 3],
}

/// Plans by shape. `None` where cuDNN has none.
type Plans = HashMap<Shape, Option<Arc<Plan>>>;

impl Cudnn {
    /// Returns a device's cuDNN, or `None` if it can't be used. Fails if it can't and the environment asks for it.
    pub(super) fn new(cuda: &CudaKernels) -> Result<Option<Self>> {
        let wanted = wants_cudnn()?;
        if wanted == Some(false) {
            return Ok(None);
        }
        let why = match Self::start(cuda, if wanted.is_some() { 1 } else { FEWEST_QUERIES })? {
            Ok(started) => return Ok(Some(started)),
            Err(why) => why,
        };
        if wanted.is_some() {
            bail!("{VARIABLE}=cudnn: {why}. Unset it to train with this project's kernels");
        }
        static SAID: Once = Once::new();
        SAID.call_once(|| warn(&format!("attention uses this project's kernels, not cuDNN's: {why}")));
        Ok(None)
    }

    /// Returns a device's cuDNN, or why it can't be used.
    fn start(cuda: &CudaKernels, fewest_queries: usize) -> Result<std::result::Result<Self, String>> {
        let refused = |what: &str, why: &dyn std::fmt::Display| Error::Core(failed(&cuda.stream, what, why));
        let context = cuda.stream.context();
        let capability = context.compute_capability().map_err(|error| refused("asking for its capability", &error))?;
        if !CAPABILITIES.contains(&capability.0) {
            return Ok(Err(format!("the GPU has compute capability {}.{}", capability.0, capability.1)));
        }
        let library = match library() {
            Ok(library) => library,
            Err(why) => return Ok(Err(why.to_string())),
        };
        context.bind_to_thread().map_err(|error| refused("starting cuDNN", &error))?;
        match Handle::new(library, cuda.stream.cu_stream().cast()) {
            Ok(handle) => Ok(Ok(Cudnn {
                library,
                handle: Mutex::new(handle),
                capability,
                fewest_queries,
                forward: Mutex::default(),
                backward: Mutex::default(),
            })),
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    /// Returns cuDNN's version, such as `9.26`.
    pub(super) fn version(&self) -> String {
        self.library.version()
    }

    /// Returns the shape of an attention that cuDNN may compute.
    fn shape(&self, flash: &FlashAttention<'_>, dtype: DType) -> Option<Shape> {
        Shape::of(flash, dtype).filter(|shape| shape.queries >= self.fewest_queries)
    }

    /// Returns whether cuDNN has plans for both directions of an attention.
    pub(super) fn covers(&self, cuda: &CudaKernels, flash: &FlashAttention<'_>, dtype: DType) -> Result<bool> {
        let Some(shape) = self.shape(flash, dtype) else { return Ok(false) };
        Ok(self.forward_plan(cuda, &shape)?.is_some() && self.backward_plan(cuda, &shape)?.is_some())
    }

    /// Writes the output and the logarithms of the sums. Returns whether cuDNN has a plan.
    pub(super) fn forward(
        &self,
        cuda: &CudaKernels,
        Attention { flash, dtype, operands }: Attention<'_>,
        [out, log_sums]: [CudaView<'_>; 2],
    ) -> Result<bool> {
        let Some(shape) = self.shape(flash, dtype) else { return Ok(false) };
        let Some(plan) = self.forward_plan(cuda, &shape)? else { return Ok(false) };
        let workspace = cuda.uninit(DType::U8, plan.workspace)?;
        let views = [Q, K, V].into_iter().zip(operands).chain([(OUT, out), (LOG_SUMS, log_sums)]);
        let memory: Vec<_> = views.map(|(number, view)| (number, view.address())).collect();
        self.run(cuda, flash, &plan, memory, cuda.view((&workspace).into())?)?;
        Ok(true)
    }

    /// Writes the gradients of q, k and v, and memory for sums `[batch, heads, queries]` in F32. Returns whether cuDNN has a plan.
    pub(super) fn backward(
        &self,
        cuda: &CudaKernels,
        Attention { flash, dtype, operands }: Attention<'_>,
        [out, d_out, log_sums]: [CudaView<'_>; 3],
        gradients: [CudaView<'_>; 3],
        row_sums: CudaView<'_>,
    ) -> Result<bool> {
        let Some(shape) = self.shape(flash, dtype) else { return Ok(false) };
        let Some(plan) = self.backward_plan(cuda, &shape)? else { return Ok(false) };
        let d_q_sums = cuda.uninit(DType::F32, shape.queries_len())?;
        let workspace = cuda.uninit(DType::U8, plan.workspace)?;
        let scratch = [cuda.view((&d_q_sums).into())?, row_sums];
        let views = [Q, K, V].into_iter().zip(operands);
        let views = views.chain([OUT, D_OUT, LOG_SUMS].into_iter().zip([out, d_out, log_sums]));
        let views = views.chain([D_Q_SUMS, ROW_SUMS].into_iter().zip(scratch));
        let views = views.chain([D_Q, D_K, D_V].into_iter().zip(gradients));
        let memory = views.map(|(number, view)| (number, view.address())).collect();
        self.run(cuda, flash, &plan, memory, cuda.view((&workspace).into())?)?;
        Ok(true)
    }

    /// Runs a plan on the compute stream, in whose order memory is freed.
    fn run(
        &self,
        cuda: &CudaKernels,
        flash: &FlashAttention<'_>,
        plan: &Plan,
        mut variables: Vec<(i64, u64)>,
        workspace: CudaView<'_>,
    ) -> Result<()> {
        bind(cuda)?;
        let first = flash.visible.first;
        let (scale, fill, one, shift) = (flash.scale as f32, f32::NEG_INFINITY, 1f32, first as i32);
        let left = flash.visible.window.unwrap_or(0) as f32 - first as f32;
        let floats = [(SCALE, &scale), (FILL, &fill), (ONE, &one), (LEFT, &left)];
        variables.extend(floats.map(|(number, value)| (number, std::ptr::from_ref(value) as u64)));
        variables.push((SHIFT, std::ptr::from_ref(&shift) as u64));
        variables.retain(|(number, _)| plan.has(*number));
        // SAFETY: the tensors have the plan's sizes, by its shape. Memory is freed in the order of the compute stream.
        let done = unsafe { plan.run(&self.handle.lock(), &variables, workspace.address()) };
        Ok(done.map_err(|error| Error::Core(failed(&cuda.stream, "attention by cuDNN", &error)))?)
    }

    /// Returns the plan of forward, if cuDNN has one.
    fn forward_plan(&self, cuda: &CudaKernels, shape: &Shape) -> Result<Option<Arc<Plan>>> {
        let plan = |handle: &Handle| shape.forward(self.library, Target::Handle(handle));
        self.known(cuda, &self.forward, shape, plan)
    }

    /// Returns the plan of backward, if cuDNN has one.
    fn backward_plan(&self, cuda: &CudaKernels, shape: &Shape) -> Result<Option<Arc<Plan>>> {
        let plan = |handle: &Handle| shape.backward(self.library, Target::Handle(handle), self.capability);
        self.known(cuda, &self.backward, shape, plan)
    }

    /// Returns a shape's plan, making it if it is new.
    fn known(
        &self,
        cuda: &CudaKernels,
        plans: &Mutex<Plans>,
        shape: &Shape,
        make: impl FnOnce(&Handle) -> std::result::Result<Plan, Refused>,
    ) -> Result<Option<Arc<Plan>>> {
        let mut plans = plans.lock();
        if let Some(plan) = plans.get(shape) {
            return Ok(plan.clone());
        }
        if plans.len() == MOST_PLANS {
            return Ok(None);
        }
        bind(cuda)?;
        let plan = match make(&self.handle.lock()) {
            Ok(plan) => Some(Arc::new(plan)),
            Err(error) => {
                if !error.is_unsupported() {
                    warn(&format!("attention uses this project's kernels, not cuDNN's, for {shape:?}: {error}"));
                }
                None
            }
        };
        plans.insert(shape.clone(), plan.clone());
        Ok(plan)
    }
}

/// Makes the device's context the thread's.
fn bind(cuda: &CudaKernels) -> Result<()> {
    let bound = cuda.stream.context().bind_to_thread();
    Ok(bound.map_err(|error| Error::Core(failed(&cuda.stream, "attention by cuDNN", &error)))?)
}
