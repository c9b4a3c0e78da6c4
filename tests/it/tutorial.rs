//! docs/tutorial.md shows the transcriptions in fsdp-candle/tests/it/tutorial, which run, line by line.

use fsdp_test_support::workspace;

/// Lines of PyTorch's and the lines of ours beside them.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    theirs: Vec<String>,
    ours: Vec<String>,
}

/// The transcriptions in a source: what stands between `tutorial: NAME` and `// end`. Lines of PyTorch's begin with
/// `//>`.
fn transcriptions(source: &str) -> Vec<Pair> {
    let mut pairs: Vec<Pair> = vec![];
    let mut is_inside = false;
    for line in source.lines() {
        let code = line.trim_start();
        if code.starts_with("//") && !code.starts_with("//!") && code.contains("tutorial: ") {
            is_inside = true;
            pairs.push(Pair::default());
        } else if code == "// end" {
            is_inside = false;
        } else if let (true, Some(pair)) = (is_inside, pairs.last_mut()) {
            match code.strip_prefix("//>") {
                Some(theirs) => pair.theirs.push(theirs.strip_prefix(' ').unwrap_or(theirs).to_string()),
                None => pair.ours.push(line.to_string()),
            }
        }
    }
    assert!(!is_inside, "a transcription has no end");
    for pair in &mut pairs {
        let indents = pair.ours.iter().filter(|line| !line.is_empty()).map(|line| line.len() - line.trim_start().len());
        let indent = indents.min().unwrap_or(0);
        pair.ours.iter_mut().for_each(|line| *line = line.get(indent..).unwrap_or_default().to_string());
    }
    pairs
}

/// The blocks of Python in a document, each with the block of Rust behind it.
fn shown(document: &str) -> Vec<Pair> {
    let mut pairs: Vec<Pair> = vec![];
    let mut blocks = document.split("```").skip(1).step_by(2);
    while let Some(block) = blocks.next() {
        let lines = |block: &str| block.lines().skip(1).map(str::to_string).collect::<Vec<_>>();
        assert!(block.starts_with("python\n"), "a block of Python stands before each of Rust: {block}");
        let ours = blocks.next().unwrap_or_default();
        assert!(ours.starts_with("rust\n"), "a block of Rust stands behind each of Python: {block}");
        pairs.push(Pair { theirs: lines(block), ours: lines(ours) });
    }
    pairs
}

#[test]
fn every_snippet_of_the_tutorial_runs_in_a_test() {
    let mut run = vec![];
    for entry in std::fs::read_dir(workspace().join("fsdp-candle/tests/it/tutorial")).unwrap() {
        run.extend(transcriptions(&std::fs::read_to_string(entry.unwrap().path()).unwrap()));
    }
    let shown = shown(&std::fs::read_to_string(workspace().join("docs/tutorial.md")).unwrap());
    assert!(shown.len() > 15, "{}", shown.len());
    for pair in &shown {
        assert!(run.contains(pair), "no test runs this: {pair:#?}");
    }
    for pair in &run {
        assert!(shown.contains(pair), "docs/tutorial.md does not show this: {pair:#?}");
    }
}

#[test]
fn a_snippet_that_no_test_runs_would_be_found() {
    let source = [
        "    // tutorial: a",
        "    //> for x in y:",
        "    for x in y {",
        "        //>     f(x)",
        "        f(x);",
        "    }",
        "    // end",
    ];
    let source = &source.join("\n");
    let document = "```python\nfor x in y:\n    f(x)\n```\n\n```rust\nfor x in y {\n    f(x);\n}\n```\n";
    assert_eq!(transcriptions(source), shown(document));
    assert_ne!(transcriptions(source), shown(&document.replace("f(x);", "g(x);")));
    assert_ne!(transcriptions(source), shown(&document.replace("    f(x)\n", "    g(x)\n")));
}
