//! What the device double counted.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// The counts of one rank.
#[derive(Clone, Debug)]
pub struct Counts(Value);

impl Counts {
    /// Those of each rank that ran with `GPU_DOUBLE_REPORT` set to this directory.
    ///
    /// # Panics
    /// When a rank has left none.
    pub fn of(directory: &Path, ranks: usize) -> Vec<Self> {
        let read = |rank: usize| {
            let path = directory.join(format!("rank-{rank}.json"));
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Counts(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        };
        (0..ranks).map(read).collect()
    }

    /// A number of the whole process, such as `peak_bytes`.
    ///
    /// # Panics
    /// When there is none of this name.
    pub fn bytes(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("the double did not count {name}: {}", self.0))
    }

    /// What was counted of a category, by name.
    pub fn by_name(&self, category: &str) -> Vec<(String, u64)> {
        let sections = self.0["sections"].as_array().into_iter().flatten();
        let mut sums: Vec<(String, u64)> = vec![];
        for (name, count) in sections.filter_map(|section| section["counts"][category].as_object()).flatten() {
            let count = count.as_u64().unwrap_or(0);
            match sums.iter_mut().find(|(other, _)| other == name) {
                Some((_, sum)) => *sum += count,
                None => sums.push((name.clone(), count)),
            }
        }
        sums
    }

    /// All that was counted of a category whose name `is_it` accepts.
    pub fn sum(&self, category: &str, is_it: impl Fn(&str) -> bool) -> u64 {
        self.by_name(category).into_iter().filter(|(name, _)| is_it(name)).map(|(_, count)| count).sum()
    }
}
