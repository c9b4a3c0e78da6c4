//! A table of vectors, one for each id: `candle_nn::embedding`.

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Module, Result, Storage, Tensor, WithDType, bail};
use candle_nn::{Init, VarBuilder};
use half::{bf16, f16};

use super::cpu::{cpu, dense, floats, no_id, read, table_rows};
use super::cuda::Cuda;
use super::limits::check_size;
use super::tensor_parallel::{EmbeddingSharding, TpLayer, check_embedding, colwise_output, gather_ids, rowwise_output};
use super::weight::{Weight, has_cpu_kernels, register_layer};
use crate::graph::{Reads, graph_op};
use crate::kernels::Float;
use crate::tensor_parallel::ActivationLayout;

/// An embedding, as [`candle_nn::Embedding`]: weight `[vocabulary, hidden]`, ids (u8, u32 or i64) of any shape `[..]`,
/// output `[.., hidden]`. The largest number of the ids' dtype stands for no row: its output is zero and has no
/// gradient.
///
/// The gradient of a row is the sum of the output's gradients at the positions of its id. The row of
/// [`padding_idx`](Self::with_padding_idx) has none.
///
/// Under a plan ([`crate::parallelize`]) the weight is this rank's part. [`crate::VocabParallel`] shards the
/// vocabulary: each rank looks its ids up, and the rows are summed over ranks. [`crate::HiddenParallel`] shards the
/// hidden dimension.
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
    padding_idx: Option<usize>,
    parallel: Option<Arc<TpLayer<EmbeddingSharding>>>,
}

impl Embedding {
    /// Returns an embedding with this weight, `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        register_layer(&embeddings);
        let parallel = TpLayer::of_embedding(&embeddings).map(Arc::new);
        Self { embeddings, hidden_size, padding_idx: None, parallel }
    }

    /// Sets PyTorch's `padding_idx`: lookups of this id give its row no gradient. The row keeps its values, and other
    /// layers that share the weight still add to its gradient. Fails if the id is not in the vocabulary.
    pub fn with_padding_idx(self, padding_idx: Option<usize>) -> Result<Self> {
        let (rows, _) = self.embeddings.dims2()?;
        let vocabulary = match &self.parallel {
            Some(parallel) if parallel.style.vocab => rows * parallel.group().size(),
            _ => rows,
        };
        if let Some(id) = padding_idx.filter(|&id| id >= vocabulary) {
            bail!("Embedding: padding_idx is {id}, but the vocabulary has {vocabulary} ids. Use a smaller id, or None");
        }
        Ok(Self { padding_idx, ..self })
    }

    /// Returns the id whose row has no gradient from lookups.
    pub fn padding_idx(&self) -> Option<usize> {
        self.padding_idx
    }

    /// Returns the weight, `[vocabulary, hidden]`, or this rank's part under a plan.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// Returns the length of one embedding.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

/// Returns an [`Embedding`] from the tensor `weight` of `vb`.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let weight = vb.get_with_hints((in_size, out_size), "weight", Init::Randn { mean: 0., stdev: 1. })?;
    check_embedding(&weight)?;
    Ok(Embedding::new(weight, out_size))
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (vocabulary, hidden) = self.embeddings.dims2()?;
        let padding = self.padding_idx;
        let whole = VocabRange { first: 0, rows: vocabulary, of: vocabulary, padding };
        let Some(parallel) = &self.parallel else {
            self.check_hidden(hidden)?;
            return lookup(&self.embeddings, ids, whole);
        };
        let (EmbeddingSharding { vocab: shards_vocab, input, output }, group) = (parallel.style, parallel.group());
        let ids = match input {
            ActivationLayout::Replicate => ids.clone(),
            ActivationLayout::Shard(dim) => gather_ids(ids, dim, group)?,
        };
        if shards_vocab {
            self.check_hidden(hidden)?;
            let (first, of) = (group.rank() * vocabulary, group.size() * vocabulary);
            let range = VocabRange { first, of, ..whole };
            let group = &parallel.group_for(&ids)?;
            rowwise_output("Embedding", &lookup(&self.embeddings, &ids, range)?, output, group)
        } else {
            self.check_hidden(hidden * group.size())?;
            let rows = lookup(&self.embeddings, &ids, whole)?;
            colwise_output("Embedding", rows, output, group)
        }
    }
}

