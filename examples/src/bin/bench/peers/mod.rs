//! `bench peers`: training steps and attention beside PyTorch's, as a Markdown table.
//!
//! Every run is a process of its own: `bench step` or `bench attention` of this program, and the scripts of
//! tests/interop, which are part of this program. Runs of both sides alternate, so that a slow minute of the machine
//! slows both.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::builder::PossibleValuesParser;
use fsdp_train::console::Console;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::print;

/// Measures training steps of several models on two ranks, and attention in one process, beside PyTorch FSDP2 and
/// scaled_dot_product_attention, with one thread for each rank. Prints a Markdown table: seconds of the fastest step and
/// the most resident memory of a rank.
///
/// The floor is the time of a step's matrix products alone, in PyTorch's BLAS.
///
/// Needs Python with torch, transformers and, for adapters, peft. Without them, it measures candle-fsdp alone. Use an
/// idle machine with at least two cores. With all rows, it takes an hour. A program that takes more than three minutes for
/// a row runs once.
#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  All rows, with the PyTorch of a virtual environment:
    bench peers --python venv/bin/python
  Two rows, once:
    bench peers --rows resnet-18,attention-4096 --rounds 1
  A model of yours. Flags after -- go to `bench step` and to its PyTorch counterpart:
    bench peers --model DIR -- --batch 1 --seq 1024 --param-dtype bf16")]
pub(crate) struct Args {
    /// Python interpreter to run PyTorch with.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// Runs of each program. The best counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Timed steps of a run, after a warm-up step.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Rows to measure, in this order [default: all]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = PossibleValuesParser::new(ROWS.map(|row| row.0)))]
    rows: Vec<String>,
    /// Measure the model of this directory instead. Its config.json is that of `bench step --model`.
    #[arg(long, value_name = "DIR", conflicts_with = "rows")]
    model: Option<PathBuf>,
    /// With --model: flags of the step.
    #[arg(last = true, requires = "model", value_name = "FLAGS")]
    flags: Vec<String>,
    /// Print one JSON object for the machine and one for each row.
    #[arg(long)]
    json: bool,
}

/// Name, title, model and flags of each row. Rows without a model are attention, and their flag is the number of tokens.
const ROWS: [(&str, &str, &str, &str); 11] = [
    ("llama-125m", "Llama, 125 million parameters", "llama-125m", ""),
    ("gpt2-124m", "GPT-2, 124 million parameters", "gpt2-124m", ""),
    ("bert-base", "BERT, 110 million parameters", "bert-base", ""),
    ("llama-125m-bf16", "Llama, in bf16", "llama-125m", "--param-dtype bf16"),
    ("mixtral-123m", "Mixtral, 8 experts, 2 for each token, 123 million parameters", "mixtral-123m", ""),
    ("llama-125m-lora", "Llama, adapters of rank 16 only", "llama-125m", "--lora-rank 16"),
    ("resnet-18", "ResNet-18, 16 images of 64 x 64", "resnet-18", "--batch 16"),
    ("convnext-tiny", "ConvNeXt-tiny, 16 images of 64 x 64", "convnext-tiny", "--batch 16"),
    ("attention-1024", "attention, 1,024 tokens", "", "1024"),
    ("attention-4096", "attention, 4,096 tokens", "", "4096"),
    ("attention-8192", "attention, 8,192 tokens", "", "8192"),
];

/// Files for other programs.
const FILES: [(&str, &str); 9] = [
    ("step.py", include_str!("step.py")),
    ("attention.py", include_str!("attention.py")),
    ("floor.py", include_str!("floor.py")),
    ("llama-125m/config.json", include_str!("../../../../configs/llama-125m/config.json")),
    ("gpt2-124m/config.json", include_str!("../../../../configs/gpt2-124m/config.json")),
    ("bert-base/config.json", include_str!("../../../../configs/bert-base/config.json")),
    ("mixtral-123m/config.json", include_str!("../../../../configs/mixtral-123m/config.json")),
    ("resnet-18/config.json", include_str!("../../../../configs/resnet-18/config.json")),
    ("convnext-tiny/config.json", include_str!("../../../../configs/convnext-tiny/config.json")),
];

const RANKS: &str = "2";

