//! Damaged and invalid files: errors name the problem and the file.

use std::path::{Path, PathBuf};

use crate::hostile::{change_manifest, crc32c};
use crate::world::{Global, fresh, line, read, save_all, saved, zoo};
use fsdp_ckpt::hf::HfModel;
use fsdp_ckpt::{Checkpoint, Error, SafetensorsFile, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{DType, Placement};
use proptest::prelude::*;
use tempfile::TempDir;

const FIRST: &str = "shard-00001-model-00001-of-00001.safetensors";

fn open_fails(dir: &Path) -> String {
    Checkpoint::open(dir).unwrap_err().to_string()
}

#[test]
fn missing_manifest_is_incomplete() {
    let (root, dir) = saved(2);
    std::fs::remove_file(dir.join("checkpoint.json")).unwrap();
    let message = open_fails(&dir);
    assert!(message.starts_with("incomplete checkpoint: ") && message.ends_with("use another step"), "{message}");
    assert!(matches!(Checkpoint::open(&dir), Err(Error::Incomplete { .. })));
    assert!(open_fails(&root.path().join("other")).contains("no such directory"));
}

#[test]
fn detects_every_flipped_bit_of_data() {
    let (_root, dir) = saved(2);
    let path = dir.join(FIRST);
    let good = std::fs::read(&path).unwrap();
    let start = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for at in start..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let error = Checkpoint::open(&dir).unwrap().verify().unwrap_err();
        assert!(matches!(&error, Error::Checksum { path, .. } if path.ends_with(FIRST)), "{error}");
    }
    // A load that reads a whole chunk also detects it.
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let damaged = zoo().into_iter().filter(|global| {
        let read = read(&checkpoint, global, &Region::whole(&global.shape));
        matches!(read, Err(Error::Checksum { tensor: Some(tensor), .. }) if tensor == global.fqn)
    });
    assert_eq!(damaged.count(), 1);
}

#[test]
fn detects_a_file_of_another_tensor() {
    let (root, dir) = saved(2);
    let other = root.path().join("other");
    let mut globals = zoo();
    globals[0] = Global::new("model.even.weight", DType::F32, &[6, 10], &[Placement::Shard(0)]);
    save_all(&other, &globals, &line(2));
    let (from, to) = (other.join(FIRST), dir.join(FIRST));
    std::fs::copy(from, &to).unwrap();
    change_manifest(&dir, |json| json["files"][FIRST]["bytes"] = std::fs::metadata(&to).unwrap().len().into());
    let error = Checkpoint::open(&dir).unwrap().verify().unwrap_err();
    assert!(matches!(error, Error::Checksum { tensor: None, .. }) && error.is_damage(), "{error}");

    // The header has the recorded checksum, but another shape.
    let file = std::fs::read(&to).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    change_manifest(&dir, |json| json["files"][FIRST]["header_crc32c"] = crc32c(&file[..header]).into());
    let message = Checkpoint::open(&dir).unwrap().verify().unwrap_err().to_string();
    assert!(message.contains("\"model.even.weight\"") && message.contains("but the file has F32 [3, 10]"), "{message}");

    change_manifest(&dir, |json| {
        json["tensors"]["model.even.weight"]["chunks"][0]["file"] = "../other/x".into();
    });
    assert!(open_fails(&dir).contains("not a plain file name"));
}

#[test]
fn rejects_invalid_reads() {
    let (_root, dir) = saved(2);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let region = |offset, size| Region { offsets: vec![offset, 0], sizes: vec![size, 5] };
    let ask = |name: &str, region: &Region, bytes| checkpoint.read(name, region, &mut vec![0; bytes]).unwrap_err();
    assert!(ask("model.even.weight", &region(10, 3), 60).to_string().contains("[10..13, 0..5] is not within"));
    assert!(ask("model.even.weight", &region(usize::MAX, 3), 60).to_string().contains("is not within"));
    assert!(ask("model.even.weight", &Region::whole(&[3]), 12).to_string().contains("is not within"));
    assert!(ask("model.even.weight", &region(0, 2), 39).to_string().contains("needs 40 bytes, but the buffer has 39"));
    let missing = ask("even.weight", &region(0, 2), 40);
    assert!(
        missing.to_string().contains("no tensor \"even.weight\"; did you mean [\"model.even.weight\"]"),
        "{missing}"
    );
}

fn file(header: &str, claimed: u64, data: usize) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.safetensors");
    let mut bytes = claimed.to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(&path, bytes).unwrap();
    (root, path)
}

