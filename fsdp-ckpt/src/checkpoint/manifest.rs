//! `checkpoint.json`: reading, checking and writing the manifest.
//!
//! Its last field, `crc32c`, is the checksum of all text before that field. The checksum is of the text, not of the
//! parsed JSON, and it can be written in one form only. So every changed byte is noticed, in white space and in the
//! checksum itself, too.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use fsdp_core::MeshLayout;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

use crate::checksum::Checksum;
use crate::file_names::MANIFEST;
use crate::region::Bounds;
use crate::source::{FileEntry, TensorEntry, is_plain_file_name};
use crate::store::Store;
use crate::{Error, Result};

/// Value of `format`.
const FORMAT: &str = "candle-fsdp checkpoint";
/// Newest version that this crate reads. Version 1 had checksums of chunks only.
const VERSION: u64 = V_HOSTS;
/// First version with checksums of every byte. Written unless a later version is needed.
const V_CHECKSUMS: u64 = 2;
/// First version with hosts and copies.
const V_HOSTS: u64 = 3;
/// Largest `step`: JSON readers may round larger numbers.
const MAX_STEP: u64 = 1 << 53;
/// Largest size of a manifest.
const MAX_BYTES: u64 = 1 << 30;

/// The contents of `checkpoint.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    version: u64,
    /// Program and version that wrote it.
    pub(crate) created_by: String,
    pub(crate) world_size: usize,
    mesh: Mesh,
    /// Whether all ranks declared their floating point numbers finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) finite: bool,
    /// Non-tensor state.
    pub(crate) values: serde_json::Map<String, serde_json::Value>,
    /// Files by name.
    #[serde(deserialize_with = "unique")]
    pub(crate) files: BTreeMap<String, FileEntry>,
    #[serde(deserialize_with = "unique")]
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    /// Written by [`append_checksum`].
    #[serde(default, skip_serializing)]
    crc32c: Option<u32>,
}

