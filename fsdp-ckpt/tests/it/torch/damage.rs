//! Damaged and hostile files of PyTorch: errors name the problem and the file.

use std::path::Path;

use fsdp_ckpt::torch::TorchDcp;
use fsdp_ckpt::{Error, TensorSource, open};
use proptest::prelude::*;

use super::build::{Build, Item, Tensor, metadata};
use super::{fixture, hostile, recorded};

/// Pickles a dict with one tensor.
fn state(tensor: impl Fn(Build) -> Build) -> Vec<u8> {
    tensor(Build::new().ops(b"}").text("w")).ops(b"s").end()
}

fn message(pickle: &[u8]) -> String {
    hostile::pickle(pickle).unwrap_err().to_string()
}

#[test]
fn names_refused_globals() {
    for (module, name) in
        [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.storage", "_load_from_bytes")]
    {
        let call = |build: Build| build.text("touch /tmp/x").ops(b"\x85R");
        let one = state(|build| call(build.global(module, name)));
        let two = state(|build| call(build.text(module).text(name).ops(b"\x93")));
        for pickle in [one, two] {
            let message = message(&pickle);
            assert!(message.contains("hostile.pt: its pickle uses ") && message.contains("was not run"), "{message}");
            assert!(message.contains(&format!("uses {module}.{name},")), "{message}");
        }
    }
    // A DCP checkpoint leaves out such values, and its tensors stay readable.
    let dcp = open(fixture("dcp")).unwrap();
    assert_eq!(dcp.unreadable()["half"], "a pickle that uses fractions.Fraction");
    assert_eq!(dcp.unreadable()["state"], "a whole number of 17 bytes");
    assert_eq!(dcp.values()["seed"], u64::MAX);
    assert_eq!(dcp.tensors().len(), 2);
}

#[test]
fn rejects_invalid_pickles() {
    let nested = |depth: usize| {
        let lists = [b"]".repeat(depth), b"a".repeat(depth - 1)].concat();
        Build::new().ops(b"}").text("w").ops(&lists).ops(b"s").end()
    };
    let dicts =
        (0..100).fold(Build::new(), |build, _| build.ops(b"}").text("k")).ops(b"N").ops(&b"s".repeat(100)).end();
    // Each list holds the previous one ten times.
    let laughs = (0..30u8).fold(Build::new().ops(b"]q\0"), |build, i| {
        let again = [b'h', i].repeat(10);
        build.ops(b"](").ops(&again).ops(b"eq").ops(&[i + 1])
    });
    let cycle = Build::new().ops(b"]q\0h\0a").end();
    let long = "k".repeat(5000);
    for (pickle, part) in [
        (nested(100_000), "nested more than 64 deep"),
        (dicts, "nested more than 64 deep"),
        (laughs.end(), "repeats itself until"),
        (cycle, "nested more than 64 deep"),
        (Build::new().ops(b"}").text(&long).ops(b"K\x01s").end(), "has the key a string"),
        (Build::new().ops(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff").end(), "more bytes, but has 1"),
        (Build::new().ops(b"X\xff\xff\xff\xff").end(), "it needs 4294967295 more bytes, but has 1"),
        (Build::new().ops(b"\x8a\x20").ops(&[1; 16]).end(), "it needs 32 more bytes, but has 17"),
        (Build::new().ops(b"h\x05").end(), "the memo has no entry 5"),
        (Build::new().ops(b"R").end(), "the stack is empty"),
        (Build::new().ops(b"t").end(), "the stack has no mark"),
        (Build::new().ops(b"(").end(), "the stack is empty"),
        (Build::new().ops(b"K\x01K\x02a").end(), "the value on the stack can't be changed"),
        (Build::new().ops(b"}K\x02a").end(), "appended to a value that is not a list"),
        (Build::new().ops(b"}(K\x02u").end(), "a key has no value"),
        (Build::new().ops(b"i").end(), "operation 0x69"),
        (b"\x80\x09N.".to_vec(), "its protocol is 9"),
        (b"\x80\x02".to_vec(), "it needs 1 more bytes, but has 0"),
        (b"\x80\x02cos".to_vec(), "a name does not end"),
        (Vec::new(), "it needs 1 more bytes"),
    ] {
        let message = message(&pickle);
        assert!(message.contains(part) && message.contains("hostile.pt: "), "{part}: {message}");
    }
    // The memo accepts any index.
    hostile::pickle(&Build::new().ops(b"}r\xff\xff\xff\xff").end()).unwrap();
}

#[test]
fn rejects_tensors_outside_their_storage() {
    let huge = u64::MAX / 2;
    hostile::pickle(&state(|build| build.tensor("0", 0, &[4, 4], &[4, 1]))).unwrap();
    for (tensor, part) in [
        (Build::default().tensor("0", 1, &[4, 4], &[4, 1]), "end at byte 68 of its storage, which has 64 bytes"),
        (Build::default().tensor("0", huge, &[1], &[1]), "overflow"),
        (Build::default().tensor("0", 0, &[huge, huge], &[1, 1]), "overflow"),
        (Build::default().tensor("0", 0, &[huge, huge, 0], &[1, 1, 1]), "overflow"),
        (Build::default().tensor("0", 0, &[2, 2], &[huge, huge]), "overflow"),
        (Build::default().tensor("0", 0, &[1 << 40], &[0]), "it expands 64 bytes"),
        (Build::default().tensor("0", 0, &[2], &[1, 1]), "do not describe a tensor"),
        (Build::default().tensor("0", 0, &[u64::MAX], &[1]), "do not describe a tensor"),
        (Build::default().tensor("0", 0, &[1; 65], &[1; 65]), "do not describe a tensor"),
        (Build::default().tensor("../0", 0, &[1], &[1]), "no storage \"../0\""),
    ] {
        let message = message(&state(|build| build.ops(&tensor.0)));
        assert!(message.contains(part), "{part}: {message}");
    }
    let twice = Build::new().ops(b"}(").text("a.b").ops(b"K\x01").text("a").ops(b"}").text("b").ops(b"K\x02su").end();
    assert!(message(&twice).contains("\"a.b\": this name is there twice"));
}

/// Returns the error for a checkpoint of one file with these tensors, values and items.
fn dcp(tensors: &[Tensor], values: &[&str], items: &[Item]) -> String {
    let metadata = metadata(tensors, values, items);
    hostile::dcp_metadata(&metadata, &fixture("dcp")).unwrap_err().to_string()
}

#[test]
fn rejects_invalid_metadata() {
    let file = "__0_0.distcp";
    let item = |at: u64, offset: u64| Item {
        fqn: "w",
        offsets: Some(vec![at]),
        path: file,
        offset,
        length: 1000,
        transforms: None,
    };
    let chunk = |at: u64, size: u64| (vec![at], vec![size]);
    let one = |shape: u64, chunks: &[(u64, u64)], items: &[Item]| {
        dcp(&[("w", vec![shape], chunks.iter().map(|&(at, size)| chunk(at, size)).collect())], &[], items)
    };
    let two = [item(0, 0), item(2, 1000)];
    let huge = u64::MAX / 2;
    let with = |change: &dyn Fn(&mut Item)| {
        let mut changed = item(0, 0);
        change(&mut changed);
        one(4, &[(0, 4)], &[changed])
    };
    for (message, part) in [
        (
            one(4, &[(0, 2), (3, 1)], &[item(0, 0), item(3, 1000)]),
            "\"w\": its chunks leave out 1 elements of its shape [4]",
        ),
        (one(4, &[(0, 3), (2, 2)], &two), "overlap"),
        (one(4, &[(0, 2), (2, 3)], &two), "is outside its shape [4]"),
        (one(4, &[(0, 2), (2, 2)], &two[..1]), "its chunk [2..4] is in no file"),
        (one(4, &[(0, 2), (0, 2)], &two), "is in no file, or is listed twice"),
        (one(huge, &[(0, huge)], &two[..1]), "does not fit into the 1000 bytes of its item in \"__0_0.distcp\""),
        (one(4000, &[(0, 4000)], &two[..1]), "does not fit into the 1000 bytes"),
        (
            one(4, &[(0, 2), (2, 2)], &[item(0, 0), item(2, 999)]),
            "\"w\": it starts at 999 of \"__0_0.distcp\", within \"w\"",
        ),
        (one(4, &[(0, 2), (2, 2)], &[item(0, 0), item(0, 1000)]), "two chunks of it have the same offsets"),
        (with(&|item| item.offset = 1 << 40), "has items up to byte 1099511628776; is it truncated?"),
        (with(&|item| item.offset = huge), "has items up to byte"),
        (with(&|item| item.offset = u64::MAX), "it has no file, offset and length"),
        (with(&|item| item.path = "../w"), "which is not a plain file name"),
        (with(&|item| item.path = "/etc/passwd"), "which is not a plain file name"),
        (with(&|item| item.path = ".."), "which is not a plain file name"),
        (with(&|item| item.path = "gone"), "has no file \"gone\""),
        (with(&|item| item.transforms = Some("zstd")), "\"w\": it is stored with transforms"),
        (with(&|item| item.offsets = None), "stored as a value"),
        (with(&|item| item.fqn = "v"), "is in no file"),
        (with(&|_| ()), "\"w\": it is not a file of torch.save"),
        (dcp(&[], &["v"], &[]), "\"v\": it is in 0 places, expected 1"),
        (dcp(&[], &["v", "v"], &[]), "\"v\": it is in 0 places"),
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let tensor = |build: Build| build.tensor("0", 0, &[1], &[1]);
    for (pickle, part) in [
        (Build::new().ops(b"}").end(), "it is not the metadata of a DCP checkpoint"),
        (state(tensor), "it is not the metadata of a DCP checkpoint"),
        (state(|build| build.global("os", "system")), "uses os.system"),
    ] {
        let message = hostile::dcp_metadata(&pickle, &fixture("dcp")).unwrap_err().to_string();
        assert!(message.contains(".metadata: ") && message.contains(part), "{message}");
    }
}

fn copy(from: &Path) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), root.path().join(entry.file_name())).unwrap();
    }
    root
}

