//! Tiles by the instruction `tdpbf16ps` of AMX.
//!
//! The instruction multiplies registers of 16 rows of 64 bytes: 16 rows of 16 pairs by 16 pairs of 16 columns. The sums of
//! a tile are in two by two registers.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use raw_cpuid::CpuId;

use super::{COLS, Kernel, LANES, blocks, has_avx512_bf16, pack, write};
use crate::nn::cpu::matrix::{Mat, MatMut};

pub(super) struct Amx;

/// Rows of a tile.
const ROWS: usize = 2 * LANES;

impl Kernel for Amx {
    const ROWS: usize = ROWS;
    // A panel of columns takes 32 KiB. It stays in the L1 cache, of 48 KiB. Rows are loaded with a hint to bypass it.
    const PAIRS: usize = 256;
    const STEP: usize = LANES;

    fn is_available() -> bool {
        static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
            let features = CpuId::new().get_extended_feature_info();
            has_avx512_bf16() && features.is_some_and(|has| has.has_amx_tile() && has.has_amx_bf16()) && is_permitted()
        });
        *IS_AVAILABLE
    }

    unsafe fn pack<'p>(packed: &'p mut [MaybeUninit<u32>], from: Mat<'_>, pairs: usize) -> &'p [u32] {
        // SAFETY: the caller ensures that the processor has the instructions.
        unsafe { pack::by_rows::<ROWS>(packed, from, pairs) }
    }

    unsafe fn multiply(dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize) {
        // SAFETY: as above.
        unsafe { multiply(dst, accumulate, left, right, pairs) };
    }
}

/// Asks Linux for the registers, which it gives a process only at its request
/// (<https://docs.kernel.org/arch/x86/xstate.html>). It refuses if a thread's stack for signals has no room for them, and
/// afterwards refuses such stacks.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this request has no pointer.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The layout of the registers that `ldtilecfg` reads: 16 rows of 64 bytes in each.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    const fn new() -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut register = 0;
        while register < 8 {
            (row_bytes[register], rows[register]) = (64, 16);
            register += 1;
        }
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

static CONFIG: Config = Config::new();

/// The sums of a tile.
#[repr(align(64))]
struct Sums([[f32; COLS]; ROWS]);

/// Assembly that uses the registers of AMX. The compiler keeps nothing in them.
macro_rules! amx_asm {
    ($($args:tt)*) => {
        asm!(
            $($args)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

#[target_feature(enable = "avx512f")]
fn multiply(mut dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize) {
    assert!(pairs.is_multiple_of(LANES) && right.len() == COLS * pairs);
    let (rows, cols) = (dst.rows, dst.cols);
    assert!(left.len() >= rows.next_multiple_of(ROWS) * pairs);
    let mut sums = MaybeUninit::<Sums>::uninit();
    // SAFETY: the processor has the instruction, and the layout is one that it supports.
    unsafe { amx_asm!("ldtilecfg [{}]", in(reg) &CONFIG,) };
    for (i, rows) in blocks(0..rows, ROWS).enumerate() {
        // SAFETY: the panels have `pairs` pairs of 32 rows, and of 32 columns. Each pass reads 2,048 bytes of each, which
        // are 16 pairs. `sums` has 32 rows of 128 bytes. The registers have the layout that was loaded above, because
        // nothing else in this thread uses them.
        let sums = unsafe {
            amx_asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloaddt1 tmm4, [{left} + {narrow}*1]",
                "tileloadd tmm6, [{right} + {wide}*1]",
                "tileloadd tmm7, [{right} + {wide}*1 + 64]",
                "tileloaddt1 tmm5, [{left} + {narrow}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 2048",
                "add {right}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {wide}*1], tmm0",
                "tilestored [{sums} + {wide}*1 + 64], tmm1",
                "tilestored [{sums} + {wide}*1 + 2048], tmm2",
                "tilestored [{sums} + {wide}*1 + 2112], tmm3",
                steps = inout(reg) pairs / LANES => _,
                left = inout(reg) left[i * ROWS * pairs..].as_ptr() => _,
                right = inout(reg) right.as_ptr() => _,
                sums = in(reg) sums.as_mut_ptr(),
                // Bytes from a row to the next.
                narrow = in(reg) 64usize,
                wide = in(reg) 128usize,
            );
            &sums.assume_init_ref().0
        };
        let dst = dst.part(rows, 0..cols);
        for (row, sums) in (0..dst.rows).zip(sums) {
            let (low, high) = sums.split_at(LANES);
            // SAFETY: each half has 16 sums.
            let sums = unsafe { [_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr())] };
            write(&dst, row, accumulate, sums);
        }
    }
    // SAFETY: the processor has the instruction. Without it, every later switch of threads would save the registers.
    unsafe { amx_asm!("tilerelease",) };
}
