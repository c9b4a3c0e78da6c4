//! A rank holds only its share of the training state.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{launch, program, read_text, run, workspace};
use serde_json::Value;

/// Allowance for activations, bookkeeping and threads.
const SLACK: u64 = 1 << 20;

const PHASES: [&str; 4] = ["build", "optimizer", "forward", "backward"];

struct Memory {
    model: u64,
    unit: u64,
    resident: u64,
    transient: u64,
    phases: [u64; 4],
}

/// Runs `bench memory` and returns a report for each mode.
fn memory<const MODES: usize>(ranks: usize, flags: &str) -> [Memory; MODES] {
    let dir = tempfile::tempdir().unwrap();
    let args: Vec<&str> = ["memory", "--json"].into_iter().chain(flags.split_whitespace()).collect();
    let run = launch(ranks, "bench", &args, dir.path()).ok();
    let report = |line: &str| {
        let report: Value = serde_json::from_str(&line[line.find('{')?..]).unwrap();
        let number = |key: &str| report[key].as_u64().unwrap();
        Some(Memory {
            model: number("model_bytes"),
            unit: number("unit_bytes"),
            resident: number("resident_bytes"),
            transient: number("transient_bytes"),
            phases: PHASES.map(|phase| report["phases"][phase].as_u64().unwrap()),
        })
    };
    let reports: Vec<Memory> = run.stdout.lines().filter_map(report).collect();
    reports.try_into().unwrap_or_else(|_| panic!("{}", run.stdout))
}

/// Gradients of one unit are reduced while those of the next are computed.
#[test]
fn an_optimizer_in_backward_leaves_no_gradients() {
    for ranks in [1, 2, 4] {
        let [Memory { model, unit, resident, transient, .. }] = memory(ranks, "--mode zero3 --optimizer-in-backward");
        let (share, of_unit) = (model / ranks as u64, unit / ranks as u64);
        assert!(resident.abs_diff(3 * share) <= SLACK, "{ranks} ranks: {resident} bytes resident, a share is {share}");
        // Parameters of two units, gradients of one, and a unit's share of reduced gradients.
        let bound = if ranks == 1 { 4 * unit } else { 3 * unit + of_unit };
        assert!(transient <= bound + SLACK, "{ranks} ranks: {transient} bytes on top, a unit is {unit}");
    }
}

#[test]
fn zero3_holds_a_share_two_units_and_one_units_gradients() {
    for ranks in [1, 2, 4] {
        let [zero3, zero2, plain] = memory(ranks, "--mode zero3,zero2,plain");
        let Memory { model, unit, resident, transient, .. } = zero3;
        // A share of parameters, gradients and two moments.
        let share = model / ranks as u64;
        assert!(
            resident >= 4 * share && resident <= 4 * share + SLACK,
            "{ranks} ranks: {resident} bytes resident, a share is {share}"
        );
        // The figure can include one unit's share of gradients. On one rank that is the whole unit.
        let bound = if ranks == 1 { 4 * unit } else { 3 * unit };
        assert!(transient <= bound + SLACK, "{ranks} ranks: {transient} bytes on top, a unit is {unit}");
        assert!(transient >= unit, "{ranks} ranks: {transient} bytes on top can't be all, a unit is {unit}");
        assert!(zero2.resident.abs_diff(resident) <= SLACK);

        for (mode, phases, kept) in [("zero3", zero3.phases, 0), ("zero2", zero2.phases, 1)] {
            // Parameters; two moments; what forward keeps; gradients.
            let formula = [share, 3 * share, 3 * share + kept * model, 4 * share];
            for ((phase, found), want) in PHASES.iter().zip(phases).zip(formula) {
                // One rank does not gather parameters.
                let is_near = found.abs_diff(want) <= SLACK || ranks == 1;
                assert!(is_near, "{mode} at {ranks} ranks: {found} bytes after {phase}, not {want}");
            }
        }
        if ranks == 2 {
            // ZeRO-2 holds all parameters between forward and backward, and plain Candle everything.
            let more = zero2.transient;
            assert!(more >= model && more <= model + unit + SLACK, "{more}");
            assert!(plain.resident >= 4 * model && plain.resident <= 4 * model + SLACK, "{}", plain.resident);
            assert!(resident + transient < zero2.resident + zero2.transient);
            assert!(zero2.resident + zero2.transient < plain.resident + plain.transient);
        }
    }
}

#[test]
fn moments_of_8_bits_take_a_quarter_and_momentum_a_half() {
    for ranks in [1, 2, 4] {
        // A scale for 256 codes is a 64th more. The test above measures AdamW's moments in f32.
        for (optimizer, part) in [("adamw8bit", 0.25..0.27), ("sgd", 0.49..0.51)] {
            let [Memory { model, phases: [build, made, ..], resident, .. }] =
                memory(ranks, &format!("--mode zero3 --optimizer {optimizer}"));
            // Parameters and gradients do not change.
            let share = model / ranks as u64;
            let kept = (made - build) as f64 / (2 * share) as f64;
            assert!(part.contains(&kept), "{optimizer} at {ranks} ranks: {kept}");
            let want = 2 * share + made - build;
            assert!(resident.abs_diff(want) <= SLACK, "{optimizer} at {ranks} ranks: {resident}, not {want}");
        }
    }
}