#[test]
fn detects_damaged_checkpoints() {
    let root = copy(&fixture("dcp"));
    let path = root.path().join("__0_0.distcp");
    let good = std::fs::read(&path).unwrap();
    let sound = TorchDcp::open(fixture("dcp")).unwrap();
    let mut noticed = 0;
    for at in (0..good.len()).step_by(3) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let read = TorchDcp::open(root.path()).and_then(|checkpoint| {
            checkpoint.verify()?;
            super::assert_same_tensors(&checkpoint, &sound);
            assert_eq!(checkpoint.values(), sound.values());
            Ok(())
        });
        if let Err(error) = read {
            noticed += 1;
            let names = ["w", "b", "step", "betas", "flags", "last", "kind", "half", "seed", "state"];
            let message = error.to_string();
            assert!(message.contains("__0_0.distcp") && names.iter().any(|name| message.contains(name)), "{message}");
        }
    }
    assert!(noticed > good.len() / 24, "{noticed} of {}", good.len());
    for len in (0..good.len()).step_by(47) {
        std::fs::write(&path, &good[..len]).unwrap();
        let message = TorchDcp::open(root.path()).unwrap_err().to_string();
        assert!(message.contains("__0_0.distcp: it has ") && message.contains("is it truncated?"), "{message}");
    }
    std::fs::write(&path, &good).unwrap();
    let metadata = std::fs::read(root.path().join(".metadata")).unwrap();
    for len in (0..metadata.len()).step_by(3) {
        std::fs::write(root.path().join(".metadata"), &metadata[..len]).unwrap();
        let error = TorchDcp::open(root.path()).unwrap_err();
        assert!(matches!(&error, Error::Malformed { path, .. } if path.ends_with(".metadata")), "{error}");
    }
    std::fs::remove_file(root.path().join(".metadata")).unwrap();
    let message = TorchDcp::open(root.path()).unwrap_err().to_string();
    assert!(message.contains("has no .metadata: it is not a DCP checkpoint, or its save did not finish"), "{message}");
}

