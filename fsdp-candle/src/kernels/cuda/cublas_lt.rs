//! Products of 8-bit floats by cuBLASLt (<https://docs.nvidia.com/cuda/cublas/#cublasltmatmul>).

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

use candle_core::{Result, bail};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use fsdp_core::DType;
use fsdp_core::device::cuda::{CudaMemory, failed};
use parking_lot::Mutex;

use super::super::layers::Float8Format;
use super::device::CudaKernels;
use crate::error::Error;

/// Bytes that cuBLASLt may use within a product: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Least compute capability with 8-bit floats, and with a scale for each vector.
const TENSORWISE: i32 = 89;
const ROWWISE: i32 = 90;
/// Least version of cuBLAS with a scale for each vector.
const ROWWISE_VERSION: usize = 120_900;
/// Attributes of cuBLAS 12.9 and later, which cudarc has for toolkits of these versions only.
const A_SCALE_MODE: c_uint = 31;
const B_SCALE_MODE: c_uint = 32;
const OUTER_VECTORS: i32 = 3;
/// Largest alignment that cuBLASLt asks for.
const ALIGNED: u32 = 256;

unsafe extern "C" {
    fn cublasLtMatmulDescSetAttribute(
        desc: sys::cublasLtMatmulDesc_t,
        attribute: c_uint,
        value: *const c_void,
        size: usize,
    ) -> sys::cublasStatus_t;
}

/// A matrix of codes: row-major, with a row for each vector.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) address: u64,
    /// The inverse of the scale, or of each row's.
    pub(super) inverses: u64,
    pub(super) format: Float8Format,
}

/// A product `to = lhs rhs^T`, or `to += lhs rhs^T` if `accumulate`.
#[derive(Clone, Copy)]
pub(super) struct CodesProduct {
    /// Rows of `lhs`, rows of `rhs`, and columns of both, of which the last two are multiples of 16.
    pub(super) sizes: [usize; 3],
    pub(super) lhs: Codes,
    pub(super) rhs: Codes,
    /// Whether each row has a scale.
    pub(super) by_vector: bool,
    /// Whether tensor cores may add with fewer bits.
    pub(super) is_fast: bool,
    pub(super) accumulate: bool,
    pub(super) to: u64,
    pub(super) dtype: DType,
}

/// The properties of a product by which cuBLAS chooses an algorithm.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    formats: [Float8Format; 2],
    by_vector: bool,
    is_fast: bool,
    dtype: DType,
    alignment: u32,
}

/// A device's cuBLASLt.
pub(in crate::kernels) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    /// Products on the compute stream share it.
    workspace: CudaMemory,
    algorithms: Mutex<HashMap<Key, sys::cublasLtMatmulAlgo_t>>,
    capability: i32,
}

