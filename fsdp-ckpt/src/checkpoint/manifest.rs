//! TODO

use std::collections::{BTreeMap, BTreeSet};

use fsdp_core::MeshLayout;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::file_names::MANIFEST;
use crate::region::Bounds;
use crate::source::{FileEntry, TensorEntry, is_plain_file_name};
use crate::store::Store;
use crate::{Error, Result};

/// What its `format` says.
const FORMAT: &str = "candle-fsdp checkpoint";
/// The newest version that this crate reads. Version 1 had no checksums but those of chunks.
const VERSION: u64 = HOSTS;
/// The first version with checksums of everything. It is written where all can be said in it.
const CHECKED: u64 = 2;
/// The first version with files of hosts, and copies.
const HOSTS: u64 = 3;
/// Larger numbers are not the same to every reader of JSON, and no run takes as many steps.
const MOST_STEPS: u64 = 1 << 53;
/// More than any manifest has.
const MAX_BYTES: u64 = 1 << 30;

/// A whole manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    version: u64,
    /// The program and version that wrote it.
    pub(crate) created_by: String,
    pub(crate) world_size: usize,
    mesh: Mesh,
    /// Whether those who saved it had found every floating point number finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) finite: bool,
    /// Non-tensor state.
    pub(crate) values: serde_json::Map<String, serde_json::Value>,
    /// Files by plain name.
    #[serde(deserialize_with = "unique")]
    pub(crate) files: BTreeMap<String, FileEntry>,
    #[serde(deserialize_with = "unique")]
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    /// What [`seal`] adds to the text.
    #[serde(default, skip_serializing)]
    crc32c: Option<u32>,
}

/// [`MeshLayout`] before it is checked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mesh {
    names: Vec<String>,
    shape: Vec<usize>,
}

impl Manifest {
    pub(crate) fn new(
        mesh: &MeshLayout,
        world_size: usize,
        finite: bool,
        values: serde_json::Map<String, serde_json::Value>,
        files: BTreeMap<String, FileEntry>,
        tensors: BTreeMap<String, TensorEntry>,
    ) -> Self {
        let version = if of_hosts(&files, &tensors) { HOSTS } else { CHECKED };
        Manifest {
            format: FORMAT.into(),
            version,
            created_by: concat!("fsdp-ckpt ", env!("CARGO_PKG_VERSION")).into(),
            world_size,
            mesh: Mesh { names: mesh.names().to_vec(), shape: mesh.shape().to_vec() },
            finite,
            values,
            files,
            tensors,
            crc32c: None,
        }
    }

