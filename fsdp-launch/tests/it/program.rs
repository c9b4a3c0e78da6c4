//! How the program is found and built.

use std::{fs, path::Path};

use crate::{executable, finish, launcher};

fn workspace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, content: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"a\", \"b\"]\n");
    for package in ["a", "b"] {
        write(
            &format!("{package}/Cargo.toml"),
            &format!("[package]\nname = \"{package}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n"),
        );
        write(&format!("{package}/src/lib.rs"), "");
        write(&format!("{package}/src/bin/both.rs"), &format!("fn main() {{ println!(\"both of {package}\") }}"));
    }
    write(
        "a/src/bin/trainer.rs",
        "fn main() { println!(\"{:?} {}\", std::env::args().nth(1), std::env::var(\"RANK\").unwrap()) }",
    );
    write("a/examples/demo.rs", "fn main() { println!(\"demo, {}\", env!(\"CARGO_PKG_NAME\")) }");
    write("b/src/bin/broken.rs", "fn main() { no_such_function() }");
    dir
}

fn in_dir(dir: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    // `cargo test` sets another package's variables for the launcher.
    finish(launcher(args).current_dir(dir).env("CARGO_NET_OFFLINE", "true").env("CARGO_PKG_NAME", "wrong"))
}

#[test]
fn targets_of_the_workspace_are_built_and_run() {
    let dir = workspace();
    let (code, stdout, stderr) = in_dir(dir.path(), &["--nproc-per-node", "2", "trainer", "--nproc-per-node"]);
    assert_eq!(code, Some(0), "{stderr}");
    let lines = crate::sorted(&stdout);
    assert_eq!(lines, ["[rank 0] Some(\"--nproc-per-node\") 0", "[rank 1] Some(\"--nproc-per-node\") 1"]);
    assert!(stderr.contains("Compiling a v0.1.0") && stderr.contains("`release` profile"), "{stderr}");

    let (code, stdout, stderr) = in_dir(dir.path(), &["--dry-run", "demo"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.starts_with("# built first by: cargo build --release --workspace --example demo\n"), "{stdout}");
    assert!(
        stdout.ends_with("target/release/examples/demo\n") && !dir.path().join("target/release/examples/demo").exists()
    );

    // From a subdirectory, without a rebuild.
    let (code, stdout, stderr) = in_dir(&dir.path().join("b/src"), &["demo"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] demo, a\n"), "{stderr}");
    let (code, _, stderr) = in_dir(dir.path(), &["demo"]);
    assert!(code == Some(0) && !stderr.contains("Compiling"), "{stderr}");

    let (code, _, stderr) = in_dir(dir.path(), &["both"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("\"both\" is a target of several packages: a, b"), "{stderr}");
    let (code, stdout, _) = in_dir(&dir.path().join("b"), &["both"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] both of b\n"));

    for (name, hint) in
        [("trianer", ". Did you mean trainer?"), ("demos", ". Did you mean demo?"), ("zzz", "'/' in it\n")]
    {
        let (code, _, stderr) = in_dir(dir.path(), &[name]);
        assert!(code == Some(1) && stderr.contains(hint), "{stderr}");
    }

    let (code, stdout, stderr) = in_dir(dir.path(), &["broken"]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(
        stderr.contains("no_such_function")
            && stderr.contains("`cargo build --release --workspace --bin broken` failed"),
        "{stderr}"
    );
}

#[test]
fn non_default_members_do_not_affect_features() {
    let dir = workspace();
    let write = |path: &str, content: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    // The common dependency does not compile with the feature that `b` enables.
    let package = |name: &str, more: &str| {
        write(
            &format!("{name}/Cargo.toml"),
            &format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n{more}"),
        );
    };
    package("c", "[features]\ncuda = []\n");
    write("c/src/lib.rs", "#[cfg(feature = \"cuda\")]\ncompile_error!(\"there is no GPU\");");
    package("a", "[dependencies]\nc = { path = \"../c\" }\n");
    package("b", "[dependencies]\nc = { path = \"../c\", features = [\"cuda\"] }\n");
    let (code, _, stderr) = in_dir(dir.path(), &["trainer", "x"]);
    assert!(code == Some(1) && stderr.contains("there is no GPU"), "{stderr}");

    write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"a\", \"b\", \"c\"]\ndefault-members = [\"a\"]\n");
    let (code, stdout, stderr) = in_dir(dir.path(), &["--dry-run", "trainer"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("# built first by: cargo build --release -p a --bin trainer\n"), "{stdout}");
    let (code, stdout, stderr) = in_dir(dir.path(), &["trainer", "x"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] Some(\"x\") 0\n"), "{stderr}");
}

#[test]
fn a_name_without_target_is_found_in_path() {
    let dir = workspace();
    let tool = executable(dir.path().join("some-tool"), "#!/bin/sh\necho tool $1\n");
    let path = format!("{}:{}", tool.parent().unwrap().display(), std::env::var("PATH").unwrap());
    for here in [dir.path(), Path::new("/")] {
        let (code, stdout, stderr) = finish(launcher(&["some-tool", "x"]).current_dir(here).env("PATH", &path));
        assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] tool x\n"), "{stderr}");
    }
}

#[test]
fn works_without_cargo_or_a_workspace() {
    let dir = tempfile::tempdir().unwrap();
    executable(dir.path().join("some-tool"), "#!/bin/sh\necho tool\n");
    let mut command = launcher(&["some-tool"]);
    command.current_dir("/").env_remove("CARGO").env("PATH", dir.path());
    assert_eq!(finish(&mut command), (Some(0), "[rank 0] tool\n".into(), String::new()));
    // An unreadable workspace is reported only if nothing is found.
    let workspace = workspace();
    command.current_dir(workspace.path());
    assert_eq!(finish(&mut command), (Some(0), "[rank 0] tool\n".into(), String::new()));
    let mut command = launcher(&["no-such-tool"]);
    let (code, _, stderr) = finish(command.current_dir(workspace.path()).env_remove("CARGO").env("PATH", dir.path()));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("can't be read: cargo is not in PATH"), "{stderr}");
}

#[test]
fn fsdp_launch_build_no_skips_the_build() {
    let (workspace, built) = (workspace(), tempfile::tempdir().unwrap());
    executable(built.path().join("trainer"), "#!/bin/sh\necho built before\n");
    let mut command = launcher(&["trainer"]);
    command.current_dir(workspace.path()).env("FSDP_LAUNCH_BUILD", "no").env("PATH", built.path());
    assert_eq!(finish(&mut command), (Some(0), "[rank 0] built before\n".into(), String::new()));
    let (code, _, stderr) = finish(launcher(&["demo"]).current_dir(workspace.path()).env("FSDP_LAUNCH_BUILD", "no"));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("\"demo\" was not found") && stderr.contains("FSDP_LAUNCH_BUILD=no"), "{stderr}");
}

#[test]
fn an_unknown_program_names_the_searched_places() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("train.sh"), "").unwrap();
    let (code, stdout, stderr) = finish(launcher(&["train.sh"]).current_dir(dir.path()));
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    for part in [
        "\"train.sh\" was not found",
        "is not in one",
        "beside fsdp-launch, in /",
        "PATH",
        "give a path",
        "here: ./train.sh",
    ] {
        assert!(stderr.contains(part), "{part} is not in {stderr}");
    }
}

