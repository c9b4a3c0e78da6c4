//! Detecting flipped bytes anywhere in a checkpoint.
//!
//! `FSDP_FLIPS` is the number of manifests and of shard files to damage.

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

/// Flips a bit, or replaces a byte.
fn flip(bytes: &mut [u8], random: &mut u64) {
    let at = (splitmix(random) % bytes.len() as u64) as usize;
    bytes[at] ^= match splitmix(random) % 2 {
        0 => 1 << (splitmix(random) % 8),
        _ => (1 + splitmix(random) % 255) as u8,
    };
}

/// Verifies like `fsdp-ckpt verify`.
fn verify(dir: &Path) -> fsdp_ckpt::Result<()> {
    Checkpoint::open(dir)?.verify().map(drop)
}

#[test]
fn detects_flipped_bytes_of_a_manifest() {
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
        // No run resumes from it, and `train --resume auto` quarantines it.
        let found = survey(root.path()).unwrap();
        assert!(found.newest.is_none() && found.skipped[0].1.is_damage(), "flip {count}: {found:?}");
    }
    std::fs::write(&path, &good).unwrap();
    assert_eq!(latest(root.path()).unwrap(), Some(dir));
}

#[test]
fn detects_flipped_bytes_of_shard_files() {
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
fn load_detects_damaged_headers() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(2));
    let path = dir.join("shard-00001-model-00001-of-00001.safetensors");
    let good = std::fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&good);
    // Only PyTorch's reader uses the offsets.
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
