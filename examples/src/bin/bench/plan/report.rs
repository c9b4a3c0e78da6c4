//! The result of a plan, and its table.

use std::fmt::Write;

use serde::Serialize;

use super::hardware::{Device, Links, Mesh};
use super::memory::{self, Memory, Moment};
use super::setup::{self, Choice, Setup};
use super::time::{self, Time, Unit};

/// A plan in bytes and seconds.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) parameters: f64,
    /// Floating point operations per token, forward and backward, without recomputation.
    pub(super) operations_per_token: f64,
    pub(super) mesh: Mesh,
    pub(super) device: Device,
    pub(super) links: Links,
    pub(super) memory: Memory,
    pub(super) fits: bool,
    /// Elements of a tensor that is too large: Candle's CUDA kernels count fewer than 2^31.
    pub(super) uncountable: Option<f64>,
    pub(super) time: Time,
    /// Seconds of a step whose kernels all reach the device's data sheet.
    pub(super) fastest_step: f64,
    pub(super) best: Vec<Choice>,
}

impl Report {
    /// Computes a plan with the `top` best choices.
    pub(super) fn new(setup: &Setup, top: usize) -> Self {
        let memory = memory::of(setup);
        Report {
            parameters: setup.whole.parameters(),
            operations_per_token: setup.operations(),
            mesh: setup.mesh,
            device: setup.device,
            links: setup.links,
            fits: setup.fits(memory.total),
            uncountable: setup.uncountable(),
            memory,
            time: time::of(setup),
            fastest_step: time::of(&Setup { device: setup.device.at_data_sheet(), ..*setup }).step,
            best: setup::best(setup, top),
        }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// Formats the plan as text.
pub(super) fn table(report: &Report, setup: &Setup) -> String {
    let mut lines = String::new();
    // Writing to a string can't fail.
    let _ = head(&mut lines, report, setup);
    let _ = memory(&mut lines, report);
    let _ = time(&mut lines, report);
    let _ = units(&mut lines, &report.time.units, setup.has_root());
    let _ = best(&mut lines, report);
    lines.truncate(lines.trim_end().len());
    lines
}

fn head(to: &mut String, report: &Report, setup: &Setup) -> std::fmt::Result {
    let mesh = report.mesh;
    writeln!(
        to,
        "{:.3} billion parameters in {} units, over {} ranks on {}: {} sharded over {} {}",
        report.parameters / 1e9,
        setup.model.layers.len() + if setup.has_root() { 1 } else { 2 },
        mesh.ranks(),
        if mesh.hosts == 1 { "one host".into() } else { format!("{} hosts", mesh.hosts) },
        if mesh.replicate == 1 { "one replica".into() } else { format!("{} replicas, each", mesh.replicate) },
        mesh.shard,
        if mesh.tensor == 1 { "ranks".into() } else { format!("groups of {} ranks", mesh.tensor) }
    )?;
    if mesh.expert > 1 {
        writeln!(
            to,
            "The experts of a layer are on {} ranks, each sharded over {}",
            mesh.expert,
            mesh.shard / mesh.expert
        )?;
    }
    writeln!(
        to,
        "{} {} x {} tokens per step. reshard_after_forward: {}",
        match mesh.tensor * mesh.context {
            1 => "A rank reads".to_owned(),
            ranks => format!("A group of {ranks} ranks reads"),
        },
        setup.batch,
        setup.seq,
        setup::reshard_word(setup.reshard)
    )
}

fn memory(to: &mut String, report: &Report) -> std::fmt::Result {
    let memory = &report.memory;
    let gib = |bytes: f64| bytes / GIB;
    let state = memory.state;
    writeln!(to, "\nMemory of a rank, GiB")?;
    writeln!(to, "  between steps      {:>9.2}", gib(state.total()))?;
    let registered = (state.registered > 0.).then_some(("NCCL's memory", state.registered));
    let parts =
        [("parameters", state.parameters), ("gradients", state.gradients), ("optimizer state", state.optimizer)];
    for (name, bytes) in parts.into_iter().chain(registered) {
        writeln!(to, "    {name:<16} {:>9.2}", gib(bytes))?;
    }
    let peak = &memory.peak;
    let Moment { state, gradients, gathered, unreduced, pooled, activations, logits, working, .. } = *peak;
    writeln!(to, "  peak               {:>9.2}  in {}", gib(memory.total), peak.when)?;
    for (name, bytes) in [
        ("parameters, state", state),
        ("gradients", gradients),
        ("gathered", gathered),
        ("unreduced", unreduced),
        ("pooled buffers", pooled),
        ("activations", activations),
        ("logits and loss", logits),
        ("working memory", working),
        ("reserve", memory.reserve),
    ] {
        writeln!(to, "    {name:<17}{:>9.2}", gib(bytes))?;
    }
    if let Some(elements) = report.uncountable {
        writeln!(
            to,
            "  It can NOT run: a tensor has {elements:.0} elements, and Candle's kernels count fewer than 2^31."
        )?;
    }
    let is_there = |there| memory.total <= there;
    match (report.device.memory.is_none_or(is_there), report.device.memory) {
        (true, Some(there)) => writeln!(to, "  It fits in the device's {:.1} GiB.", gib(there)),
        (false, Some(there)) => writeln!(to, "  It does NOT fit in the device's {:.1} GiB.", gib(there)),
        (_, None) => Ok(()),
    }
}

fn time(to: &mut String, report: &Report) -> std::fmt::Result {
    let time = &report.time;
    let compute = time.compute;
    writeln!(to, "\nTime of a step, s    {:>9.4}", time.step)?;
    for (name, seconds) in [
        ("matrix products", compute.products),
        ("attention", compute.attention),
        ("bound by memory", compute.memory),
        ("waiting for ranks", time.exposed),
        ("optimizer", time.optimizer),
    ] {
        writeln!(to, "    {name:<17}{seconds:>9.4}")?;
    }
    let hidden = time.communication - time.exposed;
    writeln!(
        to,
        "  Collectives run for {:.4} s, of which {:.4} s overlap with compute.",
        time.communication,
        hidden.max(0.)
    )?;
    writeln!(to, "  A rank sends {:.2} GiB.", time.sent / GIB)?;
    if time.launches > 0. {
        let bound = if time.launching < time.step { "" } else { ", which bound the step" };
        writeln!(to, "  The host makes {:.0} launches in {:.4} s{bound}.", time.launches, time.launching)?;
    }
    if report.fastest_step < time.step {
        writeln!(to, "  If all kernels reached the device's data sheet: {:.4} s", report.fastest_step)?;
    }
    writeln!(
        to,
        "  {:.0} tokens/s per rank, {:.0} in total; {:.1} % of the device's peak",
        time.tokens_per_s_per_rank,
        time.tokens_per_s_per_rank * report.mesh.ranks() as f64,
        100. * time.mfu
    )
}

fn units(to: &mut String, units: &[Unit], has_root: bool) -> std::fmt::Result {
    writeln!(to, "\nTime of each unit, ms")?;
    let exchanges = units.iter().any(|unit| unit.exchange > 0.);
    let column = if exchanges { "  exchange" } else { "" };
    writeln!(to, "                  forward  backward    gather  regather    reduce  replicas   exposed{column}")?;
    let mut first = 0;
    while first < units.len() {
        let alike = |other: &&Unit| {
            // Units that print the same are combined.
            let rounded = |unit: &Unit| figures(unit).map(|seconds| (seconds * 1e5).round() as i64);
            first > 0 && rounded(other) == rounded(&units[first])
        };
        let blocks = units.len() - usize::from(!has_root);
        let count = units[first..blocks.max(first)].iter().take_while(alike).count().max(1);
        let name = match (first, count) {
            (0, _) => if has_root { "root" } else { "embedding" }.into(),
            _ if first == blocks => "head".into(),
            (_, 1) => format!("block {}", first - 1),
            _ => format!("blocks {}-{}", first - 1, first + count - 2),
        };
        write!(to, "  {name:<13}")?;
        let exchange = exchanges.then_some(units[first].exchange);
        for seconds in figures(&units[first]).into_iter().chain(exchange) {
            write!(to, " {:>9.2}", seconds * 1e3)?;
        }
        writeln!(to)?;
        first += count;
    }
    Ok(())
}

fn figures(unit: &Unit) -> [f64; 7] {
    let &Unit { forward, backward, gather_forward, gather_backward, reduce_scatter, all_reduce, exposed, .. } = unit;
    [forward, backward, gather_forward, gather_backward, reduce_scatter, all_reduce, exposed]
}

fn best(to: &mut String, report: &Report) -> std::fmt::Result {
    if report.best.is_empty() {
        return writeln!(to, "\nNo mesh, policy and batch fit: take more ranks, or --activation-checkpoint full.");
    }
    writeln!(to, "\nThe fastest that fit, by mesh, reshard_after_forward and batch")?;
    writeln!(to, "  shard x replicas reshard    batch       GiB    step s   exposed    tokens/s/rank   peak %")?;
    for choice in &report.best {
        writeln!(
            to,
            "  {:>5} x {:<6}   {:<8} {:>7} {:>9.2} {:>9.4} {:>9.4} {:>16.0} {:>8.1}",
            choice.shard,
            choice.replicate,
            choice.reshard_after_forward,
            choice.batch,
            choice.memory / GIB,
            choice.step,
            choice.exposed,
            choice.tokens_per_s_per_rank,
            100. * choice.mfu
        )?;
    }
    Ok(())
}
