//! Running a collective: comparing what everybody issued, with the first bytes, and then rounds of messages.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use super::{
    super::{
        call::{FIXED, HEAD},
        collective::Collective,
        host::{
            packing::{ALIGN, Piece, Stream},
            reduce::{Input, partial, reduce, widening},
        },
    },
    held::{Held, Page, Span, page},
    line::{Batch, Transfer, Way},
    phase::{Combined, Lane, Output, Phase},
    wire::{ROUNDS, Trouble, Wire},
};
use crate::{Buffer, Error, Result};

/// What travels with the announcement, at most.
pub(super) const INLINE: usize = 4096;

/// Where in a page are the bytes that begin at `start`.
fn within(page: usize, start: usize, bytes: &Range<usize>) -> Span {
    Span { region: page, bytes: start + bytes.start..start + bytes.end }
}

/// A chunk that is one piece travels from its place, and to it.
fn only(stream: &Stream, round: usize, step: usize) -> Option<Piece> {
    let mut pieces = stream.pieces(round, step);
    pieces.next().filter(|_| pieces.next().is_none())
}

/// Messages that are on their way together.
struct Round {
    /// Which chunks of the streams.
    number: usize,
    /// Which set of pages they use, if they are not all from place to place.
    pages: Option<usize>,
}

/// A collective that is being run.
pub(super) struct Exchange<'a> {
    pub(super) wire: &'a mut Wire,
    pub(super) collective: &'a Collective<'a>,
    /// Bytes of pages for partial results, which come behind the buffers.
    pub(super) partials: Vec<usize>,
}

