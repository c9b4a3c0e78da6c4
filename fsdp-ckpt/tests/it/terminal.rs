//! Escaping names from files in all output.

use std::path::Path;

use fsdp_core::{DType, Placement};

use crate::cli::{fsdp_ckpt, json, text};
use crate::hostile::change_manifest;
use crate::world::{Global, damage, fresh, line, save_all, state, world};

/// Sets the title, clears the screen, reverses text, hides, and forges a line.
const HOSTILE_NAME: &str = "a\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\u{200b}\r\nok: all is well\u{fffe}\u{7f}";

fn is_plain(text: &str) -> bool {
    let is_evil = |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{200b}\u{fffe}".contains(c);
    !text.chars().any(is_evil) && !text.lines().any(|line| line.starts_with("ok: all is well"))
}

/// Saves tensors, values and a mesh with hostile names.
fn saved(dir: &Path, count: usize) {
    let globals: Vec<Global> = (0..count)
        .map(|i| Global::new(&format!("model.{i}.{HOSTILE_NAME}.w"), DType::F32, &[4, 3], &[Placement::Shard(0)]))
        .collect();
    let mesh = fsdp_core::MeshLayout::new(&[(HOSTILE_NAME, 2)]).unwrap();
    world(2, |group| {
        let mut state = state(&globals, &mesh, group.rank());
        state.values.insert(HOSTILE_NAME.into(), HOSTILE_NAME.into());
        fsdp_ckpt::save(dir, group, &state).unwrap();
    });
    change_manifest(dir, |manifest| manifest["created_by"] = HOSTILE_NAME.into());
}

#[test]
fn escapes_names_in_all_output() {
    let (root, _) = fresh();
    let run = root.path().join("run");
    let dir = run.join(format!("{HOSTILE_NAME}-step-7"));
    saved(&dir, 2);
    let (more, out, svg) = (root.path().join("more"), root.path().join("out"), root.path().join("a.svg"));
    saved(&more, 3);
    let (dir, more) = (text(&dir), text(&more));
    let check = |args: &[&str], code: i32| {
        let (found, out, err) = fsdp_ckpt(args);
        assert!(found == code && is_plain(&out) && is_plain(&err), "{args:?}: {found} {out:?} {err:?}");
        (out, err)
    };
    let (shown, _) = check(&["inspect", dir], 0);
    assert!(
        shown.contains(r"a\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\u{200b}\r\nok: all is well\u{fffe}\u{7f}.w"),
        "{shown}"
    );
    check(&["inspect", text(&run)], 0);
    for args in [&["inspect", dir, "--json"][..], &["inspect", text(&run), "--json"], &["verify", dir, "--json"]] {
        json(&check(args, 0).0);
    }
    let (shown, _) = check(&["inspect", dir, "--json"], 0);
    assert_eq!(json(&shown)["values"][HOSTILE_NAME], HOSTILE_NAME);
    check(&["verify", dir, "--finite"], 0);
    check(&["diff", dir, more], 1);
    check(&["diff", text(&run), more], 1);
    check(&["convert", more, text(&out), "--to", "hf"], 0);
    check(&["convert", more, text(&out), "--to", "hf"], 1);
    check(&["convert", more, dir, "--to", "fsdp", "--alias", "x=y"], 1);

    check(&["inspect", dir, "--svg", text(&svg)], 0);
    let picture = std::fs::read_to_string(&svg).unwrap();
    let document = roxmltree::Document::parse(&picture).unwrap();
    let titles: Vec<&str> = document.descendants().filter_map(|node| node.text()).collect();
    assert!(titles.iter().any(|title| title.contains(r"owned\u{7}")) && is_plain(&picture), "{titles:?}");

    // Errors about damaged tensors and files.
    let shard = Path::new(dir).join("shard-00002-model-00001-of-00001.safetensors");
    damage(&shard);
    check(&["verify", dir], 1);
    check(&["convert", dir, text(&root.path().join("other")), "--to", "hf"], 1);
    change_manifest(Path::new(dir), |manifest| {
        manifest["files"][HOSTILE_NAME] = serde_json::json!({ "bytes": 1, "header_crc32c": 1 });
    });
    let (_, error) = check(&["inspect", dir], 1);
    assert!(error.contains(r"ok: all is well"), "{error}");
    check(&["inspect", text(&run)], 0);
}

#[test]
fn escapes_names_of_hugging_face_models() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("m.safetensors");
    let entry = |dtype: &str, from: usize, to: usize| {
        let shape = [to - from];
        serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [from, to] })
    };
    let mut header = serde_json::Map::new();
    header.insert(HOSTILE_NAME.into(), entry("U8", 0, 4));
    header.insert(format!("b{HOSTILE_NAME}"), entry("BOOL", 4, 6));
    let header = serde_json::Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[1; 6]].concat();
    std::fs::write(&file, bytes).unwrap();
    let plain = root.path().join("plain");
    save_all(&plain, &[Global::new("w", DType::F32, &[2], &[Placement::Replicate])], &line(1));
    let out = root.path().join("out");
    for (args, code) in [
        (&["inspect", text(&file)][..], 0),
        (&["verify", text(&file)], 0),
        (&["diff", text(&file), text(&plain)], 1),
        (&["convert", text(&file), text(&out), "--to", "fsdp"], 1),
        (&["consolidate", text(&file), text(&out), "--skip-unreadable"], 0),
    ] {
        let (found, out, err) = fsdp_ckpt(args);
        assert!(found == code && is_plain(&out) && is_plain(&err), "{args:?}: {found} {out:?} {err:?}");
    }
}
