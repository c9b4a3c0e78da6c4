//! The top-level modules of each library import only modules below them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_test_support::{read_text, workspace};

/// The modules of each library, bottom first.
const LAYERS: [(&str, &str); 5] = [
    (
        "fsdp-core",
        "device_id host_names file_limit error dtype device buffer channel mesh_layout env store hash text shared_file heartbeat \
        reduce_op error_file process_group device_mesh placement layout block_format dtensor",
    ),
    (
        "fsdp-ckpt",
        "cast escape file_names error region placeholder store checksum source model_prefix training_state safetensors checkpoint load finite convert diff hf \
         merge gguf torch weights open",
    ),
    ("fsdp-launch", "spec report error rendezvous pmi rank job program cli watch output launch"),
    (
        "fsdp-candle",
        "error warning autograd kernels storage disk graph upload pattern tensors collectives random extension adapter tensor_parallel \
        data_parallel initializer world dtensor fsdp activation_checkpoint display gradcheck nn optim state_dict \
        doc_example",
    ),
    (
        "examples",
        "console command_line flags json hub input data generate job writable metrics models tasks progress ranks schedule tensorboard",
    ),
];

/// Splits code at everything that is not an identifier.
fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Returns the code before the file's tests, without comments.
fn code(path: &Path) -> String {
    let text = read_text(path);
    let lines = text.split("#[cfg(test)]\nmod tests {").next().unwrap().lines();
    lines.map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Returns the names that follow `crate::`, directly or in braces.
fn names(code: &str) -> Vec<&str> {
    let mut names = vec![];
    for (at, prefix) in code.match_indices("crate::") {
        let path = &code[at + prefix.len()..];
        let (mut depth, mut begins) = (0, true);
        for (at, c) in path.char_indices() {
            match c {
                '{' => (depth, begins) = (depth + 1, depth == 0),
                '}' => depth -= 1,
                ',' => begins = depth == 1,
                _ if begins && !c.is_whitespace() => {
                    names.extend(words(&path[at..]).next());
                    begins = false
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

/// Returns the Rust files at a path, without those of tests.
fn files(path: &Path) -> Vec<PathBuf> {
    match path.is_dir() {
        _ if path.file_stem().unwrap() == "tests" => vec![],
        true => std::fs::read_dir(path).unwrap().flat_map(|entry| files(&entry.unwrap().path())).collect(),
        false => vec![path.to_owned()],
    }
}

#[test]
fn modules_import_lower_modules() {
    let mut wrong = vec![];
    for (library, layers) in LAYERS {
        let src = workspace().join(library).join("src");
        let levels = layers.split(' ').enumerate();
        let mut levels: HashMap<String, usize> = levels.map(|(level, name)| (name.to_owned(), level)).collect();
        for path in code(&src.join("lib.rs")).split(';').filter_map(|statement| statement.split("use ").nth(1)) {
            let path = path.trim_start_matches("crate::");
            let Some(&level) = levels.get(words(path).next().unwrap()) else { continue };
            words(path).for_each(|name| _ = levels.entry(name.to_owned()).or_insert(level));
        }
        for entry in std::fs::read_dir(&src).unwrap() {
            let path = entry.unwrap().path();
            let module = path.file_stem().unwrap().to_str().unwrap();
            if ["lib", "main", "bin"].contains(&module) {
                continue;
            }
            let level = levels.get(module).unwrap_or_else(|| panic!("{library}: add `{module}` to LAYERS"));
            for file in files(&path) {
                let code = code(&file);
                let higher =
                    names(&code).into_iter().filter(|name| levels.get(*name).is_none_or(|other| other > level));
                wrong.extend(higher.map(|name| format!("{}: crate::{name}", file.display())));
            }
        }
    }
    assert!(wrong.is_empty(), "imports of higher or unknown modules:\n{}", wrong.join("\n"));
}
