//! Making groups: what ranks tell each other when they meet.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::Duration,
};

use super::{
    super::host::packing::ALIGN,
    driver::{Driver, lock},
    held::{Held, Span, page},
    line::{Line, Transfer, Way},
    wire::{ROUNDS, Trouble, Wire},
};
use crate::HostNames;

/// The most bytes that pages for messages take, and the least that a message is cut to for that.
const PAGES: usize = 32 << 20;
const LEAST: usize = 64 << 10;
/// The longest message. MPI counts in `int`.
const LONGEST: usize = 1 << 30;
/// The shortest message: two places, so that half of it is a whole one.
const SHORTEST: usize = 2 * ALIGN;
/// Bytes of what ranks tell each other when they meet: a tag, a step, a host and a nonce, and the name of the host.
const MET: usize = NUMBERS + NAME;
const NUMBERS: usize = 32;
/// The longest name of a Linux host.
const NAME: usize = 64;
/// Messages are so many chunks long: the network is slower than memory, and has more to say about each.
const CHUNKS: usize = 8;

impl Wire {
    /// Makes a group of some of this one's ranks, of which this rank is the `rank`-th, on `host`. `chunk_bytes` is what
    /// it wants to move at a time; the first rank's choice counts, as a multiple of [`ALIGN`] from [`SHORTEST`] on.
    pub(super) fn meet(
        &mut self,
        ranks: &[usize],
        rank: usize,
        chunk_bytes: usize,
        host: u64,
        timeout: Duration,
    ) -> Result<Result<Wire, Trouble>, String> {
        let tag = self.driver.tag()?;
        let line = Arc::new(Line::new(tag, ranks.iter().map(|&rank| self.line.ranks[rank]).collect(), rank));
        // Before anybody knows its tag.
        self.driver.open(&line);
        let (mine, others) = (ranks[rank], line.peers().map(|peer| ranks[peer]));
        let span = |region| Span { region, bytes: 0..MET };
        let mut own = page(MET);
        let nonce = RandomState::new().build_hasher().finish();
        let numbers = [u64::from(tag), step(chunk_bytes, ranks.len()) as u64, host, nonce];
        own[..numbers.len()].copy_from_slice(&numbers);
        let (name, uname) = (bytemuck::cast_slice_mut(&mut own[numbers.len()..]), rustix::system::uname());
        name.iter_mut().zip(uname.nodename().to_bytes()).for_each(|(to, from): (&mut u8, _)| *to = *from);
        let pages = [own].into_iter().chain(ranks.iter().map(|_| page(MET))).collect();
        let held = Arc::new(Held::new(vec![], pages));
        let place = |of: usize| ranks.iter().position(|&rank| rank == of).unwrap_or_default();
        let transfers = others.flat_map(|peer| {
            let receive = Transfer { way: Way::From, peer, span: span(1 + place(peer)) };
            [receive, Transfer { way: Way::To, peer, span: span(0) }]
        });
        debug_assert_eq!(place(mine), rank);
        let transfers = transfers.collect();
        // SAFETY: the pages are used for nothing else, and read when all is done.
        let batch = unsafe { self.post(&held, transfers) };
        if let Err(trouble) = self.wait(&batch, self.timeout) {
            self.driver.close(&line, None);
            return Ok(Err(trouble));
        }
        // SAFETY: all messages are done.
        let bytes = |of: usize| unsafe { held.read(&span(if of == rank { 0 } else { 1 + of })) };
        let told = |of: usize| {
            let bytes = bytes(of);
            let number = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            [number(0), number(8), number(16), number(24)]
        };
        line.set_tags((0..ranks.len()).map(|of| told(of)[0] as u16).collect());
        let name = |of: usize| {
            let name = bytes(of)[NUMBERS..].split(|&byte| byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        };
        let names = HostNames::of((0..ranks.len()).map(name));
        let mut wire = Wire::new(self.driver, line, timeout, vec![0; ranks.len()]);
        let [_, step, _, nonce] = told(0);
        (wire.names, wire.nonce) = (names, nonce);
        wire.step = (step as usize).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN;
        wire.host_ids = (0..ranks.len()).map(|of| told(of)[2]).collect();
        // One that wants no hierarchy turns it off for all, also in the groups that they make without it.
        if wire.host_ids.contains(&0) {
            wire.host_ids.fill(0);
        }
        Ok(Ok(wire))
    }

    /// The world of all processes that MPI knows, for groups to be made of. One at a time has it.
    pub(super) fn world<T>(driver: &'static Driver, timeout: Duration, f: impl FnOnce(&mut Wire) -> T) -> T {
        let mut received = lock(&driver.received);
        let mut wire = Wire::new(driver, driver.world.clone(), timeout, std::mem::take(&mut *received));
        let outcome = f(&mut wire);
        *received = wire.received;
        outcome
    }
}

/// Bytes of a message in a group of so many ranks: so that pages for all of them don't take much memory.
fn step(chunk_bytes: usize, ranks: usize) -> usize {
    let share = (PAGES / (2 * ROUNDS * (ranks - 1).max(1))).max(LEAST);
    chunk_bytes.saturating_mul(CHUNKS).min(share).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_aligned_and_never_longer_than_mpi_counts() {
        for (chunk_bytes, ranks, expected) in [
            (128 << 10, 2, 1 << 20),
            (128 << 10, 64, 88768),
            (128 << 10, 1000, LEAST),
            (0, 2, SHORTEST),
            (100, 2, 768),
            (usize::MAX, 2, 5592384),
        ] {
            assert_eq!(step(chunk_bytes, ranks), expected);
        }
    }
}
