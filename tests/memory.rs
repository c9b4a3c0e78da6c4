//! A rank really holds only its share.
#![allow(clippy::unwrap_used, missing_docs)]

use fsdp_tests::launch;
use serde_json::Value;

/// Room for activations, bookkeeping and threads beside the tensors.
const SLACK: u64 = 1 << 20;

fn memory(ranks: usize) -> (u64, u64, u64, u64) {
    let dir = tempfile::tempdir().unwrap();
    let run = launch(ranks, "bench", &["memory", "--json"], dir.path()).ok();
    let line = run.stdout.lines().find(|line| line.contains('{')).unwrap();
    let report: Value = serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap();
    let number = |key: &str| report[key].as_u64().unwrap();
    (number("model_bytes"), number("unit_bytes"), number("resident_bytes"), number("transient_bytes"))
}

#[test]
fn state_is_a_share_and_transients_are_two_units_and_one_units_gradients() {
    for ranks in [1, 2, 4] {
        let (model, unit, resident, transient) = memory(ranks);
        // Parameters, gradients and two moments, a share each.
        let share = 4 * model / ranks as u64;
        assert!(
            resident >= share && resident <= share + SLACK,
            "{ranks} ranks: {resident} bytes resident, a share is {share}"
        );
        assert!(transient <= 3 * unit + SLACK, "{ranks} ranks: {transient} bytes on top, a unit is {unit}");
        // Buffers go round in a pool that keeps them, so that its most is its last: a figure below one unit would mean that nothing was counted.
        assert!(
            ranks == 1 || transient >= unit,
            "{ranks} ranks: {transient} bytes on top can't be all, a unit is {unit}"
        );
    }
}
