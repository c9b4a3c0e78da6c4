//! State between ranks: whole tensors from shards, and rank 0's to all.

use candle_core::{DType, Device, Tensor};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DeviceMesh, Element};
use serde_json::Value;

use super::dict::{StateDict, StateTensor};
use super::options::StateDictOptions;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::storage::{to_core_dtype, to_host, to_tensor};

/// A tensor of the shape, dtype and cut of a parameter, as the options want it. Collective where they want it whole.
pub(super) fn taken(param: &FsdpParam, shard: &Tensor, options: &StateDictOptions) -> Result<StateTensor> {
    let shape = param.shape().dims();
    if !options.full_state_dict {
        let tensor = if options.cpu_offload { on_host(shard)? } else { shard.clone() };
        let layout = Some((param.device_mesh().clone(), param.placements()));
        return Ok(StateTensor { tensor, shape: shape.to_vec(), region: param.region().clone(), layout });
    }
    let shards = DTensor::from_local(&on_host(shard)?, shape, param.device_mesh(), &param.placements())?;
    Ok(StateTensor::whole(shards.full_tensor()?))
}

/// A copy in host memory.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(to_tensor(to_host(tensor)?, tensor.dims(), &Device::Cpu)?)
}

/// Only rank 0 keeps a full state dict in host memory.
pub(super) fn kept(dict: StateDict, mesh: &DeviceMesh, options: &StateDictOptions) -> StateDict {
    if options.full_state_dict && options.cpu_offload && mesh.rank() != 0 { StateDict::default() } else { dict }
}

/// A tensor that a state dict may give.
pub(super) struct Wanted<'a> {
    /// Its name there.
    pub(super) name: String,
    pub(super) shape: &'a [usize],
    pub(super) region: Region,
    pub(super) dtype: DType,
    /// Whether a state dict that lacks it lacks something.
    pub(super) required: bool,
}

/// Rank 0's tensors, each cut for this rank; `None` where rank 0 has none. `Ok(None)` for all where nothing is
/// broadcast. Collective.
pub(super) fn given(
    dict: &StateDict,
    wanted: &[Wanted<'_>],
    mesh: &DeviceMesh,
    options: &StateDictOptions,
) -> Result<Vec<Option<Tensor>>> {
    if !options.broadcast_from_rank0 {
        let cut = |wanted: &Wanted<'_>| {
            let Some(state) = dict.tensors.get(&wanted.name) else { return Ok(None) };
            state.cut(&wanted.name, wanted.shape, &wanted.region, wanted.dtype).map(Some)
        };
        return wanted.iter().map(cut).collect();
    }
    if !options.full_state_dict {
        return Err(Error::Argument("broadcast_from_rank0 sends whole tensors: set full_state_dict as well".into()));
    }
    // Rank 0 looks at everything first, so that all ranks go on or none does.
    let first = mesh.rank() == 0;
    let mut failed = None;
    let mut wholes = Vec::new();
    for wanted in wanted.iter().filter(|_| first) {
        let whole = Region::whole(wanted.shape);
        let cut =
            dict.tensors.get(&wanted.name).map(|state| state.cut(&wanted.name, wanted.shape, &whole, wanted.dtype));
        wholes.push(cut.transpose().unwrap_or_else(|error| {
            failed.get_or_insert(error);
            None
        }));
    }
    let mut flags = vec![u8::from(failed.is_some())];
    flags.extend((0..wanted.len()).map(|index| u8::from(wholes.get(index).is_some_and(Option::is_some))));
    let flags = from_rank_0(flags, mesh)?;
    if let Some(error) = failed {
        return Err(error);
    }
    if flags[0] != 0 {
        return Err(Error::Argument("the state dict of rank 0 does not fit the model: its error says why".into()));
    }
    let mut given = Vec::with_capacity(wanted.len());
    for (index, (wanted, &flag)) in wanted.iter().zip(&flags[1..]).enumerate() {
        if flag == 0 {
            given.push(None);
            continue;
        }
        let elements = wanted.shape.iter().product();
        let whole = match wholes.get_mut(index).and_then(Option::take) {
            Some(tensor) => to_host(&tensor)?,
            None => Buffer::try_zeros(to_core_dtype(wanted.dtype)?, elements)?,
        };
        let whole = StateTensor::whole(to_tensor(mesh.broadcast(whole, 0)?, wanted.shape, &Device::Cpu)?);
        given.push(Some(whole.cut(&wanted.name, wanted.shape, &wanted.region, wanted.dtype)?));
    }
    Ok(given)
}

/// A value of the state dict: rank 0's where it is broadcast (then collective). `None` where it has none.
pub(super) fn value_given(
    dict: &StateDict,
    key: &str,
    mesh: &DeviceMesh,
    options: &StateDictOptions,
) -> Result<Option<Value>> {
    let own = dict.values.get(key);
    if !options.broadcast_from_rank0 {
        return Ok(own.cloned());
    }
    let text = own.filter(|_| mesh.rank() == 0).map(|value| value.to_string().into_bytes()).unwrap_or_default();
    let len: Vec<i64> = from_rank_0(vec![text.len() as i64], mesh)?;
    let len = len[0] as usize;
    if len == 0 {
        return Ok(None);
    }
    let text = from_rank_0(if mesh.rank() == 0 { text } else { vec![0; len] }, mesh)?;
    let parsed = serde_json::from_slice(&text);
    parsed.map(Some).map_err(|error| Error::Argument(format!("rank 0's {key} can't be read: {error}")))
}

/// Whether it is so on rank 0, told to all where its state dict is what counts.
pub(super) fn on_rank_0(so: bool, mesh: &DeviceMesh, options: &StateDictOptions) -> Result<bool> {
    if !options.broadcast_from_rank0 {
        return Ok(so);
    }
    Ok(from_rank_0(vec![u8::from(so)], mesh)? == [1])
}

/// Rank 0's values, of which every rank has as many. Collective.
fn from_rank_0<T: Element>(values: Vec<T>, mesh: &DeviceMesh) -> Result<Vec<T>> {
    let len = values.len();
    let values = mesh.broadcast(values.into(), 0)?.into_vec().ok().filter(|values: &Vec<T>| values.len() == len);
    values.ok_or_else(|| Error::Argument(format!("a broadcast of {len} numbers returned something else")))
}
