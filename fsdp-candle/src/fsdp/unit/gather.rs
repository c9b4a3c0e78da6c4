//! The all-gather of a unit: what each parameter sends, and how what arrives becomes the parameter.

use std::sync::{Arc, Mutex};

use candle_core::{Result, bail};
use fsdp_core::layout::chunk_range;
use fsdp_core::{Allocator, Buffer, DType, DeviceId, GatherPart, ProcessGroup, Readable, View, Work, heartbeat};

use super::members::Members;
use super::memory::{Full, Memory};
use super::param::FsdpParam;
use crate::error::Error;
use crate::fsdp::comm::AllGather;
use crate::storage::{Pool, TensorMemory, copy, to_core_dtype};

/// The way out for ranks that gather different parameters.
const ADVICE: &str = "Units are gathered as they are called, and those by name as their layers are used: every rank \
                      must call the same units in the same order, or `unshard()` all of them first. Where ranks use \
                      different units by name, call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the \
                      root on every rank";

/// The all-gathers in flight, one for each set of ranks.
pub(super) struct Gathering(Vec<Flight>);

/// An all-gather that is put together.
struct Departure {
    ranks: ProcessGroup,
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
    /// Issues the all-gathers of the parameters at the positions `missing`.
    pub(super) fn issue(
        members: &Members,
        missing: &[usize],
        memory: &Memory,
        custom: Option<&Arc<dyn AllGather>>,
    ) -> Result<Self> {
        tracing::debug!(unit = members.name(), parameters = missing.len(), "unshard");
        let mut flights = vec![];
        let mut start = |Departure { ranks, positions, parts, arrivals }: Departure| {
            // A user's all-gather may take its outputs in any order.
            let in_place = memory.keep && custom.is_none();
            let ranks = ranks.signed(members.signature(positions).with_advice(ADVICE));
            let work = match custom {
                Some(custom) => custom.all_gather(&ranks, parts, memory.allocator.clone()),
                None if in_place => ranks.all_gather(parts, Places::of(&arrivals, &members.pool)?),
                None => ranks.all_gather(parts, memory.allocator.clone()),
            };
            flights.push(Flight { work, arrivals, in_place });
            Ok(())
        };
        let outcome = departures(members, missing)?.into_iter().try_for_each(&mut start);
        let gathering = Gathering(flights);
        match outcome {
            Ok(()) => Ok(gathering),
            Err(error) => {
                gathering.abandon();
                Err(error)
            }
        }
    }

    /// Waits; returns the full parameters.
    pub(super) fn land(self, members: &Members, memory: &Memory) -> Result<Vec<(Arc<FsdpParam>, Full)>> {
        let _span = tracing::debug_span!("wait for all-gather", unit = members.name()).entered();
        let _told = heartbeat::span("wait for all-gather", members.name());
        let (mut full, mut outcome) = (vec![], Ok(()));
        for flight in self.0 {
            match outcome {
                Ok(()) => outcome = flight.land(members, memory, &mut full),
                // Nothing stays in flight behind one that failed.
                Err(_) => drop(flight.work.wait()),
            }
        }
        outcome.map(|()| full)
    }

    /// Waits, and drops what comes.
    pub(super) fn abandon(self) {
        self.0.into_iter().for_each(|flight| drop(flight.work.wait()));
    }
}

/// Puts the all-gathers together. Nearly always it is one: a placement may put a parameter on another mesh.
fn departures(members: &Members, missing: &[usize]) -> Result<Vec<Departure>> {
    let mut departures: Vec<Departure> = vec![];
    for &position in missing {
        let param = &members.params[position];
        let kept = match param.values().take_part() {
            Some(part) => Some((param.ranks().neighbours(part.ranks)?, part.buffer)),
            None => None,
        };
        let ranks = kept.as_ref().map_or(param.ranks().shard(), |(fewer, _)| fewer).clone();
        let at = match departures.iter().position(|other| other.ranks.is(&ranks)) {
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
                let elements = param.unsharded_shape().elem_count();
                let counts = (0..ranks.size()).map(|rank| chunk_range(elements, ranks.size(), rank).len()).collect();
                let input = Arc::new(Pooled { buffer: Some(buffer), pool: members.pool.clone() });
                parts.push(GatherPart { input, counts });
                Arrival::Whole
            }
            None => send(param, parts)?,
        };
        arrivals.push((param.clone(), arrival));
    }
    Ok(departures)
}

/// Hands out the outputs of one all-gather: the parameters' own buffers where they have some. The engine takes an
/// output for each part, in order.
struct Places {
    /// One for each part, from the last to the first.
    own: Mutex<Vec<Option<Buffer>>>,
    pool: Arc<Pool>,
}

