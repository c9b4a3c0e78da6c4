//! Finds the program to launch: a path, a target of the current Cargo workspace, an executable beside the launcher, or
//! a name in `PATH`.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::Metadata,
    io::{self, BufReader},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use cargo_metadata::{Message, MetadataCommand, PackageId, TargetKind};
use rustix::fs::{Access, access};

use crate::{Error, Result, rank::environment::forget_cargo_run};

/// Returns the executable that `program` names.
///
/// With a `/`, it is a path. A name is a binary or example of the Cargo workspace of the current directory, which is
/// first built in release mode (Cargo's messages go to stderr). Otherwise it is an executable beside the running one,
/// or in `PATH`.
///
/// # Errors
/// [`Error::Program`] when there is no such program, or two packages have a target of this name, or Cargo fails.
pub fn find_program(program: impl AsRef<OsStr>) -> Result<PathBuf> {
    match locate(program.as_ref())? {
        Located::Executable(path) => Ok(path),
        Located::Target(target) => target.build(),
    }
}

/// Returns the path that [`find_program`] would return, and the build command. Does not build.
pub(crate) fn plan_program(program: &OsStr) -> Result<(PathBuf, Option<String>)> {
    Ok(match locate(program)? {
        Located::Executable(path) => (path, None),
        Located::Target(target) => (target.executable.clone(), Some(target.build_command())),
    })
}

/// With the value `no`, names are those of executables, and nothing is built.
const BUILD: &str = "FSDP_LAUNCH_BUILD";

enum Located {
    Executable(PathBuf),
    Target(Target),
}

fn locate(program: &OsStr) -> Result<Located> {
    if program.as_bytes().contains(&b'/') {
        return check_path(PathBuf::from(program)).map(Located::Executable);
    }
    let (workspace, suggestion) = match env::var_os(BUILD).is_some_and(|value| value == "no") {
        true => (format!("in a workspace ({BUILD}=no)"), None),
        false => match find_target(program)? {
            Found::Target(target) => return Ok(Located::Target(target)),
            Found::Nothing { places, suggestion } => (places, suggestion),
        },
    };
    let beside = env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let found = beside.as_ref().map(|dir| dir.join(program)).filter(|it| runnable(it));
    if let Some(found) = found.or_else(|| find_in_path(program)) {
        tracing::debug!(program = ?found, "found");
        return Ok(Located::Executable(found));
    }
    let here =
        Path::new(program).is_file().then(|| format!(". There is a file of that name here: ./{}", program.display()));
    let suggestion = suggestion.map(|name| format!(". Did you mean {name}?"));
    let hint = here.or(suggestion).unwrap_or_default();
    let beside = beside.map_or("beside fsdp-launch".into(), |dir| format!("beside fsdp-launch, in {}", dir.display()));
    Err(Error::Program(format!(
        "program {program:?} was not found. Searched: (1) {workspace}; (2) {beside}; (3) the directories of PATH. \
         Check the name against the [[bin]] and [[example]] targets, or give a path, which has a '/' in it{hint}"
    )))
}

enum Found {
    Target(Target),
    Nothing {
        /// The places that were searched, in words.
        places: String,
        /// A target with a similar name.
        suggestion: Option<String>,
    },
}

impl Found {
    fn nothing(places: String) -> Self {
        Found::Nothing { places, suggestion: None }
    }
}

/// A binary or example of the workspace.
struct Target {
    name: String,
    example: bool,
    package: PackageId,
    package_name: String,
    package_dir: PathBuf,
    /// Whether to build with `--workspace`: if all members are default members, and the target's name and kind are
    /// unique.
    with_all: bool,
    /// Default path of the executable.
    executable: PathBuf,
}

