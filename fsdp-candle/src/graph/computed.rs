//! Results of operations, which are computed before Candle asks for them.

use candle_core::{Result, Shape, Storage, bail};
use parking_lot::Mutex;

/// The memory and the shape of an operation's result.
pub(super) struct Computed {
    pub(super) memory: Storage,
    pub(super) shape: Shape,
}

/// The result of an operation, which Candle takes once.
pub(super) struct Forward {
    /// The operation's name in Candle's messages.
    pub(super) name: &'static str,
    computed: Mutex<Option<Computed>>,
}

impl Forward {
    pub(super) fn new(name: &'static str, computed: Computed) -> Self {
        Forward { name, computed: Mutex::new(Some(computed)) }
    }

    /// Takes the result. `on_device` returns its memory on the device of the operation's sources.
    pub(super) fn take<S>(&self, on_device: impl FnOnce(Storage) -> Option<S>) -> Result<(S, Shape)> {
        let Some(Computed { memory, shape }) = self.computed.lock().take() else { bail!("{} ran twice", self.name) };
        match on_device(memory) {
            Some(memory) => Ok((memory, shape)),
            None => bail!("{}: a node must be on the device of its source", self.name),
        }
    }
}

/// Implements Candle's trait for an operation with these sources, a `forward` and a function `backward`.
macro_rules! custom_op {
    ($op:ident: $trait:ident($($source:ident),*), $gradients:pat => $found:expr, $returned:ty) => {
        const _: () = {
            use candle_core::{CpuStorage, CudaStorage, Layout, MetalStorage, Storage};

            #[allow(unused_variables)]
            impl candle_core::$trait for $op {
                fn name(&self) -> &'static str {
                    self.forward.name
                }

                fn cpu_fwd(&self, $($source: &CpuStorage, _: &Layout),*) -> Result<(CpuStorage, Shape)> {
                    self.forward.take(|memory| if let Storage::Cpu(memory) = memory { Some(memory) } else { None })
                }

                fn cuda_fwd(&self, $($source: &CudaStorage, _: &Layout),*) -> Result<(CudaStorage, Shape)> {
                    self.forward.take(|memory| if let Storage::Cuda(memory) = memory { Some(memory) } else { None })
                }

                fn metal_fwd(&self, $($source: &MetalStorage, _: &Layout),*) -> Result<(MetalStorage, Shape)> {
                    self.forward.take(|memory| if let Storage::Metal(memory) = memory { Some(memory) } else { None })
                }

                fn bwd(&self, $($source: &Tensor,)* node: &Tensor, gradient: &Tensor) -> Result<$returned> {
                    let $gradients = self.backward(&[$($source),*], node, gradient)?;
                    Ok($found)
                }
            }
        };
    };
}
pub(super) use custom_op;
