//! A rank holds only its share of the training state.

use fsdp_test_support::{launch, read_text, workspace};
use serde_json::Value;

/// Allowance for activations, bookkeeping and threads.
const SLACK: u64 = 1 << 20;

struct Memory {
    model: u64,
    unit: u64,
    resident: u64,
    transient: u64,
    phases: [u64; 4],
}

fn memory(ranks: usize, flags: &str) -> Memory {
    let dir = tempfile::tempdir().unwrap();
    let args: Vec<&str> = ["memory", "--json"].into_iter().chain(flags.split_whitespace()).collect();
    let run = launch(ranks, "bench", &args, dir.path()).ok();
    let line = run.stdout.lines().find(|line| line.contains('{')).unwrap();
    let report: Value = serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap();
    let number = |key: &str| report[key].as_u64().unwrap();
    Memory {
        model: number("model_bytes"),
        unit: number("unit_bytes"),
        resident: number("resident_bytes"),
        transient: number("transient_bytes"),
        phases: ["build", "optimizer", "forward", "backward"].map(|phase| report["phases"][phase].as_u64().unwrap()),
    }
}

#[test]
fn zero3_holds_a_share_two_units_and_one_units_gradients() {
    for ranks in [1, 2, 4] {
        let Memory { model, unit, resident, transient, .. } = memory(ranks, "--mode zero3");
        // A share of parameters, gradients and two moments.
        let share = 4 * model / ranks as u64;
        assert!(
            resident >= share && resident <= share + SLACK,
            "{ranks} ranks: {resident} bytes resident, a share is {share}"
        );
        // The figure can include one unit's share of gradients. On one rank that is the whole unit.
        let bound = if ranks == 1 { 4 * unit } else { 3 * unit };
        assert!(transient <= bound + SLACK, "{ranks} ranks: {transient} bytes on top, a unit is {unit}");
        assert!(transient >= unit, "{ranks} ranks: {transient} bytes on top can't be all, a unit is {unit}");
    }
}

#[test]
fn zero2_adds_the_model_and_plain_candle_holds_everything() {
    let [zero3, zero2, plain] = ["zero3", "zero2", "plain"].map(|mode| memory(2, &format!("--mode {mode}")));
    // ZeRO-2 holds all parameters between forward and backward.
    assert!(
        zero2.transient >= zero2.model && zero2.transient <= zero2.model + zero2.unit + SLACK,
        "{}",
        zero2.transient
    );
    assert!(zero2.resident.abs_diff(zero3.resident) <= SLACK);
    assert!(plain.resident >= 4 * plain.model && plain.resident <= 4 * plain.model + SLACK, "{}", plain.resident);
    assert!(zero3.resident + zero3.transient < zero2.resident + zero2.transient);
    assert!(zero2.resident + zero2.transient < plain.resident + plain.transient);
}

#[test]
fn moments_of_8_bits_take_a_quarter_and_momentum_a_half() {
    let kept = |ranks: usize, optimizer: &str| {
        let Memory { model, phases: [build, made, ..], resident, .. } =
            memory(ranks, &format!("--mode zero3 --optimizer {optimizer}"));
        // Parameters and gradients do not change.
        let share = model / ranks as u64;
        assert!(resident.abs_diff(2 * share + made - build) <= SLACK, "{optimizer}: {resident} and {}", made - build);
        (made - build) as f64 / (2 * share) as f64
    };
    for ranks in [1, 2, 4] {
        let [f32s, of_8_bits, momentum] = ["adamw", "adamw8bit", "sgd"].map(|optimizer| kept(ranks, optimizer));
        assert!((f32s - 1.).abs() < 0.01 && (momentum - 0.5).abs() < 0.01, "{ranks} ranks: {f32s} {momentum}");
        // A scale for 256 codes is a 64th more.
        assert!((0.25..0.27).contains(&of_8_bits), "{ranks} ranks: {of_8_bits}");
    }
}

