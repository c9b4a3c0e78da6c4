//! The functions of an MPI library that are used, by name.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library;

/// What MPI, or the loader, says of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) text: String,
    pub(super) kind: Kind,
}

/// Which failure it is, as far as that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A process of the job has ended.
    Died,
    Other,
}

impl Refused {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Refused { text: text.into(), kind: Kind::Other }
    }
}

pub(super) type Outcome<T = ()> = Result<T, Refused>;
/// The functions that are used.
pub(super) struct Functions<H> {
    pub(super) init_thread: unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    pub(super) initialized: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) finalized: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) query_thread: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) finalize: unsafe extern "C" fn() -> c_int,
    pub(super) comm_rank: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    pub(super) comm_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    pub(super) comm_set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    pub(super) comm_idup: unsafe extern "C" fn(H, *mut H, *mut H) -> c_int,
    pub(super) type_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    pub(super) isend: unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    pub(super) irecv: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    pub(super) testsome: unsafe extern "C" fn(c_int, *mut H, *mut c_int, *mut c_int, *mut c_void) -> c_int,
    pub(super) cancel: unsafe extern "C" fn(*mut H) -> c_int,
    pub(super) error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    pub(super) error_class: unsafe extern "C" fn(c_int, *mut c_int) -> c_int,
    pub(super) get_library_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
}

/// A function, or the address of a variable, by name. `T` is a pointer.
///
/// # Safety
/// What has the name in the library is of the type that `T` points to.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Outcome<T> {
    // SAFETY: as the caller promises.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| Refused::new(format!("it has no {name}: {error}")))
}

impl<H: Copy> Functions<H> {
    /// # Safety
    /// The library is an MPI of version 3 or later, whose handles are passed as `H` is.
    pub(super) unsafe fn of(library: &Library) -> Outcome<Self> {
        // SAFETY: the types are those of the MPI standard, with handles as the caller promises.
        unsafe {
            Ok(Functions {
                init_thread: symbol(library, "MPI_Init_thread")?,
                initialized: symbol(library, "MPI_Initialized")?,
                finalized: symbol(library, "MPI_Finalized")?,
                query_thread: symbol(library, "MPI_Query_thread")?,
                finalize: symbol(library, "MPI_Finalize")?,
                comm_rank: symbol(library, "MPI_Comm_rank")?,
                comm_size: symbol(library, "MPI_Comm_size")?,
                comm_set_errhandler: symbol(library, "MPI_Comm_set_errhandler")?,
                comm_idup: symbol(library, "MPI_Comm_idup")?,
                type_size: symbol(library, "MPI_Type_size")?,
                isend: symbol(library, "MPI_Isend")?,
                irecv: symbol(library, "MPI_Irecv")?,
                testsome: symbol(library, "MPI_Testsome")?,
                cancel: symbol(library, "MPI_Cancel")?,
                error_string: symbol(library, "MPI_Error_string")?,
                error_class: symbol(library, "MPI_Error_class")?,
                get_library_version: symbol(library, "MPI_Get_library_version")?,
            })
        }
    }
}
