//! Devices, links between ranks, and number formats: peak rates, and the shares that training reaches.

use anyhow::{Context, ensure};
use clap::ValueEnum;
use fsdp_train::models::parallel::gcd;
use serde::Serialize;

/// Devices with figures from NVIDIA's data sheets (SXM and HGX modules, without sparsity).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DeviceName {
    /// A100 SXM: 312 TFLOP/s in bf16 (19.5 in f32), 80 GB at 2039 GB/s
    #[value(name = "a100-80")]
    #[serde(rename = "a100-80")]
    A100,
    /// H100 SXM: 989 TFLOP/s in bf16 (67 in f32), 80 GB at 3350 GB/s
    H100Sxm,
    /// H200 SXM: 989 TFLOP/s in bf16 (67 in f32), 141 GB at 4800 GB/s
    H200,
    /// B200 in an HGX: 2250 TFLOP/s in bf16 (75 in f32), 180 GB at 7700 GB/s
    B200,
    /// A CPU: --flops is the rate that it reaches, as `bench step` measures it
    Cpu,
}

/// Rates of a device in bytes, operations and seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Device {
    pub(super) name: DeviceName,
    /// Peak operations per second of matrix products.
    pub(super) flops: f64,
    /// Bytes of memory. Unknown: every plan fits.
    pub(super) memory: Option<f64>,
    /// Bytes per second of the memory. Unknown: memory-bound operations take no time.
    pub(super) memory_bandwidth: Option<f64>,
    pub(super) shares: Shares,
}

/// Shares of a device's rates that training reaches.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Shares {
    /// Share of the operations per second in fully connected layers.
    pub(super) products: f64,
    /// Share of the operations per second in attention.
    pub(super) attention: f64,
    /// Share of the memory bandwidth in other operations.
    pub(super) memory: f64,
}

/// Figures from the command line that replace the table's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Given {
    pub(super) flops: Option<f64>,
    pub(super) memory: Option<f64>,
    pub(super) memory_bandwidth: Option<f64>,
    pub(super) products: Option<f64>,
}

const TERA: f64 = 1e12;
pub(super) const GIGA: f64 = 1e9;

impl DeviceName {
    /// Returns TFLOP/s in bf16 and in f32, GB, and GB/s.
    fn sheet(self) -> Option<[f64; 4]> {
        match self {
            DeviceName::A100 => Some([312., 19.5, 80., 2039.]),
            DeviceName::H100Sxm => Some([989., 67., 80., 3350.]),
            DeviceName::H200 => Some([989., 67., 141., 4800.]),
            DeviceName::B200 => Some([2250., 75., 180., 7700.]),
            DeviceName::Cpu => None,
        }
    }

    /// Returns the shares that kernels reach. They are round figures for cuBLAS at the sizes of language models,
    /// FlashAttention 2 and elementwise kernels, and not fitted to training runs. An A100 reaches more of its peak than
    /// Hopper GPUs, whose power limit lowers the clock.
    fn shares(self) -> Shares {
        match self {
            DeviceName::A100 => Shares { products: 0.75, attention: 0.55, memory: 0.8 },
            DeviceName::H100Sxm | DeviceName::H200 | DeviceName::B200 => {
                Shares { products: 0.55, attention: 0.3, memory: 0.8 }
            }
            // --flops is the rate that the CPU reaches.
            DeviceName::Cpu => Shares { products: 1., attention: 1., memory: 1. },
        }
    }

    /// Returns whether candle-fsdp computes attention by cuDNN there.
    pub(super) fn has_cudnn(self) -> bool {
        match self {
            DeviceName::H100Sxm | DeviceName::H200 | DeviceName::B200 => true,
            DeviceName::A100 | DeviceName::Cpu => false,
        }
    }

    /// Returns GB/s of collectives between ranks of a host: 0.8 of one direction of NVLink.
    pub(super) fn intra(self) -> f64 {
        match self {
            DeviceName::A100 => 240.,
            DeviceName::H100Sxm | DeviceName::H200 => 360.,
            DeviceName::B200 => 720.,
            DeviceName::Cpu => 5.,
        }
    }

    /// Returns GB/s of a rank to other hosts: 0.8 of 400 Gbit/s, or of 10 Gbit/s for CPUs.
    pub(super) fn inter(self) -> f64 {
        if self == DeviceName::Cpu { 1. } else { 40. }
    }
}

