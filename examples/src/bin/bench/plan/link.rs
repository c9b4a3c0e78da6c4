//! How long collectives take: rings over the links of a mesh.

use serde::Serialize;

/// Ranks, and how the model lies over them: copies (HSDP) of a model that is sharded. A host's ranks, and a copy's,
/// follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Mesh {
    pub(super) ranks_per_host: usize,
    pub(super) hosts: usize,
    /// Ranks that a copy is sharded over.
    pub(super) shard: usize,
    /// Copies.
    pub(super) replicate: usize,
}

impl Mesh {
    pub(super) fn ranks(&self) -> usize {
        self.ranks_per_host * self.hosts
    }
}

/// What links reach, in bytes a second and seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Links {
    /// Between ranks of a host, a rank.
    pub(super) intra: f64,
    /// To other hosts, a rank.
    pub(super) inter: f64,
    /// Of one hop in a ring.
    pub(super) latency: f64,
}

/// Ranks that communicate: so many, and the rate at which a ring over them passes on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    ranks: f64,
    rate: f64,
    latency: f64,
}

impl Ring {
    fn new(links: &Links, ranks: usize, on_one_host: bool, on_a_host: usize) -> Self {
        // Every rank of a host has a card of its own, and a ring enters a host by each of them.
        let rate = if on_one_host { links.intra } else { links.intra.min(on_a_host as f64 * links.inter) };
        Ring { ranks: ranks as f64, rate, latency: links.latency }
    }

    /// Over `ranks` neighbouring ranks: those of a copy, or a part of them.
    pub(super) fn of_neighbours(mesh: &Mesh, links: &Links, ranks: usize) -> Self {
        let host = mesh.ranks_per_host;
        let on_one_host = mesh.hosts == 1 || ranks <= host && host.is_multiple_of(ranks);
        Ring::new(links, ranks, on_one_host, common_divisor(ranks, host))
    }

    /// Over the ranks that hold the same shard of each copy.
    pub(super) fn of_replicas(mesh: &Mesh, links: &Links) -> Self {
        let on_a_host = (mesh.ranks_per_host / mesh.shard).max(1);
        Ring::new(links, mesh.replicate, mesh.hosts == 1, on_a_host)
    }

    /// Seconds of an all-gather to, or a reduce-scatter of, so many bytes.
    pub(super) fn gather(&self, bytes: f64) -> f64 {
        let hops = self.ranks - 1.;
        hops * self.latency + bytes * hops / self.ranks / self.rate
    }

    /// Seconds of an all-reduce of so many bytes.
    pub(super) fn all_reduce(&self, bytes: f64) -> f64 {
        2. * self.gather(bytes)
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: Links = Links { intra: 100., inter: 10., latency: 0.5 };

    #[test]
    fn rings_go_at_the_rate_of_their_narrowest_place() {
        let mesh = |hosts, shard, replicate| Mesh { ranks_per_host: 8, hosts, shard, replicate };
        let rate = |mesh: Mesh| Ring::of_neighbours(&mesh, &LINKS, mesh.shard).rate;
        assert_eq!(rate(mesh(1, 8, 1)), 100.);
        assert_eq!(rate(mesh(4, 8, 4)), 100.);
        // Eight cards a host.
        assert_eq!(rate(mesh(4, 32, 1)), 80.);
        // Groups of six lie across hosts, two ranks on one of them.
        assert_eq!(rate(mesh(3, 6, 4)), 20.);
        let replicas = |mesh| Ring::of_replicas(&mesh, &LINKS).rate;
        assert_eq!(replicas(mesh(1, 4, 2)), 100.);
        assert_eq!(replicas(mesh(4, 8, 4)), 10.);
        assert_eq!(replicas(mesh(4, 4, 8)), 20.);
    }

    #[test]
    fn a_ring_passes_on_all_but_its_own_share() {
        let mesh = Mesh { ranks_per_host: 4, hosts: 1, shard: 4, replicate: 1 };
        let ring = Ring::of_neighbours(&mesh, &LINKS, 4);
        assert_eq!(ring.gather(400.), 3. * 0.5 + 3.);
        assert_eq!(ring.all_reduce(400.), 9.);
        assert_eq!(Ring::of_replicas(&mesh, &LINKS).all_reduce(400.), 0.);
    }
}
