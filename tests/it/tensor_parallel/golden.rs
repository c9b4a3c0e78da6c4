//! What PyTorch's `parallelize_module` beside `fully_shard` recorded, repeated on each of its meshes.

use fsdp_test_support::trajectory::Trajectory;

use super::{DP2_TP2, Mesh, REPLICATE2_TP2, SEQUENCE, TP4, assert_near, train};
use crate::golden::ends_as_recorded;

fn repeats(model: &str, mesh: &Mesh, sequence: bool, more: &[&str]) {
    let (record, flags) = match sequence {
        true => (format!("{}_sequence", mesh.record), [more, &[SEQUENCE]].concat()),
        false => (mesh.record.to_owned(), more.to_vec()),
    };
    let dir = tempfile::tempdir().unwrap();
    let (ours, _) = train(model, mesh, &[&flags[..], &["--export-hf", "export"]].concat(), dir.path());
    let recorded = Trajectory::recorded(model, &record);
    assert_eq!(recorded.0.len(), 20);
    assert_near(&ours, &recorded, &format!("{model}, {record}"));
    ends_as_recorded(model, dir.path());
}

#[test]
fn layers_in_two_or_four_parts_on_every_mesh() {
    for mesh in [DP2_TP2, TP4, REPLICATE2_TP2] {
        for sequence in [false, true] {
            repeats("llama_tp_tiny", &mesh, sequence, &[]);
        }
    }
}

/// The outputs of products are kept, and those of whole layers made of them again.
#[test]
fn blocks_that_run_again_and_keep_their_products() {
    for sequence in [false, true] {
        // One sequence a rank lies as it is scattered, several don't.
        for batch in [&[][..], &["--batch-size", "1", "--grad-accum", "3"]] {
            let keep = ["--activation-checkpoint", "full", "--checkpoint-keep", "linear"];
            repeats("llama_tp_tiny", &DP2_TP2, sequence, &[&keep, batch].concat());
        }
    }
}

/// And the ways to save memory, which compute and communicate in another order.
#[test]
fn a_tied_head_biases_and_shared_heads() {
    let accumulated = ["--grad-accum", "3", "--batch-size", "1", "--grad-sync", "last"];
    let again = ["--activation-checkpoint", "full", "--reshard-after-forward", "always", "--prefetch", "0"];
    for (mesh, sequence, more) in [
        (&DP2_TP2, false, &accumulated[..]),
        (&DP2_TP2, true, &again),
        (&REPLICATE2_TP2, false, &again),
        (&REPLICATE2_TP2, true, &accumulated),
    ] {
        repeats("llama_tp_tied_tiny", mesh, sequence, more);
    }
}
