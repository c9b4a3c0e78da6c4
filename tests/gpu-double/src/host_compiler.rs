//! Compiles a source with the stand-in `nvcc`, once for all processes.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Where the stand-in `nvcc` and its headers are.
fn nvcc() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("nvcc");
    std::env::var_os("GPU_DOUBLE_NVCC").map_or_else(beside, PathBuf::from)
}

/// Where libraries are kept.
fn cache() -> PathBuf {
    let in_workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/gpu-double/nvrtc");
    std::env::var_os("GPU_DOUBLE_CACHE").map_or_else(in_workspace, PathBuf::from)
}

/// What is compiled.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Source {
    pub(crate) text: String,
    /// How the compiler's messages call it.
    pub(crate) name: String,
    /// Files that it may include, with their names.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) options: Vec<String>,
    /// Expressions of C++ that name kernels, and the names that they get.
    pub(crate) expressions: Vec<(String, String)>,
}

/// What came of it: an image for `cuModuleLoadData`, or the compiler's messages.
pub(crate) type Compiled = Result<String, String>;

/// The error says why the compiler could not be called.
pub(crate) fn compile(source: &Source) -> io::Result<Compiled> {
    let nvcc = nvcc();
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    hash_files(&nvcc, &mut hasher)?;
    let folder = cache().join(format!("{:016x}", hasher.finish()));
    fs::create_dir_all(&folder)?;
    // Other processes ask for the same: the first one compiles, the others wait for it.
    let lock = File::create(folder.join("lock"))?;
    lock.lock()?;
    let image = folder.join("kernels.ptx");
    if let Ok(image) = fs::read_to_string(&image) {
        return Ok(Ok(image));
    }
    for (name, text) in &source.headers {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&folder))?;
        fs::write(path, text)?;
    }
    let file = folder.join("kernels.cu");
    fs::write(&file, format!("#line 1 \"{}\"\n{}\n", source.name, source.text))?;
    let mut command = Command::new("bash");
    command.arg(nvcc.join("nvcc")).args(["--ptx", "--strict", "-D", "__CUDACC_RTC__"]).args(&source.options);
    for (expression, name) in &source.expressions {
        command.arg("--kernel").arg(format!("{name}={expression}"));
    }
    // The image comes to be in one step, so that a process that is killed leaves none that is half written.
    let new = folder.join("new.ptx");
    let output = command.arg("-o").arg(&new).arg(&file).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    fs::rename(&new, &image)?;
    fs::read_to_string(&image).map(Ok)
}

/// A library of an older compiler or older headers is none to use.
fn hash_files(folder: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let context = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = fs::read_dir(folder)
        .map_err(context)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            hash_files(&path, hasher)?;
        } else {
            fs::read(&path)?.hash(hasher);
        }
    }
    Ok(())
}
