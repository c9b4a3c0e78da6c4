//! Damaged and hostile input of the command: one line names the problem and the file, and the status is 1.

use std::path::Path;

use crate::cli::{fails, fsdp_ckpt, json, succeeds, text};
use crate::hostile::{self, change_manifest};
use crate::world::{change, saved};
use serde_json::Value;

const FILES: [&str; 2] =
    ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"];

/// Asserts that every command that reads a checkpoint fails with all of these parts.
fn all_fail(dir: &Path, parts: &[&str]) {
    let dst = dir.with_file_name("dst");
    for args in [
        &["inspect", text(dir)][..],
        &["verify", text(dir)],
        &["convert", text(dir), text(&dst), "--to", "hf"],
        &["consolidate", text(dir), text(&dst)],
        &["diff", text(dir), text(dir)],
    ] {
        let message = fails(args);
        assert!(parts.iter().all(|part| message.contains(part)), "{args:?}: {message}");
        assert!(!dst.exists());
    }
}

#[test]
fn verify_lists_all_damage() {
    let (_root, dir) = saved(2);
    for name in FILES {
        change(&dir.join(name), |bytes| {
            // The first tensor has the largest alignment.
            let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[start] ^= 4;
            *bytes.last_mut().unwrap() ^= 1;
        });
    }
    let (code, out, err) = fsdp_ckpt(&["verify", text(&dir)]);
    assert_eq!(code, 1);
    assert_eq!(out.lines().count(), 4, "{out}");
    assert_eq!(out.matches("is damaged: checksum").count(), 4, "{out}");
    assert!(FILES.iter().all(|name| out.matches(name).count() == 2), "{out}");
    assert!(err.contains("4 of its 14 chunks can't be used") && err.lines().count() == 1, "{err}");
    let (code, out, _) = fsdp_ckpt(&["verify", text(&dir), "--json"]);
    let found = json(&out);
    assert_eq!((code, &found["ok"], found["damaged"].as_array().unwrap().len()), (1, &Value::Bool(false), 4));

    // A damaged header is reported once, with the tensors of the file.
    change(&dir.join(FILES[0]), |bytes| bytes[9] = b'?');
    let (code, out, _) = fsdp_ckpt(&["verify", text(&dir)]);
    assert!(code == 1 && out.matches("the header of ").count() == 1, "{out}");
    assert!(out.contains("it holds \"model.buffer\""), "{out}");
}

#[test]
fn rejects_truncated_missing_and_linked_files() {
    let (_root, dir) = saved(2);
    let path = dir.join(FILES[1]);
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, &good[..good.len() / 2]).unwrap();
    all_fail(&dir, &[FILES[1], &format!("expected {}", good.len())]);
    std::fs::remove_file(&path).unwrap();
    all_fail(&dir, &["has no file", FILES[1]]);
    // A link, even to equal bytes.
    let elsewhere = dir.with_file_name("elsewhere");
    std::fs::write(&elsewhere, &good).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    all_fail(&dir, &[FILES[1], "it is a symbolic link", "replace it by a copy"]);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &good).unwrap();
    succeeds(&["verify", text(&dir)]);
}

