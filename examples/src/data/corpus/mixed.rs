//! Sequences of a mixture of corpora, step by step.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fsdp_core::ProcessGroup;
use fsdp_corpus::mixture::{Mixture, Place};
use fsdp_corpus::sequence::{Pack, Sequence};

use crate::data::batches::BatchShape;
use crate::data::corpus::CorpusOptions;
use crate::metrics::{DataRecord, SourceRecord};

/// A mixture of corpora to train on. All ranks read the same steps in the same order.
pub struct MixedCorpus {
    state: Mutex<State>,
    group: ProcessGroup,
    pack: Pack,
    seq_len: usize,
    description: String,
    summary: String,
    /// Place of the first sequence.
    start: Place,
}

struct State {
    mixture: Mixture,
    /// The step that was read last.
    step: Option<Step>,
    /// Time spent on waiting for data in the steps that were recorded.
    recorded: Duration,
}

/// Sequences of a step.
struct Step {
    position: u64,
    /// Sequences of this rank, by their offset in the step.
    own: Vec<(u64, Sequence)>,
    /// Number of targets of all ranks.
    counted: u64,
}

impl MixedCorpus {
    pub(super) fn new(
        mixture: Mixture,
        options: &CorpusOptions,
        group: ProcessGroup,
        description: String,
        summary: String,
    ) -> Self {
        let (start, pack, seq_len) = (mixture.place(), options.pack, options.seq_len);
        let state = Mutex::new(State { mixture, step: None, recorded: Duration::ZERO });
        MixedCorpus { state, group, pack, seq_len, description, summary, start }
    }

    /// Returns whether tokens attend to tokens of other documents.
    pub fn pack(&self) -> Pack {
        self.pack
    }

    /// Describes the corpora for the user.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Describes the files of the corpora, for comparison.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Returns the place after the step that was read last, for a checkpoint.
    ///
    /// # Errors
    /// The place can't be written as JSON.
    pub fn place(&self) -> Result<serde_json::Value> {
        serde_json::to_value(self.state().mixture.place()).context("cannot save the place in the data")
    }

    /// Continues at a place, which may be of another number of ranks. Without a place, begins at the start of the data.
    ///
    /// # Errors
    /// The value is not a place, or the files, the weights or the settings are others.
    pub fn resume(&self, place: Option<&serde_json::Value>) -> Result<()> {
        let mut state = self.state();
        state.step = None;
        match place {
            None => state.mixture.resume(&self.start),
            Some(place) => {
                let place = serde::Deserialize::deserialize(place).context("its place in the data can't be read")?;
                state.mixture.resume(&place)
            }
        }
    }

    /// Returns the counters of each source since the start of the run, and the time spent on waiting for data since the
    /// last call.
    pub fn record(&self) -> DataRecord {
        let state = &mut *self.state();
        let waited = state.mixture.waited();
        let data_wait_s = waited.saturating_sub(state.recorded).as_secs_f64();
        state.recorded = waited;
        let sources = state.mixture.taken().into_iter().map(|taken| SourceRecord {
            name: taken.name,
            tokens: taken.tokens,
            epochs: taken.epochs,
            documents: taken.documents,
        });
        DataRecord { data_wait_s, sources: sources.collect() }
    }

    /// Returns the first tokens of the next sequence. Collective.
    pub(in crate::data) fn prompt(&self, tokens: usize) -> Result<Vec<u32>> {
        let mut sequence = self.state().mixture.peek(&|bytes| self.exchange(bytes))?;
        sequence.ids.truncate(tokens.min(self.seq_len));
        Ok(sequence.ids)
    }

    /// Returns the number of targets of all ranks in the step at a position. Collective.
    pub(in crate::data) fn counted(&self, position: u64, shape: BatchShape) -> Result<u64> {
        let state = &mut *self.state();
        Ok(self.step(state, position, shape)?.counted)
    }

    /// Returns this rank's sequence at an offset of the step at a position. Collective.
    pub(in crate::data) fn sequence(&self, position: u64, offset: u64, shape: BatchShape) -> Result<Sequence> {
        let state = &mut *self.state();
        let step = self.step(state, position, shape)?;
        let found = step.own.iter().find(|(own, _)| *own == offset);
        found.map(|(_, sequence)| sequence.clone()).with_context(|| format!("sequence {offset} is of another rank"))
    }

    /// Returns the step at a position: the one that was read last, or the next.
    fn step<'a>(&self, state: &'a mut State, position: u64, shape: BatchShape) -> Result<&'a Step> {
        let step = match state.step.take() {
            Some(step) if step.position == position => step,
            last => {
                // A stream allows no random access.
                let per_step = shape.sequences_per_step()?;
                let expected = last.map_or(position, |last| last.position + per_step);
                ensure!(
                    position == expected,
                    "a corpus is read in order: expected the step at sequence {expected}, found {position}"
                );
                self.read(&mut state.mixture, position, shape)?
            }
        };
        Ok(state.step.insert(step))
    }

    /// Reads this rank's sequences of a step, and skips the others.
    fn read(&self, mixture: &mut Mixture, position: u64, shape: BatchShape) -> Result<Step> {
        let exchange = |bytes| self.exchange(bytes);
        let mut step = Step { position, own: Vec::new(), counted: 0 };
        for offset in 0..shape.sequences_per_step()? {
            let is_own = offset / shape.batch_size as u64 % shape.world_size as u64 == shape.rank as u64;
            // The targets of other ranks are known once their document boundaries are.
            if !is_own && self.pack == Pack::Stream {
                mixture.skip(1, &exchange)?;
                step.counted += self.seq_len as u64;
                continue;
            }
            let (_, sequence) = mixture.next_sequence(&exchange)?;
            let ignored = match self.pack {
                Pack::Stream => 0,
                Pack::Documents => sequence.starts.iter().filter(|&&start| start > 0).count(),
            };
            step.counted += (self.seq_len - ignored) as u64;
            if is_own {
                step.own.push((offset, sequence));
            }
        }
        Ok(step)
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(self.group.gather_bytes(bytes)?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
