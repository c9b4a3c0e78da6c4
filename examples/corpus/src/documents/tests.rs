use std::io::Write;

use proptest::prelude::*;

use super::*;
use crate::format::PART;

fn write(name: &str, content: &[u8]) -> (tempfile::TempDir, CorpusFile) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    fs::write(&path, content).unwrap();
    let file = CorpusFile { format: Format::of_file(&path).unwrap(), path };
    (directory, file)
}

fn recorded(name: &str) -> CorpusFile {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
    CorpusFile { format: Format::of_file(&path).unwrap(), path }
}

/// Returns all parts of a file, with the number of skipped records.
fn read(file: &CorpusFile, options: &Options) -> Result<(Vec<Part>, u64)> {
    let source = Source::open(file, options)?;
    let (mut parts, mut skipped) = (Vec::new(), 0);
    for block in source.blocks() {
        let mut documents = source.documents(&block, Cursor::default())?;
        for part in documents.by_ref() {
            parts.push(part?);
        }
        skipped += documents.skipped();
    }
    Ok((parts, skipped))
}

fn texts(file: &CorpusFile) -> Result<Vec<String>> {
    Ok(read(file, &Options::default())?.0.into_iter().map(|part| part.text).collect())
}

fn texts_of(name: &str, content: &[u8]) -> Result<Vec<String>> {
    texts(&write(name, content).1)
}

