//! Calls of an MPI library, made by one thread.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::Path,
    time::{Duration, Instant},
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::library::{Constants, Family, Functions, Kind, MpiError, Outcome, mpich, open_mpi, standard, symbol};

/// An MPI library in use. The caller chooses the numbers of requests.
pub(super) trait Mpi {
    /// Initializes MPI unless it is initialized. Returns this process's rank and the number of processes.
    fn start(&mut self) -> Outcome<(usize, usize)>;

    /// Duplicates the world's communicator, together with all processes.
    fn separate(&mut self, timeout: Duration) -> Outcome;

    /// Starts to send `len` bytes.
    ///
    /// # Safety
    /// `from` has `len` bytes, which nobody writes until the request is done.
    unsafe fn send(&mut self, number: usize, from: *const u8, len: usize, to: usize, tag: u16) -> Outcome;

    /// Starts to receive at most `len` bytes.
    ///
    /// # Safety
    /// `to` has `len` bytes, which nobody accesses until the request is done.
    unsafe fn receive(&mut self, number: usize, to: *mut u8, len: usize, from: usize, tag: u16) -> Outcome;

    /// Tests all requests and calls `done` for each that has ended.
    fn poll(&mut self, done: &mut dyn FnMut(usize, Outcome)) -> Outcome;

    /// Cancels a receive. It then ends as other requests do.
    fn cancel(&mut self, number: usize);

    /// Finalizes MPI if [`Mpi::start`] initialized it.
    fn end(&mut self) -> Outcome;

    /// Returns the library's version text.
    fn version(&self) -> String;
}

/// Opens a library and determines its interface. `found` is a path, or a name for the loader.
pub(super) fn open(found: &Path) -> Outcome<Box<dyn Mpi>> {
    // SAFETY: the initializers of an MPI library have no preconditions. Its plug-ins use its symbols, which are
    // therefore global, as in a program linked with it.
    let library = unsafe { Library::open(Some(found), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|error| MpiError::new(error.to_string()))?;
    // The library's threads and exit handlers outlive every user.
    let library: &'static Library = Box::leak(Box::new(library));
    // SAFETY: the address of a variable is a pointer, whatever its type.
    let address = |name: &str| unsafe { symbol::<*mut c_void>(library, name) };
    let is_standard =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmpi_abi."));
    // SAFETY: handles are pointers in the standard interface and Open MPI's, and numbers in MPICH's. `checked` verifies
    // the interface.
    unsafe {
        if is_standard(found) || found.canonicalize().is_ok_and(|path| is_standard(&path)) {
            checked(Family::Standard, standard(), Functions::of(library)?)
        } else if address("ompi_mpi_comm_world").is_ok() {
            checked(Family::OpenMpi, open_mpi(address)?, Functions::of(library)?)
        } else {
            checked(Family::Mpich, mpich(), Functions::of(library)?)
        }
    }
}

fn checked<H: Copy + PartialEq + 'static>(
    family: Family,
    constants: Constants<H>,
    functions: Functions<H>,
) -> Outcome<Box<dyn Mpi>> {
    let session = Session {
        world: constants.comm_world,
        constants,
        functions,
        requests: Vec::new(),
        numbers: Vec::new(),
        indices: Vec::new(),
        statuses: Vec::new(),
        is_ours: false,
    };
    let version = session.version();
    if !family.words().iter().any(|word| version.contains(word)) {
        return Err(MpiError::new(format!(
            "unsupported library {version:?}: expected MPICH, Intel MPI, MVAPICH, Cray MPICH, Open MPI, or a library \
             with the standard interface (libmpi_abi.so)"
        )));
    }
    Ok(Box::new(session))
}

struct Session<H> {
    constants: Constants<H>,
    functions: Functions<H>,
    world: H,
    /// Active requests, and their numbers.
    requests: Vec<H>,
    numbers: Vec<usize>,
    indices: Vec<c_int>,
    statuses: Vec<c_int>,
    /// Whether this session initialized MPI.
    is_ours: bool,
}

impl<H: Copy + PartialEq> Session<H> {
    fn check(&self, what: &str, code: c_int) -> Outcome {
        if code == 0 { Ok(()) } else { Err(self.refused(what, code)) }
    }

