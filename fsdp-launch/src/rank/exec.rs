//! How a rank's process is started: in a session of its own, killed with the launcher, and only if the kernel runs its
//! program.

use std::{
    collections::BTreeMap,
    env,
    ffi::{CString, OsStr, OsString, c_char},
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, process::CommandExt},
    path::Path,
    process::Command,
    ptr,
};

use fsdp_core::file_limit::restore_signal;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal, setsid};

/// Makes `command` start as the leader of a new session and process group. The terminal's Ctrl-C does not reach it, and
/// a signal to the group also reaches its children. SIGXFSZ, which the launcher ignores, has its default again.
pub(crate) fn own_session(command: &mut Command) {
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: setsid and
    // `restore_signal` are, and the hook does not allocate.
    unsafe {
        command.pre_exec(|| {
            restore_signal();
            setsid().map(drop).map_err(io::Error::from)
        });
    }
}

/// Like [`own_session`]; the kernel also kills the process when the thread that spawned it ends: the launcher's main
/// thread.
pub(crate) fn own_session_killed_with_launcher(command: &mut Command) {
    own_session(command);
    let launcher = getpid();
    // SAFETY: as above: prctl and getppid are async-signal-safe, and an error from a code does not allocate.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the launcher died before prctl, no signal comes.
            if getppid() == Some(launcher) { Ok(()) } else { Err(io::Error::from(rustix::io::Errno::SRCH)) }
        });
    }
}

/// Length of the start that identifies a script.
const HEAD_BYTES: u64 = 256;

/// Makes `command` execute its program by `execve`, without a shell. The standard library uses `execvp`, which gives a
/// file that the kernel refuses to a shell: a damaged program would run as a script. Call it last: it copies arguments
/// and environment.
///
/// A script without a `#!` line still runs in a shell.
pub(crate) fn exec_without_shell(command: &mut Command) -> io::Result<()> {
    let program = command.get_program();
    // The standard library searches PATH for a name.
    if !program.as_bytes().contains(&b'/') || is_shell_script(Path::new(program)) {
        return Ok(());
    }
    let words = CStrings::of(std::iter::once(program).chain(command.get_args()).map(OsStr::to_owned))?;
    let mut variables: BTreeMap<OsString, OsString> = env::vars_os().collect();
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => variables.insert(name.to_owned(), value.to_owned()),
            None => variables.remove(name),
        };
    }
    let variables = variables.into_iter().map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        name
    });
    let variables = CStrings::of(variables)?;
    let exec = move || {
        let (argv, envp) = (words.as_ptr(), variables.as_ptr());
        // SAFETY: both arrays end with a null pointer; their other pointers refer to strings that this closure owns.
        // The first string is the program's path.
        unsafe { libc::execve(*argv, argv, envp) };
        Err(io::Error::last_os_error())
    };
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: execve is one, and
    // an error from a code does not allocate.
    unsafe {
        command.pre_exec(exec);
    }
    Ok(())
}

/// Returns whether a file is text without a `#!` line.
fn is_shell_script(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
    read.is_ok() && !head.is_empty() && !head.starts_with(b"#!") && is_text(&head)
}

/// Returns whether the start of a file may be text: UTF-8, possibly cut within the last character, and no control
/// characters except white space.
fn is_text(head: &[u8]) -> bool {
    let is_control = |byte: &u8| byte.is_ascii_control() && !b"\t\n\r\x0c".contains(byte);
    let is_utf8 = str::from_utf8(head).err().is_none_or(|error| error.error_len().is_none());
    is_utf8 && !head.iter().any(is_control)
}

/// C strings with an array of pointers to them.
struct CStrings {
    /// Ends with a null pointer.
    pointers: Vec<*const c_char>,
    _strings: Vec<CString>,
}

// SAFETY: the pointers refer to memory that this value owns and does not change.
unsafe impl Send for CStrings {}
// SAFETY: as above.
unsafe impl Sync for CStrings {}

impl CStrings {
    fn of(strings: impl Iterator<Item = OsString>) -> io::Result<Self> {
        let strings: Vec<CString> = strings.map(|it| CString::new(it.as_bytes())).collect::<Result<_, _>>()?;
        let pointers = strings.iter().map(|it| it.as_ptr()).chain([ptr::null()]).collect();
        Ok(CStrings { pointers, _strings: strings })
    }

    fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_text() {
        let umlaut = "\u{fc}".as_bytes();
        for text in [&b"echo a\tb\r\n\x0c"[..], umlaut, &umlaut[..1], &[b"a", &umlaut[..1]].concat()] {
            assert!(is_text(text), "{text:?}");
        }
        for other in [&b"\x7fELF"[..], b"\0", b"\x1f\x8b\x08", b"echo \x1b[0m", &umlaut[1..], b"\xfc\n"] {
            assert!(!is_text(other), "{other:?}");
        }
    }

    #[test]
    fn exec_passes_arguments_and_environment() {
        let mut command = Command::new("/usr/bin/env");
        command.env_remove("PATH").env("FSDP_TEST_A", "b c").env("FSDP_TEST_B", "");
        exec_without_shell(&mut command).unwrap();
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.contains(&"FSDP_TEST_A=b c") && lines.contains(&"FSDP_TEST_B="), "{text}");
        assert!(!lines.iter().any(|line| line.starts_with("PATH=")), "{text}");

        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo \"$0|$1|$#\"", "a b", ""]);
        exec_without_shell(&mut command).unwrap();
        assert_eq!(command.output().unwrap().stdout, b"a b||1\n");
        // A name is searched for in PATH.
        let mut command = Command::new("true");
        exec_without_shell(&mut command).unwrap();
        assert!(command.status().unwrap().success());
    }
}