#[test]
fn rejects_paths_that_cannot_run() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("plain"), "#!/bin/sh\n").unwrap();
    executable(dir.path().join("orphan"), "#!/no/such/interpreter\n");
    for (program, part) in [
        ("./plain", "without execute permission. `chmod +x`"),
        ("./", "it is a directory. Give the path of an executable"),
        ("/dev/null", "not a regular file"),
        ("./nothing", "No such file"),
        ("./orphan", "the interpreter its #! line names"),
    ] {
        let (code, stdout, stderr) = finish(launcher(&[program]).current_dir(dir.path()));
        assert_eq!((code, stdout.as_str()), (Some(1), ""));
        assert!(stderr.contains(part), "{part} is not in {stderr}");
        assert_eq!(stderr.contains("chmod"), program == "./plain", "{stderr}");
    }
}

#[test]
fn a_damaged_program_does_not_run_in_a_shell() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // Truncated, for another machine, text with binary bytes, and empty.
    let whole = fs::read("/bin/sh").unwrap();
    let mut foreign = whole.clone();
    foreign[18] ^= 0xff;
    let files: [(&str, &[u8]); 7] = [
        ("cut", &whole[..60]),
        ("magic", &whole[..4]),
        ("foreign", &foreign),
        ("words", b"\0\necho a shell ran this\n"),
        ("control", b"\x02\necho a shell ran this\n"),
        ("bytes", b"\xff\xfe\necho a shell ran this\n"),
        ("empty", b""),
    ];
    for (name, content) in files {
        executable(path(name), content);
    }
    let interpreter = format!("#!{}\necho a shell ran this\n", path("cut").display());
    executable(path("script"), &interpreter);
    for name in ["cut", "magic", "foreign", "words", "control", "bytes", "empty", "script"] {
        let (code, stdout, stderr) = finish(launcher(&[&format!("./{name}")]).current_dir(dir.path()));
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{name}: {stderr}");
        let message = "Exec format error (os error 8): it is neither a program for this machine nor a script: damaged";
        assert!(stderr.contains(message) && stderr.lines().count() == 1, "{name}: {stderr}");
    }
    // Text without a #! line is a shell script.
    executable(path("text"), "echo \"$RANK $*\"\n");
    let (code, stdout, _) = finish(launcher(&["./text", "a", "b"]).current_dir(dir.path()));
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] 0 a b\n"));
}
