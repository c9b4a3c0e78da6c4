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
/// The `problem_type` of transformers for one label per text.
pub(crate) const SINGLE_LABEL: &str = "single_label_classification";

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
            Field::Text(name) if name.trim() != name => {
                bail!("the label \"{}\" begins or ends with a space: remove it", name.escape_debug())
            }
            Field::Text(name) => Ok(Label::Name(name)),
            Field::Other(kind) => bail!("the label is {kind}, but must be a name or a whole number"),
        }
    }

    fn number(&self) -> Option<i64> {
        match self {
            Label::Number(number) => Some(*number),
            Label::Name(name) => name.parse().ok().filter(|number: &i64| number.to_string() == *name),
        }
    }

    /// Returns whether the label is a number in another form, such as `01` or `1.0`.
    fn is_odd_number(&self) -> bool {
        match self {
            Label::Number(_) => false,
            Label::Name(name) => {
                let digits = name.trim_start_matches(['+', '-']);
                digits.starts_with(|c: char| c.is_ascii_digit())
                    && name.parse::<f64>().is_ok()
                    && self.number().is_none()
            }
        }
    }
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Number(number) => write!(f, "{number}"),
            Label::Name(name) => write!(f, "\"{}\"", name.escape_debug()),
        }
    }
}

impl Labels {
    /// Reads `id2label`, `label2id` or `num_labels` in `config.json` of a model directory, if one is there.
    ///
    /// # Errors
    /// Fails for ids that are not 0, 1, 2 and so on, and for a `problem_type` other than that of one label for each text.
    pub fn of_config(model: Option<&Path>) -> Result<Option<Self>> {
        let Some(config) = read_json(model, "config.json")? else { return Ok(None) };
        let problem = &config["problem_type"];
        ensure!(
            problem.is_null() || problem == SINGLE_LABEL,
            "config.json has problem_type = {problem}, but only \"{SINGLE_LABEL}\" is supported: change it to train a \
             classifier whose texts have one label each"
        );
        let pairs: Vec<(String, String)> = match (&config["id2label"], &config["label2id"]) {
            (Value::Object(names), _) => {
                names.iter().map(|(id, name)| (id.clone(), name.as_str().unwrap_or_default().to_owned())).collect()
            }
            (_, Value::Object(ids)) => ids.iter().map(|(name, id)| (id.to_string(), name.clone())).collect(),
            _ => return Self::of_count(&config["num_labels"]),
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

    /// Names the classes of `num_labels` as transformers does.
    fn of_count(count: &Value) -> Result<Option<Self>> {
        if count.is_null() {
            return Ok(None);
        }
        let known = count.as_u64().filter(|known| (2..=MOST as u64).contains(known));
        let known = known.with_context(|| {
            format!(
                "config.json has num_labels = {count}, but a classifier has 2 to {MOST} labels: correct or remove it"
            )
        })?;
        Ok(Some(Labels { names: (0..known).map(|number| format!("{UNNAMED}{number}")).collect() }))
    }

    /// Returns the classes of labels that no config.json names: sorted names, or numbers up to the largest, or up to the
    /// number of classes in the model's head.
    pub(super) fn of_data(labels: &[(String, Label)], classes: Option<usize>) -> Result<Self> {
        if let Some((place, label)) = labels.iter().find(|(_, label)| label.is_odd_number()) {
            bail!("{place}: the label {label} is a number in another form: write it as 0, 1, 2 and so on, or a name");
        }
        let numbers: Option<Vec<i64>> = labels.iter().map(|(_, label)| label.number()).collect();
        let names = match numbers {
            Some(numbers) => {
                let bad = numbers.iter().zip(labels).find(|(number, _)| !(0..MOST as i64).contains(number));
                if let Some((number, (place, _))) = bad {
                    bail!("{place}: the label {number} is not a class: expected 0, 1, 2 and so on, or names");
                }
                let largest = numbers.iter().max().copied().unwrap_or(0);
                let count = classes.unwrap_or(0).max(largest as usize + 1);
                (0..count).map(|number| format!("{UNNAMED}{number}")).collect()
            }
            None => {
                let mut names = BTreeSet::new();
                for (place, label) in labels {
                    match label {
                        Label::Name(name) => names.insert(name.clone()),
                        Label::Number(number) => bail!(
                            "{place}: the label is the number {number}, but other records have names: use one kind"
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
    pub(super) fn lack(&self, labels: &[(String, Label)]) -> bool {
        labels.iter().any(|(_, label)| self.class(label).is_err() && label.number().is_none())
    }

    /// Returns whether a name is a number other than its class, so that a number may be a name or a class.
    fn are_other_numbers(&self) -> bool {
        let is_other = |(class, name): (usize, &String)| name.parse().is_ok_and(|number: i64| number != class as i64);
        self.names.iter().enumerate().any(is_other)
    }

    /// Returns the class of a label: a name, or a number if no name is another number.
    pub(super) fn class(&self, label: &Label) -> Result<u32> {
        let place = |name: &str| self.names.iter().position(|known| known == name);
        let named = match label {
            Label::Name(name) => place(name),
            Label::Number(_) => None,
        };
        let numbered = label.number().and_then(|number| {
            let class = usize::try_from(number).ok().filter(|class| *class < self.names.len())?;
            (!self.are_other_numbers() || self.names[class] == number.to_string()).then_some(class)
        });
        if let Some(class) = named.or(numbered) {
            return Ok(class as u32);
        }
        match label {
            Label::Number(number) if self.are_other_numbers() => bail!(
                "the label {number} may be a class or a name, because names in config.json's id2label are numbers too: write \
                 it as text, in quotes, which is a name; the labels are {self}"
            ),
            _ => bail!("the label {label} is not known; the labels are {self}"),
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

    fn numbered(labels: Vec<Label>) -> Vec<(String, Label)> {
        (1..).map(|line| format!("line {line}")).zip(labels).collect()
    }

    #[test]
    fn labels_of_data_are_sorted_names_or_numbers() {
        let names = Labels::of_data(&numbered(vec![name("b"), name("a"), name("b")]), None).unwrap();
        assert_eq!(names.names(), ["a", "b"]);
        assert_eq!((names.class(&name("b")).unwrap(), names.class(&Label::Number(0)).unwrap()), (1, 0));
        let error = names.class(&name("c")).unwrap_err().to_string();
        assert_eq!(error, "the label \"c\" is not known; the labels are a, b");
        let numbers = Labels::of_data(&numbered(vec![Label::Number(2), name("0")]), None).unwrap();
        assert_eq!(numbers.names(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
        assert!(numbers.are_unnamed() && !names.are_unnamed());
        assert!(numbers.class(&Label::Number(-1)).is_err() && numbers.class(&name("3")).is_err());
        for (labels, expected) in [
            (vec![name("a"), Label::Number(1)], "line 2: the label is the number 1, but other records have names"),
            (vec![Label::Number(0), Label::Number(-1)], "line 2: the label -1 is not a class"),
            (vec![Label::Number(0), Label::Number(1 << 40)], "is not a class"),
            (vec![name("a"), name("a")], "all records have the label a"),
            (vec![name("1"), name("01")], "line 2: the label \"01\" is a number in another form"),
            (vec![name("1.0"), name("x")], "line 1: the label \"1.0\" is a number in another form"),
        ] {
            let error = Labels::of_data(&numbered(labels), None).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// A number of a JSONL file can mean a class or a name.
    #[test]
    fn names_that_are_numbers_are_not_classes() {
        let stars = Labels { names: ["1", "2", "3", "4", "5"].map(str::to_owned).into() };
        assert_eq!((stars.class(&name("1")).unwrap(), stars.class(&name("5")).unwrap()), (0, 4));
        for number in [0, 1, 4, 5] {
            let error = stars.class(&Label::Number(number)).unwrap_err().to_string();
            assert!(error.contains(&format!("the label {number} may be a class or a name")), "{error}");
        }
        for other in ["0", "01", " 1"] {
            assert!(stars.class(&name(other)).unwrap_err().to_string().contains("is not known"), "{other}");
        }
        let own = Labels { names: ["0", "1", "many"].map(str::to_owned).into() };
        assert_eq!((own.class(&Label::Number(1)).unwrap(), own.class(&Label::Number(2)).unwrap()), (1, 2));
        assert!(own.class(&name("01")).is_err());
        for bad in [" 1", "a ", "\ta"] {
            let error = Label::of(Field::Text(bad.into())).unwrap_err().to_string();
            assert!(error.contains("begins or ends with a space"), "{error}");
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
        let counted = r#"{"num_labels": 3, "problem_type": "single_label_classification"}"#;
        assert_eq!(names(counted), ["LABEL_0", "LABEL_1", "LABEL_2"]);
        assert!(of(r#"{"num_labels": 1}"#).unwrap_err().to_string().contains("num_labels = 1, but a classifier has 2"));
        for other in ["regression", "multi_label_classification"] {
            let error = of(&format!(r#"{{"problem_type": "{other}"}}"#)).unwrap_err().to_string();
            assert!(error.contains(&format!("problem_type = \"{other}\", but only")), "{error}");
        }
        assert!(of(r#"{"id2label": {"1": "pos", "2": "neg"}}"#).unwrap_err().to_string().contains("has the id 2"));
        assert!(of(r#"{"label2id": {"pos": 0, "neg": 0}}"#).unwrap_err().to_string().contains("one id to two"));
    }
}
