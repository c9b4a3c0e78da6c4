//! State between ranks: whole tensors from shards, and rank 0's entries on all ranks.

use candle_core::{DType, Device, Tensor};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DeviceMesh, Element};
use serde_json::Value;

use super::{StateDict, StateDictOptions, StateTensor};
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::storage::{to_core_dtype, to_host, to_tensor};

/// Returns the entry of a tensor sharded as a parameter. Collective for a full state dict.
pub(super) fn entry(param: &FsdpParam, shard: &Tensor, options: &StateDictOptions) -> Result<StateTensor> {
    let shape = param.stored_shape();
    if !options.full_state_dict {
        let tensor = if options.cpu_offload { on_host(shard)? } else { shard.clone() };
        let layout = Some((param.device_mesh().clone(), param.placements()));
        return Ok(StateTensor { tensor, shape: shape.to_vec(), region: param.stored_region().clone(), layout });
    }
    let shards = DTensor::from_local(&on_host(shard)?, shape, param.device_mesh(), &param.placements())?;
    Ok(StateTensor::whole(shards.named(param.name()).full_tensor()?))
}

/// Copies a tensor to host memory.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(to_tensor(to_host(tensor)?, tensor.dims(), &Device::Cpu)?)
}

/// Drops a full state dict in host memory on ranks other than 0.
pub(super) fn on_rank_0_only(dict: StateDict, mesh: &DeviceMesh, options: &StateDictOptions) -> StateDict {
    if options.full_state_dict && options.cpu_offload && mesh.rank() != 0 { StateDict::default() } else { dict }
}

/// A tensor that a state dict may contain.
pub(super) struct Expected<'a> {
    /// Name in the state dict.
    pub(super) name: String,
    pub(super) shape: &'a [usize],
    pub(super) region: Region,
    pub(super) dtype: DType,
    /// Whether a state dict without it is incomplete.
    pub(super) required: bool,
}

/// Returns this rank's region of each expected tensor, or `None` for missing tensors. The tensors are rank 0's if they
/// are broadcast (then collective).
pub(super) fn entries(
    dict: &StateDict,
    expected: &[Expected<'_>],
    mesh: &DeviceMesh,
    options: &StateDictOptions,
) -> Result<Vec<Option<Tensor>>> {
    if !options.broadcast_from_rank0 {
        let cut = |expected: &Expected<'_>| {
            let Some(state) = dict.tensors.get(&expected.name) else { return Ok(None) };
            state.copy_region(&expected.name, expected.shape, &expected.region, expected.dtype).map(Some)
        };
        return expected.iter().map(cut).collect();
    }
    if !options.full_state_dict {
        return Err(Error::Argument("broadcast_from_rank0 needs full_state_dict, which is not set".into()));
    }
    // Rank 0 checks all tensors first, so that either all ranks continue or none.
    let first = mesh.rank() == 0;
    let mut failed = None;
    let mut wholes = Vec::new();
    for expected in expected.iter().filter(|_| first) {
        let whole = Region::whole(expected.shape);
        let cut = dict
            .tensors
            .get(&expected.name)
            .map(|state| state.copy_region(&expected.name, expected.shape, &whole, expected.dtype));
        wholes.push(cut.transpose().unwrap_or_else(|error| {
            failed.get_or_insert(error);
            None
        }));
    }
    let mut flags = vec![u8::from(failed.is_some())];
    flags.extend((0..expected.len()).map(|index| u8::from(wholes.get(index).is_some_and(Option::is_some))));
    let flags = from_rank_0(flags, mesh)?;
    if let Some(error) = failed {
        return Err(error);
    }
    if flags[0] != 0 {
        return Err(Error::Argument("the state dict of rank 0 does not fit the model: see the error of rank 0".into()));
    }
    let mut entries = Vec::with_capacity(expected.len());
    for (index, (expected, &flag)) in expected.iter().zip(&flags[1..]).enumerate() {
        if flag == 0 {
            entries.push(None);
            continue;
        }
        let elements = expected.shape.iter().product();
        let whole = match wholes.get_mut(index).and_then(Option::take) {
            Some(tensor) => to_host(&tensor)?,
            None => Buffer::try_zeros(to_core_dtype(expected.dtype)?, elements)?,
        };
        let whole = StateTensor::whole(to_tensor(mesh.broadcast(whole, 0)?, expected.shape, &Device::Cpu)?);
        entries.push(Some(whole.copy_region(&expected.name, expected.shape, &expected.region, expected.dtype)?));
    }
    Ok(entries)
}

/// Returns a value of the state dict: rank 0's if it is broadcast (then collective).
pub(super) fn value_entry(
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
    parsed.map(Some).map_err(|error| Error::Argument(format!("cannot parse rank 0's {key}: {error}")))
}

/// Returns rank 0's value of `holds` if its state dict is broadcast, otherwise this rank's.
pub(super) fn decided_by_rank_0(holds: bool, mesh: &DeviceMesh, options: &StateDictOptions) -> Result<bool> {
    if !options.broadcast_from_rank0 {
        return Ok(holds);
    }
    Ok(from_rank_0(vec![u8::from(holds)], mesh)? == [1])
}

/// Returns rank 0's values. All ranks pass equally many. Collective.
fn from_rank_0<T: Element>(values: Vec<T>, mesh: &DeviceMesh) -> Result<Vec<T>> {
    let len = values.len();
    let values = mesh.broadcast(values.into(), 0)?.into_vec().ok().filter(|values: &Vec<T>| values.len() == len);
    values.ok_or_else(|| Error::Argument(format!("a broadcast of {len} numbers returned another number of them")))
}
