//! Names of the files of a model in several files.

/// The name of a shard.
pub(crate) struct Shard<'a> {
    start: &'a str,
    pub(crate) count: usize,
    /// Digits of the numbers.
    width: usize,
    end: &'a str,
}

impl<'a> Shard<'a> {
    /// Parses `START-00001-of-00003END`.
    pub(crate) fn of(name: &'a str) -> Option<Self> {
        let (first, rest) = name.rsplit_once("-of-")?;
        let (start, number) = first.rsplit_once('-')?;
        let (count, end) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        // PyTorch's writer names the parts of each rank: `shard-00001-model-00001-of-00002.safetensors`.
        let is_number = number.len() == count.len() && number.bytes().all(|digit| digit.is_ascii_digit());
        let is_number = is_number && !start.starts_with("shard-");
        Some(Shard { start, count: count.parse().ok().filter(|_| is_number)?, width: count.len(), end })
    }

    pub(crate) fn name(&self, number: usize) -> String {
        let Shard { start, count, width, end } = self;
        format!("{start}-{number:0width$}-of-{count:0width$}{end}")
    }
}
