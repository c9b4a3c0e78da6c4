//! Memory that MPI reads and writes: it lives as long as anybody does, however a collective ends.

use std::ops::Range;

use crate::Buffer;

/// What alignment every dtype has.
type Word = u64;

/// Bytes that are aligned for every dtype.
pub(super) type Page = Vec<Word>;

/// A page with room for so many bytes.
pub(super) fn page(bytes: usize) -> Page {
    vec![0; bytes.div_ceil(size_of::<Word>())]
}

/// Bytes of one of the buffers or pages.
#[derive(Clone, Debug)]
pub(super) struct Span {
    /// Which: buffers come before pages.
    pub(super) region: usize,
    pub(super) bytes: Range<usize>,
}

/// Where a region is.
#[derive(Clone, Copy)]
struct Region {
    start: *mut u8,
    len: usize,
}

/// Buffers and pages. Messages that are on their way share it with the collective that sends them.
///
/// Its bytes are reached through [`Held::read`] and [`Held::write`] only, whose callers know what is on its way.
pub(super) struct Held {
    /// Nothing looks into these before [`Held::into_parts`].
    buffers: Vec<Buffer>,
    pages: Vec<Page>,
    regions: Vec<Region>,
}

// SAFETY: the pointers are to memory that it owns. Who reads or writes through them promises that nobody else writes.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    pub(super) fn new(mut buffers: Vec<Buffer>, mut pages: Vec<Page>) -> Self {
        let region = |bytes: &mut [u8]| Region { start: bytes.as_mut_ptr(), len: bytes.len() };
        let of_buffers = buffers.iter_mut().map(|buffer| region(buffer.bytes_mut()));
        let regions = of_buffers.chain(pages.iter_mut().map(|page| region(bytemuck::cast_slice_mut(page)))).collect();
        Held { buffers, pages, regions }
    }

    /// The region of the first page.
    pub(super) fn first_page(&self) -> usize {
        self.buffers.len()
    }

    /// The buffers and pages, of which nothing is on its way any more.
    pub(super) fn into_parts(self) -> (Vec<Buffer>, Vec<Page>) {
        (self.buffers, self.pages)
    }

    /// Where a span begins.
    ///
    /// # Panics
    /// When it is outside of its region.
    pub(super) fn address(&self, span: &Span) -> *mut u8 {
        let Region { start, len } = self.regions[span.region];
        assert!(span.bytes.start <= span.bytes.end && span.bytes.end <= len, "{span:?} is outside of {len} bytes");
        // SAFETY: it is within the region, or at its end.
        unsafe { start.add(span.bytes.start) }
    }

    /// # Safety
    /// Nobody writes to the span meanwhile: neither a message nor [`Held::write`].
    pub(super) unsafe fn read(&self, span: &Span) -> &[u8] {
        // SAFETY: the address is of so many bytes, which the caller keeps from being written.
        unsafe { std::slice::from_raw_parts(self.address(span), span.bytes.len()) }
    }

    /// # Safety
    /// Nobody reads or writes the span meanwhile: no message, no [`Held::read`] and no other [`Held::write`].
    #[expect(clippy::mut_from_ref, reason = "the caller promises that nobody else has it")]
    pub(super) unsafe fn write(&self, span: &Span) -> &mut [u8] {
        // SAFETY: the address is of so many bytes, which the caller has for itself.
        unsafe { std::slice::from_raw_parts_mut(self.address(span), span.bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_and_pages_come_back_with_what_was_written() {
        let held = Held::new(vec![Buffer::F32(vec![1.0; 2]), Buffer::U8(vec![])], vec![page(9)]);
        let span = |region, bytes| Span { region, bytes };
        // SAFETY: no two of the spans overlap.
        unsafe {
            held.write(&span(0, 4..8)).copy_from_slice(&2f32.to_ne_bytes());
            held.write(&span(held.first_page(), 8..9))[0] = 7;
            assert_eq!(held.read(&span(0, 0..4)), 1f32.to_ne_bytes());
            assert!(held.read(&span(1, 0..0)).is_empty());
        }
        let (buffers, pages) = held.into_parts();
        assert_eq!(buffers, [Buffer::F32(vec![1.0, 2.0]), Buffer::U8(vec![])]);
        assert_eq!(bytemuck::cast_slice::<u64, u8>(&pages[0])[8], 7);
    }

    #[test]
    #[should_panic(expected = "outside of 8 bytes")]
    fn what_is_outside_of_a_region_has_no_address() {
        Held::new(vec![Buffer::U8(vec![0; 8])], vec![]).address(&Span { region: 0, bytes: 4..9 });
    }
}
