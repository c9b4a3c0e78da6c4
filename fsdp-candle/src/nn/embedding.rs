//! A table of vectors, one for each id.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::values::{indices, read, served, storage, weight_grad};
use super::weight::{Weight, claim};

/// An embedding: weight `[vocabulary, hidden]`, ids (u32) of any shape `[..]`, output `[.., hidden]`.
///
/// The gradient of a row is the sum of the output's gradients at the places where its id stands.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Embedding;
///
/// let table = Embedding::new(Tensor::new(&[[0f32, 1.], [2., 3.]], &Device::Cpu)?)?;
/// let rows = table.forward(&Tensor::new(&[1u32, 0, 1], &Device::Cpu)?)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[2., 3.], [0., 1.], [2., 3.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    vocabulary: usize,
    hidden: usize,
}

impl Embedding {
    /// An embedding with this weight, `[vocabulary, hidden]`. An error if it is not a matrix.
    pub fn new(weight: Tensor) -> Result<Self> {
        let (vocabulary, hidden) = weight.dims2()?;
        claim(&weight);
        Ok(Self { weight, vocabulary, hidden })
    }

    /// The weight, `[vocabulary, hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The weight, by the name that [`candle_nn::Embedding`] has for it.
    pub fn embeddings(&self) -> &Tensor {
        &self.weight
    }

    /// Length of one embedding.
    pub fn hidden_size(&self) -> usize {
        self.hidden
    }
}

/// An [`Embedding`] from the tensor `weight` of `vb`.
pub fn embedding(vocabulary: usize, hidden: usize, vb: VarBuilder) -> Result<Embedding> {
    Embedding::new(vb.get_with_hints((vocabulary, hidden), "weight", Init::Randn { mean: 0., stdev: 1. })?)
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        if !served(&self.weight) {
            return composite(&self.weight, ids);
        }
        if !ids.device().is_cpu() {
            bail!("Embedding: the ids are on {:?} but the weight is on the CPU", ids.device().location());
        }
        let mut shape = ids.dims().to_vec();
        shape.push(self.hidden);
        let ids = indices("Embedding", "id", ids, self.vocabulary, "vocabulary size")?;
        let weight = Weight::of(&self.weight)?;
        let node = weight.node().clone();
        node.apply_op1(Lookup { weight, ids, hidden: self.hidden, shape: shape.into() })
    }
}

/// The same from Candle's operations.
pub(super) fn composite(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(weight.dim(1)?);
    weight.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
}

struct Lookup {
    weight: Weight,
    ids: Vec<u32>,
    hidden: usize,
    shape: Shape,
}

impl Lookup {
    /// Where in the table each id's row lies.
    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.ids.iter().map(|&id| id as usize * self.hidden..(id as usize + 1) * self.hidden)
    }

    /// Picks rows of a table in its own dtype.
    fn gather<T: Copy>(&self, table: &[T]) -> Vec<T> {
        let mut out = Vec::with_capacity(self.ids.len() * self.hidden);
        self.rows().for_each(|row| out.extend_from_slice(&table[row]));
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
        let out = match (super::values::cpu(&guard)?, value.dtype()) {
            (CpuStorage::BF16(table), _) => CpuStorage::BF16(self.gather(&super::values::dense(table, layout)?)),
            (CpuStorage::F16(table), _) => CpuStorage::F16(self.gather(&super::values::dense(table, layout)?)),
            (table, _) => storage(self.gather(&super::values::floats(table, layout)?), DType::F32)?,
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
                buffer[row].iter_mut().zip(grad).for_each(|(to, from)| *to += from);
            }
            Ok(())
        })
    }
}
