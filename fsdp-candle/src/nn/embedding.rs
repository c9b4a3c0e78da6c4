//! A table of vectors, one for each id: `candle_nn::embedding`.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::cpu::values::{cpu, dense, floats, read, rows_of, served, storage, weight_grad};
#[cfg(feature = "cuda")]
use super::cuda::{self, on_cuda};
use super::limits::countable;
use super::parallel::{EmbeddingCut, ParallelLayer, check_embedding, gathered_ids, output_of_columns, output_of_terms};
use super::weight::{Weight, claim};
use crate::tensor_parallel::ActivationLayout;

/// An embedding, as [`candle_nn::Embedding`]: weight `[vocabulary, hidden]`, ids (u8, u32 or i64) of any shape `[..]`,
/// output `[.., hidden]`. The largest number of the ids' dtype is no id: its row is zero and has no gradient.
///
/// The gradient of a row is the sum of the output's gradients at the places where its id stands, but for the row of
/// [`padding_idx`](Self::with_padding_idx).
///
/// Under a plan ([`crate::parallelize`]) the weight is this rank's part: of the vocabulary
/// ([`crate::VocabParallel`]: each rank looks its ids up, and the ranks' rows are added up) or of the hidden dimension
/// ([`crate::HiddenParallel`]).
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
    parallel: Option<Arc<ParallelLayer<EmbeddingCut>>>,
}

