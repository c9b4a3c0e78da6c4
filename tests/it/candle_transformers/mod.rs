//! The files of candle-transformers with the line `use fsdp_candle::nn as candle_nn;` train sharded as they do without
//! sharding.

mod changed;
mod data;
mod document;
mod gathered;
mod limits;
mod original;
mod table;
mod train;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use fsdp_test_support::workspace;
use fsdp_tests_candle_transformers::{FILES, File};

use data::{Batch, Load};
use train::{Comparison, RANKS, STEPS, Sharding, plain, sharded, var_map, weights};

fsdp_tests_candle_transformers::source_is_there!();

/// mixtral.rs itself reads the router's weights as numbers, which ends the graph.
const ROUTER: &str = "block_sparse_moe.gate.weight";

fn file(name: &str) -> &'static File {
    FILES.iter().find(|file| file.name == name).unwrap_or_else(|| panic!("{name} is not taken"))
}

/// The allowed difference of a sharded run from plain Candle, relative to that of plain Candle with the rows of each
/// rank in turn. Both differ only by rounding.
const FURTHER: f64 = 10.;

/// The number of changed lines of a file.
fn lines_changed(file: &File) -> usize {
    let (old, new): (Vec<&str>, Vec<&str>) = (file.original.lines().collect(), file.changed.lines().collect());
    let same = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let (old, new) = (&old[same..], &new[same..]);
    let tail = old.iter().rev().zip(new.iter().rev()).take_while(|(old, new)| old == new).count();
    old.len().max(new.len()) - tail
}

/// The imported files that are in the list.
fn siblings(file: &File) -> impl Iterator<Item = &'static File> {
    let imports = file.original.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<String>();
    FILES.iter().filter(move |other| {
        let stem = other.name.rsplit('/').next().unwrap().trim_end_matches(".rs");
        imports.contains(&format!("{stem}::"))
    })
}

/// Changed lines of a file and of the files whose layers it imports.
fn lines(name: &str) -> String {
    let file = file(name);
    let beside = siblings(file).filter(|other| other.name != file.name && lines_changed(other) > 0);
    let beside =
        beside.map(|other| format!("{} in `{}`", lines_changed(other), other.name.rsplit('/').next().unwrap()));
    [lines_changed(file).to_string()].into_iter().chain(beside).collect::<Vec<_>>().join(", ")
}

/// A row of the document's table.
fn row(name: &str, found: &Comparison) -> String {
    let kib = |bytes: usize| format!("{:.1}", bytes as f64 / 1024.);
    let cells = [
        format!("`{name}`"),
        lines(&format!("models/{name}")),
        found.units.to_string(),
        format!("{:.3}", found.losses[0]),
        format!("{:.3}", found.losses[STEPS - 1]),
        format!("{:.0e}", found.gradient_apart),
        format!("{:.0e}", found.plain_apart[0]),
        kib(found.bytes),
        kib(found.unmanaged),
        kib(found.gathered),
        kib(found.bound),
    ];
    format!("| {} |", cells.join(" | "))
}

const HEAD: &str = "| file | lines changed | units | loss, step 1 | step 20 | gradients apart | plain Candle's \
    | parameters, KiB | unmanaged | gathered | bound |\n|---|---|---|---|---|---|---|---|---|---|---|\n";

/// Whether a row of the document has the measured results, up to rounding.
fn says(document: &str, found: &str) -> bool {
    let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let (document, found) = (cells(document), cells(found));
    let number = |cell: &str| cell.parse::<f64>().unwrap_or(f64::NAN);
    document.len() == found.len()
        && (1..document.len()).all(|at| match at {
            4 | 5 => (number(&document[at]) - number(&found[at])).abs() < 2e-3,
            // Other processors round differently.
            6 => number(&document[at]) < FURTHER * number(&document[at + 1]),
            7 => number(&document[at]) > 0.,
            _ => document[at] == found[at],
        })
}