/// A [`MeshLayout`] before it is checked.
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
        let version = if has_hosts(&files, &tensors) { V_HOSTS } else { V_CHECKSUMS };
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

    /// Returns the text of a new manifest, with its checksum.
    pub(crate) fn to_text(&self) -> Result<String> {
        check_values(&self.values).map_err(|reason| Error::Argument(format!("can't save the checkpoint: {reason}")))?;
        let mut text = Vec::new();
        self.serialize(&mut Serializer::with_formatter(&mut text, Lines::default()))
            .map_err(|error| Error::Argument(format!("can't write the values as JSON: {error}")))?;
        append_checksum(&mut text);
        if text.len() as u64 > MAX_BYTES {
            let (found, ranks) = (text.len(), self.world_size);
            return Err(Error::Argument(format!(
                "its manifest has {found} bytes, expected at most {MAX_BYTES}, for the shards of {ranks} ranks; shard \
                 over fewer ranks, and replicate over the others"
            )));
        }
        String::from_utf8(text).map_err(|error| Error::Argument(format!("can't write the values as JSON: {error}")))
    }

    /// Returns whether every byte of the checkpoint has a checksum.
    pub(crate) fn covers_everything(&self) -> bool {
        self.version >= V_CHECKSUMS
    }

    /// Reads and checks a manifest. Returns its length and checksum, too, which identify the save.
    pub(crate) fn read(store: &dyn Store) -> Result<(Self, MeshLayout, (u64, Option<u32>))> {
        let path = store.path().join(MANIFEST);
        let Some(text) = store.read(MANIFEST, MAX_BYTES)? else {
            // A missing directory is another error.
            store.list()?;
            return Err(Error::Incomplete { path: store.path().to_path_buf() });
        };
        let parsed = Manifest::parse(&text).map_err(|flaw| match flaw {
            Flaw::UnsupportedVersion(version) => Error::UnsupportedVersion { path, version, known: VERSION },
            Flaw::Text(reason) => Error::Manifest { path, tensor: None, reason },
            Flaw::Tensor(name, reason) => Error::Manifest { path, tensor: Some(name), reason },
        });
        let (manifest, mesh) = parsed?;
        let id = (text.len() as u64, manifest.crc32c);
        Ok((manifest, mesh, id))
    }

    fn parse(text: &[u8]) -> Result<(Self, MeshLayout), Flaw> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let not_a_manifest = |error: serde_json::Error| Flaw::Text(format!("not a checkpoint manifest: {error}"));
        // Check this first: in a changed text, no number means anything, not even the version.
        let trailer = check_trailer(text);
        if let Trailer::Wrong(found) = trailer {
            return Err(Flaw::Text(format!(
                "it is damaged or edited by hand: its checksum is {found}, but it ends with another one; {ADVICE}"
            )));
        }
        let head: Head = serde_json::from_slice(text).map_err(not_a_manifest)?;
        if head.format != FORMAT {
            return Err(Flaw::Text(format!("its format is {:?}, expected {FORMAT:?}", head.format)));
        }
        if head.version > VERSION {
            return Err(Flaw::UnsupportedVersion(head.version));
        }
        if head.version == 0 {
            return Err(Flaw::Text("format version 0 does not exist".into()));
        }
        if head.version >= V_CHECKSUMS && trailer == Trailer::Absent {
            return Err(Flaw::Text(format!("it is damaged: it does not end with its checksum; {ADVICE}")));
        }
        let manifest: Manifest = serde_json::from_slice(text).map_err(not_a_manifest)?;
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
            return Err(Flaw::Text(format!("its mesh {mesh} does not have {} ranks", self.world_size)));
        }
        check_values(&self.values).map_err(Flaw::Text)?;
        let later =
            [(V_CHECKSUMS, self.finite || self.crc32c.is_some()), (V_HOSTS, has_hosts(&self.files, &self.tensors))];
        if later.into_iter().any(|(since, has)| has && self.version < since) {
            let version = self.version;
            return Err(Flaw::Text(format!("it has version {version}, but fields of a later version")));
        }
        // Number and bytes of the chunks in each file.
        let mut chunks_in = BTreeMap::new();
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
            chunks_in.insert(name.as_str(), (0usize, 0u64));
        }
        for (name, tensor) in &self.tensors {
            tensor.check(&self.files).map_err(|reason| Flaw::Tensor(name.clone(), reason))?;
            for chunk in &tensor.chunks {
                for file in chunk.files() {
                    if let Some((chunks, bytes)) = chunks_in.get_mut(file.as_str()) {
                        *chunks += 1;
                        *bytes = bytes.saturating_add(chunk.region().elements() as u64 * tensor.dtype.size() as u64);
                    }
                }
            }
        }
        for (name, (chunks, bytes)) in chunks_in {
            let size = self.files[name].bytes;
            if chunks == 0 {
                return Err(Flaw::Text(format!("no tensor has a chunk in its file {name:?}")));
            }
            if bytes > size {
                return Err(Flaw::Text(format!("its file {name:?} has {size} bytes, but chunks of {bytes} bytes")));
            }
        }
        Ok(mesh)
    }
}

/// Depth of the lists of chunks. Each of their items is on a line of its own.
const LINES: usize = 4;

/// The format of a manifest: lines with indentation, and each chunk on one line, since there are many.
#[derive(Default)]
struct Lines {
    pretty: PrettyFormatter<'static>,
    depth: usize,
}

impl Lines {
    fn begin(&mut self) -> bool {
        self.depth += 1;
        self.depth <= LINES
    }

    fn end(&mut self) -> bool {
        self.depth -= 1;
        self.depth < LINES
    }
}

impl Formatter for Lines {
    fn begin_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.begin() { self.pretty.begin_array(to) } else { CompactFormatter.begin_array(to) }
    }

    fn end_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.end() { self.pretty.end_array(to) } else { CompactFormatter.end_array(to) }
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        match self.depth <= LINES {
            true => self.pretty.begin_array_value(to, first),
            false => CompactFormatter.begin_array_value(to, first),
        }
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.depth <= LINES { self.pretty.end_array_value(to) } else { Ok(()) }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.begin() { self.pretty.begin_object(to) } else { CompactFormatter.begin_object(to) }
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.end() { self.pretty.end_object(to) } else { CompactFormatter.end_object(to) }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        match self.depth <= LINES {
            true => self.pretty.begin_object_key(to, first),
            false => CompactFormatter.begin_object_key(to, first),
        }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.depth <= LINES { self.pretty.begin_object_value(to) } else { CompactFormatter.begin_object_value(to) }
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.depth <= LINES { self.pretty.end_object_value(to) } else { Ok(()) }
    }
}

