use std::fs::{self, File};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::data::text::tests::TOKENIZER;
use crate::data::tokens::*;

pub(crate) fn data_of(ids: &[&[u32]]) -> Data {
    let mut data = Data::empty("a test".into());
    ids.iter().for_each(|ids| data.push(Ids::Tokenised(ids.to_vec())));
    data
}

fn all(data: &Data) -> Vec<u32> {
    let mut out = vec![0; data.len() as usize];
    data.copy_to(0, &mut out).unwrap();
    out
}

fn bin(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn read(path: &Path, vocab_size: usize) -> Result<Data> {
    Data::load(Some(path), &Text::new(None).unwrap(), vocab_size)
}

fn message(data: Result<Data>) -> String {
    format!("{:#}", data.err().unwrap())
}

#[test]
fn reads_span_files() {
    let data = data_of(&[&[0, 1, 2], &[], &[3], &[4, 5]]);
    for start in 0..6_u32 {
        for end in start + 1..=6 {
            let mut out = vec![99; (end - start) as usize];
            data.copy_to(start.into(), &mut out).unwrap();
            assert_eq!(out, (start..end).collect::<Vec<_>>());
        }
    }
    data.copy_to(6, &mut []).unwrap();
    for (start, len) in [(0, 7), (6, 1), (7, 0), (u64::MAX, 2)] {
        let error = data.copy_to(start, &mut vec![0; len]).unwrap_err().to_string();
        assert!(error.contains("are not in 6 tokens of a test"), "{error}");
    }
}

/// Ids below 65536 and above, as NumPy writes them in 32 and 64 bits.
#[test]
fn wider_tokens_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens.bin");
    let ids: Vec<u32> = (0..64).map(|i| i * 3 % 97).collect();
    let wide: Vec<u32> = ids.iter().map(|id| id + if id % 7 == 0 { 70_000 } else { 0 }).collect();
    let of_32 = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let of_64 = ids.iter().flat_map(|id| u64::from(*id).to_le_bytes()).collect();
    for (bytes, bits, vocab_size) in [(of_32(&ids), 32, 256), (of_64, 64, 256), (of_32(&wide), 32, 128_256)] {
        fs::write(&file, bytes).unwrap();
        let error = message(read(&file, vocab_size));
        let expected = format!("tokens.bin holds ids of {bits} bits");
        assert!(error.contains(&expected) && error.contains("--token-bits 32"), "{error}");
    }
    let narrow: Vec<u16> = ids.iter().map(|id| *id as u16).collect();
    for (ids, vocab_size) in [(narrow, 256), (vec![1; 64], 128_256), (vec![0; 64], 256)] {
        fs::write(&file, bin(&ids)).unwrap();
        assert_eq!(all(&read(&file, vocab_size).unwrap()).len(), ids.len());
    }
}

#[test]
fn truncated_token_file_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens.bin");
    fs::write(&file, bin(&[1; 10_000])).unwrap();
    let data = read(&file, 256).unwrap();
    File::options().write(true).open(&file).unwrap().set_len(4_000).unwrap();
    let mut out = vec![0; 100];
    data.copy_to(1_900, &mut out).unwrap();
    let error = format!("{:#}", data.copy_to(1_901, &mut out).unwrap_err());
    assert!(error.contains("cannot read tokens 1901 to 2001 of") && error.contains("tokens.bin"), "{error}");
    assert!(error.contains("which had 10000 when the run began"), "{error}");
}

/// Runs in a process of its own, started by the next test, because limits apply to a process.
#[test]
fn read_with_few_descriptors() {
    let Some(directory) = env::var_os("FSDP_TEST_DATA") else { return };
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(30), ..limit }).unwrap();
    assert_eq!(all(&read(Path::new(&directory), 256).unwrap()).len(), 100);
}

#[test]
fn file_limit_is_raised() {
    let directory = tempfile::tempdir().unwrap();
    (0..100).for_each(|i| fs::write(directory.path().join(format!("{i}.bin")), bin(&[i])).unwrap());
    let child = std::process::Command::new(env::current_exe().unwrap())
        .args(["--exact", "data::tokens::tests::read_with_few_descriptors", "--nocapture"])
        .env("FSDP_TEST_DATA", directory.path())
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && output.contains("1 passed"), "{output}");
}