fn message(name: &str, content: &[u8]) -> String {
    let message = format!("{:#}", texts_of(name, content).unwrap_err());
    assert!(message.contains(name), "{message}");
    message
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn zstd(content: &[u8]) -> Vec<u8> {
    // With a checksum, as the command `zstd` writes.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

const TWO: &[u8] = b"{\"id\": 1, \"text\": \"one\"}\n{\"text\": \"t\\u0077o\\n\", \"x\": NaN}\n";

#[test]
fn formats_give_the_same_texts() {
    let members = [gzip(&TWO[..30]), gzip(&TWO[30..])].concat();
    let frames = [zstd(&TWO[..30]), zstd(&TWO[30..])].concat();
    for (name, content) in [
        ("a.jsonl", TWO.to_vec()),
        ("a.ndjson", [b"\xef\xbb\xbf\n \r\n", TWO].concat()),
        ("a.jsonl", TWO[..TWO.len() - 1].to_vec()),
        ("a.jsonl", String::from_utf8_lossy(TWO).replace('\n', "\r\n").into_bytes()),
        ("a.jsonl.gz", members),
        ("a.jsonl.zst", frames),
        ("a.json", TWO.to_vec()),
        ("a.json", b" [{\"text\": \"one\", \"x\": [\"}\\\"\"]},\n{\"text\": \"two\\n\"}]\n".to_vec()),
        ("a.json.zst", zstd(b"{\n \"text\": \"one\"\n}\n{\n \"text\": \"two\\n\"\n}")),
    ] {
        assert_eq!(texts_of(name, &content).unwrap(), ["one", "two\n"], "{name}");
    }
    assert_eq!(texts_of("a.json", b"{\"text\": \"a single object\"}").unwrap(), ["a single object"]);
    assert_eq!(texts_of("a.txt", "Grüße\n".as_bytes()).unwrap(), ["Grüße\n"]);
    assert_eq!(texts_of("a.txt.gz", &gzip(b"a\nb")).unwrap(), ["a\nb"]);
    assert_eq!(texts(&recorded("frames.jsonl.zst")).unwrap(), ["one", "two"]);
}

#[test]
fn empty_files_have_no_documents() {
    for (name, content) in [
        ("a.txt", Vec::new()),
        ("a.jsonl", Vec::new()),
        ("a.jsonl", b"\n\n".to_vec()),
        ("a.json", b" ".to_vec()),
        ("a.json", b"[]".to_vec()),
        ("a.jsonl.gz", gzip(b"")),
        ("a.txt.zst", zstd(b"")),
    ] {
        assert_eq!(texts_of(name, &content).unwrap(), [""; 0], "{name}");
    }
}

#[test]
fn null_and_empty_texts_are_skipped_and_counted() {
    let (_directory, file) = write("a.jsonl", b"{\"text\": null}\n{\"text\": \"a\"}\n{\"text\": \"\"}\n");
    let (parts, skipped) = read(&file, &Options::default()).unwrap();
    assert_eq!(parts, [Part { at: Cursor { record: 1, byte: 0 }, text: "a".into(), is_last: true }]);
    assert_eq!(skipped, 2);
}

#[test]
fn damaged_json_is_named() {
    for (name, content, expected) in [
        ("a.jsonl", &b"{\"text\": \"a\"}\n\n{\"text\": \"b"[..], "line 3: invalid JSON"),
        ("a.jsonl", b"{\"text\": \"b", "cut off"),
        ("a.jsonl", b"{\"text\": \"a\"} {\"text\": \"b\"}\n", "line 1: invalid JSON: trailing"),
        ("a.jsonl", b"{\"text\": \"\xff\"}\n", "line 1: invalid JSON"),
        ("a.jsonl", b"<!DOCTYPE html>\n", "line 1"),
        ("a.jsonl", b"\"a string\"\n", "expected a JSON object, found a string"),
        ("a.jsonl", b"{\"text\": 3}\n", "the field `text` is a number, but a text was expected"),
        (
            "a.jsonl",
            b"{\"text\": \"a\"}\n{\"texts\": \"b\"}\n",
            "line 2: the record does not have a field `text`. Its fields are `texts`",
        ),
        ("a.json", b"[{\"text\": \"a\"}", "object 2: the array does not end. The file seems to be cut off"),
        ("a.json", b"[{\"text\": \"a\"", "object 1: the object does not end"),
        ("a.json", b"[{\"text\": \"a\"} {\"text\": \"b\"}]", "expected `,` or `]`, found `{"),
        ("a.json", b"[{\"text\": \"a\"},]", "expected a JSON object, found `]`"),
        ("a.json", b"[{\"text\": \"a\"}] x", "expected the end of the file after the array, found `x`"),
        ("a.json", b"[1, 2]", "object 1: expected a JSON object, found `1, 2]`"),
        ("a.json", b"{\"data\": [{\"text\": \"a\"}]}", "Its fields are `data`"),
    ] {
        let message = message(name, content);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn other_data_is_refused_with_its_flag() {
    for (record, flag) in [
        (r#"{"messages": []}"#, "conversations: pass the file as --sft FILE"),
        (r#"{"prompt": "a", "completion": "b"}"#, "--sft FILE"),
        (r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#, "preference pairs: pass the file as --dpo FILE"),
        (r#"{"content": "a"}"#, "--text-field NAME"),
    ] {
        let message = message("a.jsonl", record.as_bytes());
        assert!(message.contains(flag), "{message}");
    }
    let fields = (0..30).map(|i| format!("\"f{i}\": 0")).collect::<Vec<_>>().join(",");
    assert!(message("a.jsonl", format!("{{{fields}}}").as_bytes()).contains("`f19` and 10 more"));
}

#[test]
fn damaged_compression_is_named() {
    let long: Vec<u8> = (0..2000).flat_map(|i| format!("{{\"text\": \"{}\"}}\n", i * 7919).into_bytes()).collect();
    for (name, whole) in [("a.jsonl.gz", gzip(&long)), ("a.jsonl.zst", zstd(&long)), ("a.txt.gz", gzip(&long))] {
        let cut = message(name, &whole[..whole.len() - 9]);
        assert!(cut.contains("its compressed data is cut off. Download it again"), "{cut}");
        let mut damaged = whole.clone();
        damaged[whole.len() / 2..][..64].fill(0xa5);
        assert!(texts_of(name, &damaged).is_err(), "{name}");
    }
    // A gzip file's checksum finds what its codes allow.
    let mut stored = gzip(&TWO.repeat(9));
    let crc = stored.len() - 6;
    stored[crc] ^= 1;
    assert!(message("a.jsonl.gz", &stored).contains("damaged"));
    let mut wide = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    wide.window_log(28).unwrap();
    wide.write_all(TWO).unwrap();
    let wide = message("a.jsonl.zst", &wide.finish().unwrap());
    assert!(wide.contains("without `zstd --long`"), "{wide}");
}

#[test]
fn damaged_text_is_named() {
    let late = [vec![b'a'; 300_000], vec![0xff], vec![b'a'; 9]].concat();
    assert!(message("a.txt", &late).contains("is not UTF-8 at byte 300000"));
    let zero = [vec![b'a'; 300_000], vec![0], vec![b'a'; 9]].concat();
    assert!(message("a.txt", &zero).contains("zero byte at byte 300000"));
}

#[test]
fn records_above_the_limit_are_refused() {
    let options = Options { record_limit: 20, ..Options::default() };
    for name in ["a.jsonl", "a.json", "a.jsonl.gz"] {
        let (_directory, file) = write(name, b"{\"text\": \"short\"}\n{\"text\": \"longer than that\"}\n");
        let message = format!("{:#}", read(&file, &options).unwrap_err());
        assert!(message.contains("longer than 20 bytes") && message.contains("split the record"), "{message}");
    }
}

#[test]
fn long_texts_come_in_parts_that_end_at_newlines() {
    let line = "Grüße".repeat(1000) + "\n";
    let long = line.repeat(100);
    let json = format!("{}\n", serde_json::json!({ "text": long }));
    let mut cuts = Vec::new();
    for (name, content) in [("a.txt", long.clone()), ("a.jsonl", json.clone()), ("a.json", json)] {
        let (_directory, file) = write(name, content.as_bytes());
        let (parts, _) = read(&file, &Options::default()).unwrap();
        assert_eq!(parts.iter().map(|part| &*part.text).collect::<String>(), long);
        assert!(parts.iter().all(|part| part.text.len() <= PART && part.text.ends_with('\n')));
        assert_eq!(parts.iter().filter(|part| part.is_last).count(), 1);
        // Reading continues at any part.
        let source = Source::open(&file, &Options::default()).unwrap();
        for part in &parts {
            let mut rest = source.documents(&source.block_at(0), part.at).unwrap();
            assert_eq!(rest.next().unwrap().unwrap(), *part);
        }
        cuts.push(parts);
    }
    assert!(cuts[0].len() > 2);
    assert!(cuts.iter().all(|parts| *parts == cuts[0]));
    let one = "ü".repeat(PART);
    let parts: Vec<usize> = texts_of("a.txt", one.as_bytes()).unwrap().iter().map(String::len).collect();
    assert_eq!(parts, [PART, PART]);
    let odd = texts_of("a.txt", format!("a{one}").as_bytes()).unwrap();
    assert_eq!(odd.iter().map(String::len).collect::<Vec<_>>(), [PART - 1, PART, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the size of the blocks, each line is read once, and reading continues at every record.
    #[test]
    fn blocks_cover_each_line_once(lens in prop::collection::vec(0..40_usize, 1..30), block in 1..200_u64, last in any::<bool>()) {
        let mut content = String::new();
        let mut expected = Vec::new();
        for (index, len) in lens.iter().enumerate() {
            match len {
                0 => content += "\n",
                len => {
                    expected.push(format!("{index}{}", "x".repeat(*len)));
                    content += &format!("{{\"text\": \"{index}{}\"}}\n", "x".repeat(*len));
                }
            }
        }
        if last {
            content.pop();
        }
        let (_directory, file) = write("a.jsonl", content.as_bytes());
        let options = Options { block, ..Options::default() };
        let source = Source::open(&file, &options).unwrap();
        let mut found = Vec::new();
        for block in source.blocks() {
            let parts: Vec<Part> =
                source.documents(&block, Cursor::default()).unwrap().collect::<Result<_>>().unwrap();
            for (index, part) in parts.iter().enumerate() {
                let rest: Vec<Part> = source.documents(&block, part.at).unwrap().collect::<Result<_>>().unwrap();
                prop_assert_eq!(&rest[..], &parts[index..]);
            }
            found.extend(parts.into_iter().map(|part| part.text));
        }
        prop_assert_eq!(found, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Objects are found by their braces, whatever braces, quotes and backslashes their texts have.
    #[test]
    fn json_is_read_whatever_its_texts_hold(texts in prop::collection::vec(r#"[\[\]{}"\\,a ü]{1,12}"#, 0..8), is_pretty in any::<bool>()) {
        let records: Vec<_> =
            texts.iter().map(|text| serde_json::json!({ "text": text, text: [{ "x": text }] })).collect();
        let array = if is_pretty { serde_json::to_string_pretty(&records) } else { serde_json::to_string(&records) };
        let separated: Vec<String> =
            records.iter().map(|record| if is_pretty { format!("{record:#}") } else { record.to_string() }).collect();
        for content in [array.unwrap(), separated.join("\n")] {
            prop_assert_eq!(&texts_of("a.json", content.as_bytes()).unwrap(), &texts);
            // A cut file is an error or has fewer texts, and never others.
            let cut = content.len() / 2;
            if let Ok(found) = texts_of("a.json", &content.as_bytes()[..cut]) {
                prop_assert!(texts.starts_with(&found));
            }
        }
    }
}

#[cfg(feature = "parquet")]
mod of_parquet {
    use super::*;

    #[test]
    fn codecs_give_the_same_texts() {
        for codec in ["none", "snappy", "gzip", "zstd", "lz4"] {
            let file = recorded(&format!("{codec}.parquet"));
            let expected = ["first document", "zweites Dokument: Grüße\n", "the third\ndocument", "語"];
            assert_eq!(texts(&file).unwrap(), expected, "{codec}");
            assert_eq!(read(&file, &Options::default()).unwrap().1, 2);
            let source = Source::open(&file, &Options::default()).unwrap();
            assert_eq!(source.num_blocks(), 2);
            let from = Cursor { record: 1, byte: 0 };
            let rest: Vec<Part> = source.documents(&Block::RowGroup(1), from).unwrap().map(Result::unwrap).collect();
            assert_eq!(rest, [Part { at: from, text: "語".into(), is_last: true }]);
        }
        let expected: Vec<String> = (0..100).map(|i| format!("row {i}")).collect();
        assert_eq!(texts(&recorded("delta.parquet")).unwrap(), expected);
        let source = Source::open(&recorded("delta.parquet"), &Options::default()).unwrap();
        let rest = source.documents(&Block::RowGroup(0), Cursor { record: 57, byte: 0 }).unwrap();
        assert_eq!(rest.map(|part| part.unwrap().text).collect::<Vec<_>>(), expected[57..]);
    }

    #[test]
    fn other_columns_are_refused() {
        let message = |field: &str| {
            let options = Options { field: field.into(), ..Options::default() };
            format!("{:#}", read(&recorded("zstd.parquet"), &options).unwrap_err())
        };
        assert!(message("texts").contains("does not have a field `texts`. Its fields are `id`, `text`, `tags`"));
        assert!(message("id").contains("the column `id` holds INT64, but texts were expected"));
        assert!(message("tags").contains("the column `tags` is a list or a struct"));
        let binary = format!("{:#}", texts(&recorded("binary.parquet")).unwrap_err());
        assert!(binary.contains("binary.parquet, row group 0, row 2: the text is not UTF-8 at byte 0"), "{binary}");
        let brotli = format!("{:#}", texts(&recorded("brotli.parquet")).unwrap_err());
        assert!(brotli.contains("brotli.parquet is compressed with BROTLI"), "{brotli}");
    }

    #[test]
    fn damaged_files_are_named() {
        let whole = fs::read(recorded("none.parquet").path).unwrap();
        let cut = message("a.parquet", &whole[..whole.len() - 1]);
        assert!(cut.contains("is damaged or cut off: expected a Parquet file"), "{cut}");
        // Whatever byte is damaged, reading ends, with an error or other texts.
        for at in 4..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            let _ = texts_of("a.parquet", &damaged);
        }
    }
}

#[test]
fn records_of_all_formats_are_json() {
    let members = gzip(b"{\"a\": [1]}\n\n{\"a\": \"x\"}\n");
    for (name, content) in [("a.jsonl.gz", &members[..]), ("a.json", b"[{\"a\": [1]}, {\"a\": \"x\"}]")] {
        let (_directory, file) = write(name, content);
        let found: Vec<Record> = records(&file, 1000).unwrap().map(Result::unwrap).collect();
        let json: Vec<&str> = found.iter().map(|record| record.json.trim()).collect();
        assert_eq!(json, [r#"{"a": [1]}"#, r#"{"a": "x"}"#]);
        assert!(found[1].place.ends_with("line 3") || found[1].place.ends_with("object 2"), "{}", found[1].place);
    }
    let (_directory, text) = write("a.txt", b"x");
    assert!(records(&text, 1000).err().unwrap().to_string().contains("has no records"));
    #[cfg(feature = "parquet")]
    {
        let found: Vec<Record> = records(&recorded("zstd.parquet"), 1000).unwrap().map(Result::unwrap).collect();
        assert_eq!(found.len(), 6);
        let last: serde_json::Value = serde_json::from_str(&found[5].json).unwrap();
        assert_eq!(last, serde_json::json!({ "id": 5, "text": "語", "tags": ["a"] }));
        assert!(found[5].place.ends_with("zstd.parquet, row 6"), "{}", found[5].place);
        let short = records(&recorded("zstd.parquet"), 10).unwrap().next().unwrap().unwrap_err().to_string();
        assert!(short.contains("row 1: the record has") && short.contains("split the record"), "{short}");
        let whole = fs::read(recorded("none.parquet").path).unwrap();
        for at in 4..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            let (_directory, file) = write("a.parquet", &damaged);
            if let Ok(rows) = records(&file, 1000) {
                // Ends at the first error.
                let _ = rows.take(1000).take_while(Result::is_ok).count();
            }
        }
    }
}
