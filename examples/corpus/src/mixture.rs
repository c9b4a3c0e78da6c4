//! Mixtures: sequences of several sources by weight.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::sequence::Sequence;
use crate::source::{Sequences, SequencesPlace};
use crate::stream::{Exchange, Place as StreamPlace, Stream};

/// Name of a source, and its weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Weighted {
    /// A path, a pattern, or a name on the hub.
    pub name: String,
    /// Share of the tokens, relative to the other weights.
    pub weight: f64,
}

/// Parses `NAME[:WEIGHT],NAME:WEIGHT...`.
///
/// A weight is what follows the last colon, if it is a number above 0. Only the weight of a single source can be left
/// out. A text that is the name of a file is one source, whatever commas and colons it has.
///
/// ```
/// use fsdp_corpus::mixture::parse;
///
/// let sources = parse("a.parquet:0.7,org/data:train.jsonl:0.3")?;
/// assert_eq!((&*sources[0].name, sources[0].weight), ("a.parquet", 0.7));
/// assert_eq!((&*sources[1].name, sources[1].weight), ("org/data:train.jsonl", 0.3));
/// # anyhow::Ok(())
/// ```
pub fn parse(text: &str) -> Result<Vec<Weighted>> {
    let one = |name: &str, weight| Ok(vec![Weighted { name: name.into(), weight }]);
    if Path::new(text).exists() {
        return one(text, 1.);
    }
    if let (name, Some(weight)) = split(text)
        && Path::new(name).exists()
    {
        return one(name, weight);
    }
    let parts: Vec<&str> = text.split(',').collect();
    let mut sources = Vec::new();
    for part in &parts {
        let (name, weight) = split(part);
        ensure!(!name.is_empty(), "`{text}` has a source without a name. Expected NAME:WEIGHT,NAME:WEIGHT");
        if let Some((_, number)) = part.rsplit_once(':')
            && weight.is_none()
            && number.parse().is_ok_and(|number: f64| number <= 0.)
        {
            bail!("`{part}` has the weight {number}, but a weight is above 0. Leave the source out");
        }
        let Some(weight) = weight.or((parts.len() == 1).then_some(1.)) else {
            bail!("`{part}` has no weight. Give each source of a mixture one, such as `{part}:0.5`")
        };
        sources.push(Weighted { name: name.into(), weight });
    }
    Ok(sources)
}

/// Splits a name from its weight.
fn split(part: &str) -> (&str, Option<f64>) {
    let weighted = part.rsplit_once(':').and_then(|(name, number)| {
        // "inf" and "nan" are numbers too.
        let weight: f64 = number.parse().ok().filter(|weight: &f64| weight.is_finite() && *weight > 0.)?;
        Some((name, weight))
    });
    weighted.map_or((part, None), |(name, weight)| (name, Some(weight)))
}

/// Source of a mixture.
pub enum Source {
    /// A corpus that is read and tokenised while training.
    Stream(Box<Stream>),
    /// Tokens that allow random access.
    Sequences(Sequences),
}

/// Sequences of several sources by weight.
///
/// The next sequence is of the source that lacks most tokens of its share, so shares are exact within about a sequence.
/// All ranks consume the same sequences: each reads those that it trains on, and skips the others.
///
/// ```
/// # use std::sync::Arc;
/// # use fsdp_corpus::{documents::Options, files::Files, stream::{Corpus, Stream, alone}, tokenise::Bytes};
/// use fsdp_corpus::mixture::{Mixture, Source};
///
/// # let directory = tempfile::tempdir()?;
/// # let mut sources = Vec::new();
/// # for (name, weight) in [("a", 3.), ("b", 1.)] {
/// #     let path = directory.path().join(name);
/// #     std::fs::write(&path, name.repeat(9))?;
/// #     let corpus = Arc::new(Corpus::open(&Files::find(&path)?, &Options::default())?);
/// #     let stream = Stream::new(corpus, Arc::new(Bytes::with_end()), None, 0, 1)?;
/// #     sources.push((name.to_owned(), weight, Source::Stream(Box::new(stream))));
/// # }
/// // `sources` are a with the weight 3, and b with the weight 1.
/// let mut mixture = Mixture::new(sources, 4)?;
/// let mut order = Vec::new();
/// for _ in 0..8 {
///     let (source, _sequence) = mixture.next_sequence(&alone)?;
///     order.push(source);
/// }
/// assert_eq!(order, [0, 0, 1, 0, 0, 0, 1, 0]);
/// # anyhow::Ok(())
/// ```
pub struct Mixture {
    sources: Vec<Entry>,
    seq_len: usize,
}

