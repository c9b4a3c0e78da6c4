//! `fsdp-ckpt diff`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use fsdp_ckpt::{Error, Format, TensorDiff, TensorSource, Tolerance, TrainingState, diff, escape};

use crate::{bar, open, print_json};

#[derive(Args)]
pub(crate) struct Diff {
    /// A checkpoint or model.
    a: PathBuf,
    /// Another checkpoint or model.
    b: PathBuf,
    /// Relative tolerance: allow |a - b| up to this times |b|.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = tolerance)]
    rtol: f64,
    /// Absolute tolerance: allow |a - b| up to this.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = tolerance)]
    atol: f64,
    /// Write JSON: equal, only_a, only_b, differing (dtypes, shapes, beyond, values), within_tolerance, notes.
    #[arg(long)]
    json: bool,
}

fn tolerance(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    if number >= 0.0 && number.is_finite() { Ok(number) } else { Err("expected a finite number of at least 0".into()) }
}

impl Diff {
    /// Opens both sides. A training state of PyTorch gets the names of this project if the other side has them, unless
    /// several parts may be the model.
    fn sides(&self) -> Result<[TrainingState; 2]> {
        let sources = [open(&self.a)?, open(&self.b)?];
        let is_torch = |source: &dyn TensorSource| matches!(source.format(), Format::TorchFile | Format::TorchDcp);
        let [a, b] = sources;
        if is_torch(&*a) && is_torch(&*b) {
            return Ok([TrainingState::whole(a), TrainingState::whole(b)]);
        }
        let side = |source: Box<dyn TensorSource>, path: &Path| match TrainingState::find(source, None) {
            Err(Error::Parts { .. }) => Ok(TrainingState::whole(open(path)?)),
            found => anyhow::Ok(found?),
        };
        Ok([side(a, &self.a)?, side(b, &self.b)?])
    }

    /// Returns whether both match within the tolerance.
    pub(crate) fn run(&self) -> Result<bool> {
        let [a, b] = self.sides()?;
        let bar = bar("comparing", a.bytes().saturating_add(b.bytes()));
        let tolerance = Tolerance { rtol: self.rtol, atol: self.atol };
        let found = diff(&a, &b, tolerance, &mut |read| bar.inc(read))?;
        bar.finish_and_clear();
        let same = found.is_within_tolerance();
        if self.json {
            let mut json = serde_json::to_value(&found)?;
            json["within_tolerance"] = same.into();
            json["notes"] = serde_json::json!({"a": a.notes(), "b": b.notes()});
            print_json(&json)?;
            return Ok(same);
        }
        let mut out = std::io::stdout().lock();
        for (path, side) in [(&self.a, &a), (&self.b, &b)] {
            for note in side.notes() {
                writeln!(out, "{}: {}", escape(path.display()), escape(&note))?;
            }
        }
        for (side, names) in [(&self.a, &found.only_a), (&self.b, &found.only_b)] {
            for name in names {
                writeln!(out, "{}  only in {}", escape(name), escape(side.display()))?;
            }
        }
        let differing: Vec<(String, &TensorDiff)> =
            found.differing.iter().map(|(name, tensor)| (escape(name).to_string(), tensor)).collect();
        let width = differing.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, tensor) in differing {
            writeln!(out, "{name:<width$}  {}", in_words(tensor))?;
        }
        let beyond = found.differing.values().filter(|tensor| tensor.beyond).count();
        let within = found.differing.len() - beyond;
        write!(out, "{} tensors equal to the bit", found.equal)?;
        if self.rtol > 0.0 || self.atol > 0.0 || within > 0 {
            write!(out, ", {within} within the tolerance")?;
        }
        write!(out, ", {beyond} differ")?;
        if found.only_a.len() + found.only_b.len() > 0 {
            write!(out, ", {} only on one side", found.only_a.len() + found.only_b.len())?;
        }
        writeln!(out)?;
        if found.not_compared > 0 {
            writeln!(
                out,
                "one side is only a model: {} tensors of the other side that are not parameters were not compared",
                found.not_compared
            )?;
        }
        for (side, count) in [&self.a, &self.b].into_iter().zip(found.unreadable) {
            if count > 0 {
                let side = escape(side.display());
                writeln!(out, "{side} has {count} tensors of unsupported dtypes, which were not compared")?;
            }
        }
        Ok(same)
    }
}

fn in_words(tensor: &TensorDiff) -> String {
    let mut parts = Vec::new();
    let ([dtype_a, dtype_b], [shape_a, shape_b]) = (&tensor.dtypes, &tensor.shapes);
    if dtype_a != dtype_b {
        parts.push(format!("{dtype_a} against {dtype_b}"));
    }
    if shape_a != shape_b {
        parts.push(format!("{shape_a:?} against {shape_b:?}"));
    }
    if let Some(values) = &tensor.values {
        parts.push(format!("max abs {:.3e}, max rel {:.3e}", values.max_abs, values.max_rel));
        parts.push(match values.beyond {
            0 => format!("all of {} elements within the tolerance", values.elements),
            n => format!("{n} of {} elements differ", values.elements),
        });
    }
    parts.join("; ")
}