// SAFETY: cuBLASLt's handle may be used by any thread.
unsafe impl Send for CublasLt {}
// SAFETY: cuBLASLt's functions are thread-safe, also with one handle.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// Fails if the device has no 8-bit floats.
    pub(super) fn new(cuda: &CudaKernels) -> Result<Self> {
        let refused = |what: &str, why: &dyn std::fmt::Display| Error::Core(failed(&cuda.stream, what, why));
        let context = cuda.stream.context();
        let (major, minor) =
            context.compute_capability().map_err(|error| refused("asking for its capability", &error))?;
        let capability = 10 * major + minor;
        if capability < TENSORWISE {
            bail!(
                "8-bit products need a GPU of compute capability 8.9 or later, and this one has {major}.{minor}. Train \
                 without convert_to_float8_training"
            );
        }
        context.bind_to_thread().map_err(|error| refused("8-bit products", &error))?;
        let handle = result::create_handle().map_err(|error| refused("starting cuBLASLt", &error))?;
        let workspace = CudaMemory::uninit(&cuda.stream, DType::U8, WORKSPACE).map_err(Error::from)?;
        Ok(CublasLt { handle, workspace, algorithms: Mutex::default(), capability })
    }

    /// Multiplies codes on the compute stream. Fails if cuBLAS has no algorithm.
    ///
    /// # Safety
    /// The matrices have these sizes and lie in this device's memory, and each has its inverses.
    pub(super) unsafe fn multiply(&self, cuda: &CudaKernels, product: CodesProduct) -> Result<()> {
        if product.by_vector {
            self.check_vectors()?;
        }
        cuda.stream.context().bind_to_thread().map_err(|error| refused(cuda, product, &error))?;
        // SAFETY: ensured by the caller.
        let done = unsafe { self.enqueue(cuda, product) };
        Ok(done.map_err(|error| refused(cuda, product, &error))?)
    }

    /// Fails unless vectors may have scales.
    fn check_vectors(&self) -> Result<()> {
        // SAFETY: the function has no arguments.
        let version = unsafe { sys::cublasLtGetVersion() };
        if self.capability >= ROWWISE && version >= ROWWISE_VERSION {
            return Ok(());
        }
        bail!(
            "scales of rows need a GPU of compute capability 9.0 or later and cuBLAS 12.9 or later. Found {}.{} and \
             cuBLAS {}.{}: use Float8Recipe::Tensorwise",
            self.capability / 10,
            self.capability % 10,
            version / 10_000,
            version % 10_000 / 100
        )
    }

    /// See [`CublasLt::multiply`].
    unsafe fn enqueue(&self, cuda: &CudaKernels, product: CodesProduct) -> std::result::Result<(), CublasError> {
        let CodesProduct { sizes: [rows, cols, terms], lhs, rhs, .. } = product;
        let to_kind = match product.dtype {
            DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
            DType::F16 => sys::cudaDataType::CUDA_R_16F,
            _ => sys::cudaDataType::CUDA_R_32F,
        };
        // cuBLASLt is column-major: the transposed result has a column for each row of `lhs`, and the first operand is
        // `rhs`. 8-bit products take the first operand transposed.
        let layout = |kind, rows: usize, cols: usize| Layout::new(kind, rows, cols);
        let (a, b) = (layout(kind(rhs.format), terms, cols)?, layout(kind(lhs.format), terms, rows)?);
        let d = layout(to_kind, cols, rows)?;
        let desc = Description::new()?;
        desc.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA as c_uint, &1i32)?;
        let pointer = |attribute: sys::cublasLtMatmulDescAttributes_t, at: u64| desc.set(attribute as c_uint, &at);
        pointer(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, rhs.inverses)?;
        pointer(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, lhs.inverses)?;
        if product.by_vector {
            desc.set(A_SCALE_MODE, &OUTER_VECTORS)?;
            desc.set(B_SCALE_MODE, &OUTER_VECTORS)?;
        }
        let fast = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_FAST_ACCUM as c_uint;
        desc.set(fast, &i8::from(product.is_fast))?;
        let algorithm = self.algorithm(product, &desc, [&a, &b, &d])?;
        let (alpha, beta) = (1f32, f32::from(product.accumulate));
        // SAFETY: ensured by the caller, and the workspace has this many bytes.
        unsafe {
            result::matmul(
                self.handle,
                desc.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                rhs.address as *const c_void,
                a.0,
                lhs.address as *const c_void,
                b.0,
                product.to as *const c_void,
                d.0,
                product.to as *mut c_void,
                d.0,
                &raw const algorithm,
                self.workspace.view().address() as *mut c_void,
                WORKSPACE,
                cuda.stream.cu_stream() as sys::cudaStream_t,
            )
        }
    }

    /// Returns the fastest algorithm that cuBLAS knows for such a product. Asking takes long, so answers are kept.
    fn algorithm(
        &self,
        product: CodesProduct,
        desc: &Description,
        [a, b, d]: [&Layout; 3],
    ) -> std::result::Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let CodesProduct { sizes, lhs, rhs, by_vector, is_fast, dtype, to, .. } = product;
        let alignment = (1 << to.trailing_zeros().min(31)).min(ALIGNED);
        let key = Key { sizes, formats: [lhs.format, rhs.format], by_vector, is_fast, dtype, alignment };
        let mut known = self.algorithms.lock();
        if let Some(algorithm) = known.get(&key) {
            return Ok(*algorithm);
        }
        let preference = Preference(result::create_matmul_pref()?);
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment)?;
        // SAFETY: all arguments are live.
        let found =
            unsafe { result::get_matmul_algo_heuristic(self.handle, desc.0, a.0, b.0, d.0, d.0, preference.0)? };
        known.insert(key, found.algo);
        Ok(found.algo)
    }
}

/// Returns the error of a product.
fn refused(cuda: &CudaKernels, product: CodesProduct, cause: &dyn std::fmt::Display) -> Error {
    let CodesProduct { sizes: [rows, cols, terms], dtype, .. } = product;
    let what = format!("an 8-bit product of [{rows}, {terms}] and [{terms}, {cols}] to {dtype}");
    Error::Core(failed(&cuda.stream, &what, cause))
}

fn kind(format: Float8Format) -> sys::cudaDataType {
    match format {
        Float8Format::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Float8Format::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

/// The layout of a column-major matrix.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: sys::cudaDataType, rows: usize, cols: usize) -> std::result::Result<Self, CublasError> {
        result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64).map(Layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: the layout is live, and no one uses it any more.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// The description of a product in f32.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> std::result::Result<Self, CublasError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map(Description)
    }

    fn set<T>(&self, attribute: c_uint, value: &T) -> std::result::Result<(), CublasError> {
        // SAFETY: the description is live, and the value has the attribute's type.
        unsafe { cublasLtMatmulDescSetAttribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>()) }
            .result()
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: the description is live, and no one uses it any more.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> std::result::Result<(), CublasError> {
        // SAFETY: the preference is live, and the value has the attribute's type.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>()) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: the preference is live, and no one uses it any more.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
