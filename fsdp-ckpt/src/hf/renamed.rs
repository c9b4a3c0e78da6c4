//! Tensors of a source under other names, and slices of tensors as tensors of their own.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_core::layout::Region;

use crate::region::check_request;
use crate::source::{ChunkEntry, SourceIndex, TensorEntry};
use crate::{Error, Result, TensorSource};

/// A tensor of a source, or a slice of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the source.
    pub tensor: String,
    /// Index in the first dimension, which the part lacks.
    pub index: Option<usize>,
    /// Range in the first dimension that is left; all without one.
    pub rows: Option<Range<usize>>,
}

impl Part {
    /// Returns a whole tensor.
    pub fn whole(tensor: impl Into<String>) -> Self {
        Part { tensor: tensor.into(), index: None, rows: None }
    }

    /// Returns the shape of the part of a tensor of `shape`; `None` if it is not within the tensor.
    fn shape(&self, shape: &[usize]) -> Option<Vec<usize>> {
        let mut rest = match self.index {
            Some(index) => {
                let (first, rest) = shape.split_first()?;
                (index < *first).then_some(rest)?
            }
            None => shape,
        }
        .to_vec();
        if let Some(rows) = &self.rows {
            let first = rest.first_mut()?;
            *first = (rows.start <= rows.end && rows.end <= *first).then_some(rows.len())?;
        }
        Some(rest)
    }

    /// Returns the tensor's region of the part's region.
    fn region(&self, region: &Region) -> Region {
        let Region { mut offsets, mut sizes } = region.clone();
        if let (Some(rows), Some(first)) = (&self.rows, offsets.first_mut()) {
            *first += rows.start;
        }
        if let Some(index) = self.index {
            offsets.insert(0, index);
            sizes.insert(0, 1);
        }
        Region { offsets, sizes }
    }
}

/// Parts of a source's tensors under new names. Other tensors are left out.
///
/// ```
/// use std::collections::BTreeMap;
/// use fsdp_ckpt::TensorSource;
/// use fsdp_ckpt::hf::{HfModel, Part, Renamed};
/// # use fsdp_ckpt::{TensorShard, hf};
/// # use fsdp_core::{Buffer, layout::Region, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32((0..12).map(|value| value as f32).collect()));
/// #     hf::export(&dir, &group, &[TensorShard::whole("experts", &[2, 3, 2], data)], &[]).unwrap();
/// # });
/// // The last row of the second of two experts.
/// let row = Part { tensor: "experts".into(), index: Some(1), rows: Some(2..3) };
/// let model = Renamed::new(HfModel::open(&dir)?, BTreeMap::from([("row".into(), row)]))?;
/// let mut bytes = [0; 8];
/// model.read("row", &Region::whole(&[1, 2]), &mut bytes)?;
/// assert_eq!(bytes, *[10f32.to_ne_bytes(), 11f32.to_ne_bytes()].concat());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Renamed<S> {
    source: S,
    index: SourceIndex,
    parts: BTreeMap<String, Part>,
}

impl<S: TensorSource> Renamed<S> {
    /// Names parts of `source`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] for a tensor that the source lacks; [`Error::InvalidRead`] for a slice that is not within
    /// its tensor.
    pub fn new(source: S, parts: BTreeMap<String, Part>) -> Result<Self> {
        let of_source = source.index();
        let mut index = SourceIndex {
            mesh: of_source.mesh.clone(),
            files: of_source.files.clone(),
            values: of_source.values.clone(),
            ..SourceIndex::new(&of_source.path, of_source.format)
        };
        for (name, part) in &parts {
            if let Some(dtype) = of_source.unreadable.get(&part.tensor) {
                index.unreadable.insert(name.clone(), dtype.clone());
                continue;
            }
            let tensor = source.tensor(&part.tensor)?;
            let entry = if *part == Part::whole(&*part.tensor) {
                tensor.clone()
            } else {
                let shape = part.shape(&tensor.shape).ok_or_else(|| {
                    let reason = format!("{part:?} is not within its shape {:?}", tensor.shape);
                    Error::InvalidRead { tensor: name.clone(), reason }
                })?;
                let file = tensor.chunks.first().map_or(String::new(), |chunk| chunk.file.clone());
                let chunks = vec![ChunkEntry::new(file, Region::whole(&shape))];
                TensorEntry { dtype: tensor.dtype, shape, chunks }
            };
            index.tensors.insert(name.clone(), entry);
        }
        Ok(Renamed { source, index, parts })
    }

    /// Returns the source.
    pub fn source(&self) -> &S {
        &self.source
    }
}

impl<S: TensorSource> TensorSource for Renamed<S> {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        let part = &self.parts[fqn];
        self.source.read(&part.tensor, &part.region(region), into)
    }
}
