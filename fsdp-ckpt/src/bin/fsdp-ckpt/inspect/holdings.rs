//! Which file holds how much of which tensors: what both pictures draw.

use std::collections::BTreeMap;

use fsdp_ckpt::{TensorSource, shown};

/// A file, a column. Its name, as that of a row, is as people are shown it.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: String,
    /// The size of the file.
    pub(super) bytes: u64,
    pub(super) chunks: usize,
}

/// A tensor or a group of them, a row.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) tensors: usize,
    /// The bytes that each file holds.
    pub(super) bytes: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Holdings {
    pub(super) files: Vec<File>,
    pub(super) rows: Vec<Row>,
}

impl Row {
    pub(super) fn total(&self) -> u64 {
        self.bytes.iter().copied().fold(0, u64::saturating_add)
    }

    /// The share of each file, where the largest one is 1.
    pub(super) fn shares(&self) -> Vec<f64> {
        let most = self.bytes.iter().copied().max().unwrap_or(0).max(1);
        self.bytes.iter().map(|&bytes| bytes as f64 / most as f64).collect()
    }
}

impl Holdings {
    /// In a row for each tensor if there are at most `most`, else in one for each layer, else in one for all layers.
    pub(super) fn of(source: &dyn TensorSource, most: usize) -> Self {
        let mut files: Vec<File> = source
            .files()
            .iter()
            .map(|(name, file)| File { name: name.clone(), bytes: file.bytes, chunks: 0 })
            .collect();
        let at: BTreeMap<String, usize> = files.iter().enumerate().map(|(at, file)| (file.name.clone(), at)).collect();
        for chunk in source.tensors().values().flat_map(|tensor| &tensor.chunks) {
            if let Some(&at) = at.get(&chunk.file) {
                files[at].chunks += 1;
            }
        }
        let rows = |group: &dyn Fn(&str) -> String| {
            let mut rows = Vec::<Row>::new();
            let mut known = BTreeMap::<String, usize>::new();
            for (fqn, tensor) in source.tensors() {
                let name = group(fqn);
                let row = *known.entry(name.clone()).or_insert_with(|| {
                    rows.push(Row { name, tensors: 0, bytes: vec![0; files.len()] });
                    rows.len() - 1
                });
                rows[row].tensors += 1;
                for chunk in &tensor.chunks {
                    if let Some(&at) = at.get(&chunk.file) {
                        let bytes = chunk.region().elements() as u64 * tensor.dtype.size() as u64;
                        rows[row].bytes[at] = rows[row].bytes[at].saturating_add(bytes);
                    }
                }
            }
            rows.sort_by_cached_key(|row| natural(&row.name));
            rows
        };
        let mut found = rows(&str::to_string);
        if found.len() > most {
            found = rows(&|fqn| layer(fqn, false));
        }
        if found.len() > 2 * most {
            found = rows(&|fqn| layer(fqn, true));
        }
        // Names are looked at by people from here on.
        files.iter_mut().for_each(|file| file.name = shown(&file.name).to_string());
        found.iter_mut().for_each(|row| row.name = shown(&row.name).to_string());
        Holdings { files, rows: found }
    }
}

/// A name up to its first number, the layer, with which its tensors are told from those of other layers; `*` for `all`
/// of them.
fn layer(fqn: &str, all: bool) -> String {
    let mut parts = Vec::new();
    for part in fqn.split('.') {
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            parts.push(if all { "*" } else { part });
            return parts.join(".");
        }
        parts.push(part);
    }
    fqn.to_string()
}

/// A key that sorts layer 10 after layer 9.
pub(super) fn natural(name: &str) -> Vec<(Option<u64>, String)> {
    name.split('.').map(|part| (part.parse().ok(), part.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_name_up_to_its_number() {
        assert_eq!(layer("model.layers.10.mlp.up.weight", false), "model.layers.10");
        assert_eq!(layer("model.layers.10.mlp.up.weight", true), "model.layers.*");
        assert_eq!(layer("model.lm_head.weight", true), "model.lm_head.weight");
        assert!(natural("h.9.x") < natural("h.10.x"));
    }
}