/// Returns whether hosts wrote files to their own directories.
fn has_hosts(files: &BTreeMap<String, FileEntry>, tensors: &BTreeMap<String, TensorEntry>) -> bool {
    let mut chunks = tensors.values().flat_map(|tensor| &tensor.chunks);
    files.values().any(|file| file.host.is_some()) || chunks.any(|chunk| !chunk.copies.is_empty())
}

/// Fix for a damaged manifest.
const ADVICE: &str = "use another checkpoint";

/// Checks the values that this crate's readers use.
fn check_values(values: &serde_json::Map<String, serde_json::Value>) -> Result<(), String> {
    match values.get("step") {
        Some(serde_json::Value::Number(step)) if step.as_f64().is_none_or(|number| number.abs() > MAX_STEP as f64) => {
            Err(format!("its value \"step\" is {step}, expected at most {MAX_STEP}"))
        }
        _ => Ok(()),
    }
}

/// A problem of a manifest whose path is not known yet.
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
                    return Err(format!("{file:?} holds two of its chunks, expected at most one"));
                }
            }
            if chunk.crc32c.is_none() {
                return Err(format!("{} in {:?} has no checksum", span(), chunk.file));
            }
        }
        self.check_chunks()
    }
}

/// Deserializes a map and refuses repeated keys, of which serde_json would keep the last.
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

/// Text before the checksum. Only outermost fields have this indentation.
const FIELD: &[u8] = b",\n  \"crc32c\": ";

/// State of the checksum at the end of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trailer {
    /// The checksum matches the text.
    Valid,
    /// The checksum of the text is this, and the manifest ends with another one.
    Wrong(u32),
    /// The manifest does not end with a checksum.
    Absent,
}

/// Appends the checksum to a JSON object in the format of `serde_json::to_vec_pretty`.
pub(crate) fn append_checksum(text: &mut Vec<u8>) {
    if text.ends_with(b"\n}") {
        text.truncate(text.len() - 2);
    }
    let end = end(Checksum::of(&[text]));
    text.extend(end);
}

/// Checks the checksum at the end of a manifest.
pub(crate) fn check_trailer(text: &[u8]) -> Trailer {
    let longest = end(u32::MAX).len();
    let from = text.len().saturating_sub(longest);
    let Some(at) = text[from..].windows(FIELD.len()).rposition(|window| window == FIELD) else {
        return Trailer::Absent;
    };
    let (body, rest) = text.split_at(from + at);
    let found = Checksum::of(&[body]);
    if rest == end(found) { Trailer::Valid } else { Trailer::Wrong(found) }
}

