//! The all-gather of a unit: what each parameter sends, and how what arrives becomes the parameter.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::layout::chunk_range;
use fsdp_core::{Allocator, Buffer, DType, GatherPart, ProcessGroup, Readable, Work};

use super::ParamGroup;
use crate::Error;
use crate::param::FsdpParam;
use crate::storage::{Pool, TensorMemory, to_core_dtype};

/// The all-gathers in flight, one for each set of ranks.
pub(super) struct Gathering(Vec<Flight>);

/// An all-gather in flight.
struct Flight {
    work: Work,
    /// The parameters that it is for, and how they arrive.
    arrivals: Vec<(Arc<FsdpParam>, Arrival)>,
}

impl Gathering {
    /// Waits, and drops what comes.
    pub(super) fn abandon(self) {
        self.0.into_iter().for_each(|flight| drop(flight.work.wait()));
    }
}

/// How a parameter arrives.
#[derive(Clone, Copy)]
enum Arrival {
    /// As it is, in one buffer.
    Whole,
    /// As the concatenation of its shards, which is another order of its elements.
    Concatenated,
    /// In this many buffers that its extension decodes.
    Encoded(usize),
}

/// A buffer that goes back to the pool when the collective has read it.
struct Pooled {
    buffer: Option<Buffer>,
    pool: Arc<Pool>,
}

impl Readable for Pooled {
    fn dtype(&self) -> DType {
        self.buffer.as_ref().map_or(DType::U8, Buffer::dtype)
    }
    fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::len)
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        f(self.buffer.as_ref().map_or(&[], Buffer::bytes));
        Ok(())
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

impl ParamGroup {
    /// Issues the all-gather, unless the parameters are there or on their way.
    pub(crate) fn start_unshard(&self) -> Result<()> {
        let memory = self.memory();
        let mut state = self.state();
        if state.gathering.is_some() {
            return Ok(());
        }
        // In backward some may be done with already, and others freed early.
        let missing: Vec<_> =
            self.params.iter().filter(|param| !param.is_unsharded() && !param.is_complete()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        tracing::debug!(unit = self.name, parameters = missing.len(), "unshard");
        // Nearly always there is one set of ranks; a placement may put a parameter on another mesh.
        let mut flights: Vec<(Arc<dyn ProcessGroup>, Vec<GatherPart>, Vec<_>)> = vec![];
        for param in missing {
            let kept = match state.kept_for {
                Some(size) => {
                    param.take_post_forward().map(|buffer| Ok::<_, Error>((param.ranks().neighbours(size)?, buffer)))
                }
                None => None,
            };
            let kept = kept.transpose()?;
            let ranks = kept.as_ref().map_or(param.ranks().shard(), |(fewer, _)| fewer).clone();
            let at = match flights.iter().position(|(other, _, _)| Arc::ptr_eq(other, &ranks)) {
                Some(at) => at,
                None => {
                    flights.push((ranks, vec![], vec![]));
                    flights.len() - 1
                }
            };
            let (ranks, parts, arrivals) = &mut flights[at];
            let arrival = match kept {
                Some((_, buffer)) => {
                    let elements = param.shape().elem_count();
                    let counts =
                        (0..ranks.size()).map(|rank| chunk_range(elements, ranks.size(), rank).len()).collect();
                    let input = Arc::new(Pooled { buffer: Some(buffer), pool: self.pool.clone() });
                    parts.push(GatherPart { input, counts });
                    Arrival::Whole
                }
                None => send(param, parts)?,
            };
            arrivals.push((param.clone(), arrival));
        }
        let custom = self.settings().all_gather.clone();
        let flights = flights.into_iter().map(|(ranks, parts, arrivals)| {
            let work = match &custom {
                Some(custom) => custom.all_gather(&ranks, parts, memory.clone()),
                None => ranks.all_gather(parts, memory.clone()),
            };
            Flight { work, arrivals }
        });
        state.gathering = Some(Gathering(flights.collect()));
        Ok(())
    }

    /// Waits for the all-gathers; returns the full parameters.
    pub(super) fn finish_gather(&self, gathering: Gathering) -> Result<Vec<(Arc<FsdpParam>, Buffer)>> {
        let _span = tracing::debug_span!("wait for all-gather", unit = self.name).entered();
        let mut full = vec![];
        for flight in gathering.0 {
            self.land(flight, &mut full)?;
        }
        Ok(full)
    }

    fn land(&self, flight: Flight, full: &mut Vec<(Arc<FsdpParam>, Buffer)>) -> Result<()> {
        let buffers = flight.work.wait().map_err(|source| self.communication_failed("all-gather", source))?;
        let memory = self.memory();
        let mut buffers = buffers.into_iter();
        let mut next = || match buffers.next() {
            Some(buffer) => Ok(buffer),
            None => bail!("FSDP unit `{}`: the all-gather returned too few buffers", self.name),
        };
        for (param, arrival) in flight.arrivals {
            let buffer = match arrival {
                Arrival::Whole => next()?,
                Arrival::Concatenated => self.unpack(&param, next()?, memory.as_ref())?,
                Arrival::Encoded(count) => {
                    let encoded = (0..count).map(|_| next()).collect::<Result<Vec<_>>>()?;
                    let mut decoded = memory.take(to_core_dtype(param.compute_dtype())?, param.shape().elem_count());
                    if let Some(extension) = param.extension() {
                        extension.post_all_gather(&encoded, &param.layout().counts(), &mut decoded)?;
                    }
                    encoded.into_iter().for_each(|buffer| memory.give(buffer));
                    match param.layout().is_concatenation() {
                        true => decoded,
                        false => self.unpack(&param, decoded, memory.as_ref())?,
                    }
                }
            };
            if buffer.len() != param.shape().elem_count() {
                bail!(
                    "FSDP unit `{}`: the all-gather returned {} elements of parameter `{}`, which has {}",
                    self.name,
                    buffer.len(),
                    param.name(),
                    param.shape().elem_count()
                )
            }
            full.push((param, buffer));
        }
        Ok(())
    }

    fn unpack(&self, param: &FsdpParam, shards: Buffer, memory: &dyn Allocator) -> Result<Buffer> {
        let mut full = memory.take(shards.dtype(), shards.len());
        param.layout().unpack_buffer(&shards, &mut full)?;
        memory.give(shards);
        Ok(full)
    }
}

/// Adds what this rank sends of a parameter.
fn send(param: &FsdpParam, parts: &mut Vec<GatherPart>) -> Result<Arrival> {
    let shard = param.shard_in_compute_dtype()?;
    let counts = param.layout().counts();
    let Some(extension) = param.extension() else {
        parts.push(GatherPart { input: Arc::new(TensorMemory(shard)), counts });
        return Ok(if param.layout().is_concatenation() { Arrival::Whole } else { Arrival::Concatenated });
    };
    let lengths: Vec<Vec<usize>> = counts.iter().map(|&count| extension.lengths(count)).collect();
    let encoded = extension.pre_all_gather(&shard)?;
    let count = encoded.len();
    for (i, buffer) in encoded.into_iter().enumerate() {
        let counts = lengths.iter().map(|of_rank| of_rank.get(i).copied().unwrap_or(0)).collect();
        parts.push(GatherPart { input: Arc::new(buffer), counts });
    }
    Ok(Arrival::Encoded(count))
}
