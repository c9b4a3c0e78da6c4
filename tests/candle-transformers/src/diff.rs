//! Diffs in documents, and their application to files.

/// A block ` ```diff ` of a document: the file that its first line names, and the lines.
#[derive(Clone, Debug)]
pub struct Diff {
    /// The text after `--- `.
    pub file: String,
    /// The lines after the two file names, each with its mark: a space, `+`, `-` or `@`.
    pub lines: Vec<String>,
}

/// Returns the diffs of a document in order.
pub fn of_document(document: &str) -> Vec<Diff> {
    let blocks = document.split("\n```diff\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let diff = |block: &str| {
        let mut lines = block.lines();
        let file = lines.next().and_then(|line| line.strip_prefix("--- ")).unwrap_or_default();
        Diff { file: file.into(), lines: lines.skip_while(|line| line.starts_with("+++ ")).map(String::from).collect() }
    };
    blocks.map(diff).collect()
}

impl Diff {
    /// Applies the diff to a file. A line that begins with `@` ends a hunk. The existing lines of a hunk must match
    /// consecutive lines of the file in exactly one place.
    ///
    /// # Errors
    /// The expected lines, if they match no place or several places.
    pub fn apply(&self, text: &str) -> Result<String, String> {
        let mut lines: Vec<&str> = text.lines().collect();
        for hunk in self.lines.split(|line| line.starts_with('@')).filter(|hunk| !hunk.is_empty()) {
            let without = |mark: char| -> Vec<&str> {
                // An empty line may have lost its space.
                hunk.iter().filter(|line| !line.starts_with(mark)).map(|line| line.get(1..).unwrap_or("")).collect()
            };
            let (old, new) = (without('+'), without('-'));
            let mut places = (0..lines.len()).filter(|&at| lines[at..].starts_with(&old));
            let (Some(at), None) = (places.next(), places.next()) else {
                return Err(format!("{}: these lines do not stand in one place:\n{}", self.file, old.join("\n")));
            };
            lines.splice(at..at + old.len(), new);
        }
        Ok(lines.join("\n") + "\n")
    }
}