#[test]
fn rejects_links_directories_and_pipes() {
    let root = copy(&fixture("dcp"));
    let path = root.path().join("__0_0.distcp");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    assert!(TorchDcp::open(root.path()).unwrap_err().to_string().contains("has no file \"__0_0.distcp\""));
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("__0_0.distcp", &path).unwrap();
    let error = TorchDcp::open(root.path()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("__0_0.distcp")), "{error}");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(TorchDcp::open(root.path()).is_err());
    // A pipe must not block.
    let path = root.path().join(".metadata");
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let error = TorchDcp::open(root.path()).unwrap_err();
    assert!(format!("{error:?}").contains("not a regular file"), "{error:?}");
}

fn flipped(mut bytes: Vec<u8>, flips: &[(usize, u8)]) -> Vec<u8> {
    for &(at, to) in flips {
        let len = bytes.len();
        bytes[at % len] = to;
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn changed_metadata_never_panics(flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
        let files = recorded("llama_tiny/dcp_step10");
        let good = std::fs::read(files.join(".metadata")).unwrap();
        let _ = hostile::dcp_metadata(&flipped(good, &flips), &files);
    }

    #[test]
    fn small_changed_metadata_never_panics(flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..4)) {
        let good = std::fs::read(fixture("dcp/.metadata")).unwrap();
        let _ = hostile::dcp_metadata(&flipped(good, &flips), &fixture("dcp"));
    }

    #[test]
    fn changed_pickles_never_panic(flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
        let good = state(|build| build.tensor("0", 1, &[3, 2], &[2, 1]));
        let _ = hostile::pickle(&flipped(good, &flips));
    }

    #[test]
    fn random_pickles_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = hostile::pickle(&bytes);
        let _ = hostile::dcp_metadata(&bytes, &fixture("dcp"));
    }

    #[test]
    fn changed_archives_never_panic(flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("views.pt");
        std::fs::write(&path, flipped(std::fs::read(fixture("views.pt")).unwrap(), &flips)).unwrap();
        if let Ok(state) = open(&path) {
            let _ = state.verify();
            for fqn in state.tensors().keys() {
                let _ = super::whole(&*state, fqn);
            }
        }
    }
}