struct Entry {
    name: String,
    /// Share of the tokens. All shares sum to 1.
    share: f64,
    source: Source,
}

impl Entry {
    /// Returns the number of tokens consumed.
    fn taken(&self, seq_len: usize) -> u64 {
        match &self.source {
            Source::Stream(stream) => stream.counters().tokens,
            Source::Sequences(sequences) => sequences.position() * seq_len as u64,
        }
    }
}

/// Place in a mixture, for a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Places of the sources.
    pub sources: Vec<EntryPlace>,
}

/// Place in a source of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EntryPlace {
    /// Name of the source.
    pub name: String,
    /// Share of the tokens.
    pub share: f64,
    /// Place in the source.
    pub place: SourcePlace,
}

/// Place in a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourcePlace {
    /// Place in a stream.
    Stream(StreamPlace),
    /// Place in tokens that allow random access.
    Sequences(SequencesPlace),
}

/// Counters of a source since the start of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// Name of the source.
    pub name: String,
    /// Share of the tokens that the source is to have.
    pub share: f64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Epochs completed.
    pub epochs: u64,
    /// Documents begun. `None` for tokens that allow random access.
    pub documents: Option<u64>,
}

impl Mixture {
    /// Creates a mixture of sources with their names and weights, in sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// The list of sources is empty, or a weight is not above 0.
    pub fn new(sources: Vec<(String, f64, Source)>, seq_len: usize) -> Result<Self> {
        ensure!(!sources.is_empty(), "a mixture needs at least one source");
        ensure!(seq_len > 0, "a sequence needs at least one token");
        let sum: f64 = sources.iter().map(|(_, weight, _)| weight).sum();
        for (name, weight, _) in &sources {
            let share = weight / sum;
            ensure!(*weight > 0. && share.is_finite(), "{name} has the weight {weight}, but a weight is above 0");
        }
        let entry = |(name, weight, source)| Entry { name, share: weight / sum, source };
        Ok(Mixture { sources: sources.into_iter().map(entry).collect(), seq_len })
    }

    /// Consumes the next sequence. Returns the index of its source too.
    ///
    /// # Errors
    /// The source can't be read, or the exchange fails.
    pub fn next_sequence(&mut self, exchange: &Exchange<'_>) -> Result<(usize, Sequence)> {
        let (index, seq_len) = (self.next(), self.seq_len);
        let entry = &mut self.sources[index];
        let sequence = match &mut entry.source {
            Source::Stream(stream) => stream.next_sequence(seq_len, exchange)?,
            Source::Sequences(sequences) => sequences.next_sequence()?,
        };
        Ok((index, sequence))
    }

    /// Returns the next sequence without consuming it. All ranks call it.
    ///
    /// # Errors
    /// As [`Mixture::next_sequence`].
    pub fn peek(&mut self, exchange: &Exchange<'_>) -> Result<Sequence> {
        let (index, seq_len) = (self.next(), self.seq_len);
        match &mut self.sources[index].source {
            Source::Stream(stream) => stream.peek(seq_len, exchange),
            Source::Sequences(sequences) => sequences.at(sequences.position()),
        }
    }

    /// Consumes sequences that other ranks train on.
    ///
    /// # Errors
    /// As [`Mixture::next_sequence`].
    pub fn skip(&mut self, sequences: u64, exchange: &Exchange<'_>) -> Result<()> {
        for _ in 0..sequences {
            let (index, seq_len) = (self.next(), self.seq_len);
            let entry = &mut self.sources[index];
            match &mut entry.source {
                Source::Stream(stream) => stream.skip(1, seq_len, exchange)?,
                Source::Sequences(sequences) => sequences.skip(1),
            }
        }
        Ok(())
    }

    /// Returns the source that lacks most tokens of its share, the first of several.
    fn next(&self) -> usize {
        let taken: Vec<u64> = self.sources.iter().map(|entry| entry.taken(self.seq_len)).collect();
        let total = taken.iter().sum::<u64>() + self.seq_len as u64;
        let lacking = |index: usize| self.sources[index].share * total as f64 - taken[index] as f64;
        let mut most = 0;
        for index in 1..self.sources.len() {
            if lacking(index) > lacking(most) {
                most = index;
            }
        }
        most
    }

    /// Returns the counters of each source.
    pub fn taken(&self) -> Vec<Taken> {
        let of_entry = |entry: &Entry| {
            let (epochs, documents) = match &entry.source {
                Source::Stream(stream) => (stream.epoch(), Some(stream.counters().documents)),
                Source::Sequences(sequences) => (sequences.epoch(), None),
            };
            Taken { name: entry.name.clone(), share: entry.share, tokens: entry.taken(self.seq_len), epochs, documents }
        };
        self.sources.iter().map(of_entry).collect()
    }

