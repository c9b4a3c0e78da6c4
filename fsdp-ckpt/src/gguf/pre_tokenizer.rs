//! llama.cpp's names of pre-tokenizers, which split text before byte-pair merges.
//!
//! llama.cpp has the rules built in and reads a name. Its converter recognises a vocabulary by the tokens of a test
//! text. This module compares the rules in `tokenizer.json`, so that it also recognises new vocabularies.

use serde_json::Value as Json;

/// Patterns of `Split`, and llama.cpp's names for them.
const SPLITS: [(&str, &str); 6] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen35",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "gpt-4o",
    ),
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "gpt-2"),
];

/// Returns llama.cpp's name of a byte-level pre-tokenizer; `None` if llama.cpp has no such rules. `whole_words` is
/// `ignore_merges`: words of the vocabulary are tokens, whatever the merges say.
pub(super) fn name(pre_tokenizer: &Json, whole_words: bool) -> Option<&'static str> {
    let steps = match pre_tokenizer.get("pretokenizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![pre_tokenizer],
    };
    let kinds: Vec<&str> = steps.iter().map(|step| step.get("type").and_then(Json::as_str).unwrap_or("")).collect();
    let by_words = |step: &Json| step.get("use_regex").and_then(Json::as_bool).unwrap_or(true);
    match (&kinds[..], &steps[..]) {
        (["ByteLevel"], [bytes]) if by_words(bytes) => Some("gpt-2"),
        (["Digits", "ByteLevel"], [digits, bytes]) if by_words(bytes) => {
            digits.get("individual_digits")?.as_bool()?.then_some("smollm")
        }
        (["Split", "ByteLevel"], [split, bytes]) if !by_words(bytes) => {
            let pattern = split.get("pattern")?.get("Regex")?.as_str()?;
            let (_, name) = SPLITS.iter().find(|(known, _)| *known == pattern)?;
            match *name {
                // The same rules without whole words.
                "llama-bpe" if !whole_words => Some("dbrx"),
                name => Some(name),
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_have_llama_cpps_names() {
        let split = |pattern: &str, by_words: bool| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": by_words},
            ]})
        };
        for (pattern, expected) in SPLITS {
            assert_eq!(name(&split(pattern, false), true), Some(expected));
        }
        assert_eq!(name(&split(SPLITS[0].0, false), false), Some("dbrx"));
        assert_eq!(name(&split(SPLITS[0].0, true), true), None);
        assert_eq!(name(&split(".", false), true), None);
        assert_eq!(name(&json!({"type": "ByteLevel"}), false), Some("gpt-2"));
        let digits = json!({"type": "Digits", "individual_digits": true});
        let steps = json!({"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel"}]});
        assert_eq!(name(&steps, false), Some("smollm"));
    }
}
