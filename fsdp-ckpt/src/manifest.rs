//! `checkpoint.json`: what a checkpoint holds and where.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use fsdp_core::layout::Region;
use fsdp_core::{DType, MeshLayout};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::file_names::MANIFEST;
use crate::region::{Flaw, Span, check_tiling, checked_bytes, fits};
use crate::seal::{self, Seal};
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

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its size.
    pub bytes: u64,
    /// The CRC-32C of all that comes before the tensors' bytes: the header with its length and padding. Only our own
    /// format keeps one, since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header_crc32c: Option<u32>,
    /// The host that wrote it, where each host wrote to a directory of its own ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The boxes that together make the tensor, each in a file of its own.
    pub chunks: Vec<ChunkEntry>,
}

impl TensorEntry {
    /// The bytes of all its elements.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// A box of a tensor in a file, stored there under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkEntry {
    /// Where the box starts in the global tensor.
    pub offsets: Vec<usize>,
    /// The shape of the box.
    pub sizes: Vec<usize>,
    /// The name of the file, in the checkpoint's directory.
    pub file: String,
    /// Other files that hold the same bytes: each host's directory has its own ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// The CRC-32C of the chunk's bytes, where the format keeps one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crc32c: Option<u32>,
}

impl ChunkEntry {
    /// The box.
    pub fn region(&self) -> Region {
        Region { offsets: self.offsets.clone(), sizes: self.sizes.clone() }
    }

    /// The names of the files that hold it: one, and its copies.
    pub fn files(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.file).chain(&self.copies)
    }
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
        seal::seal(&mut text);
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
            Bad::Newer(version) => Error::Newer { path, version, known: VERSION },
            Bad::Text(reason) => Error::Manifest { path, tensor: None, reason },
            Bad::Tensor(name, reason) => Error::Manifest { path, tensor: Some(name), reason },
        });
        let (manifest, mesh) = parsed?;
        let seal = (text.len() as u64, manifest.crc32c);
        Ok((manifest, mesh, seal))
    }

    fn parse(text: &[u8]) -> Result<(Self, MeshLayout), Bad> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let not_one = |error: serde_json::Error| Bad::Text(format!("not a checkpoint manifest: {error}"));
        // This comes first: a number that was changed says nothing, that of the version included.
        let seal = seal::check(text);
        if let Seal::Broken(found) = seal {
            return Err(Bad::Text(format!(
                "it is damaged, or was changed by hand: its checksum is {found}, at its end is another; {ADVICE}"
            )));
        }
        let head: Head = serde_json::from_slice(text).map_err(not_one)?;
        if head.format != FORMAT {
            return Err(Bad::Text(format!("its format is {:?}, a checkpoint's is {FORMAT:?}", head.format)));
        }
        if head.version > VERSION {
            return Err(Bad::Newer(head.version));
        }
        if head.version == 0 {
            return Err(Bad::Text("format version 0 does not exist".into()));
        }
        if head.version >= CHECKED && seal == Seal::Missing {
            return Err(Bad::Text(format!("it is damaged: it does not end with its checksum; {ADVICE}")));
        }
        let manifest: Manifest = serde_json::from_slice(text).map_err(not_one)?;
        let mesh = manifest.check()?;
        Ok((manifest, mesh))
    }

    fn check(&self) -> Result<MeshLayout, Bad> {
        if self.mesh.names.len() != self.mesh.shape.len() {
            let (names, shape) = (&self.mesh.names, &self.mesh.shape);
            return Err(Bad::Text(format!("its mesh has names {names:?} for the shape {shape:?}")));
        }
        let dims: Vec<(&str, usize)> =
            self.mesh.names.iter().map(String::as_str).zip(self.mesh.shape.iter().copied()).collect();
        let mesh = MeshLayout::new(&dims).map_err(|error| Bad::Text(error.to_string()))?;
        if mesh.size() != self.world_size {
            return Err(Bad::Text(format!("its mesh {mesh} is not one of {} ranks", self.world_size)));
        }
        check_values(&self.values).map_err(Bad::Text)?;
        let later = [(CHECKED, self.finite || self.crc32c.is_some()), (HOSTS, of_hosts(&self.files, &self.tensors))];
        if later.into_iter().any(|(since, has)| has && self.version < since) {
            let version = self.version;
            return Err(Bad::Text(format!("it says that it is of version {version}, and has fields that came later")));
        }
        // What the chunks in each file take, and how many there are.
        let mut held = BTreeMap::new();
        for (name, file) in &self.files {
            if !is_plain_file_name(name) || name == MANIFEST {
                return Err(Bad::Text(format!("{name:?} is not a plain file name")));
            }
            if file.header_crc32c.is_some() != self.covers_everything() {
                let has = if file.header_crc32c.is_some() { "a" } else { "no" };
                let version = self.version;
                return Err(Bad::Text(format!("file {name:?} has {has} checksum of its header, in version {version}")));
            }
            held.insert(name.as_str(), (0usize, 0u64));
        }
        for (name, tensor) in &self.tensors {
            tensor.check(&self.files).map_err(|reason| Bad::Tensor(name.clone(), reason))?;
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
                return Err(Bad::Text(format!("no tensor has a chunk in its file {name:?}")));
            }
            if bytes > size {
                return Err(Bad::Text(format!("its file {name:?} has {size} bytes, the chunks in it {bytes}")));
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
enum Bad {
    Newer(u64),
    Text(String),
    Tensor(String, String),
}

impl TensorEntry {
    fn check(&self, files: &BTreeMap<String, FileEntry>) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for chunk in &self.chunks {
            let span = || format!("its chunk {}", Span(&chunk.region()));
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

    /// Checks that the chunks make the whole tensor, each element once.
    pub(crate) fn check_chunks(&self) -> Result<(), String> {
        let shape = &self.shape;
        if checked_bytes(shape, self.dtype.size()).is_none() {
            return Err(format!("its shape {shape:?} is too large to count its bytes"));
        }
        let mut regions = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let region = chunk.region();
            if !fits(&region, shape) {
                return Err(format!("its chunk {} in {:?} is outside its shape {shape:?}", Span(&region), chunk.file));
            }
            if region.is_empty() && !shape.contains(&0) {
                return Err(format!("its chunk {} in {:?} is empty", Span(&region), chunk.file));
            }
            regions.push(region);
        }
        check_tiling(shape, &regions.iter().collect::<Vec<_>>()).map_err(|flaw| match flaw {
            Flaw::Overlap(a, b) => format!(
                "its chunks {} in {:?} and {} in {:?} overlap",
                Span(&regions[a]),
                self.chunks[a].file,
                Span(&regions[b]),
                self.chunks[b].file
            ),
            Flaw::Gap(missing) => format!("its chunks leave out {missing} elements of its shape {shape:?}"),
        })
    }
}

/// Whether a name from a file may be joined to a directory: it can't leave it, or name another directory in it.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains('\0')
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

#[cfg(test)]
mod tests;
