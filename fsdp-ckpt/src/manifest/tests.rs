use super::*;
use serde_json::{Value, json};

fn good() -> Value {
    json!({
        "format": FORMAT, "version": 1, "created_by": "test", "world_size": 2,
        "mesh": {"names": ["dp"], "shape": [2]}, "values": {"lr": 0.1},
        "files": {"a": {"bytes": 100}, "b": {"bytes": 100}},
        "tensors": {"w": {"dtype": "F32", "shape": [3, 2], "chunks": [
            {"offsets": [0, 0], "sizes": [2, 2], "file": "a", "crc32c": 1},
            {"offsets": [2, 0], "sizes": [1, 2], "file": "b", "crc32c": 2},
        ]}},
    })
}

fn reason(text: &str) -> String {
    match Manifest::parse(text.as_bytes()) {
        Ok(_) => "accepted".into(),
        Err(Bad::Newer(version)) => format!("newer {version}"),
        Err(Bad::Text(reason)) => reason,
        Err(Bad::Tensor(name, reason)) => format!("{name}: {reason}"),
    }
}

#[test]
fn every_way_to_be_wrong_is_told() {
    assert_eq!(reason(&good().to_string()), "accepted");
    let huge = usize::MAX / 2;
    for (pointer, value, part) in [
        ("/format", json!("other"), "a checkpoint's is"),
        ("/version", json!(4), "newer 4"),
        ("/version", json!(0), "version 0"),
        ("/version", json!(2), "does not end with its checksum"),
        ("/values/step", json!(1u64 << 63), "no run takes more than"),
        ("/values/step", json!(-1e300), "no run takes more than"),
        ("/world_size", json!(3), "not one of 3 ranks"),
        ("/mesh/names", json!(["a", "b"]), "for the shape [2]"),
        ("/mesh/shape", json!([0]), "size 0"),
        ("/tensors/w/dtype", json!("F33"), "unknown variant"),
        ("/tensors/w/shape", json!([huge, huge]), "too large"),
        ("/tensors/w/shape", json!([4, 2]), "leave out 2 elements"),
        ("/tensors/w/shape", json!([3]), "outside its shape"),
        ("/tensors/w/chunks/0/file", json!("../a"), "not a plain file name"),
        ("/tensors/w/chunks/0/file", json!("/a"), "not a plain file name"),
        ("/tensors/w/chunks/0/file", json!("c"), "not among the files"),
        ("/tensors/w/chunks/0/file", json!("b"), "two of its chunks"),
        ("/tensors/w/chunks/0/offsets", json!([usize::MAX, 0]), "outside its shape"),
        ("/tensors/w/chunks/0/sizes", json!([3, 2]), "overlap"),
        ("/tensors/w/chunks/0/sizes", json!([1, 2]), "leave out 2 elements"),
        ("/tensors/w/chunks/0/sizes", json!([0, 2]), "is empty"),
        ("/tensors/w/chunks/0/crc32c", json!(-1), "invalid value"),
        ("/tensors/w/chunks/0/crc32c", json!(null), "no checksum"),
        ("/files", json!({"..": {"bytes": 1}}), "not a plain file name"),
        ("/files/a/bytes", json!(15), "has 15 bytes, the chunks in it 16"),
        ("/files/c", json!({"bytes": 9}), "no tensor has a chunk in its file \"c\""),
        ("/files/a/header_crc32c", json!(1), "has a checksum of its header, in version 1"),
        ("/tensors", json!({}), "no tensor has a chunk"),
        ("/finite", json!(true), "fields that came later"),
        ("/crc32c", json!(1), "fields that came later"),
        ("/files/a/host", json!("node0"), "fields that came later"),
        ("/tensors/w/chunks/0/copies", json!(["c"]), "fields that came later"),
    ] {
        let mut bad = good();
        let (at, key) = pointer.rsplit_once('/').unwrap();
        match bad.pointer_mut(at).unwrap() {
            Value::Array(items) => items[key.parse::<usize>().unwrap()] = value,
            object => object[key] = value,
        }
        let reason = reason(&bad.to_string());
        assert!(reason.contains(part), "{pointer}: {reason}");
    }
    let mut unknown = good();
    unknown["more"] = json!(1);
    assert!(reason(&unknown.to_string()).contains("unknown field"));
    let twice = good().to_string().replace("\"a\":{\"bytes\":100}", "\"a\":{\"bytes\":100},\"a\":{\"bytes\":1}");
    assert!(reason(&twice).contains("there twice"), "{}", reason(&twice));
    assert!(reason("{").contains("not a checkpoint manifest"));
}

#[test]
fn a_manifest_that_ends_with_its_checksum_has_one_of_every_header() {
    let text = |change: &dyn Fn(&mut Value)| {
        let mut manifest = good();
        manifest["version"] = json!(2);
        for file in ["a", "b"] {
            manifest["files"][file]["header_crc32c"] = json!(7);
        }
        change(&mut manifest);
        let mut text = serde_json::to_vec_pretty(&manifest).unwrap();
        seal::seal(&mut text);
        String::from_utf8(text).unwrap()
    };
    let whole = text(&|_| ());
    assert_eq!(reason(&whole), "accepted");
    assert_eq!(reason(&text(&|manifest| manifest["finite"] = json!(true))), "accepted");
    assert_eq!(reason(&text(&|manifest| manifest["version"] = json!(4))), "newer 4");
    let of_hosts = |version: u64| {
        reason(&text(&|manifest| {
            manifest["version"] = json!(version);
            manifest["files"]["a"]["host"] = json!("node0");
        }))
    };
    assert_eq!(of_hosts(3), "accepted");
    assert!(of_hosts(2).contains("of version 2, and has fields that came later"), "{}", of_hosts(2));
    let none = text(&|manifest| drop(manifest["files"]["a"].as_object_mut().unwrap().remove("header_crc32c")));
    assert!(reason(&none).contains("has no checksum of its header"), "{}", reason(&none));
    // Another version, and an older one, are damage where the checksum says so.
    for other in ["1", "3"] {
        let changed = whole.replace("\"version\": 2", &format!("\"version\": {other}"));
        assert!(reason(&changed).contains("it is damaged"), "{}", reason(&changed));
    }
}

#[test]
fn values_come_back_to_the_last_bit() {
    for value in [0.1f64, 1e-3 / 3.0, f64::MIN_POSITIVE, 5e-324, 1.7976931348623157e308, 0.30000000000000004] {
        let mut manifest = good();
        manifest["values"]["lr"] = json!(value);
        let Ok((read, _)) = Manifest::parse(manifest.to_string().as_bytes()) else { panic!("refused") };
        assert_eq!(read.values["lr"].as_f64().unwrap().to_bits(), value.to_bits());
    }
}
