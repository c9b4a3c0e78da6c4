//! Units by name: which parameters of a module that nobody wrapped are a unit.

use std::sync::Arc;

use indexmap::{IndexMap, IndexSet};

use crate::error::{Error, Result};
use crate::fsdp::unit::FsdpParam;
use crate::pattern::NamePattern;

/// How many names an error lists.
const MOST_NAMES: usize = 16;

/// The parameters of one `shard` call.
pub(super) struct ByName {
    /// The units by the paths of their modules, in the order in which they were built, each before those inside it.
    pub(super) units: IndexMap<String, Vec<Arc<FsdpParam>>>,
    /// What is left, in the order in which it was built.
    pub(super) own: Vec<Arc<FsdpParam>>,
    /// Those of `own` that would belong to a unit if a layer told of their uses.
    pub(super) raw: Vec<Arc<FsdpParam>>,
}

impl ByName {
    /// Divides the parameters of the module at `path`, empty for the root's.
    pub(super) fn of(params: &[Arc<FsdpParam>], path: &str, patterns: &[String]) -> Result<Self> {
        let names: Vec<&str> = params.iter().map(|param| param.name()).collect();
        let patterns = compiled(patterns)?;
        check(&patterns, &names, path)?;
        let mut all = ByName { units: IndexMap::new(), own: vec![], raw: vec![] };
        for param in params {
            let mut innermost = None;
            for module in matched(param.name(), path, &patterns) {
                // A module's place is that of the first that is built of it, or of what is inside it.
                innermost = Some(all.units.entry(module.to_string()).or_default());
            }
            match innermost {
                Some(unit) if param.is_claimed() => unit.push(param.clone()),
                Some(_) => {
                    all.raw.push(param.clone());
                    all.own.push(param.clone());
                }
                None => all.own.push(param.clone()),
            }
        }
        all.units.retain(|_, params| !params.is_empty());
        Ok(all)
    }
}

fn compiled(patterns: &[String]) -> Result<Vec<NamePattern>> {
    patterns.iter().map(|text| NamePattern::new(text)).collect()
}

/// The paths of the modules inside the one at `path` that a parameter belongs to, from the outermost to the innermost.
fn modules<'a>(name: &'a str, path: &str) -> impl Iterator<Item = &'a str> {
    let outside = path.len();
    name.match_indices('.').map(|(at, _)| at).filter(move |&at| at > outside).map(|end| &name[..end])
}

/// Those that a pattern matches.
fn matched<'a>(name: &'a str, path: &str, patterns: &[NamePattern]) -> impl Iterator<Item = &'a str> {
    modules(name, path).filter(|module| patterns.iter().any(|pattern| pattern.matches(module)))
}

/// Fails for a pattern that matches nothing.
fn check(patterns: &[NamePattern], names: &[&str], path: &str) -> Result<()> {
    let matches = |pattern: &NamePattern| names.iter().any(|name| modules(name, path).any(|at| pattern.matches(at)));
    let Some(idle) = patterns.iter().find(|pattern| !matches(pattern)) else { return Ok(()) };
    let listed = match listed(names.iter().flat_map(|name| modules(name, path))) {
        Some(listed) => format!("the modules that are there: {listed}"),
        None => "there are no modules inside it whose parameters are not in units of their own".into(),
    };
    Err(Error::Argument(format!("units: the pattern `{}` matches no module's name; {listed}", idle)))
}

/// Names of modules, of which those that differ by a number are one.
pub(super) fn listed<'a>(modules: impl Iterator<Item = &'a str>) -> Option<String> {
    let numberless = |module: &str| {
        let parts = module.split('.').map(|part| if part.parse::<u64>().is_ok() { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let there: IndexSet<String> = modules.map(numberless).collect();
    let mut listed: Vec<String> = there.iter().take(MOST_NAMES).map(|name| format!("`{name}`")).collect();
    if there.len() > MOST_NAMES {
        listed.push(format!("{} more", there.len() - MOST_NAMES));
    }
    (!listed.is_empty()).then(|| listed.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit_of<'a>(name: &'a str, path: &str, patterns: &[&str]) -> Option<&'a str> {
        let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        matched(name, path, &compiled(&patterns).unwrap()).last()
    }

    #[test]
    fn a_parameter_belongs_to_the_innermost_match() {
        let layers = ["model.layers.*"];
        assert_eq!(unit_of("model.layers.3.mlp.up.weight", "", &layers), Some("model.layers.3"));
        assert_eq!(unit_of("model.layers.13.norm", "", &layers), Some("model.layers.13"));
        assert_eq!(unit_of("model.norm.weight", "", &layers), None);
        assert_eq!(unit_of("model.layers.scale", "", &layers), None); // a parameter is no module
        assert_eq!(unit_of("lm_head.weight", "", &layers), None);
        let nested = ["model.layers.*", "model.layers.*.experts.*"];
        assert_eq!(unit_of("model.layers.3.experts.1.up.weight", "", &nested), Some("model.layers.3.experts.1"));
        assert_eq!(unit_of("model.layers.3.gate.weight", "", &nested), Some("model.layers.3"));
        assert_eq!(unit_of("vision.blocks.0.up.weight", "", &["**.blocks.*"]), Some("vision.blocks.0"));
        assert_eq!(unit_of("h.1.up.weight", "", &["h.[0-1]"]), Some("h.1"));
        // The module's own path, and what is around it, are no units inside it.
        assert_eq!(unit_of("encoder.0.up.weight", "encoder.0", &["encoder.*"]), None);
        assert_eq!(unit_of("encoder.0.up.weight", "encoder", &["encoder.*"]), Some("encoder.0"));
    }

    #[test]
    fn a_pattern_that_matches_nothing_says_what_is_there() {
        let names = ["model.embed.weight", "model.layers.0.up.weight", "model.layers.1.up.weight", "head"];
        let error = |pattern: &str| {
            let patterns = compiled(&["model.*".into(), pattern.into()])?;
            check(&patterns, &names, "")
        };
        let message = error("layers.*").unwrap_err().to_string();
        assert_eq!(
            message,
            "units: the pattern `layers.*` matches no module's name; the modules that are there: `model`, \
             `model.embed`, `model.layers`, `model.layers.*`, `model.layers.*.up`"
        );
        assert!(error("model.layers.*").is_ok());
        let message = error("model.[layers").unwrap_err().to_string();
        assert!(message.contains("`model.[layers` is no pattern of names"), "{message}");
    }
}
