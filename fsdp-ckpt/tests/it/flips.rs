//! Damage of any byte of a checkpoint is seen.
//!
//! `FSDP_FLIPS` says how many manifests and how many shard files are damaged.

use std::path::Path;

use fsdp_ckpt::{Checkpoint, TensorSource, latest, survey};

use crate::kills::splitmix;
use crate::world::{fresh, line, list, save_all, zoo};

const FLIPS: usize = 60;

fn flips() -> usize {
    match std::env::var("FSDP_FLIPS") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("FSDP_FLIPS={text:?} is not a number")),
        Err(_) => FLIPS,
    }
}

/// Changes a bit, or a byte to any other.
fn flip(bytes: &mut [u8], random: &mut u64) {
    let at = (splitmix(random) % bytes.len() as u64) as usize;
    bytes[at] ^= match splitmix(random) % 2 {
        0 => 1 << (splitmix(random) % 8),
        _ => (1 + splitmix(random) % 255) as u8,
    };
}

/// What `fsdp-ckpt verify` does.
fn verify(dir: &Path) -> fsdp_ckpt::Result<()> {
    Checkpoint::open(dir)?.verify().map(drop)
}

#[test]
fn no_flipped_byte_of_a_manifest_is_unseen() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    verify(&dir).unwrap();
    let path = dir.join("checkpoint.json");
    let good = std::fs::read(&path).unwrap();
    let mut random = 6;
    for count in 0..flips() {
        let mut bad = good.clone();
        flip(&mut bad, &mut random);
        std::fs::write(&path, &bad).unwrap();
        let error = verify(&dir).expect_err(&format!("flip {count}: {}", String::from_utf8_lossy(&bad)));
        assert!(error.is_damage(), "flip {count}: {error}");
        // No run goes on from it, and `train --resume auto` sets it aside.
        let found = survey(root.path()).unwrap();
        assert!(found.newest.is_none() && found.skipped[0].1.is_damage(), "flip {count}: {found:?}");
    }
    std::fs::write(&path, &good).unwrap();
    assert_eq!(latest(root.path()).unwrap(), Some(dir));
}

#[test]
fn no_flipped_byte_of_a_shard_file_is_unseen() {
    let (_root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let shards: Vec<String> = list(&dir).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(shards.len(), 2);
    let mut random = 7;
    let mut headers = 0;
    for count in 0..flips() {
        let path = dir.join(&shards[count % 2]);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        flip(&mut bad, &mut random);
        std::fs::write(&path, &bad).unwrap();
        let error = verify(&dir).expect_err(&format!("flip {count} of {}", path.display()));
        assert!(error.is_damage(), "flip {count}: {error}");
        let start = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        headers += usize::from(good[..start] != bad[..start]);
        std::fs::write(&path, &good).unwrap();
    }
    assert!(headers > flips() / 4 && headers < flips(), "{headers} of {} were in headers", flips());
    verify(&dir).unwrap();
}

#[test]
fn a_load_sees_what_verify_sees_in_headers() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(2));
    let path = dir.join("shard-00001-model-00001-of-00001.safetensors");
    let good = std::fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&good);
    // The offsets are for PyTorch's reader alone.
    let offsets = text.find("saved_offsets\\\":[0").unwrap() + "saved_offsets\\\":[".len();
    for at in [0, 8, offsets] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let error = crate::world::read(&checkpoint, &globals[0], &globals[0].region(&line(2), 0)).unwrap_err();
        assert!(error.is_damage(), "{at}: {error}");
    }
}