#[test]
fn rejects_links_out_of_a_checkpoint() {
    use std::os::unix::fs::symlink;
    let root = tempfile::tempdir().unwrap();
    let (dir, inner) = (root.path().join("checkpoint"), root.path().join("inner"));
    let files = std::fs::read_dir(fixture("dcp")).unwrap().map(|entry| entry.unwrap().file_name());
    let files: Vec<String> = files.map(|name| name.into_string().unwrap()).collect();
    assert!(files.len() >= 2, "{files:?}");
    for name in &files {
        for dir in [&dir, &inner] {
            std::fs::create_dir_all(dir).unwrap();
            std::fs::copy(fixture("dcp").join(name), dir.join(name)).unwrap();
        }
    }
    for name in &files {
        let path = dir.join(name);
        std::fs::remove_file(&path).unwrap();
        symlink(inner.join(name), &path).unwrap();
        let message = format!("{:#}", anyhow::Error::from(TorchDcp::open(&dir).unwrap_err()));
        assert!(
            message.contains(name) && message.contains("symbolic link that leads out of the checkpoint"),
            "{message}"
        );
        // A link within the directory is allowed.
        std::fs::remove_file(&path).unwrap();
        let beside = format!("other-{name}");
        std::fs::copy(inner.join(name), dir.join(&beside)).unwrap();
        symlink(&beside, &path).unwrap();
        TorchDcp::open(&dir).unwrap().verify().unwrap();
    }
}