fn end(checksum: u32) -> Vec<u8> {
    [FIELD, checksum.to_string().as_bytes(), b"\n}\n"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn detects_every_flipped_bit() {
        let value = serde_json::json!({ "a": 1, "b": { "crc32c": 7 } });
        let mut text = serde_json::to_vec_pretty(&value).unwrap();
        assert_eq!(check_trailer(&text), Trailer::Absent);
        append_checksum(&mut text);
        assert_eq!(check_trailer(&text), Trailer::Valid);
        let read: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert!(read["crc32c"].is_u64() && read["b"] == value["b"]);
        for bit in 0..8 * text.len() {
            let mut bad = text.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(check_trailer(&bad), Trailer::Valid, "bit {bit}");
        }
        for cut in 0..text.len() {
            assert_ne!(check_trailer(&text[..cut]), Trailer::Valid, "{cut} bytes");
        }
        assert_ne!(check_trailer(&[&text[..], b"\n"].concat()), Trailer::Valid);
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
    fn rejects_invalid_manifests() {
        assert_eq!(reason(&good().to_string()), "accepted");
        let huge = usize::MAX / 2;
        for (pointer, value, part) in [
            ("/format", json!("other"), "expected \"candle-fsdp"),
            ("/version", json!(4), "newer 4"),
            ("/format", json!("other"), "expected"),
            ("/version", json!(2), "does not end with its checksum"),
            ("/values/step", json!(1u64 << 63), "expected at most"),
            ("/values/step", json!(-1e300), "expected at most"),
            ("/world_size", json!(3), "does not have 3 ranks"),
            ("/mesh/names", json!(["a", "b"]), "for the shape [2]"),
            ("/mesh/shape", json!([0]), "size 0"),
            ("/tensors/w/dtype", json!("F33"), "unknown variant"),
            ("/tensors/w/shape", json!([huge, huge]), "overflow"),
            ("/tensors/w/shape", json!([4, 2]), "leave out 2 elements"),
            ("/tensors/w/shape", json!([3]), "outside its shape"),
            ("/tensors/w/chunks/0/file", json!("../a"), "not a plain file name"),
            ("/tensors/w/chunks/0/file", json!("/a"), "not a plain file name"),
            ("/tensors/w/chunks/0/file", json!("c"), "not among the files"),
            ("/tensors/w/chunks/0/file", json!("b"), "holds two of its chunks"),
            ("/tensors/w/chunks/0/offsets", json!([usize::MAX, 0]), "outside its shape"),
            ("/tensors/w/chunks/0/sizes", json!([3, 2]), "overlap"),
            ("/tensors/w/chunks/0/sizes", json!([1, 2]), "leave out 2 elements"),
            ("/tensors/w/chunks/0/sizes", json!([0, 2]), "is empty"),
            ("/tensors/w/chunks/0/crc32c", json!(-1), "invalid value"),
            ("/tensors/w/chunks/0/crc32c", json!(null), "no checksum"),
            ("/files", json!({"..": {"bytes": 1}}), "not a plain file name"),
            ("/files/a/bytes", json!(15), "has 15 bytes, but chunks of 16 bytes"),
            ("/files/c", json!({"bytes": 9}), "no tensor has a chunk in its file \"c\""),
            ("/files/a/header_crc32c", json!(1), "has a checksum of its header, in version 1"),
            ("/tensors", json!({}), "no tensor has a chunk"),
            ("/finite", json!(true), "fields of a later version"),
            ("/crc32c", json!(1), "fields of a later version"),
            ("/files/a/host", json!("node0"), "fields of a later version"),
            ("/tensors/w/chunks/0/copies", json!(["c"]), "fields of a later version"),
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
    fn version_2_needs_checksums_of_headers() {
        let text = |change: &dyn Fn(&mut Value)| {
            let mut manifest = good();
            manifest["version"] = json!(2);
            for file in ["a", "b"] {
                manifest["files"][file]["header_crc32c"] = json!(7);
            }
            change(&mut manifest);
            let mut text = serde_json::to_vec_pretty(&manifest).unwrap();
            append_checksum(&mut text);
            String::from_utf8(text).unwrap()
        };
        let whole = text(&|_| ());
        assert_eq!(reason(&whole), "accepted");
        assert_eq!(reason(&text(&|manifest| manifest["finite"] = json!(true))), "accepted");
        assert_eq!(reason(&text(&|manifest| manifest["version"] = json!(4))), "newer 4");
        let has_hosts = |version: u64| {
            reason(&text(&|manifest| {
                manifest["version"] = json!(version);
                manifest["files"]["a"]["host"] = json!("node0");
            }))
        };
        assert_eq!(has_hosts(3), "accepted");
        assert!(has_hosts(2).contains("version 2, but fields of a later version"), "{}", has_hosts(2));
        let none = text(&|manifest| drop(manifest["files"]["a"].as_object_mut().unwrap().remove("header_crc32c")));
        assert!(reason(&none).contains("has no checksum of its header"), "{}", reason(&none));
        // A changed version is reported as damage, since the checksum is wrong.
        for other in ["1", "3"] {
            let changed = whole.replace("\"version\": 2", &format!("\"version\": {other}"));
            assert!(reason(&changed).contains("it is damaged"), "{}", reason(&changed));
        }
    }

    #[test]
    fn each_chunk_is_on_one_line() {
        let Ok((manifest, _)) = Manifest::parse(good().to_string().as_bytes()) else { panic!("refused") };
        let text = manifest.to_text().unwrap();
        let chunk = r#"        {"offsets":[0,0],"sizes":[2,2],"file":"a","crc32c":1},"#;
        assert!(text.lines().any(|line| line == chunk), "{text}");
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&read["tensors"], &read["values"]), (&good()["tensors"], &good()["values"]));
        assert_eq!(check_trailer(text.as_bytes()), Trailer::Valid);
    }

    #[test]
    fn values_round_trip_exactly() {
        for value in [0.1f64, 1e-3 / 3.0, f64::MIN_POSITIVE, 5e-324, 1.7976931348623157e308, 0.30000000000000004] {
            let mut manifest = good();
            manifest["values"]["lr"] = json!(value);
            let Ok((read, _)) = Manifest::parse(manifest.to_string().as_bytes()) else { panic!("refused") };
            assert_eq!(read.values["lr"].as_f64().unwrap().to_bits(), value.to_bits());
        }
    }
}