/// A program that takes longer runs once for a row, and PyTorch takes no further step after it: on processors without
/// instructions for bf16, its steps in bf16 take minutes.
const SLOW: Duration = Duration::from_secs(180);

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(std::env::var_os("WORLD_SIZE").is_none(), "`bench peers` starts its ranks: run it without a launcher");
    let dir = write_files().context("can't write the scripts and configurations for PyTorch")?;
    let bench = std::env::current_exe().context("can't tell which program this is")?;
    // Fails if a package is missing.
    let versions = "from importlib.metadata import version as of; of('transformers'); print(of('torch'))";
    let pytorch = match output(Command::new(&args.python).args(["-c", versions])) {
        Ok(version) => Some(version.trim().to_owned()),
        Err(error) => {
            Console::Stderr.line(format_args!(
                "PyTorch was not found ({error:#}), so only candle-fsdp is measured. `pip install torch transformers \
                 peft` installs it, and --python chooses the interpreter."
            ));
            None
        }
    };
    let machine = Machine::of(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(), pytorch);
    let programs = Programs { args, dir: dir.path(), bench, has_pytorch: machine.pytorch.is_some() };
    if args.json {
        print(serde_json::to_string(&machine)?)?;
    } else {
        print(format_args!("{}\n\n{HEADER}", machine.line()))?;
    }
    let mut failed = vec![];
    for work in Work::of(args, dir.path()) {
        let row = programs.measure(work);
        if !row.errors.is_empty() {
            failed.push(row.row.clone());
        }
        match args.json {
            true => print(serde_json::to_string(&row)?)?,
            false => print(row.line())?,
        }
    }
    ensure!(failed.is_empty(), "these rows failed: {}", failed.join(", "));
    Ok(())
}

fn write_files() -> std::io::Result<TempDir> {
    let dir = TempDir::with_prefix("bench-peers-")?;
    for (name, text) in FILES {
        let path = dir.path().join(name);
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(path, text)?;
    }
    Ok(dir)
}

/// Work of a row.
struct Work {
    name: String,
    title: String,
    kind: Kind,
}

enum Kind {
    Step { model: PathBuf, flags: Vec<String> },
    Attention { tokens: String },
}

impl Work {
    fn of(args: &Args, dir: &Path) -> Vec<Self> {
        if let Some(model) = &args.model {
            let name = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned();
            let title = format!("{name} {}", args.flags.join(" ")).trim().to_owned();
            return vec![Work { name, title, kind: Kind::Step { model: model.clone(), flags: args.flags.clone() } }];
        }
        let work = |(name, title, model, flags): (&str, &str, &str, &str)| {
            let kind = match model {
                "" => Kind::Attention { tokens: flags.into() },
                _ => Kind::Step { model: dir.join(model), flags: flags.split_whitespace().map(Into::into).collect() },
            };
            Work { name: name.into(), title: title.into(), kind }
        };
        match &args.rows[..] {
            [] => ROWS.map(work).into(),
            names => names.iter().flat_map(|name| ROWS.into_iter().find(|row| row.0 == name)).map(work).collect(),
        }
    }
}

/// Programs that rows run.
struct Programs<'a> {
    args: &'a Args,
    /// Directory of [`FILES`].
    dir: &'a Path,
    /// This program.
    bench: PathBuf,
    has_pytorch: bool,
}

