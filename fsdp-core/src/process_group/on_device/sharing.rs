//! Finds ranks that compute on one device.

use std::{collections::BTreeMap, sync::Arc};

use cudarc::driver::CudaStream;

use super::super::group::ProcessGroup;
use crate::{Result, device::cuda::failed};

/// Returns the ranks of a group that compute on one device, device by device; nothing where each rank has a device of
/// its own. NCCL refuses ranks that share one, and they need [`HostStaging`](super::HostStaging). Collective over the
/// group; blocks. All ranks get the same answer.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) when the device does not say which one it is; those of a collective.
pub fn ranks_sharing_devices(host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Vec<Vec<usize>>> {
    let uuid = compute.context().uuid().map_err(|error| failed(compute, "asking for the device's UUID", &error))?;
    let mut own: Vec<u8> = uuid.bytes.iter().map(|&byte| byte as u8).collect();
    own.extend(rustix::system::uname().nodename().to_bytes());
    Ok(sharing(host.gather_bytes(own)?))
}

/// The ranks that have named the same device, in the order of the first of them.
fn sharing(devices: Vec<Vec<u8>>) -> Vec<Vec<usize>> {
    let mut ranks: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
    for (rank, device) in devices.into_iter().enumerate() {
        ranks.entry(device).or_default().push(rank);
    }
    let mut shared: Vec<_> = ranks.into_values().filter(|ranks| ranks.len() > 1).collect();
    shared.sort_unstable();
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_device_are_told_device_by_device() {
        let of = |devices: &[u8]| sharing(devices.iter().map(|&device| vec![device]).collect());
        assert!(of(&[1, 2, 3]).is_empty());
        assert_eq!(of(&[9, 2, 9, 2, 5, 9]), [vec![0, 2, 5], vec![1, 3]]);
    }
}
