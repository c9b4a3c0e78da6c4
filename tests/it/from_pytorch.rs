//! docs/from-pytorch.md: every name of PyTorch's surface has a row, and every name of ours in it exists.

use std::collections::BTreeSet;
use std::path::Path;

use fsdp_tests::workspace;

/// Names that users of PyTorch come with: FSDP2's surface, what goes with it, and FSDP1's.
const SURFACE: &[&str] = &[
    // fully_shard
    "fully_shard",
    "mesh",
    "reshard_after_forward",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
    "ignored_params",
    "dp_mesh_dims",
    "MixedPrecisionPolicy",
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "param_dtype_override_fn",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "pin_memory",
    // FSDPModule
    "FSDPModule",
    "unshard",
    "UnshardHandle",
    "reshard",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_is_last_backward",
    "set_manual_backward_finalization",
    "finalize_backward",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_keep_unsharded_storage",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "Comm::allocate",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
    "set_post_optim_event",
    "reset_iter_state",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "fsdp_pre_all_gather",
    "fsdp_post_all_gather",
    "tied parameters",
    "frozen and trainable",
    "reset_parameters",
    // DeviceMesh and DTensor
    "init_device_mesh",
    "mesh[\"dp\"]",
    "mesh[\"dp\", \"tp\"]",
    "_flatten",
    "get_group",
    "get_local_rank",
    "get_coordinate",
    "from_group",
    "Shard",
    "Replicate",
    "Partial",
    "_StridedShard",
    "from_local",
    "to_local",
    "redistribute",
    "full_tensor",
    "distribute_tensor",
    "placements",
    "device_mesh",
    // Clipping, optimizers, scaling
    "clip_grad_norm_",
    "norm_type",
    "error_if_nonfinite",
    "AdamW",
    "foreach",
    "fused",
    "parameter groups",
    "zero_grad",
    "GradScaler",
    "ShardedGradScaler",
    "checkpoint_wrapper",
    // State dicts and checkpoints
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
    "StateDictOptions",
    "full_state_dict",
    "cpu_offload",
    "broadcast_from_rank0",
    "strict",
    "ignore_frozen_params",
    "keep_submodule_prefixes",
    "flatten_optimizer_state_dict",
    "dcp.save",
    "dcp.load",
    "async_save",
    "Stateful",
    "allow_partial_load",
    "no_dist",
    "SavePlanner",
    "LoadPlanner",
    "StorageWriter",
    "StorageReader",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "FsspecReader",
    "FsspecWriter",
    "consolidate_safetensors_files_on_every_rank",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
    // torchrun
    "--nnodes",
    "--nproc-per-node",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--monitor-interval",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--log-line-prefix-template",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--role",
    "--no-python",
    "--run-path",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--print-completion",
    "--virtual-local-rank",
    "underscores",
    // FSDP1
    "FullyShardedDataParallel",
    "sharding_strategy",
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
    "NO_SHARD",
    "ModuleWrapPolicy",
    "auto_wrap_policy",
    "param_init_fn",
    "CPUOffload",
    "offload_params",
    "BACKWARD_PRE",
    "BACKWARD_POST",
    "backward_prefetch",
    "forward_prefetch",
    "MixedPrecision",
    "buffer_dtype",
    "cast_root_forward_inputs",
    "device_id",
    "sync_module_states",
    "limit_all_gathers",
    "use_orig_params",
    "no_sync",
    "ignored_states",
    "ignored_modules",
    "summon_full_params",
    "state_dict_type",
    "optim_state_dict",
    "register_comm_hook",
];

/// Names in our column that are Candle's, Rust's, or stand for the user's own.
const NOT_OURS: &[&str] = &[
    "GradStore",
    "extend",
    "VarBuilder",
    "Optimizer",
    "candle_nn",
    "Module",
    "Option",
    "Arc",
    "Display",
    "Var",
    "Some",
    "None",
    "bool",
    "mut",
    "dyn",
    "tracing",
];
/// Variables of the examples in our column.
const PLACEHOLDERS: &[&str] = &[
    "opts", "vb", "vars", "model", "loss", "inputs", "grads", "fqn", "x", "m", "dp", "n", "b", "a", "ab", "block",
    "hook", "tp", "unit", "group",
];

struct Row {
    line: usize,
    theirs: String,
    ours: String,
}

