//! Reads candle-transformers' files from Cargo's registry, and adds one line to each that uses candle_nn.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

#[allow(unreachable_pub)]
#[path = "src/diff.rs"]
mod diff;

/// The models, and the files that they import.
const MODELS: &[&str] = &[
    "bert",
    "deepseek2",
    "distilbert",
    "gemma",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "quantized_llama",
    "qwen2",
    "qwen3",
    "t5",
    "vit",
    "whisper/audio",
    "whisper/mod",
    "whisper/model",
    "whisper/quantized_model",
    "with_tracing",
];
/// Models that stay as they are: they read GGUF files.
const READERS: &[&str] = &["quantized_phi3", "quantized_qwen2", "quantized_qwen3"];
const SIBLINGS: &[&str] = &["quantized_nn", "quantized_var_builder", "utils"];

const LINE: &str = "use fsdp_candle::nn as candle_nn;\n";
/// Models that the feature `all` leaves out, separated by commas: files that do not compile.
const WITHOUT: &str = "CANDLE_TRANSFORMERS_WITHOUT";
const DOCUMENT: &str = "../../docs/from-candle.md";
const LOCK: &str = "../../Cargo.lock";

/// Lints that the workspace enables for its own code.
const ALLOWED: &str = "#[allow(warnings, clippy::all, missing_docs, unsafe_op_in_unsafe_fn, unreachable_pub, \
    clippy::undocumented_unsafe_blocks, clippy::unwrap_used, clippy::todo, clippy::unimplemented, clippy::dbg_macro)]";

/// Returns the version in the lock file.
fn version() -> String {
    let lock = fs::read_to_string(LOCK).expect("the workspace has a Cargo.lock");
    let (_, rest) = lock.split_once("name = \"candle-transformers\"\nversion = \"").expect("it is in Cargo.lock");
    rest.split('"').next().unwrap_or_default().to_owned()
}

/// Returns the source of candle-transformers, or the path where it is missing.
fn source() -> Result<PathBuf, String> {
    println!("cargo::rerun-if-env-changed=CANDLE_TRANSFORMERS");
    println!("cargo::rerun-if-env-changed=CARGO_HOME");
    if let Some(dir) = env::var_os("CANDLE_TRANSFORMERS") {
        let src = PathBuf::from(dir).join("src");
        return if src.is_dir() { Ok(src) } else { Err(format!("{} is no folder", src.display())) };
    }
    let home = env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(".cargo")));
    let registries = home.unwrap_or_default().join("registry/src");
    let package = format!("candle-transformers-{}/src", version());
    let dirs = fs::read_dir(&registries).into_iter().flatten().flatten();
    dirs.map(|dir| dir.path().join(&package)).find(|src| src.is_dir()).ok_or_else(|| {
        format!(
            "{}/*/{package} is not there: `cargo fetch --locked` downloads it. Where crates are vendored, set \
             CANDLE_TRANSFORMERS to the folder of candle-transformers",
            registries.display()
        )
    })
}

/// Returns the file with the line before its first import.
fn changed(text: &str) -> String {
    // `pub use candle_nn;` alone needs no line.
    let uses = text.contains("candle_nn::") || text.contains("candle_nn as");
    match uses.then(|| text.find("\nuse ")) {
        Some(Some(at)) => format!("{}{LINE}{}", &text[..=at], &text[at + 1..]),
        Some(None) => {
            // After the file's own documentation and attributes.
            let is_above = |line: &&str| ["//", "#!", "\n"].iter().any(|above| line.starts_with(above));
            let at = text.split_inclusive('\n').take_while(is_above).map(str::len).sum();
            format!("{}{LINE}{}", &text[..at], &text[at..])
        }
        None => text.to_owned(),
    }
}

/// Returns the file for the module `original`.
fn moved(text: &str) -> String {
    // The crate's root has a macro with this name.
    text.replace("crate::", "crate::original::").replace("#[macro_export]\n", "")
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("it is in a folder")).expect("OUT_DIR can be written");
    fs::write(path, text).expect("OUT_DIR can be written");
}

fn module(path: &Path, name: &str) -> String {
    format!("#[path = {path:?}]\npub mod {name};\n")
}

/// Returns the modules of the tree in `dir`.
fn tree(dir: &Path, models: &[&str]) -> String {
    let mut code = format!("{ALLOWED}\npub mod models {{\n");
    for name in models.iter().filter(|name| !name.contains('/') || name.ends_with("/mod")) {
        code += &module(&dir.join(format!("models/{name}.rs")), name.trim_end_matches("/mod"));
    }
    code += "}\n";
    for name in SIBLINGS {
        code += &format!("{ALLOWED}\n{}", module(&dir.join(format!("{name}.rs")), name));
    }
    code
}