impl Embedding {
    /// An embedding with this weight, `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        claim(&embeddings);
        let parallel = ParallelLayer::of_embedding(&embeddings).map(Arc::new);
        Self { embeddings, hidden_size, padding_idx: None, parallel }
    }

    /// Returns the embedding with PyTorch's `padding_idx`: lookups of this id give its row no gradient. The row keeps
    /// its values, and other layers that share the weight still add to its gradient.
    ///
    /// # Errors
    /// When the id is not in the vocabulary.
    pub fn with_padding_idx(self, padding_idx: Option<usize>) -> Result<Self> {
        let (rows, _) = self.embeddings.dims2()?;
        let vocabulary = match &self.parallel {
            Some(parallel) if parallel.style.vocabulary => rows * parallel.group().size(),
            _ => rows,
        };
        if let Some(id) = padding_idx.filter(|&id| id >= vocabulary) {
            bail!(
                "Embedding: padding_idx is {id}, but the vocabulary has {vocabulary} ids: use a smaller one, or None"
            );
        }
        Ok(Self { padding_idx, ..self })
    }

    /// The id whose row has no gradient from lookups.
    pub fn padding_idx(&self) -> Option<usize> {
        self.padding_idx
    }

    /// The weight, `[vocabulary, hidden]`; under a plan this rank's part.
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
    check_embedding(&weight)?;
    Ok(Embedding::new(weight, out_size))
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (vocabulary, hidden) = self.embeddings.dims2()?;
        let padding = self.padding_idx;
        let whole = Range { first: 0, rows: vocabulary, of: vocabulary, padding };
        let Some(parallel) = &self.parallel else {
            self.check_hidden(hidden)?;
            return lookup(&self.embeddings, ids, whole);
        };
        let (EmbeddingCut { vocabulary: cuts_vocabulary, input, output }, group) = (parallel.style, parallel.group());
        let ids = match input {
            ActivationLayout::Replicate => ids.clone(),
            ActivationLayout::Shard(dim) => gathered_ids(ids, dim, group)?,
        };
        if cuts_vocabulary {
            self.check_hidden(hidden)?;
            let (first, of) = (group.rank() * vocabulary, group.size() * vocabulary);
            let range = Range { first, of, ..whole };
            let group = &parallel.group_for(&ids)?;
            output_of_terms("Embedding", &lookup(&self.embeddings, &ids, range)?, output, group)
        } else {
            self.check_hidden(hidden * group.size())?;
            let rows = lookup(&self.embeddings, &ids, whole)?;
            output_of_columns("Embedding", rows, output, group)
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

/// The rows that a weight has of a vocabulary.
#[derive(Clone, Copy)]
struct Range {
    first: usize,
    rows: usize,
    of: usize,
    /// The id whose row has no gradient.
    padding: Option<usize>,
}

impl Range {
    /// The number that a row of the vocabulary has in the weight, if it is there.
    fn own(self, row: usize) -> Option<usize> {
        row.checked_sub(self.first).filter(|row| *row < self.rows)
    }

    /// The weight's row that has no gradient.
    fn own_padding(self) -> Option<usize> {
        self.padding.and_then(|id| self.own(id))
    }
}

/// The rows of these ids; zeros of ids whose rows are elsewhere.
fn lookup(embeddings: &Tensor, ids: &Tensor, range: Range) -> Result<Tensor> {
    let hidden = embeddings.dim(1)?;
    let shape = [ids.dims(), &[hidden]].concat();
    countable("Embedding", "the output", &shape, embeddings.device())?;
    #[cfg(feature = "cuda")]
    if on_cuda(embeddings) {
        let weight = Weight::of(embeddings)?;
        let ids = here(ids, range)?;
        let found = composite(&weight.value()?.detach(), &ids)?;
        let learnt = match range.own_padding() {
            Some(padding) => is_row(&ids, padding)?.where_cond(&none_like(&ids)?, &ids)?,
            None => ids,
        };
        return cuda::table::lookup(found, weight, &learnt);
    }
    if !served(embeddings) {
        let ids = here(ids, range)?;
        let found = composite(&Weight::in_graph(embeddings)?, &ids)?;
        return match range.own_padding() {
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
    let ids = rows_of("Embedding", ids, range.of)?;
    let ids = ids.into_iter().map(|row| row.and_then(|row| range.own(row))).collect();
    let weight = Weight::of(embeddings)?;
    let node = weight.node().clone();
    node.apply_op1(Lookup { weight, ids, padding: range.own_padding(), hidden, shape: shape.into() })
}

/// Whether each of the weight's own ids is this one.
fn is_row(ids: &Tensor, row: usize) -> Result<Tensor> {
    ids.to_dtype(DType::I64)?.eq(row as i64)
}

/// Returns an id of the same dtype that is not in any vocabulary.
fn none_of(ids: &Tensor) -> i64 {
    match ids.dtype() {
        DType::U8 => i64::from(u8::MAX),
        DType::U32 => i64::from(u32::MAX),
        _ => i64::MAX,
    }
}

/// Returns as many ids that are not in any vocabulary.
#[cfg(feature = "cuda")]
fn none_like(ids: &Tensor) -> Result<Tensor> {
    Tensor::full(none_of(ids), ids.shape(), ids.device())?.to_dtype(ids.dtype())
}

/// Ids as the weight's own rows count, for Candle's operations: those of rows elsewhere become the one that is none.
/// What is beyond the whole vocabulary stays so, and is refused.
fn here(ids: &Tensor, range: Range) -> Result<Tensor> {
    if range.rows == range.of {
        return Ok(ids.clone());
    }
    let none = none_of(ids);
    let (device, shape) = (ids.device(), ids.shape());
    let constant = |value: i64| Tensor::full(value, shape, device);
    let ids = ids.to_dtype(DType::I64)?;
    let own = (&ids - constant(range.first as i64)?)?;
    let (first, end) = (range.first as i64, (range.first + range.rows) as i64);
    let is_here = ((ids.ge(first)? * ids.lt(end)?)? * ids.ne(none)?)?;
    let is_beyond = (ids.lt(0i64)? + (ids.ge(range.of as i64)? * ids.ne(none)?)?)?;
    is_here.where_cond(&own, &is_beyond.where_cond(&ids, &constant(i64::MAX)?)?)
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
    /// The row that has no gradient.
    padding: Option<usize>,
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
            let no_gradient = self.padding.map(|row| row * self.hidden);
            for (row, grad) in self.rows().zip(grad.chunks_exact(self.hidden.max(1))) {
                let row = row.filter(|row| Some(row.start) != no_gradient);
                let to = row.map(|row| &mut buffer[row]).unwrap_or_default();
                to.iter_mut().zip(grad).for_each(|(to, from)| *to += from);
            }
            Ok(())
        })
    }
}
