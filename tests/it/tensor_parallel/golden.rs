//! Runs recorded with PyTorch's `parallelize_module` and `fully_shard`, repeated on the same meshes.

use fsdp_test_support::trajectory::Trajectory;

use super::{DP2_TP2, Mesh, REPLICATE2_TP2, SEQUENCE, TP4, assert_near, train};
use crate::golden::ends_as_recorded;

fn repeats(model: &str, mesh: &Mesh, sequence: bool, more: &str) {
    let (record, flag) = match sequence {
        true => (format!("{}_sequence", mesh.record), SEQUENCE),
        false => (mesh.record.to_owned(), ""),
    };
    let dir = tempfile::tempdir().unwrap();
    let (ours, _) = train(model, mesh, &format!("--export-hf export {flag} {more}"), dir.path());
    let recorded = Trajectory::recorded(model, &record);
    assert_eq!(recorded.0.len(), 20);
    assert_near(&ours, &recorded, &format!("{model}, {record}"));
    ends_as_recorded(model, dir.path());
}

#[test]
fn every_mesh() {
    for mesh in [DP2_TP2, TP4, REPLICATE2_TP2] {
        for sequence in [false, true] {
            repeats("llama_tp_tiny", &mesh, sequence, "");
        }
    }
}

/// Outputs of matrix products are kept, and whole layers' outputs recomputed from them.
#[test]
fn checkpointed_blocks_that_keep_products() {
    for sequence in [false, true] {
        // One sequence per rank has another memory layout than several.
        for batch in ["", "--batch-size 1 --grad-accum 3"] {
            let keep = "--activation-checkpoint full --checkpoint-keep linear";
            repeats("llama_tp_tiny", &DP2_TP2, sequence, &format!("{keep} {batch}"));
        }
    }
}

/// The options compute and communicate in another order.
#[test]
fn tied_head_biases_and_grouped_queries() {
    let accumulated = "--grad-accum 3 --batch-size 1 --grad-sync last";
    let again = "--activation-checkpoint full --reshard-after-forward always --prefetch 0";
    for (mesh, sequence, more) in [
        (&DP2_TP2, false, accumulated),
        (&DP2_TP2, true, again),
        (&REPLICATE2_TP2, false, again),
        (&REPLICATE2_TP2, true, accumulated),
    ] {
        repeats("llama_tp_tied_tiny", mesh, sequence, more);
    }
}