impl Embedding {
    fn check_hidden(&self, hidden: usize) -> Result<()> {
        if hidden != self.hidden_size {
            bail!("Embedding: the weight {:?} must be [vocabulary, {}]", self.embeddings.dims(), self.hidden_size);
        }
        Ok(())
    }
}

/// The rows of a vocabulary that a weight holds.
#[derive(Clone, Copy)]
struct VocabRange {
    first: usize,
    rows: usize,
    of: usize,
    /// Id whose row has no gradient.
    padding: Option<usize>,
}

impl VocabRange {
    /// Returns the index in the weight of a row of the vocabulary, if the weight holds it.
    fn local_row(self, row: usize) -> Option<usize> {
        row.checked_sub(self.first).filter(|row| *row < self.rows)
    }

    /// Returns the weight's row that has no gradient.
    fn local_padding(self) -> Option<usize> {
        self.padding.and_then(|id| self.local_row(id))
    }
}

/// Returns the rows of these ids, and zeros for ids whose rows are on other ranks.
fn lookup(embeddings: &Tensor, ids: &Tensor, range: VocabRange) -> Result<Tensor> {
    let hidden = embeddings.dim(1)?;
    let shape = [ids.dims(), &[hidden]].concat();
    check_size("Embedding", "the output", &shape, embeddings.device())?;
    // Candle's lookup computes an element's place in the table in 32 bits.
    check_size("Embedding", "the table", embeddings.dims(), embeddings.device())?;
    if let Some(cuda) = Cuda::of(embeddings) {
        let weight = Weight::of(embeddings)?;
        let ids = to_local_ids(ids, range)?;
        let found = composite(&weight.value()?.detach(), &ids)?;
        let learnt = match range.local_padding() {
            Some(padding) => is_row(&ids, padding)?.where_cond(&no_ids_like(&ids)?, &ids)?,
            None => ids,
        };
        return cuda.lookup(found, weight, &learnt);
    }
    if !has_cpu_kernels(embeddings) {
        let ids = to_local_ids(ids, range)?;
        let found = composite(&Weight::in_graph(embeddings)?, &ids)?;
        return match range.local_padding() {
            Some(padding) => {
                let is_padding = is_row(&ids, padding)?.unsqueeze(ids.rank())?.broadcast_as(found.shape())?;
                is_padding.where_cond(&found.detach(), &found)
            }
            None => Ok(found),
        };
    }
    if !ids.device().is_cpu() {
        bail!("Embedding: the ids are on {:?} but the weight is on the CPU", ids.device().location());
    }
    let ids = table_rows("Embedding", ids, range.of)?;
    let ids = ids.into_iter().map(|row| row.and_then(|row| range.local_row(row))).collect();
    let weight = Weight::of(embeddings)?;
    let node = weight.node().clone();
    let lookup = Lookup { weight, ids, padding: range.local_padding(), hidden };
    graph_op("Embedding", &[node], lookup.forward()?, shape, Reads::Nothing, move |_, _, dy| Ok([lookup.backward(dy)?]))
}

/// Returns whether each of the weight's own ids is this one.
fn is_row(ids: &Tensor, row: usize) -> Result<Tensor> {
    ids.to_dtype(DType::I64)?.eq(row as i64)
}

/// Returns a tensor of the same shape in which every id stands for no row.
fn no_ids_like(ids: &Tensor) -> Result<Tensor> {
    Tensor::full(no_id(ids), ids.shape(), ids.device())?.to_dtype(ids.dtype())
}

