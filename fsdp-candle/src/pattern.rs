//! Patterns of names, as files are chosen by in a shell.

use std::fmt;

use glob::{MatchOptions, Pattern};

use crate::error::{Error, Result};

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// A pattern of the fully qualified names of modules or parameters: `*` and `?` stand for characters of one part
/// between dots, `**` for any parts.
///
/// ```
/// use fsdp_candle::NamePattern;
///
/// let layers = NamePattern::new("model.layers.*")?;
/// assert!(layers.matches("model.layers.7") && !layers.matches("model.layers.7.mlp"));
/// assert!(NamePattern::new("**.q_proj")?.matches("model.layers.7.self_attn.q_proj"));
/// // Names are often meant by their ends.
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
    /// Reads a pattern.
    ///
    /// # Errors
    /// When it is none.
    pub fn new(text: &str) -> Result<Self> {
        let compiled = |text: String| {
            let fail = |error| Error::Argument(format!("`{text}` is no pattern of names: {error}"));
            Pattern::new(&with_slashes(&text)).map_err(fail)
        };
        Ok(NamePattern { text: text.into(), whole: compiled(text.into())?, end: compiled(format!("**.{text}"))? })
    }

    /// Whether the whole name is so.
    pub fn matches(&self, name: &str) -> bool {
        self.whole.matches_with(&with_slashes(name), OPTIONS)
    }

    /// Whether the name is so, or what comes after one of its dots: as PEFT's `target_modules` are meant.
    pub fn matches_end(&self, name: &str) -> bool {
        self.matches(name) || self.end.matches_with(&with_slashes(name), OPTIONS)
    }
}

/// As it was written.
impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// `glob` knows slashes.
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
            assert!(error.contains(&format!("`{bad}` is no pattern of names")), "{error}");
        }
    }
}