impl Device {
    /// Creates a device. `given` replaces its figures (in TFLOP/s, GB, GB/s).
    pub(super) fn new(name: DeviceName, compute: Precision, given: Given) -> anyhow::Result<Self> {
        let sheet = name.sheet();
        let flops = given.flops.or(sheet.map(|sheet| if compute == Precision::Bf16 { sheet[0] } else { sheet[1] }));
        let flops =
            flops.context("--device cpu needs --flops, the TFLOP/s that a rank reaches: `bench step` prints it")?;
        let shares = name.shares();
        let shares = Shares { products: given.products.unwrap_or(shares.products), ..shares };
        ensure!(shares.products <= 1., "--products-share {} must be at most 1", shares.products);
        Ok(Device {
            name,
            flops: flops * TERA,
            memory: given.memory.or(sheet.map(|sheet| sheet[2])).map(|memory| memory * GIGA),
            memory_bandwidth: given.memory_bandwidth.or(sheet.map(|sheet| sheet[3])).map(|bandwidth| bandwidth * GIGA),
            shares,
        })
    }

    /// Returns the device with kernels that reach all of its data sheet.
    pub(super) fn at_data_sheet(&self) -> Self {
        Device { shares: Shares { products: 1., attention: 1., memory: 1. }, ..*self }
    }

    /// Returns the seconds of matrix products.
    pub(super) fn products(&self, operations: f64) -> f64 {
        operations / (self.flops * self.shares.products)
    }

    /// Returns the seconds of attention.
    pub(super) fn attention(&self, operations: f64) -> f64 {
        operations / (self.flops * self.shares.attention)
    }

    /// Returns the seconds in which `bytes` are read or written.
    pub(super) fn moves(&self, bytes: f64) -> f64 {
        self.memory_bandwidth.map_or(0., |bandwidth| bytes / (bandwidth * self.shares.memory))
    }
}

/// Mesh of ranks: replicas (HSDP) of a sharded model, whose layers may be split. The ranks of a host, of a replica and of
/// a layer are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Mesh {
    pub(super) ranks_per_host: usize,
    pub(super) hosts: usize,
    /// Ranks that a replica is sharded over.
    pub(super) shard: usize,
    /// Those of them that share each sequence.
    pub(super) context: usize,
    /// Neighbouring ranks that compute each layer together.
    pub(super) tensor: usize,
    /// Those that have different experts.
    pub(super) expert: usize,
    /// Number of replicas.
    pub(super) replicate: usize,
}

impl Mesh {
    pub(super) fn ranks(&self) -> usize {
        self.ranks_per_host * self.hosts
    }
}

/// Rates of the links, in bytes per second and seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Links {
    /// Rate of a rank within a host.
    pub(super) intra: f64,
    /// Rate of a rank to other hosts.
    pub(super) inter: f64,
    /// Time of one hop in a ring.
    pub(super) latency: f64,
}

/// A ring of ranks: their number, and the rate of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    ranks: f64,
    rate: f64,
    latency: f64,
}

impl Ring {
    fn new(links: &Links, ranks: usize, on_one_host: bool, on_a_host: usize) -> Self {
        // Each rank has its own network card, and the ring enters a host by each of them.
        let rate = if on_one_host { links.intra } else { links.intra.min(on_a_host as f64 * links.inter) };
        Ring { ranks: ranks as f64, rate, latency: links.latency }
    }

    /// Creates a ring of `ranks` that hold shards of a replica, or of a part of it.
    pub(super) fn of_shards(mesh: &Mesh, links: &Links, ranks: usize) -> Self {
        Ring::of_every(mesh, links, ranks, mesh.tensor)
    }

    /// Creates a ring of the ranks that have different experts.
    pub(super) fn of_experts(mesh: &Mesh, links: &Links) -> Self {
        Ring::of_every(mesh, links, mesh.expert, mesh.context * mesh.tensor)
    }

    /// Creates a ring of the ranks that hold shards of the same expert.
    pub(super) fn of_expert(mesh: &Mesh, links: &Links) -> Self {
        Ring::of_every(mesh, links, mesh.shard / mesh.expert, mesh.tensor * mesh.expert)
    }

    /// Creates a ring of the ranks that share a sequence.
    pub(super) fn of_sequence(mesh: &Mesh, links: &Links) -> Self {
        Ring::of_every(mesh, links, mesh.context, mesh.tensor)
    }

    /// Creates a ring of the ranks that compute a layer together.
    pub(super) fn of_layer(mesh: &Mesh, links: &Links) -> Self {
        Ring::of_every(mesh, links, mesh.tensor, 1)
    }

    /// Creates a ring of ranks `step` apart.
    fn of_every(mesh: &Mesh, links: &Links, ranks: usize, step: usize) -> Self {
        let (host, span) = (mesh.ranks_per_host, ranks * step);
        let on_one_host = mesh.hosts == 1 || span <= host && host.is_multiple_of(span);
        Ring::new(links, ranks, on_one_host, (gcd(span, host) / step).max(1))
    }

