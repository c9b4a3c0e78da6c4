//! Experts of gpt-oss. A file has one tensor for the experts of a layer, `[experts, in, out]`, in which columns of gates and
//! ups alternate, or codes in MXFP4, `[experts, out, in / 32, 16]`, beside scales. [`SplitExperts`] reads the layers of single
//! experts from it, and [`JoinedExperts`] joins those again.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::layout::Region;
use half::bf16;

use super::mxfp4::{BLOCK, CODES, decode};
use crate::region::check_request;
use crate::source::{ChunkEntry, SourceIndex, TensorEntry};
use crate::{Error, Result, TensorSource};

/// Module of a layer's experts.
const EXPERTS: &str = ".mlp.experts.";
/// The tensors of a file without `_bias`, and the layers of an expert whose outputs alternate in them.
const STACKED: [(&str, &[&str]); 2] = [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];
const BIAS: &str = "_bias";
const CODED: &str = "_blocks";
const SCALES: &str = "_scales";

/// The place of a single expert's tensor in a file.
#[derive(Clone, Debug)]
struct Place {
    /// Name of the tensor in the file, without the ends of codes and scales.
    tensor: String,
    expert: usize,
    /// The first output, and the distance of outputs.
    first: usize,
    step: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Bias,
    Weight,
    Codes,
}

/// The layers of single experts, with names such as `model.layers.0.mlp.experts.3.gate_proj.weight` and weights `[out, in]`.
/// Other tensors keep their names. Codes are decoded to BF16, as transformers does.
#[derive(Debug)]
pub struct SplitExperts<S> {
    source: S,
    index: SourceIndex,
    places: BTreeMap<String, Place>,
}

impl<S: TensorSource> SplitExperts<S> {
    /// Splits the experts of `source`, of which each layer has `count`.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a tensor of experts of another shape, and for codes without scales.
    pub fn new(source: S, count: usize) -> Result<Self> {
        let of_source = source.index();
        let mut index = of_source.clone();
        let mut places = BTreeMap::new();
        for (tensor, entry) in source.tensors() {
            let Some((prefix, own)) = tensor.split_once(EXPERTS) else { continue };
            let found = STACKED.iter().find_map(|(stacked, layers)| {
                let kind = match own.strip_prefix(stacked)? {
                    "" => Kind::Weight,
                    BIAS => Kind::Bias,
                    CODED => Kind::Codes,
                    _ => return None,
                };
                Some((kind, *layers))
            });
            let Some((kind, layers)) = found else { continue };
            let bad =
                |reason: String| Error::Malformed { path: of_source.path.clone(), item: Some(tensor.clone()), reason };
            let name = tensor.strip_suffix(CODED).filter(|_| kind == Kind::Codes).unwrap_or(tensor);
            let (outputs, inputs) = match (kind, &entry.shape[..]) {
                (Kind::Bias, &[experts, outputs]) if experts == count => (outputs, None),
                (Kind::Weight, &[experts, inputs, outputs]) if experts == count => (outputs, Some(inputs)),
                (Kind::Codes, &[experts, outputs, blocks, CODES]) if experts == count && entry.dtype == DType::U8 => {
                    let scales = format!("{name}{SCALES}");
                    let there = source.tensors().get(&scales);
                    if there.is_none_or(|it| it.shape != [experts, outputs, blocks] || it.dtype != DType::U8) {
                        return Err(bad(format!(
                            "it needs scales \"{scales}\" of U8 and the shape {:?}",
                            [experts, outputs, blocks]
                        )));
                    }
                    index.tensors.remove(&scales);
                    (outputs, Some(blocks * BLOCK))
                }
                (_, shape) => {
                    return Err(bad(format!(
                        "it has the shape {shape:?}, expected {} of {count} experts",
                        match kind {
                            Kind::Bias => "[experts, out]",
                            Kind::Weight => "[experts, in, out]",
                            Kind::Codes => "[experts, out, in / 32, 16] in U8",
                        }
                    )));
                }
            };
            let step = layers.len();
            if !outputs.is_multiple_of(step) {
                return Err(bad(format!("its {outputs} outputs are not gates and ups in turn")));
            }
            let dtype = if kind == Kind::Codes { DType::BF16 } else { entry.dtype };
            let file = entry.chunks.first().map_or(String::new(), |chunk| chunk.file.clone());
            index.tensors.remove(tensor);
            for expert in 0..count {
                for (first, layer) in layers.iter().enumerate() {
                    let end = if kind == Kind::Bias { "bias" } else { "weight" };
                    let single = format!("{prefix}{EXPERTS}{expert}.{layer}.{end}");
                    let shape: Vec<usize> = std::iter::once(outputs / step).chain(inputs).collect();
                    let chunks = vec![ChunkEntry::new(file.clone(), Region::whole(&shape))];
                    let place = Place { tensor: name.to_owned(), expert, first, step, kind };
                    if index.tensors.insert(single.clone(), TensorEntry { dtype, shape, chunks }).is_some() {
                        return Err(bad(format!("the file also has \"{single}\": remove one of them")));
                    }
                    places.insert(single, place);
                }
            }
        }
        Ok(SplitExperts { source, index, places })
    }

