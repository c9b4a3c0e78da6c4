//! `train --tensorboard` writes event files in TensorBoard's format.

use std::fs;
use std::path::Path;

use fsdp_test_support::{json_lines, train_golden};

/// Returns the masked CRC-32C of TFRecord files, computed bit by bit.
fn masked_checksum(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Splits an event file into its records and checks their checksums.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut records) = (bytes, Vec::new());
    let checksum = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    while !rest.is_empty() {
        let (head, tail) = rest.split_at(12);
        let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
        assert_eq!(checksum(&head[8..]), masked_checksum(&head[..8]));
        let (record, tail) = tail.split_at(length);
        assert_eq!(checksum(&tail[..4]), masked_checksum(record));
        records.push(record);
        rest = &tail[4..];
    }
    records
}

/// Returns the scalar of `tag` in a record: the float field with key 0x15 after the tag.
fn scalar(record: &[u8], tag: &str) -> Option<f32> {
    let at = record.windows(tag.len()).position(|window| window == tag.as_bytes())? + tag.len();
    assert_eq!(record[at], 0x15);
    Some(f32::from_le_bytes(record[at + 1..at + 5].try_into().unwrap()))
}

/// Reads the event files of `dir` in TensorBoard's order.
fn files(dir: &Path) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.iter().all(|path| path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents.")));
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn every_step_is_there_and_a_resumed_run_replaces_repeated_steps() {
    let dir = tempfile::tempdir().unwrap();
    let train =
        |more: &str| train_golden("llama_tiny", 2, &format!("--steps 4 --tensorboard logs {more}"), dir.path()).ok();
    train("--checkpoint-dir first --save-every 2");
    train("--checkpoint-dir second --resume first/step-00000002");
    let metrics = json_lines(&dir.path().join("metrics.jsonl"));

    let files = files(&dir.path().join("logs"));
    // Only rank 0 writes: one file for each run.
    assert_eq!(files.len(), 2);
    for (file, first) in files.iter().zip([1u8, 3]) {
        let records = records(file);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // The step (field 2), and a session log (field 7) with the status START (1).
        assert!(records[1].ends_with(&[0x10, first, 0x3a, 2, 0x08, 1]), "{:?}", records[1]);
        let steps = &metrics[usize::from(first) - 1..];
        assert_eq!(records.len() - 2, steps.len());
        for (record, step) in records[2..].iter().zip(steps) {
            let number = u8::try_from(step["step"].as_u64().unwrap()).unwrap();
            // The wall time takes the first nine bytes.
            assert_eq!(record[9..11], [0x10, number]);
            for (tag, key) in [
                ("train/loss", "loss"),
                ("train/grad_norm", "grad_norm"),
                ("train/lr", "lr"),
                ("memory/shard_bytes", "shard_bytes"),
            ] {
                assert_eq!(scalar(record, tag), Some(step[key].as_f64().unwrap() as f32), "{tag}");
            }
            for tag in ["speed/tokens_per_s", "speed/step_time_s", "memory/peak_bytes"] {
                assert!(scalar(record, tag).unwrap() > 0., "{tag}");
            }
        }
    }
}
