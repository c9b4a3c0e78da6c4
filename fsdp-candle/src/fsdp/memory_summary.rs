//! The bytes of a rank's memory, by purpose.

use std::fmt;

use fsdp_core::DeviceId;

use super::param_group::FsdpParamGroup;
use crate::storage::Pool;

/// The bytes of a rank's memory by purpose, on the device that it computes on: PyTorch's `torch.cuda.memory_summary`.
/// If a forward or a backward fails because the memory of a device is full, the error has this as text.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// let y = model.forward(&x)?;
/// let summary = vars.memory_summary()?;
/// assert_eq!(summary.gathered.len(), 1); // the root's parameters, until backward
/// assert!(summary.shards > 0 && summary.gathered[0].1 > 0 && summary.gradients == 0);
/// println!("{summary}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemorySummary {
    /// The rank.
    pub rank: usize,
    /// The device.
    pub device: DeviceId,
    /// Free bytes of the device, and all of its bytes. `None` for host memory.
    pub free_and_total: Option<[u64; 2]>,
    /// Shards of parameters. Those that are offloaded to the host or to disk are not on the device.
    pub shards: usize,
    /// Gathered parameters of each unit that has some, largest first.
    pub gathered: Vec<(String, usize)>,
    /// Whole gradients, until they are reduced.
    pub gradients: usize,
    /// Buffers of collectives.
    pub collectives: usize,
    /// Buffers that are kept for the next units.
    pub kept: usize,
}

/// Units that the text names.
const NAMED: usize = 3;

impl MemorySummary {
    pub(super) fn of(
        rank: usize,
        units: &[impl AsRef<FsdpParamGroup>],
        pool: &Pool,
        device: DeviceId,
    ) -> candle_core::Result<Self> {
        let units = || units.iter().map(AsRef::as_ref);
        let params = || units().flat_map(|unit| unit.params());
        let gathered = units().map(|unit| {
            let params = unit.params().iter().filter(|param| param.is_unsharded());
            let bytes =
                params.map(|param| param.unsharded_shape().elem_count() * param.compute_dtype().size_in_bytes());
            (unit.name().to_owned(), bytes.sum::<usize>())
        });
        let mut gathered: Vec<(String, usize)> = gathered.filter(|(_, bytes)| *bytes > 0).collect();
        gathered.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let gradients = params().map(|param| param.gradient.bytes()).sum();
        let taken = pool.taken_bytes()[0];
        let known = gathered.iter().map(|(_, bytes)| bytes).sum::<usize>() + gradients;
        Ok(MemorySummary {
            rank,
            device,
            free_and_total: pool.kernels().free_memory(u128::MAX)?,
            shards: params().map(|param| param.shard.device_bytes()).sum(),
            gathered,
            gradients,
            collectives: taken.saturating_sub(known),
            kept: pool.kept_bytes(),
        })
    }

    /// Returns the bytes of all purposes.
    fn known(&self) -> usize {
        let gathered = self.gathered.iter().map(|(_, bytes)| bytes).sum::<usize>();
        self.shards + gathered + self.gradients + self.collectives + self.kept
    }
}

/// Formats bytes with a unit.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

impl fmt::Display for MemorySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemorySummary { rank, device, shards, gradients, collectives, kept, .. } = self;
        write!(f, "on rank {rank}, {device}")?;
        if let Some([free, total]) = self.free_and_total {
            write!(f, " has {} free of {}", size(free), size(total))?;
        }
        let of_units = self.gathered.iter().map(|(_, bytes)| *bytes as u64).sum();
        let shards = size(*shards as u64);
        write!(f, ": shards of parameters take {shards}, gathered parameters {}", size(of_units))?;
        let named = self.gathered.iter().take(NAMED).map(|(unit, bytes)| format!("`{unit}` {}", size(*bytes as u64)));
        let named: Vec<String> = named.collect();
        if !named.is_empty() {
            let more = if self.gathered.len() > NAMED { ", .." } else { "" };
            write!(f, " ({}{more})", named.join(", "))?;
        }
        let [gradients, collectives, kept] = [*gradients, *collectives, *kept].map(|bytes| size(bytes as u64));
        write!(
            f,
            ", gradients that are not reduced yet {gradients}, what collectives exchange {collectives}, and buffers kept \
             for the next units {kept}"
        )?;
        if let Some([free, total]) = self.free_and_total {
            let rest = total.saturating_sub(free).saturating_sub(self.known() as u64);
            write!(
                f,
                ". The rest, {}, is activations, sharded gradients, optimizer state, NCCL's memory, and memory of other \
                 processes",
                size(rest)
            )?;
        }
        Ok(())
    }
}

/// The beginning of the text in an error.
const BEGINNING: &str = "out of memory: ";

/// Adds what the memory holds to the error of an allocation on a device, unless it is there already.
pub(super) fn explain_memory(
    error: candle_core::Error,
    summary: impl FnOnce() -> candle_core::Result<MemorySummary>,
) -> candle_core::Error {
    let text = error.to_string();
    let is_of_device = text.contains("no memory for") && text.contains(" on CUDA device");
    if !(is_of_device || text.contains("CUDA_ERROR_OUT_OF_MEMORY")) || text.contains(BEGINNING) {
        return error;
    }
    match summary() {
        Ok(summary) => error.context(format!(
            "{BEGINNING}{summary}. Use a smaller batch or shorter sequences, more ranks, activation checkpointing or offloading"
        )),
        Err(_) => error,
    }
}