    fn refused(&self, what: &str, code: c_int) -> MpiError {
        // Longer than the longest error string of any library.
        let mut text = [0 as c_char; 8192];
        let (mut len, mut class) = (0, 0);
        // SAFETY: the text has enough space, and its last byte stays zero.
        let text = unsafe {
            (self.functions.error_string)(code, text.as_mut_ptr(), &raw mut len);
            (self.functions.error_class)(code, &raw mut class);
            text[text.len() - 1] = 0;
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        let kind = if class == self.constants.failed { Kind::Died } else { Kind::Other };
        MpiError { text: format!("{what}: {}", text.trim()), kind }
    }

    /// Returns a number that a function writes.
    fn number(&self, what: &str, ask: impl FnOnce(*mut c_int) -> c_int) -> Outcome<c_int> {
        let mut number = 0;
        self.check(what, ask(&raw mut number))?;
        Ok(number)
    }

    /// Starts a request, which `call` writes.
    fn start_request(&mut self, what: &str, number: usize, call: impl FnOnce(*mut H) -> c_int) -> Outcome {
        let mut request = self.constants.request_null;
        self.check(what, call(&raw mut request))?;
        self.requests.push(request);
        self.numbers.push(number);
        Ok(())
    }
}

fn count(len: usize) -> Outcome<c_int> {
    c_int::try_from(len).map_err(|_| MpiError::new(format!("a message of {len} bytes is longer than MPI's counts")))
}

impl<H: Copy + PartialEq> Mpi for Session<H> {
    fn start(&mut self) -> Outcome<(usize, usize)> {
        let Functions { initialized, finalized, query_thread, init_thread, .. } = self.functions;
        let Constants { comm_world, comm_self, byte, errors_return, thread_funneled, thread_serialized, .. } =
            self.constants;
        // SAFETY: these functions may be called at any time, and write one number.
        let (begun, ended) = unsafe {
            let begun = self.number("MPI_Initialized", |to| initialized(to))?;
            (begun != 0, self.number("MPI_Finalized", |to| finalized(to))? != 0)
        };
        if ended {
            return Err(MpiError::new("MPI was already finalized, and a process can initialize it only once"));
        }
        if begun {
            // SAFETY: MPI is initialized and not finalized.
            let level = unsafe { self.number("MPI_Query_thread", |to| query_thread(to))? };
            if level < thread_serialized {
                return Err(MpiError::new(
                    "the program initialized MPI for one thread: initialize it with MPI_THREAD_MULTIPLE, or leave it \
                     to this library",
                ));
            }
        } else {
            let arguments = std::ptr::null_mut();
            // SAFETY: MPI is not initialized; arguments are optional since MPI 2.
            unsafe {
                self.number("MPI_Init_thread", |to| init_thread(std::ptr::null_mut(), arguments, thread_funneled, to))?
            };
            self.is_ours = true;
        }
        let Functions { comm_set_errhandler, comm_rank, comm_size, type_size, .. } = self.functions;
        // SAFETY: MPI is initialized, by this thread or for several, and the handles are the library's.
        let (rank, size) = unsafe {
            self.check("MPI_Comm_set_errhandler", comm_set_errhandler(comm_world, errors_return))?;
            // Detects wrong constants before anything is sent.
            let alone = self.number("MPI_Comm_size", |to| comm_size(comm_self, to))?;
            let bytes = self.number("MPI_Type_size", |to| type_size(byte, to))?;
            if (alone, bytes) != (1, 1) {
                return Err(MpiError::new(format!(
                    "MPI_COMM_SELF has {alone} processes and MPI_BYTE {bytes} bytes, expected 1 each: the library has \
                     another interface than its name says"
                )));
            }
            let rank = self.number("MPI_Comm_rank", |to| comm_rank(comm_world, to))?;
            (rank, self.number("MPI_Comm_size", |to| comm_size(comm_world, to))?)
        };
        Ok((rank as usize, size as usize))
    }