fn code(src: &Path, out: &Path) -> String {
    let names = MODELS.iter().map(|name| format!("models/{name}.rs"));
    let names = names.chain(SIBLINGS.iter().map(|name| format!("{name}.rs")));
    let mut files = String::new();
    for name in names {
        let from = src.join(&name);
        let text = fs::read_to_string(&from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        write(&out.join("changed").join(&name), &changed(&text));
        write(&out.join("original").join(&name), &moved(&text));
        let changed = out.join("changed").join(&name);
        let _ = writeln!(
            files,
            "File {{ name: {name:?}, original: include_str!({from:?}), changed: include_str!({changed:?}) }},"
        );
    }
    for name in READERS.iter().map(|name| format!("models/{name}.rs")) {
        let text = fs::read_to_string(src.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        write(&out.join("original").join(&name), &moved(&text));
    }
    // The files after the document's diffs.
    let document = fs::read_to_string(DOCUMENT).expect("the document is there");
    let mut documented: Vec<(String, String)> = vec![];
    for diff in diff::of_document(&document) {
        let name = diff.file.trim_start_matches("candle-transformers/src/").to_owned();
        let text = fs::read_to_string(src.join(&name)).unwrap_or_else(|error| panic!("{DOCUMENT}, {name}: {error}"));
        let at = documented.iter().position(|(other, _)| *other == name);
        let at = at.unwrap_or_else(|| {
            documented.push((name, text));
            documented.len() - 1
        });
        documented[at].1 = diff.apply(&documented[at].1).unwrap_or_else(|error| panic!("{DOCUMENT}: {error}"));
    }
    let mut modules = String::new();
    for (name, text) in documented {
        let path = out.join("documented").join(&name);
        write(&path, &text);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        modules += &module(&path, &name);
    }
    format!(
        "#[doc(hidden)]\npub const MISSING: Option<&str> = None;\n\
         /// The files, in no order.\npub const FILES: &[File] = &[{files}];\n\
         {}\n{ALLOWED}\npub mod original {{\n{}}}\n\
         {ALLOWED}\npub mod documented {{\npub use crate::models::with_tracing;\n{modules}}}\n",
        tree(&out.join("changed"), MODELS),
        tree(&out.join("original"), &[MODELS, READERS].concat()),
    )
}

/// Returns the paths of all Rust files below a folder, relative to it.
fn files_below(dir: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut files = vec![];
    for entry in entries.flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            files.extend(files_below(&entry.path(), &format!("{name}/")));
        } else if name.ends_with(".rs") {
            files.push(name);
        }
    }
    files
}

/// Returns the code of the feature `all`: every file with the line, except models that `WITHOUT` names.
fn all(src: &Path, out: &Path) -> String {
    println!("cargo::rerun-if-env-changed={WITHOUT}");
    let without = env::var(WITHOUT).unwrap_or_default();
    let without: Vec<String> = without.split(',').map(|name| format!("pub mod {name};")).collect();
    for name in files_below(src, "") {
        let text = fs::read_to_string(src.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = match name.as_str() {
            "models/mod.rs" => {
                let kept = text.lines().filter(|line| !without.iter().any(|gone| gone == line.trim()));
                kept.map(|line| format!("{line}\n")).collect()
            }
            _ => changed(&text),
        };
        write(&out.join("all").join(&name), &text);
    }
    let root = fs::read_to_string(src.join("lib.rs")).expect("candle-transformers has a lib.rs");
    let names = root.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let modules = names.map(|name| {
        let nested = out.join(format!("all/{name}/mod.rs"));
        let path = if nested.exists() { nested } else { out.join(format!("all/{name}.rs")) };
        format!("{ALLOWED}\n{}", module(&path, name))
    });
    modules.collect()
}

fn main() {
    for path in ["build.rs", "src/diff.rs", DOCUMENT, LOCK] {
        println!("cargo::rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets it"));
    let code = match source() {
        Ok(src) => {
            println!("cargo::rerun-if-changed={}", src.display());
            match env::var_os("CARGO_FEATURE_ALL") {
                Some(_) => all(&src, &out),
                None => code(&src, &out),
            }
        }
        Err(place) => {
            // The next build looks again.
            println!("cargo::rerun-if-changed={}", out.join("not-there").display());
            format!(
                "#[doc(hidden)]\npub const MISSING: Option<&str> = Some({place:?});\n\
                 /// None.\npub const FILES: &[File] = &[];\n"
            )
        }
    };
    write(&out.join("files.rs"), &code);
}
