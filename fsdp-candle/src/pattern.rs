//! Patterns of names, like a shell's patterns of files.

use std::fmt;

use glob::{MatchOptions, Pattern};

use crate::error::{Error, Result};

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// A pattern of the fully qualified names of modules or parameters. `*` and `?` match characters of one part between
/// dots, `**` matches any parts.
///
/// ```
/// use fsdp_candle::NamePattern;
///
/// let layers = NamePattern::new("model.layers.*")?;
/// assert!(layers.matches("model.layers.7") && !layers.matches("model.layers.7.mlp"));
/// assert!(NamePattern::new("**.q_proj")?.matches("model.layers.7.self_attn.q_proj"));
/// // A pattern may match the end of a name.
/// assert!(NamePattern::new("q_proj")?.matches_end("model.layers.7.self_attn.q_proj"));
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NamePattern {
    text: String,
    whole: Pattern,
    end: Pattern,
}

impl NamePattern {
    /// Reads a pattern. Fails if `text` is not a valid pattern.
    pub fn new(text: &str) -> Result<Self> {
        let compiled = |text: String| {
            let fail = |error| Error::Argument(format!("`{text}` is not a valid pattern of names: {error}"));
            Pattern::new(&with_slashes(&text)).map_err(fail)
        };
        Ok(NamePattern { text: text.into(), whole: compiled(text.into())?, end: compiled(format!("**.{text}"))? })
    }

    /// Returns whether the pattern matches the whole name.
    pub fn matches(&self, name: &str) -> bool {
        self.whole.matches_with(&with_slashes(name), OPTIONS)
    }

    /// Returns whether the pattern matches the whole name, or the part after one of its dots, as PEFT's
    /// `target_modules`.
    pub fn matches_end(&self, name: &str) -> bool {
        self.matches(name) || self.end.matches_with(&with_slashes(name), OPTIONS)
    }
}

/// Writes the pattern's text.
impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// Replaces dots by slashes, which `glob` takes as separators.
fn with_slashes(name: &str) -> String {
    name.replace('.', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_dots() {
        let is = |pattern: &str, name: &str| NamePattern::new(pattern).unwrap().matches(name);
        assert!(is("h.*", "h.10") && is("h.?", "h.1") && is("**", "a.b.c") && is("a.**.c", "a.b.b.c"));
        assert!(!is("h.*", "h.1.attn") && !is("*", "a.b") && !is("h.?", "h.10") && !is("H.*", "h.1"));
        let ends = |pattern: &str, name: &str| NamePattern::new(pattern).unwrap().matches_end(name);
        assert!(ends("bias", "a.b.bias") && ends("bias", "bias") && ends("attn.*", "h.0.attn.q"));
        assert!(!ends("bias", "a.xbias") && !ends("attn.*", "h.0.attn.q.weight"));
        for bad in ["a.***", "a[", "b**"] {
            let error = NamePattern::new(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("`{bad}` is not a valid pattern of names")), "{error}");
        }
    }
}