fn find_target(name: &OsStr) -> Result<Found> {
    let here = env::current_dir().map_err(Error::system("read the current directory"))?;
    // Starting Cargo outside a workspace would take longer than the launch.
    let Some(root) = here.ancestors().find(|dir| dir.join("Cargo.toml").is_file()) else {
        return Ok(Found::nothing(format!("a Cargo workspace, but {} is not in one", here.display())));
    };
    let Some(name) = name.to_str() else {
        return Ok(Found::nothing("the Cargo workspace, whose targets are all named in UTF-8".into()));
    };
    let metadata = match read_metadata() {
        Ok(metadata) => metadata,
        Err(reason) => {
            tracing::debug!(%reason, "no workspace");
            return Ok(Found::nothing(format!(
                "the Cargo workspace of {}, which can't be read: {reason}",
                root.display()
            )));
        }
    };
    let (mut targets, others): (Vec<_>, Vec<_>) =
        runnable_targets(&metadata).into_iter().partition(|it| it.name == name);
    if targets.len() > 1 {
        // As in Cargo: prefer the current package's target, and a binary over an example.
        let closest = targets.iter().filter(|it| here.starts_with(&it.package_dir)).map(depth).max();
        if closest.is_some() {
            targets.retain(|it| here.starts_with(&it.package_dir) && Some(depth(it)) == closest);
        }
        if targets.iter().any(|it| !it.example) {
            targets.retain(|it| !it.example);
        }
    }
    if targets.len() > 1 {
        let packages: Vec<_> = targets.into_iter().map(|it| it.package_name).collect();
        return Err(Error::Program(format!(
            "{name:?} is a target of several packages: {}. Change into the directory of one, or give the path of a \
             built executable",
            packages.join(", ")
        )));
    }
    let nothing = || Found::Nothing {
        places: format!("the binaries and examples of the Cargo workspace {}", metadata.workspace_root),
        suggestion: nearest(name, others.iter().map(|it| it.name.as_str())).map(str::to_owned),
    };
    Ok(targets.pop().map_or_else(nothing, Found::Target))
}

fn depth(target: &Target) -> usize {
    target.package_dir.components().count()
}

fn read_metadata() -> std::result::Result<cargo_metadata::Metadata, String> {
    let mut command = MetadataCommand::new().cargo_path(cargo()).no_deps().cargo_command();
    forget_cargo_run(&mut command);
    let output = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "cargo is not in PATH".into(),
        _ => format!("cargo can't be started: {error}"),
    })?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    MetadataCommand::parse(String::from_utf8_lossy(&output.stdout)).map_err(|error| error.to_string())
}

fn runnable_targets(metadata: &cargo_metadata::Metadata) -> Vec<Target> {
    let mut found = Vec::new();
    for package in metadata.workspace_packages() {
        for target in &package.targets {
            let example = target.kind.contains(&TargetKind::Example)
                && target.crate_types.iter().any(|it| it.to_string() == "bin");
            if example || target.kind.contains(&TargetKind::Bin) {
                let directory = metadata.target_directory.join("release");
                let directory = if example { directory.join("examples") } else { directory };
                found.push(Target {
                    executable: directory.join(&target.name).into(),
                    name: target.name.clone(),
                    example,
                    package: package.id.clone(),
                    package_name: package.name.to_string(),
                    package_dir: package.manifest_path.parent().map_or_else(PathBuf::new, |dir| dir.into()),
                    with_all: true,
                });
            }
        }
    }
    let names: Vec<_> = found.iter().map(|it| (it.name.clone(), it.example)).collect();
    // Cargo before 1.71 does not report default members.
    let all_are_default = metadata.workspace_default_members.is_missing()
        || metadata.workspace_default_packages().len() == metadata.workspace_packages().len();
    for target in &mut found {
        let of_its_name = names.iter().filter(|(name, example)| (name, *example) == (&target.name, target.example));
        target.with_all = all_are_default && of_its_name.count() == 1;
    }
    found
}

impl Target {
    fn kind(&self) -> &'static str {
        if self.example { "--example" } else { "--bin" }
    }

    /// Formats the build command for people. `build` uses the package id instead of the name, because the id is unique.
    fn build_command(&self) -> String {
        let packages = if self.with_all { "--workspace".into() } else { format!("-p {}", self.package_name) };
        format!("cargo build --release {packages} {} {}", self.kind(), self.name)
    }

    fn build(&self) -> Result<PathBuf> {
        let shown = self.build_command();
        tracing::debug!(command = %shown, "building");
        let mut command = Command::new(cargo());
        command.args(["build", "--release"]);
        // Build with the features of `cargo build --workspace`, to reuse its artifacts.
        match self.with_all {
            true => command.arg("--workspace"),
            false => command.args(["-p", &self.package.repr]),
        };
        command.args([self.kind(), &self.name]);
        command.arg("--message-format=json-render-diagnostics").stdin(Stdio::null()).stdout(Stdio::piped());
        forget_cargo_run(&mut command);
        let mut cargo = command.spawn().map_err(Error::system("start cargo"))?;
        let mut executable = None;
        if let Some(stdout) = cargo.stdout.take() {
            for message in Message::parse_stream(BufReader::new(stdout)) {
                match message.map_err(Error::system("read cargo's messages"))? {
                    Message::CompilerArtifact(artifact)
                        if artifact.package_id == self.package
                            && artifact.target.name == self.name
                            && artifact.target.kind.contains(&TargetKind::Example) == self.example =>
                    {
                        executable = artifact.executable.or(executable);
                    }
                    _ => {}
                }
            }
        }
        let status = cargo.wait().map_err(Error::system("wait for cargo"))?;
        if !status.success() {
            return Err(Error::Program(format!("`{shown}` failed with {status}: see its messages above")));
        }
        executable.map(PathBuf::from).ok_or_else(|| {
            Error::Program(format!(
                "`{shown}` reported no executable: run it by hand, and give the path of the executable"
            ))
        })
    }
}