#[test]
fn rejects_invalid_manifests() {
    let (_root, dir) = saved(2);
    let path = dir.join("checkpoint.json");
    let good = std::fs::read(&path).unwrap();
    let chunk = "/tensors/model.even.weight/chunks/0";
    for (at, value, part) in [
        ("/version".into(), 4.into(), "use a newer fsdp-ckpt"),
        ("/values/step".into(), (1u64 << 63).into(), "expected at most"),
        ("/tensors".into(), serde_json::json!({}), "no tensor has a chunk in its file"),
        (format!("{chunk}/file"), "../elsewhere".into(), "not a plain file name"),
        (format!("{chunk}/file"), "/etc/passwd".into(), "not a plain file name"),
        (format!("{chunk}/offsets/0"), 3.into(), "overlap"),
        (format!("{chunk}/sizes/0"), 5.into(), "leave out 5 elements"),
        (format!("{chunk}/offsets/0"), u64::MAX.into(), "outside its shape"),
        ("/tensors/model.even.weight/shape/0".into(), (1u64 << 62).into(), "overflow"),
        ("/world_size".into(), 3.into(), "does not have 3 ranks"),
    ] {
        std::fs::write(&path, &good).unwrap();
        change_manifest(&dir, |manifest| *manifest.pointer_mut(&at).unwrap() = value);
        all_fail(&dir, &["checkpoint.json", part]);
    }
    // A change without a new checksum.
    let words = String::from_utf8(good.clone()).unwrap();
    std::fs::write(&path, words.replace("\"step\": 10", "\"step\": 11")).unwrap();
    all_fail(&dir, &["checkpoint.json", "it is damaged or edited by hand"]);
    // Only the file's header shows the dtype.
    std::fs::write(&path, &good).unwrap();
    change_manifest(&dir, |manifest| manifest["tensors"]["model.even.weight"]["dtype"] = "U32".into());
    let (code, out, _) = fsdp_ckpt(&["verify", text(&dir)]);
    assert!(code == 1 && out.contains("should be U32 [6, 5], but the file has F32 [6, 5]"), "{out}");
    let message = fails(&["convert", text(&dir), text(&dir.with_file_name("dst")), "--to", "fsdp"]);
    assert!(message.contains("\"model.even.weight\"") && message.contains("should be U32"), "{message}");
}

#[test]
fn version_1_reports_missing_checksums() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("old");
    hostile::files(&dir);
    let old = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/manifest/good")).unwrap();
    std::fs::write(dir.join("checkpoint.json"), &old).unwrap();
    let out = succeeds(&["verify", text(&dir)]);
    assert!(out.contains("ok, 5 chunks") && out.contains("written by an older fsdp-ckpt"), "{out}");
    assert_eq!(json(&succeeds(&["verify", text(&dir), "--json"]))["covered"], "tensors");
    assert!(succeeds(&["inspect", text(&dir)]).contains("not checked"));
    // Conversion upgrades it.
    let new = root.path().join("new");
    succeeds(&["convert", text(&dir), text(&new), "--to", "fsdp"]);
    assert_eq!(json(&succeeds(&["verify", text(&new), "--json"]))["covered"], "everything");
    succeeds(&["diff", text(&dir), text(&new)]);
    // Errors that need no checksum.
    change(&dir.join("checkpoint.json"), |bytes| {
        let mut manifest: Value = serde_json::from_slice(bytes).unwrap();
        manifest["tensors"] = serde_json::json!({});
        *bytes = manifest.to_string().into_bytes();
    });
    all_fail(&dir, &["checkpoint.json", "no tensor has a chunk in its file"]);
}

#[test]
fn rejects_other_files() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("m.safetensors");
    for (bytes, part) in [
        (&b""[..], "it is empty: download or copy it again"),
        (b"hello, this is text", "claims"),
        (&u64::MAX.to_le_bytes(), "claims 18446744073709551615 bytes"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        all_fail(&file, &["m.safetensors", "not a valid safetensors file", part]);
    }
    let empty = root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    all_fail(&empty, &["has no"]);
    all_fail(Path::new("/dev/null"), &["/dev/null"]);
    // A pipe without a writer must not block.
    let pipe = empty.join("model.safetensors");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    all_fail(&empty, &["has no"]);
}

#[test]
fn reads_hugging_face_caches_of_links() {
    let (root, dir) = saved(2);
    let (real, cache) = (root.path().join("real"), root.path().join("cache"));
    succeeds(&["convert", text(&dir), text(&real), "--to", "hf"]);
    std::fs::create_dir(&cache).unwrap();
    std::os::unix::fs::symlink(real.join("model.safetensors"), cache.join("model.safetensors")).unwrap();
    let out = succeeds(&["verify", text(&cache)]);
    assert!(out.contains("this format has no checksums"), "{out}");
    succeeds(&["diff", text(&cache), text(&dir)]);
}