    /// Reads outputs `rows` and inputs `columns` of an expert from a tensor.
    fn read_single(&self, place: &Place, dtype: DType, region: &Region, into: &mut [u8]) -> Result<()> {
        let (row, rows) = (region.offsets[0], region.sizes[0]);
        let (column, columns) = match region.offsets.get(1) {
            Some(&column) => (column, region.sizes[1]),
            None => (0, 1),
        };
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let Place { tensor, expert, first, step, kind } = place;
        let (start, span) = (step * row + first, step * (rows - 1) + 1);
        let size = dtype.size();
        let read = |name: &str, offsets: Vec<usize>, sizes: Vec<usize>, size: usize| {
            let region = Region { offsets, sizes };
            let mut bytes = vec![0; region.elements() * size];
            self.source.read(name, &region, &mut bytes).map(|()| bytes)
        };
        match kind {
            Kind::Bias => {
                let values = read(tensor, vec![*expert, start], vec![1, span], size)?;
                for (at, to) in into.chunks_exact_mut(size).enumerate() {
                    to.copy_from_slice(&values[step * at * size..][..size]);
                }
            }
            Kind::Weight => {
                let values = read(tensor, vec![*expert, column, start], vec![1, columns, span], size)?;
                for (at, to) in into.chunks_exact_mut(size).enumerate() {
                    let (row, column) = (at / columns, at % columns);
                    to.copy_from_slice(&values[(column * span + step * row) * size..][..size]);
                }
            }
            Kind::Codes => {
                let block = column / BLOCK;
                let blocks = (column + columns).div_ceil(BLOCK) - block;
                let at = vec![*expert, start, block];
                let scales = read(&format!("{tensor}{SCALES}"), at.clone(), vec![1, span, blocks], 1)?;
                let at = [at, vec![0]].concat();
                let codes = read(&format!("{tensor}{CODED}"), at, vec![1, span, blocks, CODES], 1)?;
                for (row, to) in into.chunks_exact_mut(columns * size).enumerate() {
                    for of_row in 0..blocks {
                        let number = step * row * blocks + of_row;
                        let values = decode(&codes[number * CODES..][..CODES], scales[number]);
                        let places = (block + of_row) * BLOCK..;
                        for (column, value) in places.zip(values).map(|(at, value)| (at.checked_sub(column), value)) {
                            if let Some(column) = column.filter(|column| *column < columns) {
                                to[column * size..][..size].copy_from_slice(&bf16::from_f32(value).to_ne_bytes());
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl<S: TensorSource> TensorSource for SplitExperts<S> {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        match self.places.get(fqn) {
            Some(place) => self.read_single(place, tensor.dtype, region, into),
            None => self.source.read(fqn, region, into),
        }
    }
}

/// The experts of each layer in the tensors of transformers' gpt-oss: the reverse of [`SplitExperts`], without codes. Other
/// tensors keep their names.
#[derive(Debug)]
pub struct JoinedExperts<S> {
    source: S,
    index: SourceIndex,
    /// The layers of the experts, `{prefix}.{expert}.{layer}.{end}`, in each joined tensor.
    joined: BTreeMap<String, Joined>,
}

#[derive(Clone, Debug)]
struct Joined {
    prefix: String,
    layers: &'static [&'static str],
    end: &'static str,
}

impl Joined {
    fn single(&self, expert: usize, layer: usize) -> String {
        format!("{}{expert}.{}.{}", self.prefix, self.layers[layer], self.end)
    }
}

/// Returns whether tensors of these names are those of [`SplitExperts`], which [`JoinedExperts`] joins.
pub fn has_split_experts<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    names.any(|name| name.split_once(EXPERTS).is_some_and(|(_, own)| own == "0.gate_proj.bias"))
}

impl<'a> JoinedExperts<&'a dyn TensorSource> {
    /// Joins the experts of `source`, if it has such experts. Errors: see [`JoinedExperts::new`].
    pub(crate) fn of(source: &'a dyn TensorSource) -> Result<Option<Self>> {
        let has_some = has_split_experts(source.tensors().keys().map(String::as_str));
        has_some.then(|| JoinedExperts::new(source)).transpose()
    }
}

impl<S: TensorSource> JoinedExperts<S> {
    /// Joins the experts of `source`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if an expert lacks a layer; [`Error::Malformed`] if the layers of experts differ in shape or
    /// dtype.
    pub fn new(source: S) -> Result<Self> {
        let mut index = source.index().clone();
        let mut joined = BTreeMap::new();
        for (stacked, layers) in STACKED {
            for (end, of_name) in [("weight", ""), ("bias", BIAS)] {
                let first = format!("0.{}.{end}", layers[0]);
                for (name, entry) in source.tensors() {
                    let Some(prefix) = name.strip_suffix(&first).filter(|prefix| prefix.ends_with(EXPERTS)) else {
                        continue;
                    };
                    let of = Joined { prefix: prefix.to_owned(), layers, end };
                    let count = (0..).take_while(|&at| source.tensors().contains_key(&of.single(at, 0))).count();
                    for (expert, layer) in (0..count).flat_map(|at| (0..layers.len()).map(move |layer| (at, layer))) {
                        let single = of.single(expert, layer);
                        let found = source.tensor(&single)?;
                        if (&found.shape, found.dtype) != (&entry.shape, entry.dtype) {
                            return Err(Error::Malformed {
                                path: source.path().to_path_buf(),
                                item: Some(single),
                                reason: format!(
                                    "it is {} {:?}, but \"{name}\" {} {:?}",
                                    found.dtype, found.shape, entry.dtype, entry.shape
                                ),
                            });
                        }
                        index.tensors.remove(&single);
                    }
                    let outputs = entry.shape[0] * layers.len();
                    let shape: Vec<usize> =
                        [count].into_iter().chain(entry.shape[1..].iter().copied()).chain([outputs]).collect();
                    let file = entry.chunks.first().map_or(String::new(), |chunk| chunk.file.clone());
                    let chunks = vec![ChunkEntry::new(file, Region::whole(&shape))];
                    let name = format!("{prefix}{stacked}{of_name}");
                    index.tensors.insert(name.clone(), TensorEntry { dtype: entry.dtype, shape, chunks });
                    joined.insert(name, of);
                }
            }
        }
        Ok(JoinedExperts { source, index, joined })
    }

    /// Reads a region of an expert, `[in, out]` or `[out]` without the first dimension.
    fn read_expert(&self, of: &Joined, expert: usize, region: &Region, size: usize, into: &mut [u8]) -> Result<()> {
        let step = of.layers.len();
        let (column, columns) = (region.offsets[region.offsets.len() - 1], region.sizes[region.sizes.len() - 1]);
        let rows = if region.sizes.len() == 2 { region.sizes[0] } else { 1 };
        for layer in 0..step {
            // The outputs of this layer among the columns.
            let first = column.saturating_sub(layer).div_ceil(step);
            let outputs = (column + columns).saturating_sub(layer).div_ceil(step).saturating_sub(first);
            if outputs == 0 || rows == 0 {
                continue;
            }
            let (mut offsets, mut sizes) = (vec![first], vec![outputs]);
            if region.sizes.len() == 2 {
                offsets.push(region.offsets[0]);
                sizes.push(rows);
            }
            let part = Region { offsets, sizes };
            let mut values = vec![0; part.elements() * size];
            self.source.read(&of.single(expert, layer), &part, &mut values)?;
            for (at, value) in values.chunks_exact(size).enumerate() {
                let (output, row) = (at / rows, at % rows);
                let place = row * columns + step * (first + output) + layer - column;
                into[place * size..][..size].copy_from_slice(value);
            }
        }
        Ok(())
    }
}

impl<S: TensorSource> TensorSource for JoinedExperts<S> {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        let size = tensor.dtype.size();
        check_request(fqn, &tensor.shape, size, region, into.len())?;
        let Some(of) = self.joined.get(fqn) else { return self.source.read(fqn, region, into) };
        let inner = Region { offsets: region.offsets[1..].to_vec(), sizes: region.sizes[1..].to_vec() };
        let bytes = inner.elements() * size;
        for at in 0..region.sizes[0] {
            self.read_expert(of, region.offsets[0] + at, &inner, size, &mut into[at * bytes..][..bytes])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fsdp_core::Buffer;
    use fsdp_core::process_group::local;

    use super::*;
    use crate::TensorShard;
    use crate::hf::{HfModel, export};

    const PREFIX: &str = "model.layers.0.mlp.experts.";
    const COUNT: usize = 3;
    const WIDTH: usize = 64;
    const INNER: usize = 32;

    fn floats(shape: &[usize]) -> Arc<Buffer> {
        let count = shape.iter().product::<usize>();
        Arc::new(Buffer::F32((0..count).map(|at| (at % 8191) as f32).collect()))
    }

    fn codes(shape: &[usize], of: fn(usize) -> u8) -> Arc<Buffer> {
        Arc::new(Buffer::U8((0..shape.iter().product::<usize>()).map(of).collect()))
    }

    /// Returns a file with these tensors of a layer's experts.
    fn file(tensors: &[(&str, &[usize], Arc<Buffer>)]) -> (tempfile::TempDir, HfModel) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        let shard = |(name, shape, data): &(&str, &[usize], Arc<Buffer>)| {
            TensorShard::whole(format!("{PREFIX}{name}"), shape, data.clone())
        };
        let shards: Vec<TensorShard> = tensors.iter().map(shard).collect();
        local::run(1, |group| export(&dir, &group, &shards, &[]).unwrap());
        let model = HfModel::open(&dir).unwrap();
        (root, model)
    }

    fn read(source: &dyn TensorSource, name: &str, region: &Region) -> Vec<f32> {
        let dtype = source.tensor(name).unwrap().dtype;
        let mut bytes = vec![0; region.elements() * dtype.size()];
        source.read(name, region, &mut bytes).unwrap();
        let value = |bytes: &[u8]| match dtype {
            DType::BF16 => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        bytes.chunks_exact(dtype.size()).map(value).collect()
    }

    /// Returns some regions of a shape.
    fn regions(shape: &[usize]) -> Vec<Region> {
        let part = |at: usize, of: usize| (of * at / 5, (of - of * at / 5).min(of * (at + 2) / 6));
        (0..5)
            .map(|at| {
                let (offsets, sizes) = shape.iter().map(|&size| part(at, size)).unzip();
                Region { offsets, sizes }
            })
            .collect()
    }

    /// Returns the elements of a region of whole values.
    fn part(values: &[f32], shape: &[usize], region: &Region) -> Vec<f32> {
        let places = region.sizes.iter().enumerate().fold(vec![0], |places, (dim, &size)| {
            let next =
                |&at: &usize| (0..size).map(move |i| at * shape[dim] + region.offsets[dim] + i).collect::<Vec<_>>();
            places.iter().flat_map(next).collect()
        });
        places.into_iter().map(|at| values[at]).collect()
    }

    #[test]
    fn experts_are_split_and_joined() {
        let tensors = [
            ("gate_up_proj", &[COUNT, WIDTH, 2 * INNER][..]),
            ("gate_up_proj_bias", &[COUNT, 2 * INNER]),
            ("down_proj", &[COUNT, INNER, WIDTH]),
            ("down_proj_bias", &[COUNT, WIDTH]),
        ];
        let (_root, model) = file(&tensors.map(|(name, shape)| (name, shape, floats(shape))));
        let split = SplitExperts::new(&model as &dyn TensorSource, COUNT).unwrap();
        assert_eq!(split.tensors().len(), COUNT * 6);
        let single = |name: &str| format!("{PREFIX}2.{name}");
        // Row 5 of the ups is column 11 of the tensor.
        let at =
            |expert: usize, input: usize, output: usize| ((expert * WIDTH + input) * 2 * INNER + output) as f32 % 8191.;
        let row = Region { offsets: vec![5, 0], sizes: vec![1, WIDTH] };
        let want: Vec<f32> = (0..WIDTH).map(|input| at(2, input, 11)).collect();
        assert_eq!(read(&split, &single("up_proj.weight"), &row), want);
        let bias = Region { offsets: vec![3], sizes: vec![2] };
        let first = (2 * 2 * INNER) as f32;
        assert_eq!(read(&split, &single("gate_proj.bias"), &bias), [first + 6., first + 8.]);
        for (name, shape) in split.tensors().iter().map(|(name, entry)| (name, &entry.shape)) {
            let whole = read(&split, name, &Region::whole(shape));
            for region in regions(shape) {
                assert_eq!(read(&split, name, &region), part(&whole, shape, &region), "{name} {region:?}");
            }
        }
        let joined = JoinedExperts::new(&split as &dyn TensorSource).unwrap();
        assert_eq!(joined.tensors().len(), 4);
        for (name, shape) in tensors {
            let name = format!("{PREFIX}{name}");
            assert_eq!(joined.tensor(&name).unwrap().shape, shape);
            for region in regions(shape).into_iter().chain([Region::whole(shape)]) {
                assert_eq!(read(&joined, &name, &region), read(&model, &name, &region), "{name} {region:?}");
            }
        }
    }

    #[test]
    fn codes_are_decoded() {
        let (codes_shape, scales_shape) = ([COUNT, 2 * INNER, WIDTH / 32, 16], [COUNT, 2 * INNER, WIDTH / 32]);
        let blocks = codes(&codes_shape, |at| (at * 37 % 251) as u8);
        let scales = codes(&scales_shape, |at| 120 + (at % 11) as u8);
        let all = [("gate_up_proj_blocks", &codes_shape[..], blocks), ("gate_up_proj_scales", &scales_shape, scales)];
        let (_root, model) = file(&all);
        let split = SplitExperts::new(&model as &dyn TensorSource, COUNT).unwrap();
        assert_eq!(split.tensors().len(), 2 * COUNT);
        for (expert, layer) in (0..COUNT).flat_map(|expert| [(expert, 0), (expert, 1)]) {
            let name = format!("{PREFIX}{expert}.{}.weight", ["gate_proj", "up_proj"][layer]);
            let shape = [INNER, WIDTH];
            assert_eq!(
                (split.tensor(&name).unwrap().dtype, &split.tensor(&name).unwrap().shape[..]),
                (DType::BF16, &shape[..])
            );
            let value = |at: usize| {
                let (row, column) = (expert * 2 * INNER + 2 * (at / WIDTH) + layer, at % WIDTH);
                let number = row * (WIDTH / 32) + column / 32;
                let codes: Vec<u8> = (number * 16..number * 16 + 16).map(|at| (at * 37 % 251) as u8).collect();
                bf16::from_f32(decode(&codes, 120 + (number % 11) as u8)[column % 32]).to_f32()
            };
            let whole: Vec<f32> = (0..INNER * WIDTH).map(value).collect();
            for region in regions(&shape).into_iter().chain([Region::whole(&shape)]) {
                assert_eq!(read(&split, &name, &region), part(&whole, &shape, &region), "{name} {region:?}");
            }
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let blocks = [COUNT, 4, 2, 16];
        for (tensors, words) in [
            (vec![("gate_up_proj", &[COUNT, 4, 6][..], floats(&[COUNT, 4, 6]))], "of 4 experts"),
            (vec![("gate_up_proj", &[4, 4, 5], floats(&[4, 4, 5]))], "its 5 outputs are not gates and ups in turn"),
            (vec![("down_proj_blocks", &[4, 4, 2, 16], codes(&[4, 4, 2, 16], |_| 0))], "it needs scales"),
            (vec![("down_proj_blocks", &blocks, codes(&blocks, |_| 0))], "in U8 of 4 experts"),
            (
                vec![("down_proj_bias", &[4, 2], floats(&[4, 2])), ("1.down_proj.bias", &[2], floats(&[2]))],
                "remove one of them",
            ),
        ] {
            let (_root, model) = file(&tensors);
            let error = SplitExperts::new(&model as &dyn TensorSource, 4).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        // An expert whose layers are missing, and one of another shape.
        let of = |name: &'static str, size| (name, vec![size], floats(&[size]));
        for (tensors, words) in [
            (vec![of("0.gate_proj.bias", 2)], "0.up_proj.bias"),
            (vec![of("0.gate_proj.bias", 2), of("0.up_proj.bias", 3)], "it is F32 [3], but"),
        ] {
            let tensors: Vec<(&str, &[usize], Arc<Buffer>)> =
                tensors.iter().map(|(name, shape, data)| (*name, &shape[..], data.clone())).collect();
            let (_root, model) = file(&tensors);
            let error = JoinedExperts::new(&model as &dyn TensorSource).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
