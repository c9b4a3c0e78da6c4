//! The order that a document writes down, and what of a package breaks it.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{Package, is_root};

/// The files of a package's `src`, bottom first, as they stand in a document: without `.rs`, and without the roots.
pub(crate) struct Order(Vec<String>);

/// The orders in a document's code blocks, `imports NAME` each, by the package's name, in the document's order.
pub(crate) fn orders(document: &str) -> Vec<(String, Order)> {
    let mut found = Vec::new();
    let mut block: Option<(String, String)> = None;
    for line in document.lines() {
        match &mut block {
            None => {
                let name = line.strip_prefix("```imports ");
                block = name.map(|name| (name.trim().to_owned(), String::new()));
            }
            Some((name, text)) if line == "```" => {
                found.push((name.clone(), Order::parse(text)));
                block = None;
            }
            Some((_, text)) => *text += &format!("{line}\n"),
        }
    }
    found
}

impl Order {
    /// Words are files; `folder/ { ... }` is a folder with its files.
    ///
    /// # Panics
    /// When braces don't match.
    pub(crate) fn parse(text: &str) -> Self {
        let (mut files, mut folders, mut folder) = (Vec::new(), Vec::new(), "");
        for word in text.split_whitespace() {
            match word {
                "{" if folder.is_empty() => panic!("a brace is opened that follows no folder: {text}"),
                "{" => folders.push(std::mem::take(&mut folder)),
                "}" => drop(folders.pop().expect("a brace is closed that none opens")),
                name if name.ends_with('/') => folder = name,
                name => files.push(folders.concat() + name),
            }
        }
        assert!(folders.is_empty() && folder.is_empty(), "a folder is not closed: {text}");
        Order(files)
    }
}

/// What stands in a package that its order does not allow, and what it imports of the packages `above` it.
pub(crate) fn problems(name: &str, package: &Package, order: &Order, above: &[String]) -> Vec<String> {
    let mut problems = package.problems.clone();
    let rooms = rooms(package);
    let listed: BTreeSet<&str> = order.0.iter().map(String::as_str).collect();
    let twice = order.0.iter().enumerate().filter(|(at, room)| order.0[..*at].contains(room));
    problems.extend(twice.map(|(_, room)| format!("the order names `{room}` twice")));
    problems.extend(
        rooms
            .iter()
            .filter(|room| !listed.contains(room.as_str()))
            .map(|room| format!("`{room}.rs` has no place in the order")),
    );
    let gone = listed.iter().filter(|room| !rooms.contains(**room));
    problems.extend(gone.map(|room| format!("the order names `{room}`, which is not there")));
    let height = |file: &str| {
        let room = file.trim_end_matches(".rs");
        // Programs stand on the library, and a root on all of its modules.
        let tree = usize::from(is_of_a_program(package, file));
        (tree, is_root(file), order.0.iter().position(|it| it == room))
    };
    for ((from, to), path) in edges(package) {
        let is_known = |file: &str| is_root(file) || listed.contains(file.trim_end_matches(".rs"));
        if is_known(&from) && is_known(&to) && height(&to) >= height(&from) {
            problems.push(format!("`{from}` imports `{to}`, which stands above it (`{path}`)"));
        }
    }
    for module in &package.modules {
        let strange = module.mentions.iter().filter(|path| above.contains(&path[0]));
        problems.extend(strange.map(|path| {
            format!("`{}` imports `{}`, of a package that stands above this one", module.file, path.join("::"))
        }));
    }
    problems.into_iter().map(|problem| format!("{name}: {problem}")).collect()
}

/// The files that have a place.
fn rooms(package: &Package) -> BTreeSet<String> {
    let files = package.modules.iter().map(|module| module.file.as_str()).filter(|file| !is_root(file));
    files.map(|file| file.trim_end_matches(".rs").to_owned()).collect()
}

fn is_of_a_program(package: &Package, file: &str) -> bool {
    let at = package.modules.iter().position(|module| module.file == file);
    at.is_some_and(|at| package.modules[package.root_of(at)].file != "lib.rs")
}

/// Which file imports which, with a path by which it does.
pub(crate) fn edges(package: &Package) -> BTreeMap<(String, String), String> {
    let mut edges = BTreeMap::new();
    for (from, module) in package.modules.iter().enumerate() {
        for path in &module.mentions {
            if let Some(to) = package.resolve(from, path)
                && package.modules[to].file != module.file
            {
                let edge = (module.file.clone(), package.modules[to].file.clone());
                edges.entry(edge).or_insert_with(|| path.join("::"));
            }
        }
    }
    edges
}

/// An order that fits a package as it is, as a document has it; what stands in circles comes last, with a word.
pub(crate) fn fitting(package: &Package) -> String {
    let edges: Vec<(String, String)> = edges(package).into_keys().collect();
    let (programs, library): (BTreeSet<_>, BTreeSet<_>) =
        rooms(package).into_iter().partition(|room| is_of_a_program(package, &format!("{room}.rs")));
    sorted("", &library, &edges) + &sorted("", &programs, &edges)
}

/// The rooms of a folder, each after those that it imports.
fn sorted(folder: &str, rooms: &BTreeSet<String>, edges: &[(String, String)]) -> String {
    let part = |room: &str| {
        let rest = room.strip_prefix(folder)?;
        Some(rest.split_once('/').map_or_else(|| rest.to_owned(), |(first, _)| format!("{first}/")))
    };
    let mut left: BTreeSet<String> = rooms.iter().filter_map(|room| part(room)).collect();
    let (mut text, indent) = (String::new(), "    ".repeat(folder.matches('/').count()));
    while !left.is_empty() {
        let is_free = |name: &&String| {
            edges.iter().all(|(from, to)| {
                let (from, to) = (from.trim_end_matches(".rs"), to.trim_end_matches(".rs"));
                let other = part(to).filter(|_| rooms.contains(to));
                part(from).as_ref() != Some(*name)
                    || !rooms.contains(from)
                    || other.is_none_or(|other| &other == *name || !left.contains(&other))
            })
        };
        let Some(next) = left.iter().find(is_free).cloned() else {
            text += &format!("{indent}CIRCLE: {left:?}\n");
            let next = left.iter().next().cloned().unwrap_or_default();
            text += &format!("{indent}{}\n", described(folder, &next, rooms, edges));
            left.remove(&next);
            continue;
        };
        text += &format!("{indent}{}\n", described(folder, &next, rooms, edges));
        left.remove(&next);
    }
    text
}

fn described(folder: &str, name: &str, rooms: &BTreeSet<String>, edges: &[(String, String)]) -> String {
    if !name.ends_with('/') {
        return name.to_owned();
    }
    let inner = format!("{folder}{name}");
    let of_it: BTreeSet<String> = rooms.iter().filter(|room| room.starts_with(&inner)).cloned().collect();
    let indent = "    ".repeat(folder.matches('/').count());
    format!("{name} {{\n{}{indent}}}", sorted(&inner, &of_it, edges))
}