impl Programs<'_> {
    /// Runs all rounds of a row.
    fn measure(&self, work: Work) -> Row {
        let mut row = Row { row: work.name.clone(), title: work.title.clone(), ..Row::default() };
        let mut slow = BTreeSet::new();
        for round in 1..=self.args.rounds {
            let mut run = |name: &str, best: &mut Option<Best>, measure: &dyn Fn() -> anyhow::Result<Best>| {
                if slow.contains(name) || row.errors.iter().any(|error| error.program == name) {
                    return;
                }
                let start = Instant::now();
                let outcome = measure();
                if start.elapsed() > SLOW {
                    slow.insert(name.to_owned());
                }
                let words = outcome.as_ref().map_or_else(|_| "failed".into(), |run| format!("{:.3} s", run.seconds));
                Console::Stderr.line(format_args!("{}, round {round}: {name}: {words}", work.name));
                match outcome {
                    Ok(run) => *best = Some(best.map_or(run, |best| best.with(run))),
                    Err(error) => row.errors.push(Failure { program: name.into(), error: format!("{error:#}") }),
                }
            };
            run("candle-fsdp", &mut row.ours, &|| self.ours(&work.kind));
            if self.has_pytorch {
                run("PyTorch", &mut row.pytorch, &|| self.pytorch(&work.kind));
                run("floor", &mut row.floor, &|| self.floor(&work.kind));
            }
        }
        row.compare_models();
        row
    }

    fn ours(&self, kind: &Kind) -> anyhow::Result<Best> {
        let mut command = Command::new(&self.bench);
        // The launcher would give each rank its share of the cores.
        command.env("RAYON_NUM_THREADS", "1");
        match kind {
            Kind::Step { model, flags } => {
                command.args(["step", "--json", "--world", RANKS, "--model"]).arg(model).args(flags);
                command.arg("--steps").arg(self.args.steps.to_string());
            }
            Kind::Attention { tokens } => {
                command.args(["attention", "--json", "--tokens", tokens]);
            }
        }
        Best::parse(&output(&mut command)?)
    }

    fn pytorch(&self, kind: &Kind) -> anyhow::Result<Best> {
        let mut command = Command::new(&self.args.python);
        command.env("OMP_NUM_THREADS", "1");
        match kind {
            Kind::Step { model, flags } => {
                command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]);
                command.arg(self.dir.join("step.py")).arg("--model").arg(model).args(flags);
                command.arg("--steps").arg(self.args.steps.to_string());
                command.arg("--limit").arg(SLOW.as_secs().to_string());
            }
            Kind::Attention { tokens } => {
                command.arg(self.dir.join("attention.py")).args(["--tokens", tokens]);
            }
        }
        Best::parse(&output(&mut command)?)
    }

    /// Runs a process for each rank at once. The slower one counts.
    fn floor(&self, kind: &Kind) -> anyhow::Result<Best> {
        let command = || {
            let mut command = Command::new(&self.args.python);
            command.env("OMP_NUM_THREADS", "1").arg(self.dir.join("floor.py"));
            match kind {
                Kind::Step { model, flags } => command.arg("--model").arg(model).args(flags),
                Kind::Attention { tokens } => command.args(["--attention", tokens]),
            };
            command
        };
        let other = match kind {
            Kind::Step { .. } => Some(start(&mut command())?),
            Kind::Attention { .. } => None,
        };
        let mut slowest = Best::parse(&output(&mut command())?)?;
        if let Some(other) = other {
            slowest.seconds = slowest.seconds.max(Best::parse(&wait(other)?)?.seconds);
        }
        Ok(slowest)
    }
}

/// Returns what a command prints to stdout.
fn output(command: &mut Command) -> anyhow::Result<String> {
    wait(start(command)?)
}

fn start(command: &mut Command) -> anyhow::Result<Child> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.with_context(|| format!("can't start {}", command.get_program().display()))
}