/// Converts ids to the weight's own rows, for Candle's operations. The rows of other ranks become no row. Ids beyond
/// the whole vocabulary stay out of range, and Candle's lookup rejects them.
fn to_local_ids(ids: &Tensor, range: VocabRange) -> Result<Tensor> {
    if range.rows == range.of {
        return Ok(ids.clone());
    }
    let none = no_id(ids);
    let (device, shape) = (ids.device(), ids.shape());
    let constant = |value: i64| Tensor::full(value, shape, device);
    let ids = ids.to_dtype(DType::I64)?;
    let own = (&ids - constant(range.first as i64)?)?;
    let (first, end) = (range.first as i64, (range.first + range.rows) as i64);
    let is_here = ((ids.ge(first)? * ids.lt(end)?)? * ids.ne(none)?)?;
    let is_beyond = (ids.lt(0i64)? + (ids.ge(range.of as i64)? * ids.ne(none)?)?)?;
    is_here.where_cond(&own, &is_beyond.where_cond(&ids, &constant(i64::MAX)?)?)
}

/// The lookup as a chain of Candle's operations.
pub(in crate::nn) fn composite(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(weight.dim(1)?);
    weight.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
}

struct Lookup {
    weight: Weight,
    /// Rows of the table, or no row.
    ids: Vec<Option<usize>>,
    /// Row that has no gradient.
    padding: Option<usize>,
    hidden: usize,
}

impl Lookup {
    /// Returns the range of each id's row in the table.
    fn rows(&self) -> impl Iterator<Item = Option<std::ops::Range<usize>>> {
        self.ids.iter().map(|id| id.map(|id| id * self.hidden..(id + 1) * self.hidden))
    }

    /// Copies the rows, in the table's dtype.
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

    fn forward(&self) -> Result<Storage> {
        let (guard, layout) = self.weight.value()?.storage_and_layout();
        Ok(Storage::Cpu(match cpu(&guard)? {
            CpuStorage::BF16(table) => CpuStorage::BF16(self.gather(&dense(table, layout)?)),
            CpuStorage::F16(table) => CpuStorage::F16(self.gather(&dense(table, layout)?)),
            table => CpuStorage::F32(self.gather(&floats(table, layout)?)),
        }))
    }

    fn backward(&self, dy: &Tensor) -> Result<Option<Tensor>> {
        if !self.weight.wants_grad() {
            return Ok(None);
        }
        match self.weight.grad_dtype() {
            DType::F32 => self.scatter::<f32>(dy),
            DType::F16 => self.scatter::<f16>(dy),
            DType::BF16 => self.scatter::<bf16>(dy),
            other => bail!("Embedding: expected a gradient of f32, f16 or bf16, found {other:?}"),
        }
    }

    /// Adds the gradients of equal ids in f32, in the order of the ids, and each sum to the row of its id.
    fn scatter<T: Float<Real = f32> + WithDType>(&self, dy: &Tensor) -> Result<Option<Tensor>> {
        read!(grad, dy);
        let hidden = self.hidden;
        let learnt = self.ids.iter().enumerate().filter(|(_, row)| **row != self.padding);
        let mut learnt: Vec<_> = learnt.filter_map(|(i, row)| Some(((*row)?, i))).collect();
        learnt.sort_unstable();
        self.weight.write_grad::<T>(|buffer, accumulate| {
            if !accumulate {
                buffer.fill(T::zero());
            }
            let mut sum = vec![0f32; hidden];
            for equal in learnt.chunk_by(|(one, _), (other, _)| one == other) {
                let to = &mut buffer[equal[0].0 * hidden..][..hidden];
                sum.iter_mut().zip(&*to).for_each(|(sum, to)| *sum = to.get());
                for (_, i) in equal {
                    sum.iter_mut().zip(&grad[i * hidden..]).for_each(|(sum, from)| *sum += from);
                }
                to.iter_mut().zip(&sum).for_each(|(to, &sum)| *to = T::from_f32(sum));
            }
            Ok(())
        })
    }
}
