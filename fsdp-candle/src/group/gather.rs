//! The all-gather of a unit: what each parameter sends, and how what arrives becomes the parameter.

use std::sync::{Arc, Mutex};

use candle_core::{Result, bail};
use fsdp_core::layout::chunk_range;
use fsdp_core::{Allocator, Buffer, DType, GatherPart, ProcessGroup, Readable, Work, heartbeat};

use super::ParamGroup;
use crate::Error;
use crate::param::{FsdpParam, Full};
use crate::storage::{Pool, TensorMemory, to_core_dtype};

/// The way out for ranks that gather different parameters.
const ADVICE: &str = "Units are gathered as they are called: every rank must call the same units in the same order, \
                      or `unshard()` all of them first";

/// The all-gathers in flight, one for each set of ranks.
pub(super) struct Gathering(Vec<Flight>);

/// An all-gather that is put together.
struct Departure {
    ranks: Arc<dyn ProcessGroup>,
    /// The parameters, by position.
    positions: Vec<usize>,
    parts: Vec<GatherPart>,
    arrivals: Vec<(Arc<FsdpParam>, Arrival)>,
}

/// An all-gather in flight.
struct Flight {
    work: Work,
    /// The parameters that it is for, and how they arrive.
    arrivals: Vec<(Arc<FsdpParam>, Arrival)>,
    /// Whether those that arrive whole do so in their own buffers.
    in_place: bool,
}

impl Gathering {
    /// Waits, and drops what comes.
    pub(super) fn abandon(self) {
        self.0.into_iter().for_each(|flight| drop(flight.work.wait()));
    }
}

/// Hands out the outputs of one all-gather: the parameters' own buffers where they have some. The engine takes an output for each part, in order.
struct Places {
    /// One for each part, from the last to the first.
    own: Mutex<Vec<Option<Buffer>>>,
    pool: Arc<Pool>,
}

