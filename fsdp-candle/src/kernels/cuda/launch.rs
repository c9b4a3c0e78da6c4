//! Running kernels by their names.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, bail};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};
use fsdp_core::DType;
use fsdp_core::device::cuda::{CudaView, failed};

use crate::error::Error;

const SOURCE: &str = include_str!("kernels.cu");

/// Threads of a block: `THREADS` of the source.
pub(super) const THREADS: u32 = 256;

/// Blocks of a launch, each thread of which takes as many elements as it must.
const MOST_BLOCKS: u64 = 1 << 16;

/// The kernels of a device, compiled.
pub(super) struct Module {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<String, CudaFunction>>,
}

/// What a kernel is given, in its own order.
#[derive(Clone, Copy)]
pub(super) enum Arg {
    /// An address, or a count.
    Long(u64),
    Word(u32),
    Double(f64),
    Float(f32),
}

impl From<CudaView<'_>> for Arg {
    fn from(view: CudaView<'_>) -> Self {
        Arg::Long(view.address())
    }
}

impl From<usize> for Arg {
    fn from(count: usize) -> Self {
        Arg::Long(count as u64)
    }
}

impl From<u32> for Arg {
    fn from(word: u32) -> Self {
        Arg::Word(word)
    }
}

impl From<f64> for Arg {
    fn from(number: f64) -> Self {
        Arg::Double(number)
    }
}

/// Blocks and threads for so many elements.
pub(super) fn for_each_of(count: usize) -> LaunchConfig {
    let blocks = (count as u64).div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

impl Module {
    /// Compiles the sources for the stream's device.
    pub(super) fn new(stream: &CudaStream) -> Result<Self> {
        let context = stream.context();
        let device = |error| Error::Core(failed(stream, "loading kernels", &error));
        let (major, minor) = context.compute_capability().map_err(device)?;
        let options = CompileOptions {
            fmad: Some(false),
            options: vec![format!("--gpu-architecture=compute_{major}{minor}")],
            name: Some("kernels.cu".into()),
            ..CompileOptions::default()
        };
        let compiled = compile_ptx_with_opts(SOURCE, options).map_err(|error| {
            let why = match error {
                CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
                other => other.to_string(),
            };
            let capability = format!("compiling kernels for compute capability {major}.{minor}");
            Error::Core(failed(stream, &capability, &why))
        })?;
        let module = context.load_module(compiled).map_err(device)?;
        Ok(Module { module, functions: Mutex::default() })
    }

    fn function(&self, name: &str, stream: &CudaStream) -> Result<CudaFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let function = self.module.load_function(name);
        let function =
            function.map_err(|error| Error::Core(failed(stream, &format!("finding kernel {name}"), &error)))?;
        functions.insert(name.into(), function.clone());
        Ok(function)
    }

    /// Runs a kernel behind what the stream does.
    ///
    /// # Safety
    /// The arguments are the kernel's, by type and order, and it reads and writes nothing but memory of theirs, which
    /// stays until the stream has done so.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        name: &str,
        config: LaunchConfig,
        args: &[Arg],
    ) -> Result<()> {
        let function = self.function(name, stream)?;
        let mut builder = stream.launch_builder(&function);
        for arg in args {
            match arg {
                Arg::Long(value) => builder.arg(value),
                Arg::Word(value) => builder.arg(value),
                Arg::Double(value) => builder.arg(value),
                Arg::Float(value) => builder.arg(value),
            };
        }
        // SAFETY: as the caller says.
        let launched = unsafe { builder.launch(config) };
        launched.map_err(|error| Error::Core(failed(stream, &format!("launching kernel {name}"), &error)))?;
        Ok(())
    }
}

/// What a kernel's name ends in, for a dtype of floats.
pub(super) fn of_float(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F64 => Ok("f64"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        other => bail!("parameters and gradients are floating point; got {other}"),
    }
}
