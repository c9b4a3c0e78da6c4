//! The `fsdp-ckpt` command.

use crate::world::{fresh, line, save_all, zoo};
use assert_cmd::Command;

fn fsdp_ckpt(args: &[&str]) -> (bool, String, String) {
    let output = Command::cargo_bin("fsdp-ckpt")
        .unwrap()
        .args(args)
        .timeout(std::time::Duration::from_secs(30))
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_checkpoint_is_shown_and_verified() {
    let (_root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let dir = dir.to_str().unwrap();

    let (ok, out, _) = fsdp_ckpt(&["inspect", dir]);
    assert!(ok);
    for part in ["(dp_shard: 2) of 2 ranks", "model.even.weight", "BF16", "[12, 5]", "2 chunks", "step = 10"] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    let (ok, out, _) = fsdp_ckpt(&["inspect", dir, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(ok);
    assert_eq!(json["tensors"]["model.uneven.weight"]["shape"], serde_json::json!([7, 3]));
    assert_eq!(json["tensors"]["model.uneven.weight"]["bytes"], 42);
    assert_eq!((&json["world_size"], &json["values"]["step"]), (&2.into(), &10.into()));

    let (ok, out, _) = fsdp_ckpt(&["verify", dir]);
    assert!(ok && out.contains("ok, ") && out.contains("in 2 files"), "{out}");
}

#[test]
fn damage_is_told_in_one_line_with_a_failing_status() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(1));
    let path = dir.join("shard-00001-model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (ok, _, err) = fsdp_ckpt(&["verify", dir.to_str().unwrap()]);
    assert!(!ok && err.contains("is damaged") && err.lines().count() == 1, "{err}");

    let (ok, _, err) = fsdp_ckpt(&["inspect", root.path().to_str().unwrap()]);
    assert!(!ok && err.starts_with("fsdp-ckpt: incomplete checkpoint:") && err.lines().count() == 1, "{err}");
}

#[test]
fn help_teaches() {
    let (ok, out, _) = fsdp_ckpt(&["--help"]);
    assert!(ok && out.contains("EXAMPLES") && out.contains("inspect") && out.contains("verify"), "{out}");
}