#[test]
fn checksum_depends_on_tokens_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let checksum = |name: &str| read(&path(name), 256).unwrap().checksum();
    fs::write(path("a.bin"), bin(&[1, 2, 3])).unwrap();
    fs::write(path("b.bin"), bin(&[1, 2, 4])).unwrap();
    assert_ne!(checksum("a.bin"), checksum("b.bin"));
    fs::create_dir(path("halves")).unwrap();
    fs::write(path("halves/1.bin"), bin(&[1])).unwrap();
    fs::write(path("halves/2.bin"), bin(&[2, 3])).unwrap();
    assert_eq!(checksum("a.bin"), checksum("halves"));
    fs::write(path("a.txt"), "one").unwrap();
    fs::write(path("b.txt"), "onE").unwrap();
    assert_ne!(checksum("a.txt"), checksum("b.txt"));
    let model = path("model");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("tokenizer.json"), TOKENIZER).unwrap();
    let tokenised = |content: &str| {
        fs::write(path("words.txt"), content).unwrap();
        Data::load(Some(&path("words.txt")), &Text::new(Some(&model)).unwrap(), 1000).unwrap().checksum()
    };
    assert_eq!(tokenised("a b"), tokenised("a  b"));
    assert_ne!(tokenised("a b"), tokenised("b a"));
}

#[test]
fn token_files_are_u16_little_endian_in_name_order() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("b.bin"), bin(&[3, 65_535])).unwrap();
    fs::write(directory.path().join("a.bin"), bin(&[258])).unwrap();
    fs::write(directory.path().join("aa.bin"), b"").unwrap();
    let data = read(directory.path(), 65_536).unwrap();
    assert_eq!(all(&data), [258, 3, 65_535]);
    assert_eq!(data.to_string(), format!("3 tokens of 3 token files in {}", directory.path().display()));
}

#[test]
fn odd_length_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("odd.bin");
    fs::write(&file, b"abc").unwrap();
    let message = message(read(&file, 65_536));
    assert!(message.contains("odd.bin has 3 bytes, which is not a multiple of 2"), "{message}");
}

#[test]
fn first_id_beyond_the_vocabulary_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens.bin");
    // Longer than one read.
    let mut ids = vec![130; 600_000];
    (ids[550_000], ids[550_001]) = (131, 200);
    fs::write(&file, bin(&ids)).unwrap();
    let message = message(read(&file, 131));
    assert!(message.contains("token 550000 of ") && message.contains("tokens.bin has id 131"), "{message}");
    assert!(
        message.contains("131 ids, 0 to 130") && message.contains("tokenizer that belongs to this model"),
        "{message}"
    );
    assert_eq!(read(&file, 201).unwrap().len(), 600_000);
}

#[test]
fn texts_are_joined_by_newlines() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("1.txt"), "one").unwrap();
    fs::write(directory.path().join("2.png"), b"\x89PNG\0").unwrap();
    fs::write(directory.path().join("3.txt"), "").unwrap();
    fs::write(directory.path().join("4.txt"), "two\n").unwrap();
    let data = read(directory.path(), 256).unwrap();
    assert_eq!(Text::new(None).unwrap().decode(&all(&data)).unwrap(), "one\n\ntwo\n");
    assert!(data.to_string().contains("3 text files in") && data.to_string().ends_with("read as bytes"), "{data}");
}

#[test]
fn binary_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("weights.safetensors");
    fs::write(&file, b"\0\0").unwrap();
    for path in [directory.path(), &file] {
        assert!(message(read(path, 256)).contains("it holds a model's weights"));
    }
    fs::rename(&file, directory.path().join("unknown")).unwrap();
    assert!(message(read(directory.path(), 256)).contains("holds no text files"));
    assert!(message(read(&directory.path().join("unknown"), 256)).contains("is not text"));
}

#[test]
fn bytes_beyond_the_vocabulary_suggest_a_tokenizer() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.txt");
    fs::write(&file, "ab\u{e9}").unwrap();
    let text = Text::new(Some(directory.path())).unwrap();
    let message = message(Data::load(Some(&file), &text, 131));
    assert!(
        message.contains("token 2 of ") && message.contains("id 195") && message.contains("has no tokenizer.json"),
        "{message}"
    );
}

#[test]
fn ids_beyond_the_vocabulary_suggest_another_tokenizer() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("tokenizer.json"), TOKENIZER).unwrap();
    let text = Text::new(Some(directory.path())).unwrap();
    let texts = directory.path().join("texts");
    fs::create_dir(&texts).unwrap();
    fs::write(texts.join("1.txt"), "a b").unwrap();
    fs::write(texts.join("2.txt"), "b rare").unwrap();
    assert_eq!(all(&Data::load(Some(&texts), &text, 1000).unwrap()), [1, 2, 2, 999]);
    let message = message(Data::load(Some(&texts), &text, 3));
    assert!(
        message.contains("token 1 of ")
            && message.contains("2.txt has id 999")
            && message.contains("tokenizer.json gives ids"),
        "{message}"
    );
}

#[test]
fn workspace_is_the_default() {
    // Tests run in their package's directory, which may be in a workspace.
    let data = Data::load(None, &Text::new(None).unwrap(), 256);
    match DataFiles::of_workspace(&env::current_dir().unwrap()) {
        Ok(_) => assert!(data.unwrap().len() > 1000),
        Err(_) => assert!(message(data).contains("Pass --data PATH")),
    }
}
