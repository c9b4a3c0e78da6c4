//! Requirements of tests, and whether this machine meets them.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use fsdp_test_support::need::{Mpi, missing};
use fsdp_test_support::workspace;
use libtest_mimic::{Completion, Trial};

use crate::{full_disk, limited_memory, manifests, network, slurm};

/// Reason why a requirement is not met, determined once.
type Missing = OnceLock<Option<String>>;

#[derive(Clone, Copy)]
pub(crate) enum Need {
    /// Python with the packages of `tests/interop/requirements.txt`.
    Pytorch,
    /// Network namespaces.
    Networks,
    /// Mount namespaces.
    Mounts,
    /// Open MPI and MPICH.
    Mpi,
    /// Memory limits.
    Memory,
    /// Slurm's programs.
    Slurm,
    /// Kubernetes' schema.
    Kubernetes,
    /// llama.cpp's Python package, which takes many minutes to build. Its tests may always be ignored.
    LlamaCpp,
}

impl Need {
    fn missing(self) -> Option<&'static str> {
        static PYTORCH: Missing = OnceLock::new();
        static NETWORKS: Missing = OnceLock::new();
        static MOUNTS: Missing = OnceLock::new();
        static MPI: Missing = OnceLock::new();
        static MEMORY: Missing = OnceLock::new();
        static SLURM: Missing = OnceLock::new();
        static KUBERNETES: Missing = OnceLock::new();
        static LLAMA_CPP: Missing = OnceLock::new();
        match self {
            Need::Pytorch => PYTORCH.get_or_init(|| pytorch().err()).as_deref(),
            Need::Mounts => MOUNTS.get_or_init(|| full_disk::mounts().err()).as_deref(),
            Need::Memory => MEMORY.get_or_init(|| limited_memory::memory_can_be_limited().err()).as_deref(),
            Need::Mpi => MPI.get_or_init(|| Mpi::Open.mpirun().and(Mpi::Mpich.mpirun()).err()).as_deref(),
            Need::Slurm => SLURM.get_or_init(|| slurm::installed().err()).as_deref(),
            Need::Kubernetes => KUBERNETES.get_or_init(|| manifests::installed().err()).as_deref(),
            Need::LlamaCpp => LLAMA_CPP.get_or_init(|| llama_cpp().err()).as_deref(),
            Need::Networks => NETWORKS.get_or_init(|| network::two_hosts().err()).as_deref(),
        }
    }
}

/// Lists tests by their functions, or by a name and a closure. Test names begin with the module.
macro_rules! trials {
    ($needs:expr => $($name:ident $(: $test:expr)?),* $(,)?) => {
        vec![$({
            let module = module_path!().split_once("::").map_or("", |(_, module)| module);
            let name = format!("{module}::{}", stringify!($name));
            $crate::need::trial(&name, $needs, $crate::need::trials!(@test $name $(: $test)?))
        }),*]
    };
    (@test $name:ident) => { $name };
    (@test $name:ident : $test:expr) => { $test };
}
pub(crate) use trials;

/// Makes a test that is ignored if something that it needs is missing. With `FSDP_TESTS_REQUIRE=all` it fails, unless only
/// llama.cpp is missing.
pub(crate) fn trial(name: &str, needs: &'static [Need], test: fn()) -> Trial {
    Trial::ignorable_test(name, move || match needs.iter().find_map(|need| Some((*need, need.missing()?))) {
        Some((Need::LlamaCpp, reason)) => Ok(Completion::ignored_with(reason)),
        Some((_, reason)) => missing(reason),
        None => {
            test();
            Ok(Completion::Completed)
        }
    })
}

/// Returns the Python interpreter of the tests.
pub(crate) fn python() -> PathBuf {
    let installed = workspace().join("target/interop/bin/python");
    match env::var_os("FSDP_TESTS_PYTHON") {
        Some(chosen) => chosen.into(),
        None if installed.exists() => installed,
        None => "python3".into(),
    }
}

/// Returns the environment with llama.cpp's Python package.
pub(crate) fn llama_cpp() -> Result<PathBuf, String> {
    let environment = workspace().join("target/llama");
    let mut pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    if pythons.any(|python| python.path().join("site-packages/llama_cpp").is_dir()) {
        return Ok(environment);
    }
    Err(format!(
        "{} has no llama_cpp: make it with `python3 -m venv target/llama` and `target/llama/bin/pip install \
         llama-cpp-python==0.3.36 gguf`, which compiles for many minutes",
        environment.display()
    ))
}

/// Compares versions from the packages' metadata, because imports take seconds.
const LOOK: &str = "
import importlib.metadata, sys
for line in open(sys.argv[1]).read().split():
    name, version = line.split('==')
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = 'none'
    # A wheel names what it was built for behind a plus sign: 2.15.0+cpu.
    if found.split('+')[0] != version:
        sys.exit(f'{line} is needed, there is {found}')
";

fn pytorch() -> Result<(), String> {
    let python = python();
    let requirements = workspace().join("tests/interop/requirements.txt");
    let said = match Command::new(&python).arg("-c").arg(LOOK).arg(requirements).output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string(),
        Err(error) => error.to_string(),
    };
    let python = python.display();
    Err(format!(
        "{python}: {said} (.ci/install installs it in target/interop; FSDP_TESTS_PYTHON chooses another Python)"
    ))
}
