//! The binary interfaces of MPI libraries: how each spells handles and constants. Functions are the same in all.
//!
//! Read from the headers: `mpi_abi.h` (MPI 5.0), `mpi.h` of MPICH 3.4 to 5, and of Open MPI 4 and 5.

use std::ffi::{c_int, c_void};

/// The interface of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// That of the MPI standard since 5.0: `libmpi_abi.so`.
    Standard,
    /// MPICH's own, which Intel MPI, MVAPICH and Cray MPICH have too: `libmpi.so.12`.
    Mpich,
    /// Open MPI's own, since version 2: `libmpi.so.40`.
    OpenMpi,
}

impl Family {
    /// What its library says of itself: one of these words is in `MPI_Get_library_version`.
    pub(super) fn words(self) -> &'static [&'static str] {
        match self {
            // Whoever has it.
            Family::Standard => &[""],
            Family::Mpich => &["MPICH", "Intel(R) MPI", "MVAPICH"],
            Family::OpenMpi => &["Open MPI"],
        }
    }

    /// The names of its libraries, newest first.
    pub(super) fn names(self) -> &'static [&'static str] {
        match self {
            Family::Standard => &["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so"],
            // The second is Debian's name.
            Family::Mpich => &["libmpi.so.12", "libmpich.so.12"],
            Family::OpenMpi => &["libmpi.so.40"],
        }
    }
}

/// Numbers that families spell differently, and handles (`H`: communicators, datatypes, error handlers, requests).
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants<H> {
    pub(super) comm_world: H,
    pub(super) comm_self: H,
    pub(super) byte: H,
    pub(super) errors_return: H,
    pub(super) request_null: H,
    pub(super) thread_funneled: c_int,
    pub(super) thread_serialized: c_int,
    pub(super) err_in_status: c_int,
    /// A status in `int`s, and which of them is its error.
    pub(super) status: (usize, usize),
    /// The error class of a process that has failed.
    pub(super) failed: c_int,
}

/// Those of MPI 5.0. It has no class for processes that have failed.
pub(super) fn standard() -> Constants<*mut c_void> {
    let handle = |value: usize| std::ptr::without_provenance_mut(value);
    Constants {
        comm_world: handle(0x101),
        comm_self: handle(0x102),
        byte: handle(0x247),
        errors_return: handle(0x143),
        request_null: handle(0x180),
        thread_funneled: 1024,
        thread_serialized: 2048,
        err_in_status: 19,
        status: (8, 2),
        failed: -1,
    }
}

/// MPICH's.
pub(super) fn mpich() -> Constants<c_int> {
    Constants {
        comm_world: 0x4400_0000,
        comm_self: 0x4400_0001,
        byte: 0x4c00_010d,
        errors_return: 0x5400_0001,
        request_null: 0x2c00_0000,
        thread_funneled: 1,
        thread_serialized: 2,
        err_in_status: 17,
        status: (5, 4),
        failed: 101,
    }
}

/// Open MPI's: handles are the addresses of what `symbol` finds by name.
pub(super) fn open_mpi<E>(symbol: impl Fn(&str) -> Result<*mut c_void, E>) -> Result<Constants<*mut c_void>, E> {
    Ok(Constants {
        comm_world: symbol("ompi_mpi_comm_world")?,
        comm_self: symbol("ompi_mpi_comm_self")?,
        byte: symbol("ompi_mpi_byte")?,
        errors_return: symbol("ompi_mpi_errors_return")?,
        request_null: symbol("ompi_request_null")?,
        thread_funneled: 1,
        thread_serialized: 2,
        err_in_status: 18,
        // Four `int`s and a `size_t`.
        status: (6, 2),
        failed: 75,
    })
}
