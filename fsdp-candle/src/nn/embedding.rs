//! A table of vectors, one for each id: `candle_nn::embedding`.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::cpu::values::{cpu, dense, floats, read, rows_of, served, storage, weight_grad};
#[cfg(feature = "cuda")]
use super::cuda::{self, on_cuda};
use super::weight::{Weight, claim};

/// An embedding, as [`candle_nn::Embedding`]: weight `[vocabulary, hidden]`, ids (u8, u32 or i64) of any shape `[..]`,
/// output `[.., hidden]`. The largest number of the ids' dtype is no id: its row is zero and has no gradient.
///
/// The gradient of a row is the sum of the output's gradients at the places where its id stands.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Embedding;
///
/// let table = Embedding::new(Tensor::new(&[[0f32, 1.], [2., 3.]], &Device::Cpu)?, 2);
/// let rows = table.forward(&Tensor::new(&[1u32, 0, 1], &Device::Cpu)?)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[2., 3.], [0., 1.], [2., 3.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
    hidden_size: usize,
}

impl Embedding {
    /// An embedding with this weight, `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        claim(&embeddings);
        Self { embeddings, hidden_size }
    }

    /// The weight, `[vocabulary, hidden]`.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// Length of one embedding.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

/// An [`Embedding`] from the tensor `weight` of `vb`.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let weight = vb.get_with_hints((in_size, out_size), "weight", Init::Randn { mean: 0., stdev: 1. })?;
    Ok(Embedding::new(weight, out_size))
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (vocabulary, hidden) = self.embeddings.dims2()?;
        if hidden != self.hidden_size {
            bail!("Embedding: the weight {:?} must be [vocabulary, {}]", self.embeddings.dims(), self.hidden_size);
        }
        #[cfg(feature = "cuda")]
        if on_cuda(&self.embeddings) {
            let weight = Weight::of(&self.embeddings)?;
            let found = composite(&weight.value()?.detach(), ids)?;
            return cuda::table::lookup(found, weight, ids);
        }
        if !served(&self.embeddings) {
            return composite(&Weight::in_graph(&self.embeddings)?, ids);
        }
        if !ids.device().is_cpu() {
            bail!("Embedding: the ids are on {:?} but the weight is on the CPU", ids.device().location());
        }
        let mut shape = ids.dims().to_vec();
        shape.push(hidden);
        let ids = rows_of("Embedding", ids, vocabulary)?;
        let weight = Weight::of(&self.embeddings)?;
        let node = weight.node().clone();
        node.apply_op1(Lookup { weight, ids, hidden, shape: shape.into() })
    }
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(weight.dim(1)?);
    weight.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
}

struct Lookup {
    weight: Weight,
    /// The rows of the table, or none.
    ids: Vec<Option<usize>>,
    hidden: usize,
    shape: Shape,
}

impl Lookup {
    /// Where in the table each id's row lies.
    fn rows(&self) -> impl Iterator<Item = Option<std::ops::Range<usize>>> {
        self.ids.iter().map(|id| id.map(|id| id * self.hidden..(id + 1) * self.hidden))
    }

    /// Picks rows of a table in its own dtype.
    fn gather<T: Copy + Default>(&self, table: &[T]) -> Vec<T> {
        let mut out = Vec::with_capacity(self.ids.len() * self.hidden);
        for row in self.rows() {
            match row {
                Some(row) => out.extend_from_slice(&table[row]),
                None => out.resize(out.len() + self.hidden, T::default()),
            }
        }
        out
    }
}

impl CustomOp1 for Lookup {
    fn name(&self) -> &'static str {
        "Embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let value = self.weight.value()?;
        let (guard, layout) = value.storage_and_layout();
        let out = match (cpu(&guard)?, value.dtype()) {
            (CpuStorage::BF16(table), _) => CpuStorage::BF16(self.gather(&dense(table, layout)?)),
            (CpuStorage::F16(table), _) => CpuStorage::F16(self.gather(&dense(table, layout)?)),
            (table, _) => storage(self.gather(&floats(table, layout)?), DType::F32)?,
        };
        Ok((out, self.shape.clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        weight_grad(&self.weight, |buffer, accumulate| {
            read!(grad, dy);
            if !accumulate {
                buffer.fill(0.0);
            }
            for (row, grad) in self.rows().zip(grad.chunks_exact(self.hidden.max(1))) {
                let to = row.map(|row| &mut buffer[row]).unwrap_or_default();
                to.iter_mut().zip(grad).for_each(|(to, from)| *to += from);
            }
            Ok(())
        })
    }
}
