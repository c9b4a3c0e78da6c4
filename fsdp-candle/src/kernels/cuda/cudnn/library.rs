//! cuDNN's library, which is loaded when attention first asks for it, and its descriptors.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::names::{AttributeKind, DataType, Heuristics, Kind, Knob, Name, Pointwise, Reduction};

/// cuDNN 9.25, the first version whose backward pass on Hopper is deterministic without memory for all scores.
const LEAST_VERSION: usize = 92_500;
/// Names of its file, the version's first.
const FILES: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];
/// Statuses from 3000 to 3999 say that cuDNN has no kernel for a graph.
const UNSUPPORTED: u32 = 3;
/// Bytes of a message.
const MESSAGE: usize = 2048;

/// A status of cuDNN, as a number: newer versions have more of them than cudarc's enumeration.
type Status = u32;
type Raw = *mut c_void;

/// The functions of cuDNN that are called here (<https://docs.nvidia.com/deeplearning/cudnn/backend/latest/>).
pub(super) struct Library {
    version: unsafe extern "C" fn() -> usize,
    message: unsafe extern "C" fn(*mut c_char, usize),
    create: unsafe extern "C" fn(*mut Raw) -> Status,
    set_stream: unsafe extern "C" fn(Raw, Raw) -> Status,
    create_descriptor: unsafe extern "C" fn(u32, *mut Raw) -> Status,
    destroy_descriptor: unsafe extern "C" fn(Raw) -> Status,
    set_attribute: unsafe extern "C" fn(Raw, u32, u32, i64, *const c_void) -> Status,
    get_attribute: unsafe extern "C" fn(Raw, u32, u32, i64, *mut i64, *mut c_void) -> Status,
    finalize: unsafe extern "C" fn(Raw) -> Status,
    execute: unsafe extern "C" fn(Raw, Raw, Raw) -> Status,
}

/// Returns the library, or why it can't be used.
pub(super) fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(Library::load).as_ref().map_err(String::as_str)
}

impl Library {
    fn load() -> Result<Self, String> {
        /// Returns a function of the library.
        ///
        /// # Safety
        /// The function has this type.
        unsafe fn get<T: Copy>(loaded: &libloading::Library, name: &str) -> Result<T, String> {
            // SAFETY: ensured by the caller.
            let found = unsafe { loaded.get::<T>(name.as_bytes()) };
            found.map(|function| *function).map_err(|_| format!("libcudnn has no {name}"))
        }
        // SAFETY: cuDNN may be loaded at any time.
        let mut found = FILES.iter().filter_map(|file| unsafe { libloading::Library::new(*file) }.ok());
        let loaded = found.next().ok_or("libcudnn.so.9 is not on the library path")?;
        // SAFETY: the types are those of cuDNN's headers.
        let library = unsafe {
            Library {
                version: get(&loaded, "cudnnGetVersion")?,
                message: get(&loaded, "cudnnGetLastErrorString")?,
                create: get(&loaded, "cudnnCreate")?,
                set_stream: get(&loaded, "cudnnSetStream")?,
                create_descriptor: get(&loaded, "cudnnBackendCreateDescriptor")?,
                destroy_descriptor: get(&loaded, "cudnnBackendDestroyDescriptor")?,
                set_attribute: get(&loaded, "cudnnBackendSetAttribute")?,
                get_attribute: get(&loaded, "cudnnBackendGetAttribute")?,
                finalize: get(&loaded, "cudnnBackendFinalize")?,
                execute: get(&loaded, "cudnnBackendExecute")?,
            }
        };
        // The functions live as long as the process.
        std::mem::forget(loaded);
        // SAFETY: the function has no arguments.
        match unsafe { (library.version)() } {
            new if new >= LEAST_VERSION => Ok(library),
            old => Err(format!("cuDNN {} is installed, and attention needs {}", version(old), version(LEAST_VERSION))),
        }
    }

    /// Returns the version, such as `9.26`.
    pub(super) fn version(&self) -> String {
        // SAFETY: the function has no arguments.
        version(unsafe { (self.version)() })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), Refused> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0; MESSAGE];
        // SAFETY: cuDNN writes at most this many bytes, and ends the string.
        unsafe { (self.message)(message.as_mut_ptr(), MESSAGE) };
        message[MESSAGE - 1] = 0;
        // SAFETY: the array ends with 0.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().trim().to_string();
        Err(Refused { call, status, message })
    }
}

/// Returns the name of a version that is a number.
fn version(number: usize) -> String {
    format!("{}.{}", number / 10_000, number % 10_000 / 100)
}

/// An error of cuDNN.
#[derive(Debug, thiserror::Error)]
#[error("{call} returned {status}: {message}")]
pub(super) struct Refused {
    call: &'static str,
    status: Status,
    message: String,
}

impl Refused {
    /// The error of a graph for which cuDNN knows no engine.
    pub(super) fn no_engine() -> Self {
        Refused { call: "cuDNN", status: 1000 * UNSUPPORTED, message: "no engine for the graph".into() }
    }

    /// Returns whether cuDNN has no kernel for the graph, rather than failing.
    pub(super) fn is_unsupported(&self) -> bool {
        self.status / 1000 == UNSUPPORTED
    }
}

/// A handle of cuDNN: its state on a device.
pub(super) struct Handle {
    library: &'static Library,
    raw: Raw,
}

// SAFETY: cuDNN's handles may move between threads.
unsafe impl Send for Handle {}