impl Places {
    fn of(arrivals: &[(Arc<FsdpParam>, Arrival)], pool: &Arc<Pool>) -> Result<Arc<Self>> {
        let mut own = vec![];
        for (param, arrival) in arrivals {
            match arrival {
                Arrival::Whole => own.push(Some(param.values().take_own()?)),
                Arrival::Concatenated => own.push(None),
                Arrival::Encoded(count) => own.extend((0..*count).map(|_| None)),
            }
        }
        own.reverse();
        Ok(Arc::new(Places { own: Mutex::new(own), pool: pool.clone() }))
    }
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
        self.buffer.as_ref().map_or(Ok(()), |buffer| buffer.read(f))
    }
    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        self.buffer.as_ref().map_or(Ok(()), |buffer| buffer.view(f))
    }
    fn device(&self) -> DeviceId {
        self.buffer.as_ref().map_or(DeviceId::Host, Readable::device)
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

impl Flight {
    /// Waits, and adds the full parameters to `full`.
    fn land(self, members: &Members, memory: &Memory, full: &mut Vec<(Arc<FsdpParam>, Full)>) -> Result<()> {
        let buffers = self.work.wait().map_err(|source| members.communication_failed("all-gather", source))?;
        let allocator = memory.allocator.as_ref();
        let mut buffers = buffers.into_iter();
        let mut next = || match buffers.next() {
            Some(buffer) => Ok(buffer),
            None => bail!("FSDP unit `{}`: the all-gather returned too few buffers", members.name()),
        };
        for (param, arrival) in self.arrivals {
            let elements = param.unsharded_shape().elem_count();
            let scratch = || -> Result<Full> {
                let buffer = allocator.take(to_core_dtype(param.compute_dtype())?, elements).map_err(Error::from)?;
                Ok(Full { buffer, own: false })
            };
            // Where the parameter goes when it does not arrive in place.
            let place = || match memory.keep {
                true => Ok(Full { buffer: param.values().take_own()?, own: true }),
                false => scratch(),
            };
            let arrived = match arrival {
                Arrival::Whole if self.in_place => Full { buffer: next()?, own: true },
                Arrival::Whole | Arrival::Concatenated => {
                    let shards = next()?;
                    check_arrival(members, &param, &shards)?;
                    let whole = matches!(arrival, Arrival::Whole);
                    if whole && !memory.keep {
                        Full { buffer: shards, own: false }
                    } else {
                        let mut full = place()?;
                        match whole {
                            true => copy(&shards, &mut full.buffer)?,
                            false => param.layout().unpack(&shards, &mut full.buffer)?,
                        }
                        allocator.give(shards);
                        full
                    }
                }
                Arrival::Encoded(count) => {
                    let encoded = (0..count).map(|_| next()).collect::<Result<Vec<_>>>()?;
                    let concatenation = param.layout().is_concatenation();
                    let mut decoded = if concatenation { place()? } else { scratch()? };
                    if let Some(extension) = param.extension() {
                        extension.post_all_gather(&encoded, &param.layout().counts(), &mut decoded.buffer)?;
                    }
                    encoded.into_iter().for_each(|buffer| allocator.give(buffer));
                    if concatenation {
                        decoded
                    } else {
                        let mut full = place()?;
                        param.layout().unpack(&decoded.buffer, &mut full.buffer)?;
                        allocator.give(decoded.buffer);
                        full
                    }
                }
            };
            check_arrival(members, &param, &arrived.buffer)?;
            full.push((param, arrived));
        }
        Ok(())
    }
}

fn check_arrival(members: &Members, param: &FsdpParam, buffer: &Buffer) -> Result<()> {
    let (elements, dtype) = (param.unsharded_shape().elem_count(), to_core_dtype(param.compute_dtype())?);
    if (buffer.len(), buffer.dtype()) == (elements, dtype) {
        return Ok(());
    }
    bail!(
        "FSDP unit `{}`: the all-gather returned {} elements of {} of parameter `{}`, which has {elements} of {dtype}",
        members.name(),
        buffer.len(),
        buffer.dtype(),
        param.name()
    )
}

/// Adds what this rank sends of a parameter.
fn send(param: &FsdpParam, parts: &mut Vec<GatherPart>) -> Result<Arrival> {
    let counts = param.layout().counts();
    let Some(extension) = param.extension() else {
        parts.push(GatherPart { input: shard(param)?, counts });
        return Ok(if param.layout().is_concatenation() { Arrival::Whole } else { Arrival::Concatenated });
    };
    let lengths: Vec<Vec<usize>> = counts.iter().map(|&count| extension.lengths(count)).collect();
    let encoded = extension.pre_all_gather(&param.shard_in_compute_dtype()?)?;
    let count = encoded.len();
    for (i, buffer) in encoded.into_iter().enumerate() {
        let counts = lengths.iter().map(|of_rank| of_rank.get(i).copied().unwrap_or(0)).collect();
        parts.push(GatherPart { input: Arc::new(buffer), counts });
    }
    Ok(Arrival::Encoded(count))
}

/// The shard in the dtype that travels, for the all-gather to read.
fn shard(param: &FsdpParam) -> Result<Arc<dyn Readable>> {
    match param.parts() {
        Some(_) => Ok(Arc::new(TensorMemory(param.shard_in_compute_dtype()?))),
        None => own(param),
    }
}

/// What this rank holds in the dtype that travels, for a collective to read.
pub(super) fn own(param: &FsdpParam) -> Result<Arc<dyn Readable>> {
    Ok(match param.offload() {
        Some(offload) => Arc::new(offload.upload(to_core_dtype(param.compute_dtype())?)?),
        None => Arc::new(TensorMemory(param.own_in_compute_dtype()?)),
    })
}
