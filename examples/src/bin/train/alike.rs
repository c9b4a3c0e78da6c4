//! What must be the same on all ranks: compared once, before the first step. Ranks that differ would train on without a
//! word, each a little of another model.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use fsdp_candle::World;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::agree::from_every_rank;
use crate::args::{Args, INPUTS, OF_RANK_0};

/// Values by the names that people know them by, in words.
pub(crate) type Words = BTreeMap<String, String>;

/// What a rank tells the others about itself.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Account {
    /// What must be the same.
    same: Words,
    /// What may differ, and may explain why the above does.
    beside: Words,
}

/// Fails on every rank, with the same words, unless all were started with the same settings. Collective.
pub(crate) fn settings(args: &Args, world: &World) -> anyhow::Result<()> {
    let (_, same) = flags(args)?;
    check(world, Account { same, ..Account::default() }, "start all ranks with the same arguments")
}

/// The same for what the ranks have read, by name. Collective.
pub(crate) fn inputs(read: Words, args: &Args, world: &World) -> anyhow::Result<()> {
    let (mut beside, _) = flags(args)?;
    beside.retain(|flag, _| INPUTS.contains(&flag.trim_start_matches("--")));
    check(world, Account { same: read, beside }, "let all ranks read the same model and the same data")
}

/// The flags that may differ, and those that must not.
fn flags(args: &Args) -> anyhow::Result<(Words, Words)> {
    let flags = words("--", args)?;
    let may_differ = |flag: &str| INPUTS.iter().chain(&OF_RANK_0).any(|free| *free == flag.trim_start_matches("--"));
    Ok(flags.into_iter().partition(|(flag, _)| may_differ(flag)))
}

/// The fields of a value, and those of its fields, each with `prefix` before its name.
pub(crate) fn words(prefix: &str, value: &impl Serialize) -> anyhow::Result<Words> {
    let mut words = Words::new();
    collect(prefix, "", serde_json::to_value(value)?, &mut words);
    Ok(words)
}

fn collect(prefix: &str, name: &str, value: Value, words: &mut Words) {
    let value = match value {
        Value::Object(fields) => {
            let dot = if name.is_empty() { "" } else { "." };
            return fields
                .into_iter()
                .for_each(|(field, value)| collect(prefix, &format!("{name}{dot}{field}"), value, words));
        }
        Value::Null => "not given".to_owned(),
        // It goes to a terminal.
        Value::String(text) => text.escape_debug().to_string(),
        value => value.to_string(),
    };
    words.insert(format!("{prefix}{name}"), value);
}

fn check(world: &World, own: Account, way_out: &str) -> anyhow::Result<()> {
    let all = from_every_rank(world, &own).context("the ranks can't compare what they were started with")?;
    let different = differences(&all.iter().map(|account| &account.same).collect::<Vec<_>>());
    if different.is_empty() {
        return Ok(());
    }
    let beside = differences(&all.iter().map(|account| &account.beside).collect::<Vec<_>>());
    let beside = if beside.is_empty() { String::new() } else { format!("; they were given {}", beside.join(", ")) };
    bail!("the ranks differ in what must be the same: {}{beside}. The way out: {way_out}", different.join(", "));
}

/// The names under which not all ranks have the same, each with who has what.
fn differences(ranks: &[&Words]) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = ranks.iter().flat_map(|words| words.keys()).collect();
    let different = names.into_iter().filter_map(|name| {
        let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, words) in ranks.iter().enumerate() {
            let value = words.get(name).map_or("not known", String::as_str);
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, holders)) => holders.push(rank),
                None => values.push((value, vec![rank])),
            }
        }
        let holders = values.iter().map(|(value, holders)| format!("{}: {value}", listed(holders)));
        (values.len() > 1).then(|| format!("{name} ({})", holders.collect::<Vec<_>>().join("; ")))
    });
    different.collect()
}

/// `rank 1` or `ranks 0, 2 to 5`.
fn listed(ranks: &[usize]) -> String {
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
    fn ranks_are_grouped_by_what_they_have() {
        #[derive(Serialize)]
        struct Settings {
            lr: f64,
            seed: u64,
            model: Option<String>,
        }
        let rank = |lr, seed, model: Option<&str>| {
            words("--", &Settings { lr, seed, model: model.map(str::to_owned) }).unwrap()
        };
        let ranks = [
            rank(1e-3, 7, None),
            rank(2e-3, 7, None),
            rank(1e-3, 7, Some("a\x1bb")),
            rank(1e-3, 7, None),
            rank(1e-3, 7, None),
        ];
        let different = differences(&ranks.each_ref());
        assert_eq!(
            different,
            [
                "--lr (ranks 0, 2 to 4: 0.001; rank 1: 0.002)",
                "--model (ranks 0, 1, 3, 4: not given; rank 2: a\\u{1b}b)"
            ]
        );
        assert!(differences(&[&ranks[0], &ranks[3]]).is_empty());
    }

    #[test]
    fn what_only_some_ranks_have_is_a_difference() {
        let (none, some) = (Words::new(), Words::from([("bias".into(), "true".into())]));
        assert_eq!(differences(&[&none, &some]), ["bias (rank 0: not known; rank 1: true)"]);
    }

    #[test]
    fn fields_of_fields_have_both_names() {
        let config = serde_json::json!({ "rope": { "theta": 1e4, "kind": null }, "act": "silu" });
        let words: Vec<(String, String)> = words("config.json's ", &config).unwrap().into_iter().collect();
        let want = [("act", "silu"), ("rope.kind", "not given"), ("rope.theta", "10000.0")];
        assert_eq!(words, want.map(|(name, value)| (format!("config.json's {name}"), value.to_owned())));
    }

    /// Numbers that are not the same bits are not the same words.
    #[test]
    fn the_last_bit_of_a_number_counts() {
        let of = |x: f64| words("", &serde_json::json!({ "x": x })).unwrap();
        assert_ne!(of(0.1), of(0.1 + f64::EPSILON / 8.));
        assert_eq!(of(1e-8)["x"], "1e-8");
    }
}
