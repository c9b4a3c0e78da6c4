//! NaN and infinity in checkpoints of every format, and the record that numbers were finite.

use std::path::Path;

use fsdp_ckpt::{AsyncSaver, Checkpoint, SaveOptions, WhenBusy, non_finite, open, save_with};
use fsdp_core::process_group::local;
use fsdp_core::{DType, Placement};

use crate::cli::{fails, fsdp_ckpt, json, succeeds, text};
use crate::world::{Global, damage, fresh, line, save_all, state, world};

/// Creates numbers from 1 on, with three that are not finite.
fn with_nan(dtype: DType) -> Global {
    let name = format!("model.{}.weight", dtype.name().to_lowercase());
    let mut global = Global::new(&name, dtype, &[6, 4], &[Placement::Shard(0)]);
    let bytes = |number: f32| match dtype {
        DType::BF16 => half::bf16::from_f32(number).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(number).to_le_bytes().to_vec(),
        DType::F32 => number.to_le_bytes().to_vec(),
        _ => f64::from(number).to_le_bytes().to_vec(),
    };
    let number = |at: usize| match at {
        14 => f32::NAN,
        15 => f32::NEG_INFINITY,
        17 => f32::INFINITY,
        at => at as f32 + 1.0,
    };
    global.bytes = (0..24).flat_map(|at| bytes(number(at))).collect();
    global
}

/// Creates integers with the bits of NaN.
fn integers() -> Global {
    let mut global = Global::new("model.ids", DType::I64, &[4], &[Placement::Replicate]);
    global.bytes = vec![0xff; 32];
    global
}

fn finite() -> Global {
    let mut global = Global::new("model.good.weight", DType::F32, &[3, 2], &[Placement::Shard(0)]);
    global.bytes = [f32::MAX, f32::MIN, 0.0, -0.0, f32::MIN_POSITIVE, 1.0].map(f32::to_le_bytes).concat();
    global
}

#[test]
fn lists_tensors_with_nan_or_infinity() {
    let (root, dir) = fresh();
    let mut globals: Vec<Global> = [DType::F32, DType::BF16, DType::F16, DType::F64].map(with_nan).into();
    globals.extend([integers(), finite()]);
    save_all(&dir, &globals, &line(2));
    let torch = root.path().join("torch");
    succeeds(&["convert", text(&dir), text(&torch), "--to", "torch-dcp"]);
    let hf = root.path().join("hf");
    succeeds(&["convert", text(&dir), text(&hf), "--to", "hf"]);
    for path in [&dir, &torch, &hf] {
        let found = non_finite(&*open(path).unwrap(), &mut |_| ()).unwrap();
        assert_eq!(found.len(), 4, "{found:?}");
        for tensor in &found {
            assert_eq!((tensor.elements, tensor.nan, tensor.infinite), (24, 1, 2), "{tensor:?}");
            assert_eq!(tensor.first, [3, 2], "{tensor:?}");
        }
    }

    succeeds(&["verify", text(&dir)]);
    let (code, out, err) = fsdp_ckpt(&["verify", text(&dir), "--finite"]);
    assert_eq!(code, 1);
    assert_eq!(out.lines().count(), 5, "{out}");
    let about =
        "\"model.bf16.weight\" (BF16): of 24 numbers 1 are NaN and 2 infinite, the first at [3, 2], in shard-00002";
    assert!(out.contains(about), "{out}");
    assert!(err.contains("has 12 numbers that are not finite, in 4 tensors; use an earlier checkpoint"), "{err}");
    let (code, out, _) = fsdp_ckpt(&["verify", text(&dir), "--finite", "--json"]);
    let found = json(&out);
    assert_eq!((code, &found["ok"], &found["damaged"]), (1, &false.into(), &serde_json::json!([])));
    assert_eq!(found["non_finite"][0]["first"], serde_json::json!([3, 2]));
    assert_eq!(json(&succeeds(&["verify", text(&dir), "--json"]))["non_finite"], serde_json::Value::Null);

    let good = root.path().join("good");
    save_all(&good, &[integers(), finite()], &line(2));
    assert!(succeeds(&["verify", text(&good), "--finite"]).contains("all floating point numbers are finite"));
    // Damage is reported first.
    let shard = good.join("shard-00001-model-00001-of-00001.safetensors");
    damage(&shard);
    assert!(fails(&["verify", text(&good), "--finite"]).contains("is damaged"));
}

#[test]
fn finite_is_recorded_if_all_ranks_declare_it() {
    let (root, _) = fresh();
    let saved = |name: &str, finite: &(dyn Fn(usize) -> bool + Sync)| {
        let dir = root.path().join(name);
        world(2, |group| {
            let options = SaveOptions { finite: finite(group.rank()), ..SaveOptions::default() };
            save_with(&dir, group, &state(&[self::finite()], &line(2), group.rank()), &options).unwrap();
        });
        dir
    };
    for (dir, is_finite) in
        [(saved("all", &|_| true), true), (saved("one", &|rank| rank == 1), false), (saved("none", &|_| false), false)]
    {
        assert_eq!(Checkpoint::open(&dir).unwrap().is_finite(), is_finite, "{}", dir.display());
        let out = succeeds(&["inspect", text(&dir)]);
        let word = if is_finite { "  finite      checked when saved" } else { "  finite      not checked" };
        assert!(out.contains(word), "{out}");
        assert_eq!(json(&succeeds(&["inspect", text(&dir), "--json"]))["finite_when_saved"], is_finite);
        succeeds(&["verify", text(&dir)]);
    }
    in_the_background(&root.path().join("background"));
}

fn in_the_background(dir: &Path) {
    local::run(2, |group| {
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
        let state = state(&[finite()], &line(2), group.rank());
        saver.save_with(dir, &state, &SaveOptions { finite: true, ..SaveOptions::default() }).unwrap();
        saver.finish().unwrap();
    });
    assert!(Checkpoint::open(dir).unwrap().is_finite());
}
