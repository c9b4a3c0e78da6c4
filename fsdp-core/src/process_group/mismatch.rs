//! The error of ranks that issued different collectives.

use super::{
    call::{Announcement, MEMBERS, PARTS, SPELLED},
    signature::Subject,
};
use crate::Error;

/// Largest number of members that are named for one set of ranks.
const NAMED: usize = 8;

/// Returns the error, with what each rank issued and the differences.
///
/// `subject` is this rank's subject. `disagreement` is a difference outside the announcements' common part.
pub(super) fn error(
    rank: usize,
    group: &str,
    sequence: u64,
    issued: &[Announcement<'_>],
    subject: Option<&Subject>,
    disagreement: Option<String>,
) -> Error {
    let texts = sets(issued.iter().map(Announcement::text));
    let mut details: Vec<_> = texts.iter().map(|(text, ranks)| format!("rank(s) {ranks:?} issued {text}")).collect();
    let said = details.len();
    details.extend(positions(issued));
    details.extend(subject.and_then(|subject| members(issued, rank, subject)));
    // Parts of collectives about different subjects differ anyway.
    if details.len() == said {
        details.extend(parts(issued, texts.len() > 1));
    }
    details.extend(disagreement);
    if details.len() == 1 {
        details.push(hidden_difference(issued));
    }
    let advice: Vec<_> = sets(issued.iter().map(Announcement::advice)).into_iter().map(|(advice, _)| advice).collect();
    let advice = advice.iter().filter(|advice| !advice.is_empty()).map(|advice| format!(". {advice}")).collect();
    Error::Mismatch { rank, group: group.into(), sequence, details: details.join("; "), advice }
}

/// Groups equal values with the ranks that have them, in rank order.
fn sets<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<(T, Vec<usize>)> {
    let mut sets: Vec<(T, Vec<usize>)> = Vec::new();
    for (rank, value) in values.enumerate() {
        match sets.iter_mut().find(|(have, _)| *have == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => sets.push((value, vec![rank])),
        }
    }
    sets
}

fn positions(issued: &[Announcement<'_>]) -> Option<String> {
    let sets = sets(issued.iter().map(Announcement::sequence));
    let spelled: Vec<_> = sets.iter().map(|(at, ranks)| format!("{at} on rank(s) {ranks:?}")).collect();
    (sets.len() > 1).then(|| format!("sequence numbers differ: {}", spelled.join(", ")))
}

/// Names the members that only some of the ranks have, among ranks with this rank's subject.
fn members(issued: &[Announcement<'_>], rank: usize, subject: &Subject) -> Option<String> {
    let hash = issued[rank].subject();
    let alike: Vec<usize> = (0..issued.len()).filter(|&peer| issued[peer].subject() == hash).collect();
    let mut found: Vec<(Vec<usize>, Vec<&str>)> = Vec::new();
    for (member, name) in subject.members().iter().take(issued[rank].members()).enumerate() {
        let ranks: Vec<usize> = alike.iter().copied().filter(|&peer| issued[peer].has(member)).collect();
        if ranks.is_empty() || ranks.len() == alike.len() {
            continue;
        }
        match found.iter_mut().find(|(have, _)| *have == ranks) {
            Some((_, names)) => names.push(name),
            None => found.push((ranks, vec![name])),
        }
    }
    let spelled = found.iter().enumerate().map(|(at, (ranks, names))| {
        let shown: Vec<_> = names.iter().take(NAMED).map(|name| format!("`{name}`")).collect();
        let more = if names.len() > NAMED { format!(" and {} more", names.len() - NAMED) } else { String::new() };
        let verb = match (at, names.len()) {
            (0, 1) => "is ",
            (0, _) => "are ",
            _ => "",
        };
        format!("{}{more} {verb}on rank(s) {ranks:?} only", shown.join(", "))
    });
    let spelled: Vec<_> = spelled.collect();
    (!spelled.is_empty()).then(|| spelled.join(", "))
}

/// Describes the first part that differs, unless the texts show it.
fn parts(issued: &[Announcement<'_>], shown: bool) -> Option<String> {
    let parts: Vec<_> = issued.iter().map(Announcement::parts).collect();
    let count = parts.iter().map(Vec::len).max()?;
    let in_place = |place: usize| sets(parts.iter().map(move |parts| parts.get(place).copied()));
    let place = (0..count).find(|&place| in_place(place).len() > 1)?;
    let found = in_place(place);
    let all: Vec<_> = found.iter().filter_map(|(part, _)| *part).collect();
    if (shown && place < SPELLED) || all.len() < found.len() {
        return None;
    }
    let ranks = found.iter().map(|(_, ranks)| ranks);
    let spelled: Vec<_> =
        all.iter().zip(ranks).map(|(part, ranks)| format!("{} on rank(s) {ranks:?}", part.beside(&all))).collect();
    Some(format!("part {place} is {}", spelled.join(", ")))
}

/// Describes the difference if no announced field differs.
fn hidden_difference(issued: &[Announcement<'_>]) -> String {
    let subjects = sets(issued.iter().map(|issued| (issued.subject(), issued.members())));
    if subjects.len() > 1 {
        let spelled: Vec<_> =
            subjects.iter().map(|((_, count), ranks)| format!("{count} on rank(s) {ranks:?}")).collect();
        return format!("the names differ, or their order: {}", spelled.join(", "));
    }
    let mut places = Vec::new();
    if issued.iter().any(Announcement::is_cut) {
        places.push("after the end of these texts".to_string());
    }
    if issued.iter().any(|issued| issued.parts().len() == PARTS) {
        places.push(format!("after part {}", PARTS - 1));
    }
    if issued.iter().any(|issued| issued.members() == MEMBERS) {
        places.push(format!("after the {MEMBERS}th name"));
    }
    let hashes = sets(issued.iter().map(Announcement::fingerprint));
    let hashes: Vec<_> = hashes.iter().map(|(hash, ranks)| format!("{hash:016x} on rank(s) {ranks:?}")).collect();
    format!("they differ {}: their fingerprints are {}", places.join(" or "), hashes.join(", "))
}