    /// Creates a ring of the ranks that hold the same shard of each replica.
    pub(super) fn of_replicas(mesh: &Mesh, links: &Links) -> Self {
        let on_a_host = (mesh.ranks_per_host / (mesh.shard * mesh.tensor)).max(1);
        Ring::new(links, mesh.replicate, mesh.hosts == 1, on_a_host)
    }

    /// Returns the seconds of an all-gather or a reduce-scatter of `bytes`.
    pub(super) fn gather(&self, bytes: f64) -> f64 {
        let hops = self.ranks - 1.;
        hops * self.latency + bytes * hops / self.ranks / self.rate
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> f64 {
        self.ranks
    }

    /// Returns the bytes that a rank sends in an all-gather or a reduce-scatter of `bytes`, or if it has `bytes` for all
    /// ranks.
    pub(super) fn sent(&self, bytes: f64) -> f64 {
        bytes * (self.ranks - 1.) / self.ranks
    }

    /// Returns the seconds of an all-reduce of `bytes`.
    pub(super) fn all_reduce(&self, bytes: f64) -> f64 {
        2. * self.gather(bytes)
    }
}

/// A floating point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Precision {
    /// 4 bytes
    F32,
    /// 2 bytes
    Bf16,
}

impl Precision {
    /// Returns the bytes of an element.
    pub(super) fn bytes(self) -> f64 {
        match self {
            Precision::F32 => 4.,
            Precision::Bf16 => 2.,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_replace_the_table() {
        let device = |name, given| Device::new(name, Precision::Bf16, given);
        let h100 = device(DeviceName::H100Sxm, Given::default()).unwrap();
        assert_eq!((h100.flops, h100.memory), (989e12, Some(80e9)));
        let given = Given { flops: Some(912.), memory: Some(96.), memory_bandwidth: Some(2400.), products: Some(0.5) };
        let other = device(DeviceName::H100Sxm, given).unwrap();
        assert_eq!((other.flops, other.memory, other.memory_bandwidth), (912e12, Some(96e9), Some(2.4e12)));
        assert!((other.products(456e12) - 1.).abs() < 1e-12);
        assert_eq!(Device::new(DeviceName::A100, Precision::F32, Given::default()).unwrap().flops, 19.5e12);
        let error = device(DeviceName::Cpu, Given::default()).unwrap_err().to_string();
        assert!(error.contains("--flops"), "{error}");
        let cpu = device(DeviceName::Cpu, Given { flops: Some(0.1), ..Given::default() }).unwrap();
        assert_eq!((cpu.moves(1e12), cpu.memory), (0., None));
    }

    const LINKS: Links = Links { intra: 100., inter: 10., latency: 0.5 };

    #[test]
    fn slowest_link_bounds_a_ring() {
        let mesh = |hosts, shard, replicate| Mesh {
            ranks_per_host: 8,
            hosts,
            shard,
            context: 1,
            tensor: 1,
            expert: 1,
            replicate,
        };
        let rate = |mesh: Mesh| Ring::of_shards(&mesh, &LINKS, mesh.shard).rate;
        assert_eq!(rate(mesh(1, 8, 1)), 100.);
        assert_eq!(rate(mesh(4, 8, 4)), 100.);
        // Eight network cards per host.
        assert_eq!(rate(mesh(4, 32, 1)), 80.);
        // Groups of six span two hosts, with two ranks on one of them.
        assert_eq!(rate(mesh(3, 6, 4)), 20.);
        // Each layer over four ranks, and its shards over two ranks of each host.
        let split = Mesh { tensor: 4, ..mesh(4, 8, 1) };
        assert_eq!([rate(split), Ring::of_layer(&split, &LINKS).rate], [20., 100.]);
        let replicas = |mesh| Ring::of_replicas(&mesh, &LINKS).rate;
        assert_eq!(replicas(mesh(1, 4, 2)), 100.);
        assert_eq!(replicas(mesh(4, 8, 4)), 10.);
        assert_eq!(replicas(mesh(4, 4, 8)), 20.);
    }

    #[test]
    fn ring_transfers_all_but_one_share() {
        let mesh = Mesh { ranks_per_host: 4, hosts: 1, shard: 4, context: 1, tensor: 1, expert: 1, replicate: 1 };
        let ring = Ring::of_shards(&mesh, &LINKS, 4);
        assert_eq!(ring.gather(400.), 3. * 0.5 + 3.);
        assert_eq!(ring.all_reduce(400.), 9.);
        assert_eq!(Ring::of_replicas(&mesh, &LINKS).all_reduce(400.), 0.);
    }
}