impl Handle {
    /// Returns a handle of the thread's device, whose operations run on a stream.
    pub(super) fn new(library: &'static Library, stream: Raw) -> Result<Self, Refused> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a handle.
        library.check("cudnnCreate", unsafe { (library.create)(&raw mut raw) })?;
        // SAFETY: both are live.
        library.check("cudnnSetStream", unsafe { (library.set_stream)(raw, stream) })?;
        Ok(Handle { library, raw })
    }

    /// Runs a plan.
    ///
    /// # Safety
    /// The variables' memory has the sizes of the plan's tensors, and lives until the stream has run the plan.
    pub(super) unsafe fn execute(&self, plan: &Descriptor, variables: &Descriptor) -> Result<(), Refused> {
        // SAFETY: ensured by the caller.
        let status = unsafe { (self.library.execute)(self.raw, plan.raw, variables.raw) };
        self.library.check("cudnnBackendExecute", status)
    }
}

/// The values of an attribute.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    Handle(&'a Handle),
    Descriptors(&'a [&'a Descriptor]),
    Longs(&'a [i64]),
    Pointers(&'a [*mut c_void]),
    Flag(bool),
    DataType(DataType),
    Pointwise(Pointwise),
    Reduction(Reduction),
    Heuristics(Heuristics),
    Knob(Knob),
    #[cfg_attr(not(test), allow(dead_code, reason = "tests plan for devices that are not here"))]
    Text(&'a str),
}

/// A descriptor of cuDNN's backend. A descriptor that refers to another one keeps it alive.
pub(super) struct Descriptor {
    library: &'static Library,
    raw: Raw,
}

// SAFETY: cuDNN's descriptors may move between threads.
unsafe impl Send for Descriptor {}
// SAFETY: shared descriptors are final, and cuDNN only reads those.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) fn new(library: &'static Library, kind: Kind) -> Result<Self, Refused> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a descriptor.
        let status = unsafe { (library.create_descriptor)(kind as u32, &raw mut raw) };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { library, raw })
    }

    /// Sets an attribute.
    pub(super) fn set(&mut self, name: Name, values: Values<'_>) -> Result<&mut Self, Refused> {
        fn of<T>(kind: AttributeKind, values: &[T]) -> (AttributeKind, usize, *const c_void) {
            (kind, values.len(), values.as_ptr().cast())
        }
        let one = std::slice::from_ref;
        let descriptors: Vec<Raw> = match values {
            Values::Descriptors(all) => all.iter().map(|descriptor| descriptor.raw).collect(),
            _ => vec![],
        };
        let (kind, count, at) = match &values {
            Values::Handle(handle) => of(AttributeKind::Handle, one(&handle.raw)),
            Values::Descriptors(_) => of(AttributeKind::BackendDescriptor, &descriptors),
            Values::Longs(longs) => of(AttributeKind::Int64, longs),
            Values::Pointers(pointers) => of(AttributeKind::VoidPtr, pointers),
            Values::Flag(flag) => of(AttributeKind::Boolean, std::slice::from_ref(flag)),
            Values::DataType(kind) => of(AttributeKind::DataType, std::slice::from_ref(kind)),
            Values::Pointwise(mode) => of(AttributeKind::PointwiseMode, std::slice::from_ref(mode)),
            Values::Reduction(operator) => of(AttributeKind::ReductionOperatorType, std::slice::from_ref(operator)),
            Values::Heuristics(mode) => of(AttributeKind::HeurMode, std::slice::from_ref(mode)),
            Values::Knob(knob) => of(AttributeKind::KnobType, std::slice::from_ref(knob)),
            Values::Text(text) => of(AttributeKind::Char, text.as_bytes()),
        };
        // SAFETY: the descriptor is live, and cuDNN copies this many values of the attribute's type.
        let status = unsafe { (self.library.set_attribute)(self.raw, name as u32, kind as u32, count as i64, at) };
        self.library.check("cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    /// Ends the setting of attributes.
    pub(super) fn finalize(self) -> Result<Self, Refused> {
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.library.finalize)(self.raw) };
        self.library.check("cudnnBackendFinalize", status)?;
        Ok(self)
    }

    /// Returns a number.
    pub(super) fn long(&self, name: Name) -> Result<i64, Refused> {
        let (mut value, mut count) = (0i64, 0);
        let kind = AttributeKind::Int64 as u32;
        // SAFETY: there is room for one number.
        let status = unsafe {
            let at = (&raw mut value).cast();
            (self.library.get_attribute)(self.raw, name as u32, kind, 1, &raw mut count, at)
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(value)
    }

    /// Returns the descriptors that an attribute holds, at most `most`.
    pub(super) fn descriptors(&self, name: Name, kind: Kind, most: usize) -> Result<Vec<Descriptor>, Refused> {
        let mut found = (0..most).map(|_| Descriptor::new(self.library, kind)).collect::<Result<Vec<_>, Refused>>()?;
        let mut raw: Vec<Raw> = found.iter().map(|descriptor| descriptor.raw).collect();
        let mut count = 0;
        let of_descriptors = AttributeKind::BackendDescriptor as u32;
        // SAFETY: cuDNN fills at most these descriptors.
        let status = unsafe {
            let at = raw.as_mut_ptr().cast();
            (self.library.get_attribute)(self.raw, name as u32, of_descriptors, most as i64, &raw mut count, at)
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        Ok(found)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is live, and no one uses it any more.
        let _ = unsafe { (self.library.destroy_descriptor)(self.raw) };
    }
}
