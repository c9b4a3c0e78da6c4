//! Ranks that issued different collectives: what differs, for people.

use super::{
    call::{Announcement, MEMBERS, PARTS, SPELLED},
    signature::Subject,
};
use crate::Error;

/// The most members that are named for one set of ranks.
const NAMED: usize = 8;

/// What the ranks issued, by rank, and how it differs. `subject` is this rank's, `disagreement` what they differ in
/// beside what was announced.
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
    // Collectives about different things have different parts, which tell nothing.
    if details.len() == said {
        details.extend(parts(issued, texts.len() > 1));
    }
    details.extend(disagreement);
    if details.len() == 1 {
        details.push(unnamed(issued));
    }
    let advice: Vec<_> = sets(issued.iter().map(Announcement::advice)).into_iter().map(|(advice, _)| advice).collect();
    let advice = advice.iter().filter(|advice| !advice.is_empty()).map(|advice| format!(". {advice}")).collect();
    Error::Mismatch { rank, group: group.into(), sequence, details: details.join("; "), advice }
}

/// Equal values with the ranks that have them, in rank order.
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
    let spelled: Vec<_> = sets.iter().map(|(at, ranks)| format!("number {at} on rank(s) {ranks:?}")).collect();
    (sets.len() > 1).then(|| format!("it is collective {}", spelled.join(", ")))
}

/// Which members only some of the ranks named, of those whose collectives are about this rank's subject.
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

/// The first part that differs, where the texts don't show it.
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

/// Where they differ when nothing that was announced does.
fn unnamed(issued: &[Announcement<'_>]) -> String {
    let subjects = sets(issued.iter().map(|issued| (issued.subject(), issued.members())));
    if subjects.len() > 1 {
        let spelled: Vec<_> =
            subjects.iter().map(|((_, count), ranks)| format!("{count} on rank(s) {ranks:?}")).collect();
        return format!("they list other names by that, or in another order: {}", spelled.join(", "));
    }
    let mut places = Vec::new();
    if issued.iter().any(Announcement::is_cut) {
        places.push("behind the end of these texts".to_string());
    }
    if issued.iter().any(|issued| issued.parts().len() == PARTS) {
        places.push(format!("after part {}", PARTS - 1));
    }
    if issued.iter().any(|issued| issued.members() == MEMBERS) {
        places.push(format!("after the {MEMBERS}th name"));
    }
    let marks = sets(issued.iter().map(Announcement::fingerprint));
    let marks: Vec<_> = marks.iter().map(|(mark, ranks)| format!("{mark:016x} on rank(s) {ranks:?}")).collect();
    format!("they differ {}: their fingerprints are {}", places.join(" or "), marks.join(", "))
}