#[test]
fn state_on_disk_takes_16_mib_in_any_model() {
    for layers in [6, 12] {
        let flags = format!("--mode zero3 --layers {layers} --state-on-disk .");
        let [Memory { model, resident, phases: [build, made, ..], .. }] = memory(2, &flags);
        let want = 16 << 20;
        assert!((made - build).abs_diff(want) <= SLACK, "{layers} layers: {} bytes for moments", made - build);
        // Parameters and gradients.
        assert!(resident.abs_diff(model + want) <= SLACK, "{layers} layers: {resident} bytes between steps");
    }
}

/// Gradients are those of a unit, so nothing in memory between steps depends on the model.
#[test]
fn state_and_shards_on_disk_take_32_mib_in_any_model() {
    for ranks in [1, 2, 4] {
        for layers in [6, 12] {
            let flags =
                format!("--mode zero3 --layers {layers} --state-on-disk . --shards-on-disk --optimizer-in-backward");
            let [Memory { unit, resident, transient, .. }] = memory(ranks, &flags);
            let what = format!("{layers} layers on {ranks} ranks");
            assert!(resident.abs_diff(32 << 20) <= SLACK, "{what}: {resident} bytes between steps");
            // Parameters of two units, gradients of one, a reduced share, and the shares that two all-gathers read.
            let share = unit / ranks as u64;
            assert!(transient <= 3 * unit + 3 * share + SLACK, "{what}: {transient} bytes more during a step");
        }
    }
}

#[test]
fn muon_adds_three_bf16_shards_and_a_dozen_matrices() {
    for ranks in [1, 2, 4] {
        // Shards are large compared with a matrix.
        let flags = "--mode zero3 --optimizer muon --width 256 --layers 24";
        let [Memory { model, unit, transient, phases: [build, made, ..], .. }] = memory(ranks, flags);
        let share = model / ranks as u64;
        assert!((made - build).abs_diff(share) <= SLACK, "{ranks} ranks: {} bytes of momentum", made - build);
        // In BF16, a share is half as large. A matrix is half a unit. The figure can include a unit's share.
        let bound = 3 * share / 2 + 13 * unit / 2 + unit / ranks as u64;
        assert!(transient <= bound + SLACK, "{ranks} ranks: {transient} bytes on top, not {bound}");
        assert!(transient >= share, "{ranks} ranks: {transient} bytes on top can't be all, a share is {share}");
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
    let dir = tempfile::tempdir().unwrap();
    let stdout = launch(4, "bench", &["memory"], dir.path()).ok().stdout;
    for mode in ["zero3", "zero2", "plain"] {
        let of_mode = |text: &str| {
            let at = text.find(&format!("{mode}  4 ranks, 6 units of ")).unwrap_or_else(|| panic!("{mode}: {text}"));
            figures(text[at..].lines().next().unwrap())
        };
        let (printed, written) = (of_mode(&stdout), of_mode(&docs));
        let slack = SLACK as f64 / f64::from(1 << 20);
        let near = printed.iter().zip(written).all(|(printed, written)| (printed - written).abs() <= slack);
        assert!(near, "{mode}: {printed:?} MiB, not {written:?}");
    }
}

/// Several forwards before one backward need at most one more unit than one forward.
#[test]
fn several_forwards_add_one_unit() {
    // One forward is the same in one call.
    let ways =
        [(1, ""), (1, "--by-name"), (3, ""), (3, "--in-one-call"), (3, "--by-name"), (3, "--by-name --in-one-call")];
    for ranks in [2, 4] {
        for (passes, way) in ways {
            let flags = format!("--mode zero3 --layers 8 --passes {passes} {way}");
            let [Memory { model, unit, transient, .. }] = memory(ranks, &flags);
            // With units by name, the figure includes this rank's reduced gradients.
            let reduced = if way.contains("--by-name") { model / ranks as u64 } else { 0 };
            let bound = reduced + if passes == 1 { 3 * unit } else { 4 * unit };
            assert!(
                transient <= bound + SLACK,
                "{ranks} ranks, {way}, {passes} forwards: {transient} bytes, a unit is {unit}"
            );
        }
    }
}

/// Returns the page faults of two ranks in their median step. The first steps can take memory from the system until the
/// heap is large enough for any order of its allocations. Only in huge pages is that a small number of faults.
fn page_faults(tunables: Option<&str>) -> [u64; 2] {
    let mut command = Command::new(program("bench"));
    command.args(["step", "--world", "2", "--batch", "2", "--steps", "25", "--json", "--model"]);
    command.arg(workspace().join("examples/configs/resnet-18"));
    command.env_remove("GLIBC_TUNABLES").envs(tunables.map(|value| ("GLIBC_TUNABLES", value)));
    let run = run(command, Duration::from_secs(300)).ok();
    let report: Value = serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap();
    serde_json::from_value(report["page_faults"].clone()).unwrap()
}

#[test]
fn under_the_launcher_a_step_takes_no_memory_from_the_system() {
    let [kept, freed] = [None, Some("")].map(page_faults);
    assert!(kept.iter().all(|&faults| faults < 100), "{kept:?}");
    assert!(freed.iter().all(|&faults| faults > 1000), "{freed:?}");
}
