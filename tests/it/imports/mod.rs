//! Imports go one way: what docs/architecture.md writes down is what the sources do.

mod order;
mod sources;

use std::collections::BTreeMap;

use fsdp_tests::workspace;
use order::{Order, fitting, orders, problems};
use sources::{Files, Package, read};

const DOCUMENT: &str = "docs/architecture.md";

/// The workspace's members, by their folders.
fn members() -> Vec<String> {
    let manifest = std::fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let list = manifest.split_once("members = [").unwrap().1.split_once(']').unwrap().0;
    list.split(',').map(|name| name.trim().trim_matches('"').to_owned()).collect()
}

/// What code calls the library of a member.
fn library(member: &str) -> String {
    let manifest = std::fs::read_to_string(workspace().join(member).join("Cargo.toml")).unwrap();
    let name = manifest.split_once("name = \"").unwrap().1.split_once('"').unwrap().0;
    name.replace('-', "_")
}

/// The workspace's packages, by their folders.
fn packages() -> BTreeMap<String, Package> {
    let package = |member: &String| Package::new(&library(member), &read(&workspace().join(member).join("src")));
    members().into_iter().map(|member| (member.clone(), package(&member))).collect()
}

/// What breaks the orders in a document.
fn broken(document: &str, packages: &BTreeMap<String, Package>) -> Vec<String> {
    let orders = orders(document);
    let mut found = Vec::new();
    for (at, (member, order)) in orders.iter().enumerate() {
        let above: Vec<String> = orders[at + 1..].iter().map(|(member, _)| library(member)).collect();
        found.extend(problems(member, &packages[member], order, &above));
    }
    found
}

fn document() -> String {
    std::fs::read_to_string(workspace().join(DOCUMENT)).unwrap()
}

#[test]
fn imports_go_the_way_that_the_document_says() {
    let found = broken(&document(), &packages());
    assert!(found.is_empty(), "{DOCUMENT}, \"The order of imports\", and the sources differ:\n{}", found.join("\n"));
}

#[test]
fn every_member_has_an_order() {
    let listed: Vec<String> = orders(&document()).into_iter().map(|(member, _)| member).collect();
    for (member, package) in packages() {
        let fits = fitting(&package);
        let hint = format!("This one fits:\n```imports {member}\n{fits}```");
        assert!(listed.contains(&member), "{DOCUMENT} has no order for {member}. {hint}");
    }
}

#[test]
fn an_order_that_lacks_a_line_is_reported() {
    let (document, packages) = (document(), packages());
    let lines: Vec<&str> = document.lines().collect();
    let (mut is_order, mut removed) = (false, 0);
    for (at, line) in lines.iter().enumerate() {
        if line.starts_with("```") {
            is_order = line.starts_with("```imports ");
            continue;
        }
        // One that opens a folder or closes one can't go alone.
        let file = line.split_whitespace().find(|word| !word.ends_with(['/', '{', '}']));
        let Some(file) = file.filter(|_| is_order && line.matches('{').count() == line.matches('}').count()) else {
            continue;
        };
        let without = [&lines[..at], &lines[at + 1..]].concat().join("\n");
        let found = broken(&without, &packages);
        let expected = format!("{file}.rs` has no place in the order");
        assert!(found.iter().any(|problem| problem.ends_with(&expected)), "{line}: {found:?}");
        removed += 1;
    }
    assert!(removed > 20, "{removed} lines");
}

/// A package of these files.
fn made_up(files: &[(&str, &str)]) -> Package {
    let files: Files = files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    Package::new("made_up", &files)
}

/// What a package of these files breaks of an order.
fn found(files: &[(&str, &str)], order: &str) -> Vec<String> {
    problems("p", &made_up(files), &Order::parse(order), &["upper".to_owned()])
}

const LIB: (&str, &str) = ("lib.rs", "mod low; mod high; pub use high::Thing; pub use low::Plain; pub fn own() {}");

#[test]
fn an_import_from_above_is_named_and_one_from_below_is_none() {
    let files = [LIB, ("low.rs", "pub struct Plain;"), ("high.rs", "use crate::low::Plain; pub struct Thing;")];
    assert_eq!(found(&files, "low high"), [""; 0]);
    let expected = ["p: `high.rs` imports `low.rs`, which stands above it (`crate::low::Plain`)"];
    assert_eq!(found(&files, "high low"), expected);
}

