//! What a step communicates in the group of each dimension of the mesh, in calls and bytes, against the formula.

use std::collections::BTreeMap;

use fsdp_tests::trace::Trace;

use super::{DP2_TP2, Mesh, REPLICATE2_TP2, SEQUENCE, TP4, train};

#[test]
fn dump() {
    for mesh in [DP2_TP2, TP4, REPLICATE2_TP2] {
        for sequence in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let more: &[&str] = if sequence { &[SEQUENCE] } else { &[] };
            train("llama_tp_tiny", &mesh, &[&["--steps", "3", "--trace", "trace.json"], more].concat(), dir.path());
            let events = Trace::read(&dir.path().join("trace.json")).events();
            let step = Trace::step(&events, 1, 3);
            let mut all: BTreeMap<(String, String), Vec<u64>> = BTreeMap::new();
            for event in step.iter().filter(|event| event.phase == "B") {
                if let Some((group, bytes)) = &event.moved {
                    all.entry((group.clone(), event.name.clone())).or_default().push(*bytes);
                }
            }
            println!("{} {sequence}: {all:#?}", mesh.record);
        }
    }
}
