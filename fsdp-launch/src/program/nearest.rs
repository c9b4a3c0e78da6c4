//! What a misspelt word was meant to be.

/// The most similar of the `known` words, if it is similar enough to be meant.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let similar = known.into_iter().map(|it| (strsim::jaro(word, it), it)).filter(|(similarity, _)| *similarity > 0.8);
    similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, it)| it)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_similar() {
        let of = |word| nearest(word, ["train", "trace", "eval"]);
        assert_eq!((of("trian"), of("trac"), of("EVAL"), of("bench")), (Some("train"), Some("trace"), None, None));
    }
}
