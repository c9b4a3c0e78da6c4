//! Exchange of small values between ranks, and the checks that all ranks were started alike.
//!
//! Ranks with different settings would train different models without an error. The checks therefore run before the
//! first step.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, anyhow, bail};
use fsdp_candle::{ReduceOp, World};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::{Args, INPUTS, RANK_0_FLAGS};

/// Text for an absent value.
pub(crate) const NOT_GIVEN: &str = "not given";

/// Outcome of a check that each rank makes for itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum RankResult {
    Passed,
    /// The check could not be made, with the error.
    Failed(String),
    /// The checkpoint is damaged, with the error.
    Damaged(String),
}

impl RankResult {
    fn severity(&self) -> u8 {
        match self {
            RankResult::Passed => 0,
            RankResult::Failed(_) => 1,
            RankResult::Damaged(_) => 2,
        }
    }
}

/// Returns the most severe result on every rank, from the lowest rank that has it. Collective.
pub(crate) fn worst_result(world: &World, own: RankResult) -> anyhow::Result<RankResult> {
    let severity = f64::from(own.severity());
    let most = world.all_reduce(&[severity], ReduceOp::Max)?[0];
    if most == 0. {
        return Ok(RankResult::Passed);
    }
    let holder = if severity == most { world.rank() } else { world.size() };
    let first = world.all_reduce(&[holder as f64], ReduceOp::Min)?[0] as usize;
    broadcast_result(world, first, || Ok(own))
}

/// Calls `compute` on `rank` and returns its result, or the text of its error, on every rank. Collective.
pub(crate) fn broadcast_result<T: Serialize + for<'de> Deserialize<'de>>(
    world: &World,
    rank: usize,
    compute: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let text = if world.rank() == rank {
        serde_json::to_vec(&compute().map_err(|error| format!("{error:#}")))?
    } else {
        Vec::new()
    };
    let text = world.group().broadcast_bytes(rank, text)?;
    let result: Result<T, String> = serde_json::from_slice(&text)?;
    result.map_err(|message| anyhow!(message))
}

/// Setting names with their values as text.
pub(crate) type Fields = BTreeMap<String, String>;

/// Settings of a rank, for comparison with the other ranks.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Settings {
    /// Settings that must be the same on every rank.
    required: Fields,
    /// Settings that may differ. The error lists them where they explain a difference.
    optional: Fields,
}

/// Fails on every rank unless all ranks have the same command line, except [`INPUTS`] and [`RANK_0_FLAGS`]. Collective.
pub(crate) fn check_settings(args: &Args, world: &World) -> anyhow::Result<()> {
    let (_, required) = flags(args)?;
    check(world, Settings { required, ..Settings::default() }, "start all ranks with the same arguments")
}

/// Fails on every rank unless all ranks have read the same model and data. Collective.
pub(crate) fn check_inputs(read: Fields, args: &Args, world: &World) -> anyhow::Result<()> {
    let (mut optional, _) = flags(args)?;
    optional.retain(|flag, _| INPUTS.contains(&flag.trim_start_matches("--")));
    check(world, Settings { required: read, optional }, "let all ranks read the same model and the same data")
}

/// Fails on every rank unless all ranks have their inputs from the same place: this host, or the same name on the hub.
/// Collective.
pub(crate) fn check_sources(sources: Fields, world: &World) -> anyhow::Result<()> {
    let advice = "let all ranks find the same paths on their hosts, or none of them";
    check(world, Settings { required: sources, ..Settings::default() }, advice)
}

/// Splits the flags into those that may differ between ranks and those that must not.
fn flags(args: &Args) -> anyhow::Result<(Fields, Fields)> {
    let may_differ = |flag: &str| INPUTS.iter().chain(&RANK_0_FLAGS).any(|free| *free == flag.trim_start_matches("--"));
    Ok(fields("--", args)?.into_iter().partition(|(flag, _)| may_differ(flag)))
}

/// Lists the fields of a value, nested ones as `outer.inner`, with `prefix` before each name.
pub(crate) fn fields(prefix: &str, value: &impl Serialize) -> anyhow::Result<Fields> {
    let mut fields = Fields::new();
    collect(prefix, "", serde_json::to_value(value)?, &mut fields);
    Ok(fields)
}