/// The tables' rows. Panics where a row is outside a table, or has another number of cells than its table.
fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(workspace().join("docs/from-pytorch.md")).unwrap();
    let mut rows = vec![];
    let (mut columns, mut in_head) = (0, 0);
    for (line, text) in text.lines().enumerate() {
        let Some(inner) = text.strip_prefix('|') else {
            (columns, in_head) = (0, 0);
            continue;
        };
        let inner = inner.replace("\\|", "\u{1}");
        let mut cells: Vec<String> = inner.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect();
        assert_eq!(cells.pop().as_deref(), Some(""), "line {}: the row does not end", line + 1);
        match in_head {
            0 => columns = cells.len(),
            1 => assert!(cells.iter().all(|cell| cell == "---"), "line {}: a row outside a table", line + 1),
            _ => rows.push(Row { line: line + 1, theirs: cells[0].clone(), ours: cells[1].clone() }),
        }
        assert_eq!(cells.len(), columns, "line {}", line + 1);
        in_head += 1;
    }
    rows
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `name` is in `text`, and not as a part of a longer one.
fn names(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + name.len()..].chars().next();
        // A flag may follow dashes only if it begins with them.
        !before.is_some_and(is_word) && !after.is_some_and(|c| is_word(c) || name.starts_with("--") && c == '-')
    })
}

#[test]
fn every_name_of_the_surface_has_a_row() {
    let rows = rows();
    let missing: Vec<_> = SURFACE.iter().filter(|name| !rows.iter().any(|row| names(&row.theirs, name))).collect();
    assert!(missing.is_empty(), "docs/from-pytorch.md has no row for {missing:?}");
}

#[test]
fn every_row_says_what_is_ours() {
    for row in rows() {
        assert!(!row.ours.is_empty(), "line {}: {} has no counterpart, and no reason why", row.line, row.theirs);
    }
}

/// Every name that the crates' sources define: items, fields, variants, modules and crates.
fn definitions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for name in ["fsdp-core", "fsdp-ckpt", "fsdp-launch", "fsdp-candle", "examples"] {
        names.insert(name.replace('-', "_"));
        names.insert(name.to_string());
        collect(&workspace().join(name).join("src"), &mut names);
    }
    names
}

fn collect(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        names.insert(path.file_stem().unwrap().to_str().unwrap().to_string());
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .for_each(|line| names.extend(defined(line)));
        }
    }
}

/// What a line of code defines, roughly: the word after `fn` and its like, a field, a variant.
fn defined(line: &str) -> Option<String> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
    let mut words = line.split_whitespace();
    let first = words.next()?;
    let (name, is_item) = match ["fn", "struct", "enum", "trait", "type", "mod", "const"].contains(&first) {
        true => (words.next()?, true),
        false => (first, false),
    };
    let end = name.find(|c| !is_word(c)).unwrap_or(name.len());
    let variant =
        name.starts_with(char::is_uppercase) && (end == name.len() || name[end..].starts_with([',', '(', '{']));
    let field = name[end..].starts_with(':') && !name[end..].starts_with("::");
    (end > 0 && (is_item || variant || field)).then(|| name[..end].to_string())
}

/// The names in the code of a cell.
fn ours(cell: &str) -> Vec<String> {
    let mut names = vec![];
    for code in cell.split('`').skip(1).step_by(2) {
        // What is quoted is text.
        for code in code.split('"').step_by(2) {
            for word in code.split(|c: char| !is_word(c) && c != '-') {
                let flag = word.strip_prefix("--").map(|flag| flag.replace('-', "_"));
                let word = flag.unwrap_or_else(|| word.trim_matches('-').to_string());
                // Words in capitals are a flag's value, or a dtype.
                let value = word.chars().all(|c| !c.is_lowercase());
                if word.starts_with(|c: char| c.is_alphabetic() || c == '_') && !value {
                    names.push(word);
                }
            }
        }
    }
    names
}

#[test]
fn every_name_of_ours_exists() {
    let mut known = definitions();
    known.extend(["train", "fsdp-launch", "fsdp-ckpt", "debug", "true", "false", "auto", "cpu"].map(String::from));
    known.extend(NOT_OURS.iter().chain(PLACEHOLDERS).map(|name| name.to_string()));
    let unknown: Vec<_> = rows()
        .into_iter()
        .flat_map(|row| ours(&row.ours).into_iter().map(move |name| (row.line, name)))
        .filter(|(_, name)| !known.contains(name))
        .collect();
    assert!(unknown.is_empty(), "docs/from-pytorch.md tells of names that are defined nowhere, by line: {unknown:?}");
}
