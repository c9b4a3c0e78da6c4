//! Lists of names in messages.

/// Number of names that a report lists.
const MAX_NAMES: usize = 8;

/// Lists the first few names and counts the rest.
pub(crate) fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(MAX_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
