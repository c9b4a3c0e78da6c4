//! Fused experts: one tensor for the experts of a layer, as transformers keeps them in memory and saves them with
//! `save_original_format=False`.

use std::collections::BTreeMap;

use crate::hf::Part;
use crate::{Error, Result, TensorSource};

/// Names of experts in files of transformers' original format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Module of the router and the experts in a layer, such as `mlp`.
    pub module: &'static str,
    /// Name of the router in the module.
    pub router: &'static str,
    /// Gate, up and down projections of an expert.
    pub projections: [&'static str; 3],
}

impl ExpertNames {
    /// Names in files of Mixtral.
    pub const MIXTRAL: Self =
        ExpertNames { module: "block_sparse_moe", router: "gate", projections: ["w1", "w3", "w2"] };
    /// Names in files of Qwen 3 MoE.
    pub const QWEN3_MOE: Self =
        ExpertNames { module: "mlp", router: "gate", projections: ["gate_proj", "up_proj", "down_proj"] };
    /// Names in [`SplitExperts`](crate::hf::SplitExperts), as gpt-oss has no single experts in its files.
    pub const GPT_OSS: Self = ExpertNames { router: "router", ..Self::QWEN3_MOE };
}

/// Module of the experts in memory.
const MODULE: &str = ".mlp.";
const GATE_UP: &str = ".experts.gate_up_proj";
const DOWN: &str = ".experts.down_proj";

/// Returns the parts that a model's tensors form in the original format: fused weights of `count` experts,
/// `[count, 2 * inner, width]` and `[count, width, inner]`, become single ones, and the module gets its original name. All other tensors keep their
/// names.
///
/// # Errors
/// [`Error::Malformed`] if two tensors have the same name then, as if a file has fused and single experts.
pub fn unfused(source: &dyn TensorSource, names: ExpertNames, count: usize) -> Result<BTreeMap<String, Part>> {
    let [gate, up, down] = names.projections;
    let module = format!(".{}.", names.module);
    let mut parts = BTreeMap::<String, Part>::new();
    let mut twice = None;
    let mut insert = |name: String, part: Part| {
        if let Some(other) = parts.insert(name.clone(), part) {
            twice.get_or_insert((name, other.tensor));
        }
    };
    for (tensor, entry) in source.tensors() {
        let name = tensor.replacen(MODULE, &module, 1);
        let mut expert = |prefix: &str, index: usize, projection: &str, rows| {
            let part = Part { tensor: tensor.clone(), index: Some(index), rows };
            insert(format!("{prefix}.experts.{index}.{projection}.weight"), part);
        };
        match (&entry.shape[..], name.strip_suffix(GATE_UP), name.strip_suffix(DOWN)) {
            ([experts, rows, _], Some(prefix), _) if *experts == count && rows.is_multiple_of(2) => {
                for index in 0..*experts {
                    expert(prefix, index, gate, Some(0..rows / 2));
                    expert(prefix, index, up, Some(rows / 2..*rows));
                }
            }
            ([experts, _, _], _, Some(prefix)) if *experts == count => {
                (0..*experts).for_each(|index| expert(prefix, index, down, None));
            }
            _ => {
                insert(name, Part::whole(tensor));
            }
        }
    }
    for tensor in source.unreadable().keys() {
        insert(tensor.replacen(MODULE, &module, 1), Part::whole(tensor));
    }
    match twice {
        None => Ok(parts),
        Some((name, tensor)) => {
            let reason = format!("with \"{tensor}\", two tensors are the weights \"{name}\": remove one of them");
            Err(Error::Malformed { path: source.path().to_path_buf(), item: Some(tensor), reason })
        }
    }
}
