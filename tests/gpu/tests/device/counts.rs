//! What a step costs on a device, by the count of the double: memory, waits of the host, calls of NCCL.

use fsdp_tests_gpu::{Counts, Way};

fn counts(steps: usize, flags: &[&str]) -> Vec<Counts> {
    let dir = tempfile::tempdir().unwrap();
    Way { steps, flags, ..Way::recorded("llama_tiny", 2) }.start(dir.path()).ok();
    Counts::of(dir.path(), 2)
}

#[test]
fn a_step_waits_for_the_device_where_loss_and_norm_are_read_and_takes_no_new_memory() {
    let (short, long) = (counts(3, &[]), counts(7, &[]));
    for (short, long) in short.iter().zip(&long) {
        for category in ["host synchronisation", "allocation", "operation"] {
            for (name, count) in long.by_name(category) {
                let before = short.sum(category, |other| other == name);
                println!("{category}, {name}: {} a step", (count - before) as f64 / 4.);
            }
        }
        let a_step = |category: &str, part: &str| {
            let of = |counts: &Counts| counts.sum(category, |name| name.starts_with(part));
            let more = of(long) - of(short);
            assert_eq!(more % 4, 0, "{category} {part}: {more} in four steps");
            more / 4
        };
        // The loss, and the norm.
        assert_eq!(a_step("host synchronisation", ""), 2);
        assert_eq!(long.bytes("peak_bytes"), short.bytes("peak_bytes"));
    }
}

#[test]
fn memory_is_the_same_on_every_run() {
    let flags = ["--grad-accum", "2"];
    let (one, other) = (counts(3, &flags), counts(3, &flags));
    for (one, other) in one.iter().zip(&other) {
        assert_eq!(one.bytes("peak_bytes"), other.bytes("peak_bytes"));
    }
}