#[test]
fn rejects_invalid_headers() {
    let one = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let overlap = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
        "v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let huge = r#"{"w":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,8]}}"#;
    let hidden = r#"{"w":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807,0],"data_offsets":[0,0]}}"#;
    for (header, claimed, data, part) in [
        (one, u64::MAX, 8, "claims 18446744073709551615 bytes"),
        (one, 1 << 40, 8, "claims 1099511627776 bytes"),
        (one, one.len() as u64, 7, "describes 8 bytes of tensors, the file has 7"),
        (one, one.len() as u64, 9, "describes 8 bytes of tensors, the file has 9"),
        (overlap, overlap.len() as u64, 12, "header is damaged"),
        (huge, huge.len() as u64, 8, "header is damaged"),
        (hidden, hidden.len() as u64, 0, ""),
        ("not json", 8, 0, "header is damaged"),
    ] {
        let (_root, path) = file(header, claimed, data);
        let error = SafetensorsFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::NotSafetensors { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let (_root, path) = file(one, one.len() as u64, 8);
    assert_eq!(SafetensorsFile::open(&path).unwrap().info("w").unwrap().shape, [2]);
    std::fs::write(&path, [1, 2, 3]).unwrap();
    assert!(SafetensorsFile::open(&path).unwrap_err().to_string().contains("it has 3 bytes"));
    assert!(SafetensorsFile::open(path.parent().unwrap()).is_err());
}

proptest! {
    #[test]
    fn random_headers_never_panic(
        mut header in proptest::collection::vec(any::<u8>(), 0..200),
        flips in proptest::collection::vec((0usize..300, any::<u8>()), 0..6),
        whole in any::<bool>(),
    ) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("f");
        if whole {
            let json = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
                "b":{"dtype":"U8","shape":[1],"data_offsets":[24,25]}}"#;
            header = (json.len() as u64).to_le_bytes().to_vec();
            header.extend(json);
            header.extend([0; 25]);
            for (at, to) in flips {
                let len = header.len();
                header[at % len] = to;
            }
        }
        std::fs::write(&path, &header).unwrap();
        if let Ok(file) = SafetensorsFile::open(&path) {
            for name in file.names() {
                if let Ok(info) = file.info(name) {
                    let mut bytes = vec![0; info.shape.iter().product::<usize>() * info.dtype.size()];
                    file.read(name, &Region::whole(&info.shape), &mut bytes).unwrap();
                }
            }
        }
    }
}

fn model(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(root.path().join(name), text).unwrap();
    }
    root
}

const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 9\n";

#[test]
fn rejects_invalid_model_directories() {
    let index = "model.safetensors.index.json";
    let map = |file: &str| format!(r#"{{"metadata":{{}},"weight_map":{{"w":{file:?}}}}}"#);
    let (_one, one) = file(r#"{"v":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#, 55, 2);
    for (files, part) in [
        (vec![], "has no model.safetensors and no model.safetensors.index.json"),
        (vec![("model.safetensors", "x".to_string())], "is not a valid safetensors file: it has 1 bytes"),
        (vec![(index, "[".to_string())], "not the index of a model"),
        (
            vec![(index, map("a.safetensors"))],
            "has no file \"a.safetensors\", which model.safetensors.index.json lists",
        ),
        (vec![(index, map("../a.safetensors"))], "which is not a plain file name"),
        (vec![(index, map("/etc/passwd"))], "which is not a plain file name"),
        (vec![(index, map(".."))], "which is not a plain file name"),
    ] {
        let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let root = model(&files);
        let message = HfModel::open(root.path()).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    for (name, content, part) in [
        ("model.safetensors", LFS, "it is a Git LFS pointer, not the file: run `git lfs pull`"),
        ("model.safetensors.index.json", LFS, "it is a Git LFS pointer"),
        ("model.safetensors", "<!doctype HTML>\n", "it is an HTML page"),
        ("model.safetensors", "", "it is empty"),
        ("model.safetensors", "GGUF\u{3}\0\0\0more", "it is a GGUF file"),
        ("model-00001-of-00002.safetensors", "x", "has no model-00002-of-00002.safetensors, although it has"),
        ("pytorch_model.bin", LFS, "it is a Git LFS pointer"),
        ("pytorch_model.bin", "<html>", "it is an HTML page"),
    ] {
        let root = model(&[(name, content)]);
        let message = fsdp_ckpt::open(root.path()).unwrap_err().to_string();
        assert!(message.contains(part), "{name}: {message}");
    }
    let root = model(&[(index, &map("a.safetensors"))]);
    std::fs::copy(&one, root.path().join("a.safetensors")).unwrap();
    let message = HfModel::open(root.path()).unwrap_err().to_string();
    assert!(message.contains("lists weight \"w\" in a.safetensors, which has no such tensor"), "{message}");
    assert!(HfModel::open(root.path().join("no")).unwrap_err().to_string().contains("no such directory"));

    let model = HfModel::open(one.parent().unwrap()).unwrap();
    assert!(model.tensor("v").unwrap_err().to_string().contains("has unsupported dtypes: \"v\" (BOOL); expected"));
    assert!(model.tensor("w").unwrap_err().to_string().contains("has no tensor \"w\""));
}

#[test]
fn reads_narrow_and_wide_columns() {
    let (_root, dir) = fresh();
    let globals = [
        Global::new("narrow", DType::BF16, &[700, 9], &[Placement::Shard(0)]),
        Global::new("wide", DType::F32, &[40, 9000], &[Placement::Shard(0)]),
    ];
    save_all(&dir, &globals, &line(2));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for global in &globals {
        let columns = global.shape[1] / 3;
        let region = Region { offsets: vec![1, columns], sizes: vec![global.shape[0] - 2, columns] };
        assert_eq!(read(&checkpoint, global, &region).unwrap(), global.cut(&region), "{}", global.fqn);
    }
}