/// Returns the Cargo that runs this process, or else the one in `PATH`.
fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Finds an executable in the directories of `PATH`.
fn find_in_path(program: &OsStr) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // An empty entry of PATH means the current directory.
    let dirs = env::split_paths(&path).map(|dir| if dir.as_os_str().is_empty() { ".".into() } else { dir });
    dirs.map(|dir| dir.join(program)).find(|it| runnable(it))
}

fn check_path(path: PathBuf) -> Result<PathBuf> {
    match path.metadata() {
        Err(error) => Err(unreachable_path(&path, &error)),
        Ok(meta) if !meta.is_file() => Err(not_a_file(&path, &meta)),
        Ok(_) if !runnable(&path) => Err(Error::Program(format!(
            "program {path:?} can't be run: it is a file without execute permission. \
             `chmod +x` makes a script with a #! line executable; else start its interpreter: `python3 FILE`"
        ))),
        Ok(_) => Ok(path),
    }
}

fn not_a_file(path: &Path, meta: &Metadata) -> Error {
    let found = if meta.is_dir() { "a directory" } else { "not a regular file" };
    Error::Program(format!("program {path:?} can't be run: it is {found}. Give the path of an executable or a script"))
}

fn unreachable_path(path: &Path, error: &io::Error) -> Error {
    Error::Program(format!("program {path:?} can't be run: {error}. Check the path, relative to the current directory"))
}

fn runnable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

/// Runs a script with `runpy`, as torchrun's `--run-path`.
const RUN_PATH: &str = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// How Python runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PythonKind {
    /// A script file.
    Script,
    /// `--module`: a module.
    Module,
    /// `--run-path`: a file, directory or zip archive for `runpy.run_path`.
    RunPath,
}

/// Returns whether the name ends in .py.
pub(crate) fn is_python_script(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py")
}

/// Returns the interpreter, and its arguments up to the script's own.
pub(crate) fn python_command(kind: PythonKind, name: OsString) -> Result<(PathBuf, Vec<OsString>)> {
    if kind != PythonKind::Module {
        let path = PathBuf::from(&name);
        match path.metadata() {
            Err(error) => return Err(unreachable_path(&path, &error)),
            Ok(meta) if kind == PythonKind::Script && !meta.is_file() => return Err(not_a_file(&path, &meta)),
            Ok(_) => {}
        }
    }
    // Unbuffered, so that lines appear when they are printed.
    let mut args: Vec<OsString> = vec!["-u".into()];
    match kind {
        PythonKind::Script => {}
        PythonKind::Module => args.push("-m".into()),
        PythonKind::RunPath => args.extend(["-c".into(), RUN_PATH.into()]),
    }
    args.push(name);
    Ok((interpreter()?, args))
}

fn interpreter() -> Result<PathBuf> {
    let name = env::var_os("PYTHON_EXEC").filter(|name| !name.is_empty()).unwrap_or_else(|| "python3".into());
    if Path::new(&name).components().count() > 1 {
        return check_path(name.into())
            .map_err(|error| Error::Program(format!("PYTHON_EXEC is not a Python interpreter: {error}")));
    }
    find_in_path(&name).ok_or_else(|| {
        Error::Program(format!("the Python interpreter {name:?} is not in PATH: set PYTHON_EXEC to an interpreter"))
    })
}

/// Returns the most similar of the `known` words, if it is similar enough.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let similar = known.into_iter().map(|it| (strsim::jaro(word, it), it)).filter(|(similarity, _)| *similarity > 0.8);
    similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, it)| it)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_only_similar_words() {
        let of = |word| nearest(word, ["train", "trace", "eval"]);
        assert_eq!((of("trian"), of("trac"), of("EVAL"), of("bench")), (Some("train"), Some("trace"), None, None));
    }
}