macro_rules! models {
    ($($name:ident),*) => {
        /// The files that are trained.
        const TRAINED: &[&str] = &[$(<changed::cases::$name as changed::cases::Model>::FILE),*];

        /// Trains each changed file on two ranks and compares with training without sharding.
        fn comparisons() -> Vec<(&'static str, Comparison)> {
            use changed::cases::{self, Model};
            vec![$({
                let load: Load = cases::boxed::<cases::$name>;
                let [run, in_turn] = [1, RANKS].map(|parts| plain(&weights(load), load, parts));
                let sharding = Sharding { units: cases::$name::UNITS, experts: cases::$name::EXPERTS };
                let found = Comparison { plain_apart: run.apart(&in_turn), ..sharded(&run, sharding, load) };
                (cases::$name::FILE, found)
            }),*]
        }

        /// Compares the outputs of each changed file and the original.
        fn outputs() -> Vec<(&'static str, [Tensor; 2])> {
            vec![$({
                let ours: Load = changed::cases::boxed::<changed::cases::$name>;
                let theirs: Load = original::cases::boxed::<original::cases::$name>;
                let weights = weights(ours);
                let file = <changed::cases::$name as changed::cases::Model>::FILE;
                (file, [output(&weights, ours), output(&weights, theirs)])
            }),*]
        }
    };
}

models!(Llama, Mistral, Qwen2, Qwen3, Gemma, Phi3, Mixtral, DeepSeek2, Bert, DistilBert, Vit, T5, Whisper);

#[test]
fn every_file_trains_as_on_one_rank() {
    let mut table = HEAD.to_owned();
    for (file, found) in comparisons() {
        let row = row(file, &found);
        println!("{row}");
        table += &format!("{row}\n");
        assert!(lines_changed(self::file(&format!("models/{file}"))) == 1, "{file}");
        let apart = [found.gradient_apart, found.loss_apart];
        let near = apart.iter().zip(found.plain_apart).all(|(&apart, plain)| plain > 0. && apart < FURTHER * plain);
        assert!(near, "{file}: gradient and loss are {apart:?} apart, plain Candle's {:?}", found.plain_apart);
        assert!(found.losses[STEPS - 1] < found.losses[0], "{file}: {:?}", found.losses);
        assert!(found.gathered <= found.bound && found.gathered > 0, "{file}: {found:?}");
        let is_router = file == "mixtral.rs";
        assert!(found.without.iter().all(|name| is_router && name.ends_with(ROUTER)), "{file}: {:?}", found.without);
        assert_eq!(found.without.is_empty(), !is_router, "{file}");
        assert_eq!(found.wrong.is_empty(), !is_router, "{file}: {:?}", found.wrong);
    }
    let document = std::fs::read_to_string(workspace().join("docs/from-candle.md")).unwrap();
    let rows = |text: &str| text.lines().filter(|line| line.starts_with('|')).map(String::from).collect::<Vec<_>>();
    let (there, found) = (rows(&document), rows(&table));
    let there: Vec<String> = there.into_iter().skip_while(|row| *row != found[0]).take(found.len()).collect();
    let agrees = there.len() == found.len() && there[..2] == found[..2];
    let agrees = agrees && there.iter().zip(&found).skip(2).all(|(there, found)| says(there, found));
    assert!(agrees, "docs/from-candle.md has another table than this one:\n{table}");
}

fn output(weights: &std::collections::BTreeMap<String, Tensor>, load: Load) -> Tensor {
    let vb = VarBuilder::from_varmap(&var_map(weights), candle_core::DType::F32, &Device::Cpu);
    (load(vb).unwrap())(&Batch::of(0, 1).unwrap()).unwrap()
}

#[test]
fn changed_files_compute_the_same() {
    for (file, [ours, theirs]) in outputs() {
        let of = |tensor: Tensor| tensor.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let apart = of((ours - &theirs).unwrap()) / of(theirs);
        assert!(apart < 1e-5, "{file}: {apart}");
    }
}