    /// The text of a new manifest, with the checksum at its end.
    pub(crate) fn to_text(&self) -> Result<String> {
        check_values(&self.values)
            .map_err(|reason| Error::Argument(format!("a checkpoint can't be saved: {reason}")))?;
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::Argument(format!("can't write the values as JSON: {error}")))?;
        seal(&mut text);
        String::from_utf8(text).map_err(|error| Error::Argument(format!("can't write the values as JSON: {error}")))
    }

    /// Whether checksums cover every byte of the checkpoint, this manifest's too.
    pub(crate) fn covers_everything(&self) -> bool {
        self.version >= CHECKED
    }

    /// Reads and checks the manifest of a checkpoint. Its length and the checksum at its end tell it from others.
    pub(crate) fn read(store: &dyn Store) -> Result<(Self, MeshLayout, (u64, Option<u32>))> {
        let path = store.path().join(MANIFEST);
        let Some(text) = store.read(MANIFEST, MAX_BYTES)? else {
            // What is not even there is told by the list.
            store.list()?;
            return Err(Error::Incomplete { path: store.path().to_path_buf() });
        };
        let parsed = Manifest::parse(&text).map_err(|flaw| match flaw {
            Flaw::UnsupportedVersion(version) => Error::UnsupportedVersion { path, version, known: VERSION },
            Flaw::Text(reason) => Error::Manifest { path, tensor: None, reason },
            Flaw::Tensor(name, reason) => Error::Manifest { path, tensor: Some(name), reason },
        });
        let (manifest, mesh) = parsed?;
        let seal = (text.len() as u64, manifest.crc32c);
        Ok((manifest, mesh, seal))
    }

    fn parse(text: &[u8]) -> Result<(Self, MeshLayout), Flaw> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let not_one = |error: serde_json::Error| Flaw::Text(format!("not a checkpoint manifest: {error}"));
        // This comes first: a number that was changed says nothing, that of the version included.
        let seal = check(text);
        if let Trailer::Wrong(found) = seal {
            return Err(Flaw::Text(format!(
                "it is damaged, or was changed by hand: its checksum is {found}, at its end is another; {ADVICE}"
            )));
        }
        let head: Head = serde_json::from_slice(text).map_err(not_one)?;
        if head.format != FORMAT {
            return Err(Flaw::Text(format!("its format is {:?}, a checkpoint's is {FORMAT:?}", head.format)));
        }
        if head.version > VERSION {
            return Err(Flaw::UnsupportedVersion(head.version));
        }
        if head.version == 0 {
            return Err(Flaw::Text("format version 0 does not exist".into()));
        }
        if head.version >= CHECKED && seal == Trailer::Absent {
            return Err(Flaw::Text(format!("it is damaged: it does not end with its checksum; {ADVICE}")));
        }
        let manifest: Manifest = serde_json::from_slice(text).map_err(not_one)?;
        let mesh = manifest.check()?;
        Ok((manifest, mesh))
    }

    fn check(&self) -> Result<MeshLayout, Flaw> {
        if self.mesh.names.len() != self.mesh.shape.len() {
            let (names, shape) = (&self.mesh.names, &self.mesh.shape);
            return Err(Flaw::Text(format!("its mesh has names {names:?} for the shape {shape:?}")));
        }
        let dims: Vec<(&str, usize)> =
            self.mesh.names.iter().map(String::as_str).zip(self.mesh.shape.iter().copied()).collect();
        let mesh = MeshLayout::new(&dims).map_err(|error| Flaw::Text(error.to_string()))?;
        if mesh.size() != self.world_size {
            return Err(Flaw::Text(format!("its mesh {mesh} is not one of {} ranks", self.world_size)));
        }
        check_values(&self.values).map_err(Flaw::Text)?;
        let later = [(CHECKED, self.finite || self.crc32c.is_some()), (HOSTS, of_hosts(&self.files, &self.tensors))];
        if later.into_iter().any(|(since, has)| has && self.version < since) {
            let version = self.version;
            return Err(Flaw::Text(format!("it says that it is of version {version}, and has fields that came later")));
        }
        // What the chunks in each file take, and how many there are.
        let mut held = BTreeMap::new();
        for (name, file) in &self.files {
            if !is_plain_file_name(name) || name == MANIFEST {
                return Err(Flaw::Text(format!("{name:?} is not a plain file name")));
            }
            if file.header_crc32c.is_some() != self.covers_everything() {
                let has = if file.header_crc32c.is_some() { "a" } else { "no" };
                let version = self.version;
                return Err(Flaw::Text(format!(
                    "file {name:?} has {has} checksum of its header, in version {version}"
                )));
            }
            held.insert(name.as_str(), (0usize, 0u64));
        }
        for (name, tensor) in &self.tensors {
            tensor.check(&self.files).map_err(|reason| Flaw::Tensor(name.clone(), reason))?;
            for chunk in &tensor.chunks {
                for file in chunk.files() {
                    if let Some((chunks, bytes)) = held.get_mut(file.as_str()) {
                        *chunks += 1;
                        *bytes = bytes.saturating_add(chunk.region().elements() as u64 * tensor.dtype.size() as u64);
                    }
                }
            }
        }
        for (name, (chunks, bytes)) in held {
            let size = self.files[name].bytes;
            if chunks == 0 {
                return Err(Flaw::Text(format!("no tensor has a chunk in its file {name:?}")));
            }
            if bytes > size {
                return Err(Flaw::Text(format!("its file {name:?} has {size} bytes, the chunks in it {bytes}")));
            }
        }
        Ok(mesh)
    }
}

/// Whether hosts wrote it to directories of their own.
fn of_hosts(files: &BTreeMap<String, FileEntry>, tensors: &BTreeMap<String, TensorEntry>) -> bool {
    let mut chunks = tensors.values().flat_map(|tensor| &tensor.chunks);
    files.values().any(|file| file.host.is_some()) || chunks.any(|chunk| !chunk.copies.is_empty())
}

/// What is to be done about a manifest that is damaged.
const ADVICE: &str = "use another checkpoint";