    fn separate(&mut self, timeout: Duration) -> Outcome {
        let Constants { comm_world, errors_return, .. } = self.constants;
        let started = Instant::now();
        // Written when the request is done, which may be never.
        let made = Box::leak(Box::new(comm_world));
        let idup = self.functions.comm_idup;
        // SAFETY: MPI is initialized, and the written memory is never freed.
        self.start_request("MPI_Comm_idup", 0, |request| unsafe { idup(comm_world, &raw mut *made, request) })?;
        let mut outcome = None;
        while outcome.is_none() {
            self.poll(&mut |_, done| outcome = Some(done))?;
            if started.elapsed() >= timeout {
                return Err(MpiError::new(format!(
                    "not all processes of the job started MPI within {:.1} s",
                    started.elapsed().as_secs_f64()
                )));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        outcome.unwrap_or(Ok(()))?;
        // SAFETY: the request that writes it is done.
        self.world = unsafe { std::ptr::read_volatile(made) };
        // SAFETY: the handles are the library's.
        let code = unsafe { (self.functions.comm_set_errhandler)(self.world, errors_return) };
        self.check("MPI_Comm_set_errhandler", code)
    }

    unsafe fn send(&mut self, number: usize, from: *const u8, len: usize, to: usize, tag: u16) -> Outcome {
        let (isend, byte, world) = (self.functions.isend, self.constants.byte, self.world);
        let (len, to, tag) = (count(len)?, to as c_int, c_int::from(tag));
        // SAFETY: MPI is initialized, and the memory is as the caller guarantees.
        let call = |request| unsafe { isend(from.cast(), len, byte, to, tag, world, request) };
        self.start_request("MPI_Isend", number, call)
    }

    unsafe fn receive(&mut self, number: usize, to: *mut u8, len: usize, from: usize, tag: u16) -> Outcome {
        let (irecv, byte, world) = (self.functions.irecv, self.constants.byte, self.world);
        let (len, from, tag) = (count(len)?, from as c_int, c_int::from(tag));
        // SAFETY: MPI is initialized, and the memory is as the caller guarantees.
        let call = |request| unsafe { irecv(to.cast(), len, byte, from, tag, world, request) };
        self.start_request("MPI_Irecv", number, call)
    }

    fn poll(&mut self, done: &mut dyn FnMut(usize, Outcome)) -> Outcome {
        let (ints, error) = self.constants.status;
        let len = self.requests.len();
        if len == 0 {
            return Ok(());
        }
        self.indices.resize(len, 0);
        // Aligned for pointers, since a status of Open MPI ends with one.
        self.statuses.resize(len * ints + 2, 0);
        let statuses = self.statuses.as_mut_ptr();
        // SAFETY: the offset is 0 or 1, and there is space for one more than is used.
        let statuses = unsafe { statuses.add(usize::from(!statuses.cast::<u64>().is_aligned())) };
        let mut found = 0;
        // SAFETY: MPI is initialized, and the arrays are as long as the number passed.
        let code = unsafe {
            (self.functions.testsome)(
                count(len)?,
                self.requests.as_mut_ptr(),
                &raw mut found,
                self.indices.as_mut_ptr(),
                statuses.cast(),
            )
        };
        if code != self.constants.err_in_status {
            self.check("MPI_Testsome", code)?;
        }
        // It is negative if no request is active.
        let found = usize::try_from(found).unwrap_or(0).min(len);
        let mut ended = Vec::with_capacity(found);
        for at in 0..found {
            let index = self.indices[at] as usize;
            // SAFETY: there are that many statuses, and MPI writes them if a request failed.
            let status = unsafe { *statuses.add(at * ints + error) };
            let code = if code == 0 { 0 } else { status };
            let outcome = if code == 0 { Ok(()) } else { Err(self.refused("a message", code)) };
            ended.push((index, outcome));
        }
        // Removes from the last index on, so that earlier indices stay valid.
        ended.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        let mut numbered = Vec::with_capacity(ended.len());
        for (index, outcome) in ended {
            self.requests.swap_remove(index);
            numbered.push((self.numbers.swap_remove(index), outcome));
        }
        numbered.into_iter().rev().for_each(|(number, outcome)| done(number, outcome));
        Ok(())
    }

    fn cancel(&mut self, number: usize) {
        if let Some(index) = self.numbers.iter().position(|&other| other == number) {
            // SAFETY: the request is active. A request that cannot be cancelled continues.
            unsafe { (self.functions.cancel)(&raw mut self.requests[index]) };
        }
    }

    fn end(&mut self) -> Outcome {
        if !std::mem::take(&mut self.is_ours) {
            return Ok(());
        }
        // SAFETY: this thread initialized MPI, and makes no further calls.
        let code = unsafe { (self.functions.finalize)() };
        if code == 0 { Ok(()) } else { Err(MpiError::new(format!("MPI_Finalize returned {code}"))) }
    }

    fn version(&self) -> String {
        // Longer than the longest version text of any library.
        let mut text = [0 as c_char; 8193];
        let mut len = 0;
        // SAFETY: it may be called at any time. The text has enough space, and its last byte stays zero.
        unsafe {
            (self.functions.get_library_version)(text.as_mut_ptr(), &raw mut len);
            text[text.len() - 1] = 0;
            CStr::from_ptr(text.as_ptr()).to_string_lossy().trim().to_string()
        }
    }
}