impl Exchange<'_> {
    /// Runs phases over buffers, and returns these. Streams of the first phase that are short travel with the
    /// announcements.
    pub(super) fn run(mut self, buffers: Vec<Buffer>, phases: &[Phase]) -> Result<Vec<Buffer>> {
        let size = self.wire.size();
        // For each round with pages that may be on its way: one to and one from each rank, where one is needed.
        let mut is_needed = vec![false; 2 * size];
        let inline = self.inline();
        for (index, phase) in phases.iter().enumerate() {
            for peer in self.wire.line.peers() {
                let is_short = |lane: &Lane| index == 0 && lane.stream.len() <= inline;
                let is_scattered = |lane: &Lane| {
                    let step = self.step(phase, lane);
                    (0..lane.stream.chunks(step)).any(|round| only(&lane.stream, round, step).is_none())
                };
                let (sent, arriving) = (&phase.sends[peer], &phase.arrives[peer]);
                let is_combined = phase.combined.is_some() && arriving.stream.len() > 0;
                is_needed[peer] |= !is_short(sent) && is_scattered(sent);
                is_needed[size + peer] |= !is_short(arriving) && (is_combined || is_scattered(arriving));
            }
        }
        let partials = self.partials.iter().map(|&bytes| page(bytes));
        let of_rounds = (0..ROUNDS).flat_map(|_| is_needed.clone());
        let of_rounds = of_rounds.map(|is_needed| if is_needed { self.wire.page() } else { Page::new() });
        let pages: Vec<Page> = partials.chain(of_rounds).collect();
        let held = Arc::new(Held::new(buffers, pages));
        let nothing = Phase::nothing(size);
        self.first(&held, phases.first().unwrap_or(&nothing))?;
        for (index, phase) in phases.iter().enumerate() {
            self.rounds(&held, phase, index)?;
        }
        let (buffers, pages) = self.alone(held)?;
        pages.into_iter().skip(self.partials.len()).for_each(|page| self.wire.keep(page));
        Ok(buffers)
    }

    fn inline(&self) -> usize {
        INLINE.min(self.wire.step)
    }

    /// What streams of the `index`-th phase are longer than that travel in rounds.
    fn least(&self, index: usize) -> usize {
        if index == 0 { self.inline() } else { 0 }
    }

    /// Bytes of a message in a lane.
    fn step(&self, phase: &Phase, lane: &Lane) -> usize {
        phase.step(self.wire.step) * lane.width
    }

    fn trouble(&self, trouble: Trouble) -> Error {
        trouble.into_error(self.collective)
    }

    /// What nobody but this rank holds any more, because all messages are done.
    fn alone(&self, held: Arc<Held>) -> Result<(Vec<Buffer>, Vec<Page>)> {
        Arc::try_unwrap(held).map(Held::into_parts).map_err(|_| Error::Internal {
            rank: self.collective.group().rank,
            what: format!("the memory of {} is in use after its end", self.collective),
        })
    }

    /// Waits in the `index`-th phase.
    fn wait(&self, batch: &Batch, index: usize) -> Result<()> {
        self.wire.wait(batch, self.wire.patience(index)).map_err(|trouble| self.trouble(trouble))
    }

    /// Sends what this rank issued to all others, with what is short of the data, and compares.
    fn first(&mut self, held: &Held, phase: &Phase) -> Result<()> {
        self.wire.check().map_err(|trouble| self.trouble(trouble))?;
        let (size, rank) = (self.wire.size(), self.wire.line.rank);
        let mut own = vec![0; Collective::announcement_len(size)];
        self.collective.announce(&mut own);
        let row = if self.collective.is_sized_by_peers() { own.len() - FIXED } else { 0 };
        let head = (HEAD + row).next_multiple_of(ALIGN);
        let inline = self.inline();
        let is_short = |stream: &Stream| (1..=inline).contains(&stream.len());
        // One to each rank, and one from each. They stay for the next collective, which may have a row.
        // All are received at their longest: a rank that differs sends what is as long as its own collective.
        let len = (Collective::announcement_len(size) - FIXED + HEAD).next_multiple_of(ALIGN) + inline;
        let mut pages = std::mem::take(&mut self.wire.firsts);
        if pages.is_empty() {
            pages = (0..2 * size).map(|_| page(len)).collect();
        }
        let firsts = Arc::new(Held::new(vec![], pages));
        let mut transfers = Vec::with_capacity(2 * size);
        for peer in self.wire.line.peers() {
            transfers.push(Transfer { way: Way::From, peer, span: within(size + peer, 0, &(0..len)) });
        }
        for peer in self.wire.line.peers() {
            // SAFETY: nothing is on its way yet, and the pages are nobody else's.
            unsafe {
                firsts.write(&within(peer, 0, &(0..HEAD))).copy_from_slice(&own[..HEAD]);
                firsts.write(&within(peer, HEAD, &(0..row))).copy_from_slice(&own[FIXED..][..row]);
            }
            let lane = &phase.sends[peer];
            let mut end = head;
            if is_short(&lane.stream) {
                for piece in lane.stream.pieces(0, inline.next_multiple_of(ALIGN)) {
                    // SAFETY: as above.
                    unsafe {
                        let from = held.read(&lane.span(&piece));
                        firsts.write(&within(peer, head, &piece.chunk)).copy_from_slice(from);
                    }
                    end = head + piece.chunk.end;
                }
            }
            transfers.push(Transfer { way: Way::To, peer, span: within(peer, 0, &(0..end)) });
        }
        // SAFETY: the pages are touched again when all is done, below.
        let batch = unsafe { self.wire.post(&firsts, transfers) };
        self.wait(&batch, 0)?;
        // SAFETY: all of these messages are done.
        let told = |peer: usize| unsafe { firsts.read(&within(size + peer, 0, &(0..HEAD + row))) };
        let is_same = |peer: usize| told(peer)[..HEAD] == own[..HEAD];
        if row > 0 || !self.wire.line.peers().all(is_same) {
            let announced = |peer: usize| {
                let mut announced = own.clone();
                if peer != rank {
                    let (head, rest) = told(peer).split_at(HEAD);
                    announced[..HEAD].copy_from_slice(head);
                    announced[FIXED..][..row].copy_from_slice(rest);
                }
                announced
            };
            let announced: Vec<_> = (0..size).map(announced).collect();
            if self.collective.compare(|peer| &announced[peer]).is_err() {
                return Err(self.differ(own)?);
            }
        }
        match &phase.combined {
            None => {
                for peer in self.wire.line.peers() {
                    let lane = &phase.arrives[peer];
                    let pieces = lane.stream.pieces(0, inline.next_multiple_of(ALIGN));
                    for piece in pieces.filter(|_| is_short(&lane.stream)) {
                        // SAFETY: these messages are done, and others have not begun.
                        unsafe {
                            let from = firsts.read(&within(size + peer, head, &piece.chunk));
                            held.write(&lane.span(&piece)).copy_from_slice(from);
                        }
                    }
                }
            }
            Some(combined) if is_short(&combined.stream) => {
                for piece in combined.stream.pieces(0, inline.next_multiple_of(ALIGN)) {
                    // SAFETY: as above.
                    unsafe { self.combine(held, combined, &piece, 0, &firsts, |from| (size + from, head)) };
                }
            }
            Some(_) => {}
        }
        self.wire.firsts = self.alone(firsts)?.1;
        Ok(())
    }

    /// The error of ranks that issued different collectives: they all see it, and show each other all that they
    /// announced.
    fn differ(&mut self, own: Vec<u8>) -> Result<Error> {
        let (size, rank, len) = (self.wire.size(), self.wire.line.rank, own.len());
        let all = Arc::new(Held::new(vec![Buffer::U8(own.clone())], (0..size).map(|_| page(len)).collect()));
        let of = |region: usize| Span { region, bytes: 0..len };
        let transfers = self.wire.line.peers().flat_map(|peer| {
            let receive = Transfer { way: Way::From, peer, span: of(1 + peer) };
            [receive, Transfer { way: Way::To, peer, span: of(0) }]
        });
        let transfers = transfers.collect();
        // SAFETY: it is read when all is done.
        let batch = unsafe { self.wire.post(&all, transfers) };
        self.wait(&batch, 0)?;
        // SAFETY: all messages are done.
        let announced = |peer: usize| if peer == rank { &own[..] } else { unsafe { all.read(&of(1 + peer)) } };
        match self.collective.compare(announced) {
            Err(error) => Ok(error),
            Ok(_) => Err(Error::Internal {
                rank: self.collective.group().rank,
                what: format!("{} differed between ranks, and then no more", self.collective),
            }),
        }
    }

    /// Moves what did not travel with announcements, in rounds. Those that go from place to place are all on their way
    /// at once.
    fn rounds(&mut self, held: &Arc<Held>, phase: &Phase, index: usize) -> Result<()> {
        let least = self.least(index);
        let peers: Vec<_> = self.wire.line.peers().collect();
        let step = phase.step(self.wire.step);
        let chunks = |lane: &Lane| match lane.stream.len() > least {
            true => lane.stream.chunks(step * lane.width),
            false => 0,
        };
        let (sent, arriving) = (|peer: usize| &phase.sends[peer], |peer: usize| &phase.arrives[peer]);
        let longest = peers.iter().map(|&peer| chunks(sent(peer)).max(chunks(arriving(peer)))).max();
        let mut running: VecDeque<(Round, Arc<Batch>)> = VecDeque::new();
        let mut paged = 0;
        for number in 0..longest.unwrap_or(0) {
            let is_sent = |peer: &&usize| number < chunks(sent(**peer));
            let is_arriving = |peer: &&usize| number < chunks(arriving(**peer));
            let is_packed = |lane: &Lane| only(&lane.stream, number, step * lane.width).is_none();
            let is_combined = phase.combined.is_some();
            let needs_pages = peers.iter().filter(is_sent).any(|&peer| is_packed(sent(peer)))
                || peers.iter().filter(is_arriving).any(|&peer| is_combined || is_packed(arriving(peer)));
            let round = Round { number, pages: needs_pages.then_some(paged % ROUNDS) };
            paged += usize::from(needs_pages);
            // Its pages are free when the round that had them before is done.
            while let Some(at) = running.iter().position(|(before, _)| needs_pages && before.pages == round.pages) {
                running
                    .drain(..=at)
                    .try_for_each(|(before, batch)| self.settle(held, phase, &before, &batch, index))?;
            }
            let mut transfers = Vec::with_capacity(2 * peers.len());
            // What arrives first, so that it finds its place.
            for &peer in peers.iter().rev().filter(is_arriving) {
                transfers.push(Transfer { way: Way::From, peer, span: self.place(held, phase, &round, peer) });
            }
            for &peer in peers.iter().filter(is_sent) {
                transfers.push(Transfer { way: Way::To, peer, span: self.source(held, phase, &round, peer) });
            }
            // SAFETY: each round has pages and pieces of its own until it is drained. What a phase sends it does not
            // receive into, nor combine.
            running.push_back((round, unsafe { self.wire.post(held, transfers) }));
        }
        running.into_iter().try_for_each(|(round, batch)| self.settle(held, phase, &round, &batch, index))
    }

    /// Waits until a round is done, and does what is to be done with it.
    fn settle(&self, held: &Held, phase: &Phase, round: &Round, batch: &Batch, index: usize) -> Result<()> {
        self.wait(batch, index)?;
        self.drain(held, phase, round, self.least(index));
        Ok(())
    }

    /// The page of a round to or from a rank.
    fn page(&self, held: &Held, round: &Round, way: Way, peer: usize) -> usize {
        let size = self.wire.size();
        let place = if way == Way::To { peer } else { size + peer };
        held.first_page() + self.partials.len() + round.pages.unwrap_or(0) * 2 * size + place
    }

    /// Where what a rank sends in a round arrives.
    fn place(&self, held: &Held, phase: &Phase, round: &Round, peer: usize) -> Span {
        let lane = &phase.arrives[peer];
        let step = self.step(phase, lane);
        match only(&lane.stream, round.number, step).filter(|_| phase.combined.is_none()) {
            Some(piece) => lane.span(&piece),
            None => {
                let end = lane.stream.pieces(round.number, step).map(|piece| piece.chunk.end).max().unwrap_or(0);
                within(self.page(held, round, Way::From, peer), 0, &(0..end))
            }
        }
    }

    /// What goes to a rank in a round, packed where it is several pieces.
    fn source(&self, held: &Held, phase: &Phase, round: &Round, peer: usize) -> Span {
        let lane = &phase.sends[peer];
        let step = self.step(phase, lane);
        if let Some(piece) = only(&lane.stream, round.number, step) {
            return lane.span(&piece);
        }
        let page = self.page(held, round, Way::To, peer);
        let mut end = 0;
        for piece in lane.stream.pieces(round.number, step) {
            // SAFETY: the page is free, as the round before in its place is done; what a phase sends nobody writes.
            unsafe {
                let from = held.read(&lane.span(&piece));
                held.write(&within(page, 0, &piece.chunk)).copy_from_slice(from);
            }
            end = piece.chunk.end;
        }
        within(page, 0, &(0..end))
    }

    /// Does what is to be done with what has arrived in a round.
    fn drain(&self, held: &Held, phase: &Phase, round: &Round, least: usize) {
        match &phase.combined {
            None => {
                for peer in self.wire.line.peers() {
                    let lane = &phase.arrives[peer];
                    let step = self.step(phase, lane);
                    if lane.stream.len() <= least || only(&lane.stream, round.number, step).is_some() {
                        continue;
                    }
                    let page = self.page(held, round, Way::From, peer);
                    for piece in lane.stream.pieces(round.number, step) {
                        // SAFETY: the round is done, and no other has these pieces.
                        unsafe {
                            let from = held.read(&within(page, 0, &piece.chunk));
                            held.write(&lane.span(&piece)).copy_from_slice(from);
                        }
                    }
                }
            }
            Some(combined) if combined.stream.len() > least => {
                let step = phase.step(self.wire.step);
                for piece in combined.stream.pieces(round.number, step) {
                    let page = |from| (self.page(held, round, Way::From, from), 0);
                    // SAFETY: as above. What this rank has of the pieces it sends to nobody.
                    unsafe { self.combine(held, combined, &piece, round.number * step, held, page) };
                }
            }
            Some(_) => {}
        }
    }

    /// Combines a piece of a chunk, which begins at the byte `chunk` of the stream. What the others have is in `pages`,
    /// in the page and from the byte that `page` says.
    ///
    /// # Safety
    /// No message receives into what is read, none uses what is written, and nobody else does.
    unsafe fn combine(
        &self,
        held: &Held,
        combined: &Combined,
        piece: &Piece,
        chunk: usize,
        pages: &Held,
        page: impl Fn(usize) -> (usize, usize),
    ) {
        let rank = self.wire.line.rank;
        let own = Span { region: piece.part, bytes: piece.bytes.clone() };
        let dtype = combined.dtypes[piece.part];
        let width = widening(dtype);
        let accumulators = |bytes: &Range<usize>, start| width * (start + bytes.start)..width * (start + bytes.end);
        // SAFETY: as the caller promises; without other outputs, what this rank has is not read but as the output.
        let (inputs, output): (Vec<Input<'_>>, &mut [u8]) = unsafe {
            let input = |&(from, ranks): &(usize, usize)| {
                if from != rank {
                    let (page, start) = page(from);
                    match ranks {
                        1 => Input::Bytes(pages.read(&within(page, start, &piece.chunk))),
                        _ => Input::Partial(pages.read(&within(page, start, &accumulators(&piece.chunk, 0))), ranks),
                    }
                } else if let Output::Own = combined.output {
                    Input::Output
                } else {
                    Input::Bytes(held.read(&own))
                }
            };
            let output = match &combined.output {
                Output::Own => own.clone(),
                Output::Buffers { first, starts } => {
                    let start = starts[piece.part];
                    let bytes = piece.bytes.start - start..piece.bytes.end - start;
                    Span { region: first + piece.part, bytes }
                }
                Output::Partial { region } => Span { region: *region, bytes: accumulators(&piece.chunk, chunk) },
            };
            (combined.inputs.iter().map(input).collect(), held.write(&output))
        };
        match combined.output {
            Output::Partial { .. } => partial(dtype, combined.op, output, &inputs),
            _ => reduce(dtype, combined.op, output, &inputs),
        }
    }
}
