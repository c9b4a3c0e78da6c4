//! Distribution of records over ranks, steps and micro-batches.

use anyhow::{Result, ensure};
use fsdp_candle::nn::IGNORED;

use crate::data::batches::BatchShape;
use crate::data::records::Records;
use fsdp_corpus::permutation::Permutation;

/// Records, distributed over the ranks as [`Batches`](crate::data::Batches) distributes sequences.
pub struct RecordBatches {
    records: Records,
    shape: BatchShape,
    records_per_step: u64,
    /// Seed that shuffles the records in each epoch, if any.
    shuffle: Option<u64>,
    /// Padding token, if the model has one.
    padding: Option<u32>,
    /// Divides the length of rows.
    multiple: usize,
}

/// Records that a rank reads at once. Rows are padded at their end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordBatch {
    /// Token ids of all rows. The sequences of a record follow each other.
    pub ids: Vec<u32>,
    /// Segment types, if any is not 0.
    pub types: Option<Vec<u32>>,
    /// Tokens of a row. The same on all ranks.
    pub steps: usize,
    /// Number of tokens in each row before padding. 0 for missing records.
    pub filled: Vec<usize>,
    /// Index of the last token in each row that is not the padding token.
    pub last: Vec<usize>,
    /// Class of each record. [`IGNORED`] for missing records, and for records without a label.
    pub labels: Vec<u32>,
    /// Number of records that are not missing.
    pub counted: usize,
}

impl RecordBatches {
    /// Creates batches to train on. Fails if a size of `shape` is 0, the rank is out of range, or a step needs more
    /// records than there are.
    pub fn new(records: Records, shape: BatchShape, shuffle: Option<u64>, padding: Option<u32>) -> Result<Self> {
        let batches = Self::for_evaluation(records, shape, padding)?;
        let (records_per_step, found) = (shape.sequences_per_step()?, batches.records.len());
        ensure!(
            found as u64 >= records_per_step,
            "the data is too short: {} are fewer than one step needs, which is {records_per_step} ({} ranks x {} records \
             x {} micro-batches). Use a smaller --batch-size or --grad-accum, or more records",
            batches.records,
            shape.world_size,
            shape.batch_size,
            shape.grad_accum
        );
        Ok(RecordBatches { shape, records_per_step, shuffle, ..batches })
    }

    /// Creates batches to read once, by [`RecordBatches::pass`].
    pub fn for_evaluation(records: Records, shape: BatchShape, padding: Option<u32>) -> Result<Self> {
        ensure!(shape.rank < shape.world_size, "rank {} is not below the world size {}", shape.rank, shape.world_size);
        let shape = BatchShape { grad_accum: 1, ..shape };
        Ok(RecordBatches {
            records_per_step: shape.sequences_per_step()?,
            records,
            shape,
            shuffle: None,
            padding,
            multiple: 1,
        })
    }

    /// Pads rows to a multiple of a number of tokens.
    #[must_use]
    pub fn padded_to(self, multiple: usize) -> Self {
        RecordBatches { multiple, ..self }
    }

    /// Returns the records.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Returns the records of a step over all ranks and micro-batches, by which it advances the position.
    pub fn records_per_step(&self) -> u64 {
        self.records_per_step
    }

    /// Returns the index of the first record in micro-batch `a` of the step at `position`, over the whole run.
    pub fn first_record(&self, position: u64, a: usize) -> u64 {
        let BatchShape { world_size, rank, batch_size, .. } = self.shape;
        position.wrapping_add(((a * world_size + rank) * batch_size) as u64)
    }

    /// Reads this rank's micro-batch `a` (from 0) of the step that starts at `position`. Rows are as long as the longest
    /// sequence of the step, so that dropout does not depend on the number of ranks.
    pub fn micro_batch(&self, position: u64, a: usize) -> RecordBatch {
        let first = self.first_record(position, a);
        let own = (0..self.shape.batch_size as u64).map(|offset| Some(self.at(first.wrapping_add(offset))));
        self.read(own, self.longest(self.of_step(position)))
    }

    /// Returns the number of tokens of the step at `position`, over all ranks.
    pub fn tokens(&self, position: u64) -> u64 {
        let tokens =
            |record| (0..self.records.columns()).map(|column| self.records.ids(record, column).len() as u64).sum();
        self.of_step(position).map(|record| -> u64 { tokens(record) }).sum()
    }

    fn of_step(&self, position: u64) -> impl Iterator<Item = usize> {
        (0..self.records_per_step).map(move |offset| self.at(position.wrapping_add(offset)))
    }

    /// Reads this rank's part of round `round` (from 0) of a pass over all records. Missing records have empty rows, so
    /// every rank has the same work.
    pub fn pass(&self, round: u64) -> RecordBatch {
        let BatchShape { world_size, rank, batch_size, .. } = self.shape;
        let count = self.records.len() as u64;
        let start = round * (world_size * batch_size) as u64;
        let all = start..(start + (world_size * batch_size) as u64).min(count);
        let first = start + (rank * batch_size) as u64;
        let own = (first..first + batch_size as u64).map(|record| (record < count).then_some(record as usize));
        self.read(own, self.longest(all.map(|record| record as usize)))
    }

    /// Reads the first record, the same on every rank.
    pub fn first(&self) -> RecordBatch {
        self.read([Some(0)].into_iter(), self.longest([0].into_iter()))
    }

    /// Returns the number of rounds of a pass.
    pub fn rounds(&self) -> u64 {
        (self.records.len() as u64).div_ceil((self.shape.world_size * self.shape.batch_size) as u64)
    }

    /// Returns the record at an index over the whole run.
    fn at(&self, index: u64) -> usize {
        let count = self.records.len() as u64;
        let (epoch, place) = (index / count, index % count);
        match self.shuffle {
            Some(seed) => Permutation::new(count, seed, epoch).at(place) as usize,
            None => place as usize,
        }
    }

    fn longest(&self, records: impl Iterator<Item = usize>) -> usize {
        let columns = self.records.columns();
        records
            .flat_map(|record| (0..columns).map(move |column| (record, column)))
            .map(|(record, column)| self.records.ids(record, column).len())
            .max()
            .unwrap_or(1)
            .next_multiple_of(self.multiple)
    }

    fn read(&self, records: impl Iterator<Item = Option<usize>>, steps: usize) -> RecordBatch {
        let mut batch = RecordBatch { steps, ..RecordBatch::default() };
        let mut types = vec![];
        for record in records {
            for column in 0..self.records.columns() {
                let ids = record.map_or(&[][..], |record| self.records.ids(record, column));
                let end = batch.ids.len() + steps;
                batch.ids.extend_from_slice(ids);
                batch.ids.resize(end, self.padding.unwrap_or(0));
                types.extend_from_slice(record.map_or(&[][..], |record| self.records.types(record, column)));
                types.resize(end, 0);
                batch.filled.push(ids.len());
                // As transformers finds it.
                batch.last.push(ids.iter().rposition(|&id| Some(id) != self.padding).unwrap_or(0));
            }
            let label = record.and_then(|record| self.records.labels.get(record));
            batch.labels.push(label.copied().unwrap_or(IGNORED));
            batch.counted += usize::from(record.is_some());
        }
        batch.types = (!self.records.types.is_empty()).then_some(types);
        batch
    }
}