impl Allocator for Places {
    fn take(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        let own = self.own.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        own.flatten().map_or_else(|| self.pool.take(dtype, len), Ok)
    }
    fn give(&self, buffer: Buffer) {
        self.pool.give(buffer);
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
        let all = self.params.iter().enumerate();
        let missing: Vec<_> = all.filter(|(_, param)| !param.is_unsharded() && !param.is_complete()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        tracing::debug!(unit = self.name, parameters = missing.len(), "unshard");
        // Nearly always there is one set of ranks; a placement may put a parameter on another mesh.
        let mut departures: Vec<Departure> = vec![];
        for (position, param) in missing {
            let kept = match state.kept_for {
                Some(size) => {
                    param.take_post_forward().map(|buffer| Ok::<_, Error>((param.ranks().neighbours(size)?, buffer)))
                }
                None => None,
            };
            let kept = kept.transpose()?;
            let ranks = kept.as_ref().map_or(param.ranks().shard(), |(fewer, _)| fewer).clone();
            let at = match departures.iter().position(|other| Arc::ptr_eq(&other.ranks, &ranks)) {
                Some(at) => at,
                None => {
                    departures.push(Departure { ranks, positions: vec![], parts: vec![], arrivals: vec![] });
                    departures.len() - 1
                }
            };
            let Departure { ranks, positions, parts, arrivals } = &mut departures[at];
            positions.push(position);
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
        let mut gathering = vec![];
        for Departure { ranks, positions, parts, arrivals } in departures {
            // A user's all-gather may take its outputs in any order.
            let in_place = memory.keep && custom.is_none();
            let ranks = ranks.signed(self.signature(positions).with_advice(ADVICE));
            let work = match &custom {
                Some(custom) => custom.all_gather(&ranks, parts, memory.allocator.clone()),
                None if in_place => ranks.all_gather(parts, self.places(&arrivals)?),
                None => ranks.all_gather(parts, memory.allocator.clone()),
            };
            gathering.push(Flight { work, arrivals, in_place });
        }
        state.gathering = Some(Gathering(gathering));
        Ok(())
    }

    fn places(&self, arrivals: &[(Arc<FsdpParam>, Arrival)]) -> Result<Arc<Places>> {
        let mut own = vec![];
        for (param, arrival) in arrivals {
            match arrival {
                Arrival::Whole => own.push(Some(param.take_kept()?)),
                Arrival::Concatenated => own.push(None),
                Arrival::Encoded(count) => own.extend((0..*count).map(|_| None)),
            }
        }
        own.reverse();
        Ok(Arc::new(Places { own: Mutex::new(own), pool: self.pool.clone() }))
    }

    /// Waits for the all-gathers; returns the full parameters.
    pub(super) fn finish_gather(&self, gathering: Gathering) -> Result<Vec<(Arc<FsdpParam>, Full)>> {
        let _span = tracing::debug_span!("wait for all-gather", unit = self.name).entered();
        let _told = heartbeat::span("wait for all-gather", &self.name);
        let mut full = vec![];
        for flight in gathering.0 {
            self.land(flight, &mut full)?;
        }
        Ok(full)
    }

    fn land(&self, flight: Flight, full: &mut Vec<(Arc<FsdpParam>, Full)>) -> Result<()> {
        let buffers = flight.work.wait().map_err(|source| self.communication_failed("all-gather", source))?;
        let memory = self.memory();
        let allocator = memory.allocator.as_ref();
        let mut buffers = buffers.into_iter();
        let mut next = || match buffers.next() {
            Some(buffer) => Ok(buffer),
            None => bail!("FSDP unit `{}`: the all-gather returned too few buffers", self.name),
        };
        for (param, arrival) in flight.arrivals {
            let elements = param.shape().elem_count();
            // Where the parameter goes when it does not arrive in place.
            let place = || {
                Ok::<_, candle_core::Error>(match memory.keep {
                    true => Full { buffer: param.take_kept()?, own: true },
                    false => {
                        let buffer =
                            allocator.take(to_core_dtype(param.compute_dtype())?, elements).map_err(Error::from)?;
                        Full { buffer, own: false }
                    }
                })
            };
            let arrived = match arrival {
                Arrival::Whole if flight.in_place => Full { buffer: next()?, own: true },
                Arrival::Whole | Arrival::Concatenated => {
                    let shards = next()?;
                    self.check_arrival(&param, &shards)?;
                    let whole = matches!(arrival, Arrival::Whole);
                    if whole && !memory.keep {
                        Full { buffer: shards, own: false }
                    } else {
                        let mut full = place()?;
                        match whole {
                            true => full.buffer.bytes_mut().copy_from_slice(shards.bytes()),
                            false => param.layout().unpack_buffer(&shards, &mut full.buffer)?,
                        }
                        allocator.give(shards);
                        full
                    }
                }
                Arrival::Encoded(count) => {
                    let encoded = (0..count).map(|_| next()).collect::<Result<Vec<_>>>()?;
                    let concatenation = param.layout().is_concatenation();
                    let mut decoded = match concatenation {
                        true => place()?,
                        false => {
                            let buffer =
                                allocator.take(to_core_dtype(param.compute_dtype())?, elements).map_err(Error::from)?;
                            Full { buffer, own: false }
                        }
                    };
                    if let Some(extension) = param.extension() {
                        extension.post_all_gather(&encoded, &param.layout().counts(), &mut decoded.buffer)?;
                    }
                    encoded.into_iter().for_each(|buffer| allocator.give(buffer));
                    if concatenation {
                        decoded
                    } else {
                        let mut full = place()?;
                        param.layout().unpack_buffer(&decoded.buffer, &mut full.buffer)?;
                        allocator.give(decoded.buffer);
                        full
                    }
                }
            };
            self.check_arrival(&param, &arrived.buffer)?;
            full.push((param, arrived));
        }
        Ok(())
    }

    fn check_arrival(&self, param: &FsdpParam, buffer: &Buffer) -> Result<()> {
        let (elements, dtype) = (param.shape().elem_count(), to_core_dtype(param.compute_dtype())?);
        if (buffer.len(), buffer.dtype()) == (elements, dtype) {
            return Ok(());
        }
        bail!(
            "FSDP unit `{}`: the all-gather returned {} elements of {} of parameter `{}`, which has {elements} of {dtype}",
            self.name,
            buffer.len(),
            buffer.dtype(),
            param.name()
        )
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