/// What is wrong with values that mean something to others than those who saved them.
fn check_values(values: &serde_json::Map<String, serde_json::Value>) -> Result<(), String> {
    match values.get("step") {
        Some(serde_json::Value::Number(step))
            if step.as_f64().is_none_or(|number| number.abs() > MOST_STEPS as f64) =>
        {
            Err(format!("its value \"step\" is {step}, and no run takes more than {MOST_STEPS} steps"))
        }
        _ => Ok(()),
    }
}

/// What is wrong with a manifest whose path is not known yet.
enum Flaw {
    UnsupportedVersion(u64),
    Text(String),
    Tensor(String, String),
}

impl TensorEntry {
    fn check(&self, files: &BTreeMap<String, FileEntry>) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for chunk in &self.chunks {
            let span = || format!("its chunk {}", Bounds(&chunk.region()));
            for file in chunk.files() {
                if !is_plain_file_name(file) {
                    return Err(format!("{} is in {file:?}, which is not a plain file name", span()));
                }
                if !files.contains_key(file) {
                    return Err(format!("{} is in {file:?}, which is not among the files", span()));
                }
                if !seen.insert(file.as_str()) {
                    return Err(format!("two of its chunks are in {file:?}; a file holds one at most"));
                }
            }
            if chunk.crc32c.is_none() {
                return Err(format!("{} in {:?} has no checksum", span(), chunk.file));
            }
        }
        self.check_chunks()
    }
}

/// A map whose keys come once each; JSON by itself lets the last one win.
fn unique<'de, D: Deserializer<'de>, V: Deserialize<'de>>(from: D) -> Result<BTreeMap<String, V>, D::Error> {
    struct Unique<V>(std::marker::PhantomData<V>);
    impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
        type Value = BTreeMap<String, V>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a map")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((key, value)) = access.next_entry::<String, V>()? {
                if map.contains_key(&key) {
                    return Err(A::Error::custom(format!("{key:?} is there twice")));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }
    from.deserialize_map(Unique(std::marker::PhantomData))
}

/// What comes before the checksum. Every line of a manifest that is as little indented is one of its outermost fields.
const FIELD: &[u8] = b",\n  \"crc32c\": ";

/// What the end of a manifest says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trailer {
    /// It is as it was written.
    Valid,
    /// It has this checksum, and its end says something else.
    Wrong(u32),
    /// There is no checksum at its end.
    Absent,
}

/// Adds the checksum to a JSON object as `serde_json::to_vec_pretty` writes it.
pub(crate) fn seal(text: &mut Vec<u8>) {
    if text.ends_with(b"\n}") {
        text.truncate(text.len() - 2);
    }
    let end = end(checksum(text));
    text.extend(end);
}

/// Looks at the end of a manifest.
pub(crate) fn check(text: &[u8]) -> Trailer {
    let longest = end(u32::MAX).len();
    let from = text.len().saturating_sub(longest);
    let Some(at) = text[from..].windows(FIELD.len()).rposition(|window| window == FIELD) else {
        return Trailer::Absent;
    };
    let (body, rest) = text.split_at(from + at);
    let found = checksum(body);
    if rest == end(found) { Trailer::Valid } else { Trailer::Wrong(found) }
}

fn end(checksum: u32) -> Vec<u8> {
    [FIELD, checksum.to_string().as_bytes(), b"\n}\n"].concat()
}

fn checksum(text: &[u8]) -> u32 {
    let mut checksum = Checksum::new();
    checksum.update(text);
    checksum.value()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn every_flipped_bit_breaks_it() {
        let value = serde_json::json!({ "a": 1, "b": { "crc32c": 7 } });
        let mut text = serde_json::to_vec_pretty(&value).unwrap();
        assert_eq!(check(&text), Trailer::Absent);
        seal(&mut text);
        assert_eq!(check(&text), Trailer::Valid);
        let read: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert!(read["crc32c"].is_u64() && read["b"] == value["b"]);
        for bit in 0..8 * text.len() {
            let mut bad = text.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(check(&bad), Trailer::Valid, "bit {bit}");
        }
        for cut in 0..text.len() {
            assert_ne!(check(&text[..cut]), Trailer::Valid, "{cut} bytes");
        }
        assert_ne!(check(&[&text[..], b"\n"].concat()), Trailer::Valid);
    }

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
            Err(Flaw::UnsupportedVersion(version)) => format!("newer {version}"),
            Err(Flaw::Text(reason)) => reason,
            Err(Flaw::Tensor(name, reason)) => format!("{name}: {reason}"),
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
            seal(&mut text);
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
}
