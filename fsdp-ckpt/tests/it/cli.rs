//! The commands `inspect`, `verify` and `diff`, and their help.

use std::path::Path;

use crate::world::{Global, fresh, line, save_all, zoo};
use assert_cmd::Command;
use fsdp_core::{DType, Placement};

/// Runs the command. Returns its exit status, stdout and stderr.
pub(crate) fn fsdp_ckpt(args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("fsdp-ckpt")
        .unwrap()
        .args(args)
        .timeout(std::time::Duration::from_secs(60))
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Runs the command, which must succeed without output on stderr. Returns its stdout.
pub(crate) fn succeeds(args: &[&str]) -> String {
    let (code, out, err) = fsdp_ckpt(args);
    assert_eq!((code, err.as_str()), (0, ""), "{args:?}: {out}");
    out
}

/// Runs the command, which must fail with one line on stderr. Returns the line.
pub(crate) fn fails(args: &[&str]) -> String {
    let (code, _, err) = fsdp_ckpt(args);
    assert!(code == 1 && err.starts_with("fsdp-ckpt: ") && err.lines().count() == 1, "{args:?}: {code} {err}");
    err
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn inspects_and_verifies_a_checkpoint() {
    let (_root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let dir = text(&dir);

    let out = succeeds(&["inspect", dir]);
    for part in [
        "(dp_shard: 2) of 2 ranks",
        "├─ even.weight ",
        "BF16  [7, 3]",
        "Shard(1) x 2",
        "replicated",
        "8 chunks",
        "step = 10",
        "TENSORS BY FILE",
        "240 B  ████████ ████████",
    ] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    let about = json(&succeeds(&["inspect", dir, "--json"]));
    assert_eq!(about["format"], "fsdp");
    assert_eq!(about["tensors"]["model.uneven.weight"]["shape"], serde_json::json!([7, 3]));
    assert_eq!(about["tensors"]["model.uneven.weight"]["bytes"], 42);
    assert_eq!(about["tensors"]["model.columns.weight"]["sharded"], serde_json::json!([{ "dim": 1, "count": 2 }]));
    assert_eq!((&about["world_size"], &about["values"]["step"]), (&2.into(), &10.into()));

    let out = succeeds(&["verify", dir]);
    assert!(out.contains("ok, ") && out.contains("in 2 files"), "{out}");
    let about = json(&succeeds(&["verify", dir, "--json"]));
    assert_eq!(
        (&about["ok"], &about["damaged"], &about["checksums"]),
        (&true.into(), &serde_json::json!([]), &about["chunks"])
    );
}

#[test]
fn inspects_a_large_checkpoint_by_layers() {
    let (_root, dir) = fresh();
    let mut globals = vec![Global::new("model.embed.weight", DType::F32, &[11, 4], &[Placement::Shard(0)])];
    for layer in 0..30 {
        for part in ["attn.q.weight", "attn.k.weight", "mlp.up.weight", "norm.weight"] {
            let fqn = format!("model.layers.{layer}.{part}");
            globals.push(Global::new(&fqn, DType::BF16, &[8, 2], &[Placement::Shard(0)]));
        }
    }
    save_all(&dir, &globals, &line(4));
    let out = succeeds(&["inspect", text(&dir)]);
    assert!(out.contains("0..29 (30 alike)") && out.contains("120 tensors"), "{out}");
    assert!(out.contains("model.layers.10 (4)") && !out.contains("model.layers.10.attn"), "{out}");
    let (nine, ten) = (out.find("model.layers.9 (4)").unwrap(), out.find("model.layers.10 (4)").unwrap());
    assert!(nine < ten);
    assert!(out.lines().count() < 70, "{out}");
    let full = succeeds(&["inspect", text(&dir), "--full"]);
    assert!(full.matches("q.weight").count() == 30, "{full}");
}

#[test]
fn draws_an_svg_and_never_replaces_it() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(3));
    let svg = root.path().join("a.svg");
    succeeds(&["inspect", text(&dir), "--svg", text(&svg)]);
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg xmlns=") && picture.trim_end().ends_with("</svg>"));
    // A background, and a box for each of 9 tensors in each of 3 files.
    assert_eq!(picture.matches("<rect ").count(), 1 + 9 * 3);
    assert!(picture.contains("model.even.weight: 80 B in shard-00001-model-00001-of-00001.safetensors"), "{picture}");
    assert!(fails(&["inspect", text(&dir), "--svg", text(&svg)]).contains("can't create"));
}

#[test]
fn inspects_the_steps_of_a_run() {
    let (root, dir) = fresh();
    let run = root.path().join("run");
    for step in ["step-00000009", "step-00000010"] {
        save_all(&run.join(step), &zoo(), &line(1));
    }
    std::fs::create_dir(run.join("step-00000011")).unwrap();
    std::fs::create_dir(run.join(".step-00000012.tmp-7-abc")).unwrap();
    save_all(&run.join("step-00000013"), &zoo(), &line(1));
    std::fs::write(run.join("step-00000013/checkpoint.json"), "{").unwrap();
    // Quarantined twice, so the second name ends in a number.
    for _ in 0..2 {
        save_all(&run.join("step-00000014"), &zoo(), &line(1));
        fsdp_ckpt::quarantine(run.join("step-00000014")).unwrap().unwrap();
    }
    std::fs::write(run.join("losses.jsonl"), "").unwrap();
    let out = succeeds(&["inspect", text(&run)]);
    let lines: Vec<&str> = out.lines().filter(|line| line.contains("step-")).collect();
    for (line, part) in
        lines.iter().zip(["whole", "<- the newest", "unfinished", "unfinished", "damaged ", "set aside", "set aside"])
    {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    assert_eq!(lines.len(), 7, "{out}");
    let steps = json(&succeeds(&["inspect", text(&run), "--json"]));
    assert_eq!((&steps["steps"][1]["step"], &steps["steps"][1]["state"]), (&10.into(), &"whole".into()));
    assert_eq!((&steps["steps"][6]["step"], &steps["steps"][6]["state"]), (&14.into(), &"set aside".into()));
    // The other commands need one step.
    let newest = text(&run).to_string() + "/step-00000010";
    for args in
        [&["verify", text(&run)][..], &["diff", text(&run), text(&run)], &["consolidate", text(&run), text(&dir)]]
    {
        assert!(fails(args).contains(&format!("pass one of its steps, such as {newest}")));
    }
}

#[test]
fn diff_lists_differences() {
    let (root, a) = fresh();
    let b = root.path().join("b");
    let mut globals = zoo();
    save_all(&a, &globals, &line(2));
    save_all(&b, &globals, &line(3));
    let out = succeeds(&["diff", text(&a), text(&b)]);
    assert_eq!(out, "9 tensors equal to the bit, 0 differ\n");

    let c = root.path().join("c");
    // Row 3, column 2.
    globals[0].bytes[17 * 4..18 * 4].copy_from_slice(&1f32.to_le_bytes());
    globals[1] = Global::new("model.uneven.weight", DType::BF16, &[3, 7], &[Placement::Shard(0)]);
    globals[2].fqn = "model.other.bias".into();
    save_all(&c, &globals, &line(1));
    let (code, out, err) = fsdp_ckpt(&["diff", text(&a), text(&c)]);
    assert_eq!((code, err.as_str()), (1, ""));
    for part in [
        &format!("model.short.bias  only in {}", text(&a)),
        &format!("model.other.bias  only in {}", text(&c)),
        "[7, 3] against [3, 7]",
        "1 of 60 elements differ",
        "6 tensors equal to the bit, 2 differ, 2 only on one side",
    ] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    let (code, out, _) = fsdp_ckpt(&["diff", text(&a), text(&c), "--json"]);
    let found = json(&out);
    assert_eq!((code, &found["equal"], &found["within_tolerance"]), (1, &6.into(), &false.into()));
    assert_eq!(found["differing"]["model.even.weight"]["values"]["beyond"], 1);
    assert_eq!(found["only_a"], serde_json::json!(["model.short.bias"]));
}

#[test]
fn diff_applies_tolerances() {
    let root = tempfile::tempdir().unwrap();
    let save = |name: &str, numbers: &[f32]| {
        let dir = root.path().join(name);
        let mut global = Global::new("model.w", DType::F32, &[numbers.len()], &[Placement::Replicate]);
        global.bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        save_all(&dir, &[global], &line(1));
        text(&dir).to_string()
    };
    let a = save("a", &[1.0, -2.0, 0.0, f32::NAN, f32::INFINITY]);
    let b = save("b", &[1.001, -2.0, -0.0, f32::NAN, f32::INFINITY]);
    let c = save("c", &[1.0, -2.0, 0.0, 5.0, f32::INFINITY]);
    // Minus zero differs in its bits, but is within any tolerance.
    let (code, out, _) = fsdp_ckpt(&["diff", &a, &b]);
    assert!(code == 1 && out.contains("2 of 5 elements differ") && out.contains("max abs 1.000e-3"), "{out}");
    let out = succeeds(&["diff", &a, &b, "--rtol", "1.1e-3"]);
    assert!(out.contains("0 tensors equal to the bit, 1 within the tolerance, 0 differ"), "{out}");
    succeeds(&["diff", &a, &b, "--atol", "1.1e-3"]);
    assert_eq!(fsdp_ckpt(&["diff", &a, &b, "--atol", "0.9e-3"]).0, 1);
    let (code, out, _) = fsdp_ckpt(&["diff", &a, &c, "--atol", "1e9"]);
    assert!(code == 1 && out.contains("max abs inf"), "{out}");
    assert_eq!(fsdp_ckpt(&["diff", &a, &c, "--atol", "-1"]).0, 2);
}

#[test]
fn help_and_usage_errors() {
    let out = succeeds(&["--help"]);
    for part in ["EXAMPLES", "inspect", "verify", "convert", "diff", "consolidate", "Exit status"] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    for command in ["inspect", "verify", "convert", "diff", "consolidate"] {
        assert!(succeeds(&[command, "--help"]).contains("EXAMPLES"), "{command}");
    }
    for args in [
        &["convert", "a", "b"][..],
        &["convert", "a", "b", "--to", "zip"],
        &["convert", "a", "b", "--to", "fsdp", "--world-size", "0"],
        &["convert", "a", "b", "--to", "fsdp", "--mesh", "2"],
        &["convert", "a", "b", "--to", "fsdp", "--mesh", "2x0"],
        &["convert", "a", "b", "--to", "fsdp", "--mesh", "4096x4096"],
        &["convert", "a", "b", "--to", "fsdp", "--mesh", "2x2", "--world-size", "4"],
        &["convert", "a", "b", "--to", "fsdp", "--max-shard-size", "1GB"],
        &["convert", "a", "b", "--to", "torch-dcp", "--mesh", "2x2"],
        &["convert", "a", "b", "--to", "hf", "--world-size", "4"],
        &["convert", "a", "b", "--to", "hf", "--max-shard-size", "much"],
        &["convert", "a", "b", "--to", "hf", "--dtype", "i8"],
        &["diff", "a", "b", "--rtol", "x"],
    ] {
        let (code, _, err) = fsdp_ckpt(args);
        assert!(code == 2 && err.starts_with("error: "), "{args:?}: {code} {err}");
    }
    assert!(fails(&["inspect", "/no/such/directory"]).contains("no such directory"));
}
