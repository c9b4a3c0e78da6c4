//! How many hosts, and which of them: the values of `--nnodes` and `--node-rank`.

/// Reads `--nnodes N|MIN:MAX`.
pub(crate) fn nnodes(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse().ok().filter(|count| (1..=MOST_NODES).contains(count));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok((min, max)),
        _ => Err(format!("expected N or MIN:MAX with 1 <= MIN <= MAX <= {MOST_NODES}")),
    }
}

/// Writes what [`nnodes`] reads.
pub(crate) fn nnodes_text((min, max): (u32, u32)) -> String {
    if min == max { max.to_string() } else { format!("{min}:{max}") }
}

/// The most hosts of a launch: the coordinator has two threads for each.
const MOST_NODES: u32 = 4096;

/// Reads `--node-rank N`.
pub(crate) fn node_rank(text: &str) -> Result<u32, String> {
    let rank = text.parse().ok().filter(|&rank| rank < MOST_NODES);
    rank.ok_or_else(|| format!("expected a number, 0 for the first host, and less than {MOST_NODES}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_counts() {
        assert_eq!([(2, 2), (1, 4)].map(nnodes_text), ["2", "1:4"]);
        assert_eq!([nnodes("1"), nnodes("2"), nnodes("1:4")], [Ok((1, 1)), Ok((2, 2)), Ok((1, 4))]);
        for text in ["0", "2:1", "", "x", "1:", "1:1:1", "-1", "0:2", "1:99999"] {
            assert!(nnodes(text).unwrap_err().contains("MIN <= MAX"), "{text}");
        }
        assert!(
            node_rank("0").is_ok() && node_rank("7").is_ok() && node_rank("x").is_err() && node_rank("-1").is_err()
        );
    }
}
