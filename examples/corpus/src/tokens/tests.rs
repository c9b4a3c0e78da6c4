use std::fs;

use super::*;

const OPTIONS: Options = Options { width: Width::U16, vocab_size: 300, end: None };

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn opened(path: &Path, options: Options) -> Result<Tokens> {
    Tokens::open(&Files::find(path)?, options)
}

fn all(tokens: &Tokens) -> Vec<u32> {
    let mut ids = vec![0; tokens.len() as usize];
    tokens.read(0, &mut ids).unwrap();
    ids
}

/// Writes a file and its index, and returns the message of opening it.
fn message(content: &[u8], index: Option<&[u8]>, options: Options) -> String {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.bin");
    fs::write(&path, content).unwrap();
    if let Some(index) = index {
        fs::write(path.with_extension("idx"), index).unwrap();
    }
    let message = format!("{:#}", opened(&path, options).err().unwrap());
    assert!(message.contains("a.bin") || message.contains("a.idx"), "{message}");
    message
}

fn bytes_of(ids: impl IntoIterator<Item = u16>) -> Vec<u8> {
    ids.into_iter().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn headers_and_indices_are_recognised() {
    for name in ["llmc_gpt2.bin", "llmc_llama3.bin"] {
        let tokens = opened(&recorded(name), OPTIONS).unwrap();
        assert_eq!(all(&tokens), [250, 1, 2, 3, 250, 4, 5], "{name}");
        assert_eq!(tokens.starts(0..7).unwrap(), [0]);
        let tokens = opened(&recorded(name), Options { end: Some(250), ..OPTIONS }).unwrap();
        assert_eq!(tokens.starts(0..7).unwrap(), [0, 1, 5]);
        assert_eq!(tokens.starts(2..5).unwrap(), [0; 0]);
    }
    for name in ["megatron_u16.bin", "megatron_i32.bin"] {
        let tokens = opened(&recorded(name), OPTIONS).unwrap();
        assert_eq!(all(&tokens), (5..15).collect::<Vec<u32>>(), "{name}");
        assert_eq!(tokens.starts(0..10).unwrap(), [0, 3, 6]);
        assert_eq!(tokens.starts(1..6).unwrap(), [3]);
        assert_eq!(tokens.starts(3..4).unwrap(), [3]);
    }
}

#[test]
fn files_are_concatenated() {
    let directory = tempfile::tempdir().unwrap();
    for (index, ids) in [&[1_u32, 2, 9, 3][..], &[], &[4], &[5, 9]].iter().enumerate() {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        fs::write(directory.path().join(format!("{index}.bin")), bytes).unwrap();
    }
    let options = Options { width: Width::U32, vocab_size: 10, end: Some(9) };
    let tokens = Tokens::open(&Files::find(directory.path()).unwrap(), options).unwrap();
    assert_eq!(all(&tokens), [1, 2, 9, 3, 4, 5, 9]);
    let mut ids = [0; 3];
    tokens.read(3, &mut ids).unwrap();
    assert_eq!(ids, [3, 4, 5]);
    assert_eq!(tokens.starts(0..7).unwrap(), [0, 3, 4, 5]);
    assert!(tokens.read(5, &mut ids).unwrap_err().to_string().contains("there are 7"));
    assert_eq!(tokens.marks().unwrap()[3].name, "3.bin");
}

#[test]
fn damaged_files_are_named() {
    assert!(message(&[1; 3], None, OPTIONS).contains("not a multiple of 2"));
    assert!(message(&[1; 6], None, Options { width: Width::U32, ..OPTIONS }).contains("not a multiple of 4"));
    let wide: Vec<u8> = (0..40_u32).flat_map(u32::to_le_bytes).collect();
    assert!(message(&wide, None, OPTIONS).contains("--token-bits 32"));
    let widest: Vec<u8> = (0..40_u64).flat_map(u64::to_le_bytes).collect();
    for width in [Width::U16, Width::U32] {
        assert!(message(&widest, None, Options { width, ..OPTIONS }).contains("64 bits"));
    }
    assert!(message(b"\x93NUMPY\x01\0", None, OPTIONS).contains("tofile"));
    let header = fs::read(recorded("llmc_gpt2.bin")).unwrap();
    assert!(message(&header[..header.len() - 2], None, OPTIONS).contains("its header says 7 tokens, 1038 bytes"));
    let beyond = message(&bytes_of([1, 300]), None, OPTIONS);
    assert!(beyond.contains("token 1 of") && beyond.contains("has id 300, but the model's vocabulary has 300 ids"));
    let (data, index) =
        (fs::read(recorded("megatron_u16.bin")).unwrap(), fs::read(recorded("megatron_u16.idx")).unwrap());
    let with = |at: usize, byte: u8| {
        let mut index = index.clone();
        index[at] = byte;
        index
    };
    for (data, index, expected) in [
        (&data[..], index[..index.len() - 8].to_vec(), "4 sequences and 4 documents"),
        (&data[..18], index.clone(), "has 18 bytes, but its index"),
        (&data, with(0, 0), "is not an index of Megatron-LM"),
        (&data, with(9, 2), "has version 2"),
        (&data, with(17, 7), "floats"),
        (&data, with(17, 9), "type code 9"),
        (&data, with(24, 0xff), "its header says"),
        (&data, with(index.len() - 8, 9), "documents of sequences 0 to 9, but 4 sequences"),
        (&data, Vec::new(), "its first bytes are missing"),
        (&data, index[..20].to_vec(), "is cut off after 20 bytes"),
    ] {
        let message = message(data, Some(&index), OPTIONS);
        assert!(message.contains(expected), "{message}");
    }
    assert!(format!("{:#}", opened(&recorded("megatron_f32.bin"), OPTIONS).err().unwrap()).contains("floats"));
}

#[test]
fn ids_beyond_the_sample_are_checked_when_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.bin");
    fs::write(&path, bytes_of((0..100_000).map(|index| if index == 90_000 { 999 } else { 7 }))).unwrap();
    let tokens = opened(&path, OPTIONS).unwrap();
    tokens.read(0, &mut [0; 1000]).unwrap();
    let message = tokens.read(89_999, &mut [0; 9]).unwrap_err().to_string();
    assert!(message.contains("token 90000 of") && message.contains("has id 999"), "{message}");
    fs::write(&path, bytes_of([1, 2, 3])).unwrap();
    let message = format!("{:#}", tokens.read(50, &mut [0; 9]).unwrap_err());
    assert!(message.contains("cannot read tokens 50 to 59") && message.contains("had 100000"), "{message}");
}

#[test]
fn damage_in_an_index_does_not_panic() {
    let index = fs::read(recorded("megatron_u16.idx")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.bin");
    fs::copy(recorded("megatron_u16.bin"), &path).unwrap();
    for at in 0..index.len() {
        for byte in [0, 1, 0x7f, 0xff] {
            let mut damaged = index.clone();
            damaged[at] = byte;
            fs::write(path.with_extension("idx"), damaged).unwrap();
            if let Ok(tokens) = opened(&path, OPTIONS) {
                let _ = tokens.starts(0..tokens.len());
                let _ = tokens.starts(3..5);
            }
        }
    }
}