#[test]
fn every_way_to_name_another_file_is_seen() {
    for upward in [
        "use crate::high;",
        "use crate::high::Thing as Other;",
        "use crate::{low::Plain, high::{self, Thing}};",
        "use super::{high::*};",
        "pub(crate) use super::high::Thing;",
        "#[cfg(test)] mod tests { use super::super::high::Thing; }",
        "mod inner { pub fn f() -> crate::high::Thing { panic!() } }",
        "fn f() { use crate::high::Thing; }",
        "fn f(x: &<crate::high::Thing as Clone>::X) {}",
        "fn f() { let x = Vec::<crate::high::Thing>::new(); }",
        "fn f() { assert_eq!(1, crate::high::f(\"crate::low\")); }",
        "macro_rules! m { () => { $crate::high::f() } }",
        "#[derive(X)] #[x(parser = crate::high::f)] struct S;",
        // What the root shows is of the room that has it.
        "use crate::Thing;",
        "fn f() -> super::Thing { panic!() }",
        "use self::inner::Thing; mod inner { pub use super::super::high::Thing; }",
    ] {
        let files = [LIB, ("low.rs", upward), ("high.rs", "pub struct Thing; pub fn f() {}")];
        let found = found(&files, "low high");
        assert!(found.len() == 1 && found[0].contains("`low.rs` imports `high.rs`"), "{upward}: {found:?}");
    }
    for harmless in [
        "//! See crate::high::Thing.\n/// And `crate::high`. \nfn f() {}",
        "fn f() -> &'static str { \"use crate::high;\" }",
        "fn f() { let high = 1; high::<u8>(); other::high::f(); ::high::f(); }",
        "pub(in crate::high) fn f() {}",
        "use std::high::Thing; use other::{high, low};",
        "mod high { pub struct Own; } use high::Own;",
        "use crate::Plain; use self::Plain as Same;",
        "fn f() -> impl Iterator + use<> { crate::low::f(); } mod high {}",
        "fn f() { x.high::<u8>(); } /* crate::high::f() */ const R: &str = r#\"crate::high\"#;",
    ] {
        let files = [LIB, ("low.rs", harmless), ("high.rs", "pub struct Thing;")];
        let found: Vec<_> = found(&files, "low high").into_iter().filter(|it| it.contains("high.rs")).collect();
        assert_eq!(found, [""; 0], "{harmless}");
    }
}

#[test]
fn folders_have_one_place_and_their_files_an_order() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a/mod.rs", "mod x; mod y; pub use y::Y;"),
        ("a/x.rs", "pub struct X;"),
        ("a/y.rs", "use super::x::X; pub struct Y; mod deep;"),
        ("a/y/deep.rs", "use super::Y; use crate::b::B;"),
        ("b.rs", "use crate::a::Y; pub struct B;"),
    ];
    let expected = ["p: `a/y/deep.rs` imports `b.rs`, which stands above it (`crate::b::B`)"];
    assert_eq!(found(&files, "a/ { x y y/ { deep } mod } b"), expected);
    let upside_down = found(&files, "b a/ { mod y x y/ { deep } }");
    for edge in ["`a/mod.rs` imports `a/y.rs`", "`a/y.rs` imports `a/x.rs`", "`b.rs` imports `a/y.rs`"] {
        assert!(upside_down.iter().any(|it| it.contains(edge)), "{edge}: {upside_down:?}");
    }
    assert!(fitting(&made_up(&files)).contains("CIRCLE"));
}

#[test]
fn every_file_has_a_place_and_every_place_a_file() {
    let files = [LIB, ("low.rs", "mod gone;"), ("high.rs", "pub struct Thing;"), ("dead.rs", "")];
    assert_eq!(
        found(&files, "low low higher"),
        [
            "p: `low.rs` has a module `gone`, which has no file",
            "p: `dead.rs` is no module of anything",
            "p: the order names `low` twice",
            "p: `high.rs` has no place in the order",
            "p: the order names `higher`, which is not there",
        ]
    );
}

#[test]
fn roots_stand_at_the_top_and_programs_on_the_library() {
    let files = [
        ("lib.rs", "pub mod low; pub fn own() {}"),
        ("low.rs", "pub fn f() { crate::own() }"),
        ("bin/prog/main.rs", "mod part; use made_up::own; pub fn told() {}"),
        ("bin/prog/part.rs", "use made_up::low; use crate::told; use made_up::own;"),
    ];
    let expected = [
        "p: `bin/prog/part.rs` imports `bin/prog/main.rs`, which stands above it (`crate::told`)",
        "p: `low.rs` imports `lib.rs`, which stands above it (`crate::own`)",
    ];
    assert_eq!(found(&files, "low bin/ { prog/ { part } }"), expected);
    let strange = found(&[LIB, ("low.rs", "use upper::X;"), ("high.rs", "")], "low high");
    assert_eq!(strange, ["p: `low.rs` imports `upper::X`, of a package that stands above this one"]);
}

#[test]
fn an_order_that_fits_is_found() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a/mod.rs", "mod y; mod x;"),
        ("a/x.rs", "use super::y::Y;"),
        ("a/y.rs", "pub struct Y; use crate::c::C;"),
        ("b.rs", "use crate::c::C;"),
        ("c.rs", "pub struct C;"),
    ];
    let order = fitting(&made_up(&files));
    assert_eq!(found(&files, &order), [""; 0], "{order}");
    assert!(order.starts_with("c\n"), "{order}");
}