fn collect(prefix: &str, name: &str, value: Value, fields: &mut Fields) {
    let value = match value {
        Value::Object(inner) => {
            let dot = if name.is_empty() { "" } else { "." };
            return inner
                .into_iter()
                .for_each(|(field, value)| collect(prefix, &format!("{name}{dot}{field}"), value, fields));
        }
        Value::Null => NOT_GIVEN.to_owned(),
        // Escaped, because it is printed to a terminal.
        Value::String(text) => text.escape_debug().to_string(),
        value => value.to_string(),
    };
    fields.insert(format!("{prefix}{name}"), value);
}

fn check(world: &World, own: Settings, advice: &str) -> anyhow::Result<()> {
    let (group, failed) = (world.group(), "the ranks can't compare their settings");
    let others = group.differing_ranks(&serde_json::to_vec(&own.required)?).context(failed)?;
    if others.is_empty() {
        return Ok(());
    }
    // Some rank differs from this one, so every rank comes here.
    let texts = group.gather_bytes(serde_json::to_vec(&own)?).context(failed)?;
    let all = texts.iter().map(|text| serde_json::from_slice(text)).collect::<Result<Vec<Settings>, _>>()?;
    let different = differences(&all.iter().map(|settings| &settings.required).collect::<Vec<_>>());
    if different.is_empty() {
        return Ok(());
    }
    let optional = differences(&all.iter().map(|settings| &settings.optional).collect::<Vec<_>>());
    let given = if optional.is_empty() { String::new() } else { format!("; they were given {}", optional.join(", ")) };
    bail!("the ranks disagree on {}{given}; {advice}", different.join(", "));
}

/// Lists the names whose values differ between ranks, with the ranks that have each value.
fn differences(ranks: &[&Fields]) -> Vec<String> {
    let names: BTreeSet<&String> = ranks.iter().flat_map(|fields| fields.keys()).collect();
    let different = names.into_iter().filter_map(|name| {
        let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, fields) in ranks.iter().enumerate() {
            let value = fields.get(name).map_or("not known", String::as_str);
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, holders)) => holders.push(rank),
                None => values.push((value, vec![rank])),
            }
        }
        let holders = values.iter().map(|(value, holders)| format!("{}: {value}", rank_list(holders)));
        (values.len() > 1).then(|| format!("{name} ({})", holders.collect::<Vec<_>>().join("; ")))
    });
    different.collect()
}

/// Formats ranks as `rank 1` or `ranks 0, 2 to 5`.
fn rank_list(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|rank, next| rank + 1 == *next).map(|run| match run {
        [first, _, .., last] => format!("{first} to {last}"),
        few => few.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    });
    let plural = if ranks.len() > 1 { "s" } else { "" };
    format!("rank{plural} {}", runs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_name_the_ranks_of_each_value() {
        let rank =
            |lr: f64, model: Option<&str>| fields("--", &serde_json::json!({ "lr": lr, "model": model })).unwrap();
        let ranks =
            [rank(1e-3, None), rank(2e-3, None), rank(1e-3, Some("a\x1bb")), rank(1e-3, None), rank(1e-3, None)];
        let lr = "--lr (ranks 0, 2 to 4: 0.001; rank 1: 0.002)";
        assert_eq!(differences(&ranks.each_ref()), [lr, "--model (ranks 0, 1, 3, 4: not given; rank 2: a\\u{1b}b)"]);
        assert!(differences(&[&ranks[0], &ranks[3]]).is_empty());
        let (none, some) = (Fields::new(), Fields::from([("bias".into(), "true".into())]));
        assert_eq!(differences(&[&none, &some]), ["bias (rank 0: not known; rank 1: true)"]);
        // Numbers differ if their last bits do.
        let of = |x: f64| fields("", &serde_json::json!({ "x": x })).unwrap();
        assert_ne!(of(0.1), of(0.1 + f64::EPSILON / 8.));
        assert_eq!(of(1e-8)["x"], "1e-8");
    }

    #[test]
    fn nested_fields_have_dotted_names() {
        let config = serde_json::json!({ "rope": { "theta": 1e4, "kind": null }, "act": "silu" });
        let fields: Vec<(String, String)> = fields("config.json's ", &config).unwrap().into_iter().collect();
        let want = [("act", "silu"), ("rope.kind", "not given"), ("rope.theta", "10000.0")];
        assert_eq!(fields, want.map(|(name, value)| (format!("config.json's {name}"), value.to_owned())));
    }
}