#[test]
fn muon_adds_three_bf16_shards_and_a_dozen_matrices() {
    for ranks in [1, 2, 4] {
        // Shards are large compared with a matrix.
        let flags = "--mode zero3 --optimizer muon --width 256 --layers 24";
        let Memory { model, unit, transient, phases: [build, made, ..], .. } = memory(ranks, flags);
        let share = model / ranks as u64;
        assert!((made - build).abs_diff(share) <= SLACK, "{ranks} ranks: {} bytes of momentum", made - build);
        // In BF16, a share is half as large. A matrix is half a unit. The figure can include a unit's share.
        let bound = 3 * share / 2 + 13 * unit / 2 + unit / ranks as u64;
        assert!(transient <= bound + SLACK, "{ranks} ranks: {transient} bytes on top, not {bound}");
        assert!(transient >= share, "{ranks} ranks: {transient} bytes on top can't be all, a share is {share}");
    }
}

#[test]
fn phases_follow_the_formula() {
    for ranks in [2, 4] {
        for (mode, kept) in [("zero3", 0), ("zero2", 1)] {
            let Memory { model, phases, .. } = memory(ranks, &format!("--mode {mode}"));
            let share = model / ranks as u64;
            // Parameters; two moments; what forward keeps; gradients.
            let formula = [share, 3 * share, 3 * share + kept * model, 4 * share];
            for ((phase, found), want) in ["build", "optimizer", "forward", "backward"].iter().zip(phases).zip(formula)
            {
                assert!(
                    found.abs_diff(want) <= SLACK,
                    "{mode} at {ranks} ranks: {found} bytes after {phase}, not {want}"
                );
            }
        }
    }
}

/// Returns the numbers in a line of `bench memory`: size of a unit, bytes between steps, bytes added by a step.
fn figures(line: &str) -> [f64; 3] {
    let words: Vec<&str> = line.split_whitespace().collect();
    let figures = words.windows(2).filter(|pair| pair[1].trim_end_matches([':', ',']) == "MiB");
    figures.map(|pair| pair[0].parse().unwrap()).collect::<Vec<_>>().try_into().unwrap()
}

#[test]
fn documented_figures_are_printed() {
    let docs = read_text(&workspace().join("docs/memory.md"));
    for mode in ["zero3", "zero2", "plain"] {
        let of_mode = |text: &str| {
            let at = text.find(&format!("{mode}  4 ranks, 6 units of ")).unwrap_or_else(|| panic!("{mode}: {text}"));
            figures(text[at..].lines().next().unwrap())
        };
        let dir = tempfile::tempdir().unwrap();
        let printed = of_mode(&launch(4, "bench", &["memory", "--mode", mode], dir.path()).ok().stdout);
        let written = of_mode(&docs);
        let slack = SLACK as f64 / f64::from(1 << 20);
        let near = printed.iter().zip(written).all(|(printed, written)| (printed - written).abs() <= slack);
        assert!(near, "{mode}: {printed:?} MiB, not {written:?}");
    }
}

/// Several forwards before one backward need at most one more unit than one forward.
#[test]
fn several_forwards_add_one_unit() {
    for ranks in [2, 4] {
        for ways in ["", "--in-one-call", "--by-name", "--by-name --in-one-call"] {
            for passes in 1..=3 {
                let flags = format!("--mode zero3 --layers 8 --passes {passes} {ways}");
                let Memory { model, unit, transient, .. } = memory(ranks, &flags);
                // With units by name, the figure includes this rank's reduced gradients.
                let reduced = if ways.contains("--by-name") { model / ranks as u64 } else { 0 };
                let bound = reduced + if passes == 1 { 3 * unit } else { 4 * unit };
                assert!(
                    transient <= bound + SLACK,
                    "{ranks} ranks, {ways}, {passes} forwards: {transient} bytes, a unit is {unit}"
                );
            }
        }
    }
}
