//! `train prepare`: tokenises a corpus once. It needs no launcher.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fsdp_corpus::documents;
use fsdp_corpus::files::Files;
use fsdp_corpus::mixture::parse;
use fsdp_corpus::prepare::{Options, Prepared, Progress, prepare};
use fsdp_train::console::Console;
use fsdp_train::data::{CorpusTokenizer, Text};
use fsdp_train::models::ModelConfig;
use indicatif::{BinaryBytes, FormattedDuration, HumanCount, ProgressBar, ProgressStyle};
use serde_json::json;

use crate::flag_types::count;

const TEMPLATE: &str = "{percent}% [{wide_bar:.cyan/blue}] {msg}";
/// Lines of progress appear at least so often.
const QUIET: Duration = Duration::from_secs(30);

/// Tokenise a corpus once, on all cores, for `train --data DIR`
///
/// The directory gets files of at most 2^28 tokens and a document, an index of documents, and checksums. A run that was
/// killed continues by the same command. Opening the result takes no time, however large it is.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PrepareArgs {
    /// Text, .jsonl, .json or .parquet (also .gz and .zst), or a directory or a pattern of these
    #[arg(long, value_name = "PATH")]
    data: PathBuf,

    /// Directory to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Model directory whose tokenizer.json is used [default: bytes, as for the built-in model]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Field or column of the texts in records
    #[arg(long, value_name = "NAME", default_value = "text")]
    text_field: String,

    /// Threads that tokenise [default: one for each core]
    #[arg(long, value_name = "N", value_parser = count)]
    threads: Option<usize>,

    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

/// Prepares a corpus, and prints a summary.
pub(crate) fn run(args: &PrepareArgs) -> anyhow::Result<()> {
    let sources = args.data.to_str().map_or(Ok(vec![]), parse).context("--data")?;
    ensure!(
        sources.len() <= 1,
        "--data: found {} sources, expected one: prepare each into its own directory, and pass the list of directories \
         with weights to `train --data`",
        sources.len()
    );
    let text = Text::new(args.model.as_deref())?;
    let config = args.model.as_deref().filter(|dir| dir.join("config.json").exists());
    let vocab_size = config.map(ModelConfig::from_dir).transpose()?.map(|config| config.vocab_size());
    let tokenizer = CorpusTokenizer::new(&text, args.model.as_deref(), vocab_size)?;
    let files = Files::find(&args.data).context("--data")?;
    let default = Options::default();
    let options = Options {
        documents: documents::Options { field: args.text_field.clone(), ..documents::Options::default() },
        threads: args.threads.unwrap_or(default.threads),
        ..default
    };
    let mut display = Display::new();
    let (begun, mut new_tokens) = (Instant::now(), 0);
    let prepared = prepare(&files, &args.out, &tokenizer, &options, &mut |progress| {
        display.show(progress);
        new_tokens = progress.new_tokens;
        Ok(())
    });
    drop(display);
    Console::Stdout.line(summary(args, &prepared?, new_tokens, begun.elapsed().as_secs_f64()));
    Ok(())
}

fn summary(args: &PrepareArgs, prepared: &Prepared, new_tokens: u64, seconds: f64) -> String {
    let Prepared { index, reused } = prepared;
    let rate = new_tokens as f64 / seconds.max(1e-9);
    if args.json {
        let summary = json!({
            "out": args.out, "documents": index.documents, "tokens": index.tokens, "skipped": index.skipped,
            "shards": index.shards.len(), "reused_shards": reused, "tokenizer": index.inputs.tokenizer,
            "token_bits": 8 * index.inputs.width(), "seconds": seconds, "tokens_per_s": rate,
        });
        return summary.to_string();
    }
    let [documents, tokens, skipped] = [index.documents, index.tokens, index.skipped].map(HumanCount);
    let skipped = if index.skipped > 0 { format!("; {skipped} records without a text") } else { String::new() };
    let reused = if *reused > 0 { format!(", {reused} of them from an earlier run") } else { String::new() };
    let (shards, out) = (index.shards.len(), args.out.display());
    format!(
        "prepared: {tokens} tokens of {documents} documents in {out} ({shards} shards{reused}{skipped}; {seconds:.1} s, \
         {} tokens/s)",
        HumanCount(rate as u64)
    )
}

/// Progress on stderr: a bar on a terminal, plain lines elsewhere.
struct Display {
    bar: Option<ProgressBar>,
    percent: u64,
    shown: Duration,
}

impl Display {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(100).with_style(style.progress_chars("=> "))
        });
        Display { bar, percent: 0, shown: Duration::ZERO }
    }

    fn show(&mut self, progress: &Progress) {
        let percent = 100 * progress.file_bytes / progress.total_bytes.max(1);
        if let Some(bar) = &self.bar {
            bar.set_position(percent);
            bar.set_message(line(progress));
        } else if percent >= self.percent + 5 || progress.elapsed >= self.shown + QUIET {
            (self.percent, self.shown) = (percent, progress.elapsed);
            Console::Stderr.line(format_args!("{percent:>3} %  {}", line(progress)));
        }
    }
}

/// Leaves the bar on the terminal, so that the summary is printed below it.
impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

fn line(progress: &Progress) -> String {
    let left = progress.total_bytes.saturating_sub(progress.file_bytes) as f64;
    let rate = progress.file_bytes as f64 / progress.elapsed.as_secs_f64().max(1e-9);
    let left = Duration::try_from_secs_f64(left / rate).unwrap_or(Duration::MAX).as_secs();
    format!(
        "{} documents  {} tokens  {}/s  {} tokens/s  ETA {}",
        HumanCount(progress.documents),
        HumanCount(progress.tokens),
        BinaryBytes((progress.text_bytes as f64 / progress.elapsed.as_secs_f64().max(1e-9)) as u64),
        HumanCount(progress.rate() as u64),
        FormattedDuration(Duration::from_secs(left))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_hold_counts_rate_and_eta() {
        let progress = Progress {
            documents: 1000,
            tokens: 5000,
            text_bytes: 4 << 20,
            file_bytes: 1 << 20,
            total_bytes: 3 << 20,
            shards: 0,
            elapsed: Duration::from_secs(2),
            new_tokens: 5000,
        };
        assert_eq!(line(&progress), "1,000 documents  5,000 tokens  2.00 MiB/s  2,500 tokens/s  ETA 00:00:04");
        assert!(line(&Progress::default()).contains("0 documents"));
    }
}
