//! The top-level modules of each library import only modules below them, as do the files of some folders.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_test_support::{read_text, workspace};

/// The modules of each library, bottom first.
const LAYERS: [(&str, &str); 6] = [
    (
        "fsdp-core",
        "device_id host_names file_limit error dtype device buffer channel mesh_layout env store hash text shared_file heartbeat \
        reduce_op error_file placement layout process_group device_mesh block_format dtensor",
    ),
    (
        "fsdp-ckpt",
        "cast escape file_names error region placeholder store text_file checksum source model_prefix training_state safetensors checkpoint load finite convert diff hf \
         merge gguf torch weights open",
    ),
    ("fsdp-launch", "spec report error rendezvous pmi rank job program cli watch output launch"),
    (
        "fsdp-candle",
        "error warning autograd kernels storage disk graph upload pattern tensors collectives context_parallel random extension adapter float8 tensor_parallel \
        data_parallel expert_parallel initializer world dtensor fsdp activation_checkpoint display gradcheck nn optim state_dict \
        checkpoints doc_example",
    ),
    (
        "examples/corpus",
        "checked permutation format documents sequence tokenise source shards files memory tokens prepare stream mixture",
    ),
    (
        "examples",
        "console command_line flags json hub input writable metrics ranks data generate job models tasks progress schedule tensorboard",
    ),
];

/// The files and folders of a folder, bottom first.
const FILES: [(&str, &str); 9] = [
    (
        "fsdp-candle/src/fsdp",
        "backward_nodes comm frozen_call listed param_nodes policy shard_reader shard_inputs unit_path unsharded_memory weight_format full_values gradient \
         offload shard encoding settings unit_options order param_events param_spec param unit_params replica_shards \
         all_gather param_group memory_summary callers diagnostics reduction schedule hooks handles built division var_map unit_call module fully_shard \
         parallelize",
    ),
    ("fsdp-candle/src/checkpoints", "agree values directory train_state manager"),
    ("fsdp-candle/src/kernels", "candle_interop eight_bits slice layers no_cuda cpu cuda"),
    ("fsdp-candle/src/graph", "computed teardown running recomputation token record operation joined"),
    (
        "fsdp-candle/src/nn",
        "weight cpu input last_upload target_rows cuda no_cuda limits empty activation residual tensor_parallel linear \
         swiglu layer_norm dropout softmax attention cpu_flash_attention rotary rotary_emb batch_norm group_norm embedding \
         ops rnn moe conv pool local_experts expert_parallel experts loss kv_cache",
    ),
    (
        "fsdp-candle/src/nn/attention",
        "documents options visible_keys engine composite cpu no_cuda cuda whole_keys sinks fused context functions",
    ),
    (
        "fsdp-candle/src/optim",
        "hyper_parameters moment_kind shard_update disk state reach candle_loop sharded_optimizer elementwise sgd adam \
         candle_optimizer check_finite clip_grad ema grad_accumulator grad_scaler muon_exchange muon",
    ),
    ("fsdp-candle/src/dtensor", "placement_rules tensor ops"),
    ("fsdp-ckpt/src/checkpoint", "agree manifest run_dir async_save hosts plan writable host_dirs open_for save"),
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

/// Returns the names that follow a prefix, directly or in braces.
fn names<'a>(code: &'a str, prefix: &str) -> Vec<&'a str> {
    let mut names = vec![];
    let continues = |at: usize| code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
    for (at, _) in code.match_indices(prefix).filter(|(at, _)| !continues(*at)) {
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
                let higher = names(&code, "crate::")
                    .into_iter()
                    .filter(|name| levels.get(*name).is_none_or(|other| other > level));
                wrong.extend(higher.map(|name| format!("{}: crate::{name}", file.display())));
            }
        }
    }
    assert!(wrong.is_empty(), "imports of higher or unknown modules:\n{}", wrong.join("\n"));
}

#[test]
fn files_import_lower_files() {
    let mut wrong = vec![];
    for (folder, order) in FILES {
        let src = workspace().join(folder);
        let order: Vec<&str> = order.split(' ').collect();
        let module = folder.rsplit('/').next().unwrap();
        for entry in std::fs::read_dir(&src).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            if ["mod", "tests"].contains(&name) {
                continue;
            }
            let floor = order.iter().position(|file| *file == name);
            let floor = floor.unwrap_or_else(|| panic!("{folder}: add `{name}` to FILES"));
            for file in files(&path) {
                let code = code(&file);
                // `super` of a file is its folder.
                let inside = file.strip_prefix(&src).unwrap();
                let is_mod = file.file_stem().unwrap() == "mod";
                let ups = inside.components().count() - usize::from(is_mod);
                let by_super = names(&code, &"super::".repeat(ups)).into_iter().filter(|name| order.contains(name));
                // A path from the crate must name a file: what the folder exports again would hide it.
                let used = by_super.chain(names(&code, &format!("crate::{module}::")));
                let higher = used.filter(|used| !order[..=floor].contains(used));
                wrong.extend(higher.map(|used| format!("{}: {used}", file.display())));
            }
        }
    }
    assert!(wrong.is_empty(), "imports of higher files:\n{}", wrong.join("\n"));
}