    /// Returns the time spent on waiting for data and for other ranks.
    pub fn waited(&self) -> Duration {
        let of_entry = |entry: &Entry| match &entry.source {
            Source::Stream(stream) => stream.waited(),
            Source::Sequences(_) => Duration::ZERO,
        };
        self.sources.iter().map(of_entry).sum()
    }

    /// Returns the place of the next sequence.
    pub fn place(&self) -> Place {
        let of_entry = |entry: &Entry| EntryPlace {
            name: entry.name.clone(),
            share: entry.share,
            place: match &entry.source {
                Source::Stream(stream) => SourcePlace::Stream(stream.place()),
                Source::Sequences(sequences) => SourcePlace::Sequences(sequences.place()),
            },
        };
        Place { sources: self.sources.iter().map(of_entry).collect() }
    }

    /// Continues at a place, which may be of another number of ranks.
    ///
    /// # Errors
    /// The sources or their weights are others, or a source can't continue there.
    pub fn resume(&mut self, place: &Place) -> Result<()> {
        fn described<'a>(sources: impl Iterator<Item = (&'a String, f64)>) -> String {
            sources.map(|(name, share)| format!("{name}:{share:.6}")).collect::<Vec<_>>().join(",")
        }
        // Sources may have moved: their places tell whether they are the same.
        let (before, now) = (&place.sources, &self.sources);
        let is_same = |(before, now): (&EntryPlace, &Entry)| (before.share - now.share).abs() < 1e-9;
        ensure!(
            before.len() == now.len() && before.iter().zip(now).all(is_same),
            "the checkpoint's mixture is {}, but this run has {}: continue with the same sources and weights",
            described(before.iter().map(|entry| (&entry.name, entry.share))),
            described(now.iter().map(|entry| (&entry.name, entry.share)))
        );
        for (entry, place) in self.sources.iter_mut().zip(&place.sources) {
            let resumed = match (&mut entry.source, &place.place) {
                (Source::Stream(stream), SourcePlace::Stream(place)) => stream.resume(place),
                (Source::Sequences(sequences), SourcePlace::Sequences(place)) => sequences.resume(place),
                (Source::Stream(_), _) => {
                    bail!("the checkpoint read {} as tokens, but this run reads it as text", entry.name)
                }
                (Source::Sequences(_), _) => {
                    bail!("the checkpoint read {} as text, but this run reads it as tokens", entry.name)
                }
            };
            resumed.with_context(|| format!("cannot continue in {}", entry.name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::documents::Options;
    use crate::files::Files;
    use crate::prepare::{self, prepare};
    use crate::sequence::Pack;
    use crate::shards::Shards;
    use crate::stream::tests::on_ranks;
    use crate::stream::{Corpus, alone};
    use crate::tokenise::Bytes;

    #[test]
    fn names_and_weights_are_parsed() {
        let parsed = |text: &str| -> Vec<(String, f64)> {
            parse(text).unwrap().into_iter().map(|source| (source.name, source.weight)).collect()
        };
        let of = |name: &str, weight| vec![(name.to_owned(), weight)];
        assert_eq!(parsed("a.txt"), of("a.txt", 1.));
        assert_eq!(parsed("a.txt:2"), of("a.txt", 2.));
        assert_eq!(parsed("org/data:train"), of("org/data:train", 1.));
        assert_eq!(parsed("org/data:file:0.3"), of("org/data:file", 0.3));
        assert_eq!(parsed("C:inf"), of("C:inf", 1.));
        assert_eq!(parsed("a:0.7,b/*.jsonl.zst:3e-1"), [of("a", 0.7), of("b/*.jsonl.zst", 0.3)].concat());
        let message = |text: &str| parse(text).unwrap_err().to_string();
        assert!(message("a:0.7,b").contains("`b` has no weight"));
        assert!(message("a:0.7,b:0").contains("`b:0` has the weight 0, but a weight is above 0"));
        assert!(message("a:1,:2").contains("a source without a name"));
        let directory = tempfile::tempdir().unwrap();
        let odd = directory.path().join("a,b:3");
        fs::write(&odd, "").unwrap();
        let odd = odd.to_str().unwrap();
        assert_eq!(parsed(odd), of(odd, 1.));
        assert_eq!(parsed(&format!("{odd}:0.5")), of(odd, 0.5));
    }

    /// Makes a mixture of two streams and a prepared corpus.
    fn mixture(directory: &Path, rank: usize, ranks: usize) -> Mixture {
        let mut sources = Vec::new();
        for (name, weight) in [("a", 0.45), ("b", 0.3), ("c", 0.25)] {
            let path = directory.join(format!("{name}.jsonl"));
            let files = Files::find(&path).unwrap();
            let source = if name == "c" {
                let out = directory.join("prepared");
                Source::Sequences(
                    Sequences::new(Arc::new(Shards::open(&out, 257).unwrap()), 16, Some(3), Pack::Documents).unwrap(),
                )
            } else {
                let corpus = Arc::new(Corpus::open(&files, &Options::default()).unwrap());
                let stream = Stream::new(corpus, Arc::new(Bytes::with_end()), Some(3), rank, ranks).unwrap();
                Source::Stream(Box::new(stream))
            };
            sources.push((name.to_owned(), weight, source));
        }
        Mixture::new(sources, 16).unwrap()
    }

    fn corpora() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            let lines = (0..300).map(|line| format!("{{\"text\": \"{name} {line}\"}}\n")).collect::<String>();
            fs::write(directory.path().join(format!("{name}.jsonl")), lines).unwrap();
        }
        let files = Files::find(directory.path().join("c.jsonl")).unwrap();
        let out = directory.path().join("prepared");
        prepare(&files, &out, &Bytes::with_end(), &prepare::Options::default(), &mut |_| Ok(())).unwrap();
        directory
    }

    #[test]
    fn shares_are_the_weights() {
        let directory = corpora();
        let mut mixture = mixture(directory.path(), 0, 1);
        let mut taken = [0_u64; 3];
        for sequence in 1..=10_000 {
            let next = mixture.peek(&alone).unwrap();
            let (source, found) = mixture.next_sequence(&alone).unwrap();
            assert_eq!(found, next);
            taken[source] += 1;
            for (taken, share) in taken.iter().zip([0.45, 0.3, 0.25]) {
                // At every moment, not only at the end.
                assert!((*taken as f64 - share * f64::from(sequence)).abs() < 1.5, "{taken:?} after {sequence}");
            }
        }
        for (taken, share) in taken.iter().zip([0.45, 0.3, 0.25]) {
            assert!((*taken as f64 / 10_000. - share).abs() < 0.001);
        }
        let counted = mixture.taken();
        assert_eq!(counted.iter().map(|taken| taken.tokens / 16).collect::<Vec<_>>(), taken);
        assert!(counted.iter().all(|taken| taken.epochs > 5));
        assert!(counted[0].documents.is_some_and(|documents| documents > 5 * 300) && counted[2].documents.is_none());
    }

    #[test]
    fn mixtures_are_the_same_at_every_number_of_ranks_and_after_a_resume() {
        let directory = corpora();
        let read = |ranks: usize, place: Option<&Place>, count: usize| {
            let read = on_ranks(ranks, |rank, exchange| {
                let mut mixture = mixture(directory.path(), rank, ranks);
                if let Some(place) = place {
                    mixture.resume(place).unwrap();
                }
                let mut own = Vec::new();
                for index in 0..count {
                    match index % ranks == rank {
                        true => own.push(mixture.next_sequence(exchange).unwrap()),
                        false => mixture.skip(1, exchange).unwrap(),
                    }
                }
                (own, mixture.place())
            });
            let all: Vec<(usize, Sequence)> =
                (0..count).map(|index| read[index % ranks].0[index / ranks].clone()).collect();
            (all, read[0].1.clone())
        };
        let expected = read(1, None, 900);
        assert_eq!(read(2, None, 900), expected);
        let (mut found, place) = read(3, None, 307);
        let place: Place = serde_json::from_str(&serde_json::to_string(&place).unwrap()).unwrap();
        let (rest, last) = read(2, Some(&place), 593);
        found.extend(rest);
        assert_eq!((found, last), expected);
        // Other sources, weights and files are told.
        let mut other = mixture(directory.path(), 0, 1);
        other.sources.pop();
        let message = other.resume(&place).unwrap_err().to_string();
        assert!(message.contains("the checkpoint's mixture is a:0.450000,b:0.300000,c:0.250000, but"), "{message}");
        fs::write(directory.path().join("b.jsonl"), "{\"text\": \"b\"}\n").unwrap();
        let message = format!("{:#}", mixture(directory.path(), 0, 1).resume(&place).unwrap_err());
        assert!(message.contains("cannot continue in b: ") && message.contains("b.jsonl had"), "{message}");
    }
}
