//! Labels of a classifier, from config.json or from the data.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::data::records::table::Field;
use crate::data::sft::read_json;

/// Maximal number of classes.
const MOST: usize = 100_000;
/// Maximal number of labels that an error lists.
const MAX_LISTED: usize = 12;
/// Start of the names that transformers gives to labels without names.
const UNNAMED: &str = "LABEL_";

/// Names of the classes, by class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    names: Vec<String>,
}

/// A label in the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Label {
    Number(i64),
    /// A name, or a number in a CSV file.
    Name(String),
}

impl Label {
    pub(super) fn of(field: Field) -> Result<Self> {
        match field {
            Field::Number(number) => Ok(Label::Number(number)),
            Field::Text(name) if name.is_empty() => bail!("the label is empty: write a name or a whole number"),
            Field::Text(name) => Ok(Label::Name(name)),
            Field::Other(kind) => bail!("the label is {kind}, but must be a name or a whole number"),
        }
    }

    fn number(&self) -> Option<i64> {
        match self {
            Label::Number(number) => Some(*number),
            Label::Name(name) => name.parse().ok(),
        }
    }
}

impl Labels {
    /// Reads `id2label` or `label2id` in `config.json` of a model directory, if it is there.
    pub fn of_config(model: Option<&Path>) -> Result<Option<Self>> {
        let Some(config) = read_json(model, "config.json")? else { return Ok(None) };
        let pairs: Vec<(String, String)> = match (&config["id2label"], &config["label2id"]) {
            (Value::Object(names), _) => {
                names.iter().map(|(id, name)| (id.clone(), name.as_str().unwrap_or_default().to_owned())).collect()
            }
            (_, Value::Object(ids)) => ids.iter().map(|(name, id)| (id.to_string(), name.clone())).collect(),
            _ => return Ok(None),
        };
        let mut names = vec![None; pairs.len()];
        for (id, name) in pairs {
            let place = id.parse::<usize>().ok().and_then(|id| names.get_mut(id));
            let place = place.with_context(|| {
                format!("config.json's id2label has the id {id}, but its ids must be 0, 1, 2 and so on")
            })?;
            *place = Some(name);
        }
        let names: Option<Vec<String>> = names.into_iter().collect();
        let names = names.context("config.json's label2id gives one id to two labels")?;
        Ok(Some(Labels { names }))
    }

    /// Returns the classes of labels that no config.json names: sorted names, or numbers up to the largest.
    pub(super) fn of_data(labels: &[(u64, Label)]) -> Result<Self> {
        let numbers: Option<Vec<i64>> = labels.iter().map(|(_, label)| label.number()).collect();
        let names = match numbers {
            Some(numbers) => {
                let bad = numbers.iter().zip(labels).find(|(number, _)| !(0..MOST as i64).contains(number));
                if let Some((number, (line, _))) = bad {
                    bail!("line {line}: the label {number} is not a class: expected 0, 1, 2 and so on, or names");
                }
                let largest = numbers.iter().max().copied().unwrap_or(0);
                (0..=largest).map(|number| format!("{UNNAMED}{number}")).collect()
            }
            None => {
                let mut names = BTreeSet::new();
                for (line, label) in labels {
                    match label {
                        Label::Name(name) => names.insert(name.clone()),
                        Label::Number(number) => bail!(
                            "line {line}: the label is the number {number}, but other lines have names: use one kind"
                        ),
                    };
                }
                names.into_iter().collect::<Vec<_>>()
            }
        };
        ensure!(
            names.len() >= 2,
            "all records have the label {}, but a classifier needs at least two labels",
            names.first().map_or("", String::as_str)
        );
        ensure!(names.len() <= MOST, "it has {} labels, but at most {MOST} are supported", names.len());
        Ok(Labels { names })
    }

    /// Returns the names, by class.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns whether all names are those that transformers makes up.
    pub(super) fn are_unnamed(&self) -> bool {
        self.names.iter().enumerate().all(|(id, name)| *name == format!("{UNNAMED}{id}"))
    }

    /// Returns whether one of the labels is a name that is not a class.
    pub(super) fn lack(&self, labels: &[(u64, Label)]) -> bool {
        labels.iter().any(|(_, label)| self.class(label).is_err() && label.number().is_none())
    }

    /// Returns the class of a label.
    pub(super) fn class(&self, label: &Label) -> Result<u32> {
        let named = match label {
            Label::Name(name) => self.names.iter().position(|known| known == name),
            Label::Number(_) => None,
        };
        let numbered = || usize::try_from(label.number()?).ok().filter(|class| *class < self.names.len());
        match named.or_else(numbered) {
            Some(class) => Ok(class as u32),
            None => {
                let label = match label {
                    Label::Number(number) => number.to_string(),
                    Label::Name(name) => format!("\"{name}\""),
                };
                bail!("the label {label} is not known; the labels are {self}")
            }
        }
    }
}

/// Lists the names.
impl std::fmt::Display for Labels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown: Vec<String> =
            self.names.iter().take(MAX_LISTED).map(|name| name.escape_debug().to_string()).collect();
        let more = self.names.len() - shown.len();
        write!(f, "{}", shown.join(", "))?;
        if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Label {
        Label::Name(name.into())
    }

    fn numbered(labels: Vec<Label>) -> Vec<(u64, Label)> {
        (1..).zip(labels).collect()
    }

    #[test]
    fn labels_of_data_are_sorted_names_or_numbers() {
        let names = Labels::of_data(&numbered(vec![name("b"), name("a"), name("b")])).unwrap();
        assert_eq!(names.names(), ["a", "b"]);
        assert_eq!((names.class(&name("b")).unwrap(), names.class(&Label::Number(0)).unwrap()), (1, 0));
        let error = names.class(&name("c")).unwrap_err().to_string();
        assert_eq!(error, "the label \"c\" is not known; the labels are a, b");
        let numbers = Labels::of_data(&numbered(vec![Label::Number(2), name("0")])).unwrap();
        assert_eq!(numbers.names(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
        assert!(numbers.are_unnamed() && !names.are_unnamed());
        assert!(numbers.class(&Label::Number(-1)).is_err() && numbers.class(&name("3")).is_err());
        for (labels, expected) in [
            (vec![name("a"), Label::Number(1)], "line 2: the label is the number 1, but other lines have names"),
            (vec![Label::Number(0), Label::Number(-1)], "line 2: the label -1 is not a class"),
            (vec![Label::Number(0), Label::Number(1 << 40)], "is not a class"),
            (vec![name("a"), name("a")], "all records have the label a"),
        ] {
            let error = Labels::of_data(&numbered(labels)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn labels_of_config_need_all_ids() {
        let dir = tempfile::tempdir().unwrap();
        let of = |config: &str| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            Labels::of_config(Some(dir.path()))
        };
        let names = |config: &str| of(config).unwrap().unwrap().names;
        assert_eq!(names(r#"{"id2label": {"1": "pos", "0": "neg"}}"#), ["neg", "pos"]);
        assert_eq!(names(r#"{"label2id": {"pos": 1, "neg": 0}}"#), ["neg", "pos"]);
        assert_eq!(of("{}").unwrap(), None);
        assert!(of(r#"{"id2label": {"1": "pos", "2": "neg"}}"#).unwrap_err().to_string().contains("has the id 2"));
        assert!(of(r#"{"label2id": {"pos": 0, "neg": 0}}"#).unwrap_err().to_string().contains("one id to two"));
    }
}