/// Returns what a process printed to stdout. If it failed, prints what it wrote to stderr.
fn wait(child: Child) -> anyhow::Result<String> {
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        Console::Stderr.line(text.trim_end());
        bail!("{}", reason(&text).unwrap_or(&output.status.to_string()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the last line with an error that is not torchrun's summary, or else the last line.
fn reason(stderr: &str) -> Option<&str> {
    let is_error = |line: &&str| line.contains("Error") && !line.contains("ChildFailedError");
    let line = stderr.lines().rfind(is_error).or_else(|| stderr.lines().rfind(|line| !line.trim().is_empty()))?;
    // PyTorch's ranks begin their lines with `[rank0]: `.
    Some(line.split_once("]: ").map_or(line, |(_, error)| error).trim())
}

/// Best run of a program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Best {
    seconds: f64,
    /// Most resident memory of a rank in any run.
    peak_rss_bytes: u64,
    /// Number of the model's parameters, if the program reported it.
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<u64>,
}

impl Best {
    /// Reads the last JSON object that `bench step`, `bench attention` or a script printed.
    fn parse(stdout: &str) -> anyhow::Result<Self> {
        let line = stdout.lines().rfind(|line| line.starts_with('{')).context("it printed no JSON object")?;
        let report: Value = serde_json::from_str(line)?;
        let number = |key: &str| report[key].as_f64();
        let milliseconds =
            number("forward_ms").zip(number("backward_ms")).map(|(forward, backward)| forward + backward);
        let seconds = number("best_step_s").or(number("seconds")).or(milliseconds.map(|ms| ms / 1e3));
        let peaks = match &report["peak_rss_bytes"] {
            Value::Array(peaks) => peaks.iter().filter_map(Value::as_u64).max(),
            peak => peak.as_u64(),
        };
        Ok(Best {
            seconds: seconds.with_context(|| format!("it printed no time: {line}"))?,
            peak_rss_bytes: peaks.unwrap_or(0),
            parameters: report["parameters"].as_u64(),
        })
    }

    fn with(self, other: Best) -> Self {
        let peak_rss_bytes = self.peak_rss_bytes.max(other.peak_rss_bytes);
        Best { seconds: self.seconds.min(other.seconds), peak_rss_bytes, ..self }
    }
}

const HEADER: &str = "\
| two ranks, f32, 2 sequences of 256 tokens unless stated | floor | candle-fsdp | PyTorch | candle-fsdp / PyTorch | \
candle-fsdp / floor | memory of a rank, PyTorch's |
|---|---|---|---|---|---|---|";

/// Results of a row.
#[derive(Default, Serialize)]
struct Row {
    row: String,
    #[serde(skip)]
    title: String,
    floor: Option<Best>,
    ours: Option<Best>,
    pytorch: Option<Best>,
    errors: Vec<Failure>,
}

#[derive(Serialize)]
struct Failure {
    program: String,
    error: String,
}

impl Row {
    /// Fails the row if the two models have different numbers of parameters.
    fn compare_models(&mut self) {
        let count = |best: Option<Best>| best.and_then(|best| best.parameters);
        if let Some((ours, theirs)) = count(self.ours).zip(count(self.pytorch))
            && ours != theirs
        {
            let error = format!("its model has {theirs} parameters, and candle-fsdp's has {ours}");
            self.errors.push(Failure { program: "PyTorch".into(), error });
        }
    }

    /// Returns the row of the Markdown table.
    fn line(&self) -> String {
        let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
        let side = |name: &str, best: Option<Best>| match self.errors.iter().find(|error| error.program == name) {
            Some(failure) => format!("failed: {}", failure.error.replace('|', "\\|").replace('\n', " ")),
            None => or_dash(best.map(|best| seconds(best.seconds))),
        };
        let ratio = |other: Option<Best>| {
            or_dash(self.ours.zip(other).map(|(ours, other)| format!("{:.2}", ours.seconds / other.seconds)))
        };
        let gb = |best: Best| format!("{:.2}", best.peak_rss_bytes as f64 / 1e9);
        let memory = match (self.ours, self.pytorch) {
            (Some(ours), Some(pytorch)) => Some(format!("{}, {} GB", gb(ours), gb(pytorch))),
            (ours, _) => ours.map(|ours| format!("{} GB", gb(ours))),
        };
        let cells = [
            self.title.clone(),
            side("floor", self.floor),
            side("candle-fsdp", self.ours),
            side("PyTorch", self.pytorch),
            ratio(self.pytorch),
            ratio(self.floor),
            or_dash(memory),
        ];
        format!("| {} |", cells.join(" | "))
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 1. { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

/// The machine and its PyTorch.
#[derive(Serialize)]
struct Machine {
    processor: String,
    /// Vector and matrix instructions.
    instructions: Vec<&'static str>,
    /// Version of PyTorch, if it is installed.
    pytorch: Option<String>,
}

/// Instructions that kernels and BLAS choose by, as Linux names them.
const INSTRUCTIONS: [&str; 6] = ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "sve"];

impl Machine {
    /// Reads `/proc/cpuinfo`.
    fn of(cpuinfo: &str, pytorch: Option<String>) -> Self {
        let field = |names: &[&str]| {
            let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            fields.find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value.trim())
        };
        // Arm's list is called Features.
        let flags: Vec<&str> = field(&["flags", "Features"]).unwrap_or_default().split_whitespace().collect();
        Machine {
            processor: field(&["model name"]).unwrap_or(std::env::consts::ARCH).into(),
            instructions: INSTRUCTIONS.into_iter().filter(|instruction| flags.contains(instruction)).collect(),
            pytorch,
        }
    }

    fn line(&self) -> String {
        let pytorch = self.pytorch.as_ref().map_or("no PyTorch".into(), |version| format!("PyTorch {version}"));
        format!("{}, {}, {pytorch}", self.processor, self.instructions.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_all_programs_are_read() {
        let best = |seconds, peak_rss_bytes| Best { seconds, peak_rss_bytes, parameters: None };
        let step = r#"{"step_s": 3.0, "best_step_s": 2.5, "peak_rss_bytes": [7, 9], "parameters": 4}"#;
        let expected = Best { parameters: Some(4), ..best(2.5, 9) };
        assert_eq!(Best::parse(&format!("a warning\n{step}\n")).unwrap(), expected);
        let attention = r#"{"tokens": 4, "forward_ms": 500.0, "backward_ms": 1000.0, "peak_rss_bytes": 7}"#;
        assert_eq!(Best::parse(attention).unwrap(), best(1.5, 7));
        assert_eq!(Best::parse(r#"{"seconds": 2.0}"#).unwrap(), best(2., 0));
        assert!(Best::parse("nothing").unwrap_err().to_string().contains("no JSON"));
        assert!(Best::parse("{}").unwrap_err().to_string().contains("no time"));
        assert_eq!(best(2., 5).with(best(1., 3)), best(1., 5));
    }

    #[test]
    fn rows_are_markdown_with_results_or_errors() {
        let best = |seconds, peak_rss_bytes| Some(Best { seconds, peak_rss_bytes, parameters: None });
        let mut row = Row { title: "a model".into(), ours: best(2.5, 1_600_000_000), ..Row::default() };
        assert_eq!(row.line(), "| a model | - | 2.50 s | - | - | - | 1.60 GB |");
        row.floor = best(0.5, 0);
        row.pytorch = best(5., 3_900_000_000);
        assert_eq!(row.line(), "| a model | 500 ms | 2.50 s | 5.00 s | 0.50 | 5.00 | 1.60, 3.90 GB |");
        row.pytorch = None;
        row.errors.push(Failure { program: "PyTorch".into(), error: "no a|b".into() });
        assert_eq!(row.line(), "| a model | 500 ms | 2.50 s | failed: no a\\|b | - | 5.00 | 1.60 GB |");
        row.errors.clear();
        row.ours.as_mut().unwrap().parameters = Some(3);
        row.pytorch = Some(Best { parameters: Some(4), ..best(5., 0).unwrap() });
        row.compare_models();
        assert!(
            row.line().contains("| failed: its model has 4 parameters, and candle-fsdp's has 3 |"),
            "{}",
            row.line()
        );
        assert_eq!(HEADER.lines().map(|line| line.matches('|').count()).collect::<Vec<_>>(), [8, 8]);
    }

    #[test]
    fn the_error_is_found_before_torchruns_summary() {
        let torchrun = "[rank1]: Traceback\n[rank1]: RuntimeError: no memory\nE1126 failed\n\
                        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n";
        assert_eq!(reason(torchrun), Some("RuntimeError: no memory"));
        assert_eq!(
            reason("ModuleNotFoundError: No module named 'peft'\n"),
            Some("ModuleNotFoundError: No module named 'peft'")
        );
        assert_eq!(reason("usage\nfloor.py: unrecognized arguments\n\n"), Some("floor.py: unrecognized arguments"));
        assert_eq!(reason(""), None);
    }

    #[test]
    fn processors_are_described() {
        let machine = Machine::of("processor\t: 0\nmodel name\t: A: B\nflags\t\t: sse avx2 avx512f\n", None);
        assert_eq!(machine.line(), "A: B, avx2 avx512f, no PyTorch");
        assert_eq!(Machine::of("", Some("2.15.0".into())).instructions, [""; 0]);
    }

    #[test]
    fn every_row_has_its_model() {
        let has = |model: &str| FILES.iter().any(|file| file.0 == format!("{model}/config.json"));
        assert!(ROWS.iter().all(|row| row.2.is_empty() && row.3.parse::<u32>().is_ok() || has(row.2)));
    }
}
