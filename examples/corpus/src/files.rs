//! Files of a corpus: a file, a directory or a pattern.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use glob::{MatchOptions, Pattern};
use walkdir::{DirEntry, WalkDir};

use crate::format::{Compression, CorpusFile, Format, Sniffed, is, sniff};
use crate::shards;

/// How patterns match paths.
const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
/// Names of JSON files that describe the data beside them.
const DESCRIPTIONS: [&str; 6] =
    ["dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json", "metadata.json", "config.json"];
/// Extensions of files that describe the data beside them.
const BESIDE: [&str; 8] = ["md", "yaml", "yml", "py", "sh", "lock", "sha256", "crc"];
/// Names of files that describe the data beside them.
const NAMED: [&str; 6] = ["readme", "license", "licence", "notice", "citation", "_success"];

/// Files of a corpus, in the order in which they are read.
///
/// ```
/// use fsdp_corpus::files::{Content, Files};
///
/// let directory = tempfile::tempdir()?;
/// for name in ["b.jsonl", "a.jsonl", "README.md"] {
///     std::fs::write(directory.path().join(name), "{\"text\": \"a document\"}\n")?;
/// }
/// let files = Files::find(directory.path())?;
/// let Content::Documents(found) = &files.content else { panic!("expected documents") };
/// let names: Vec<String> = found.iter().map(|file| files.name(&file.path)).collect();
/// assert_eq!(names, ["a.jsonl", "b.jsonl"]);
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Directory that holds the files, or the only file.
    pub root: PathBuf,
    /// The files.
    pub content: Content,
}

/// Files of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Files of text or of records with a text.
    Documents(Vec<CorpusFile>),
    /// Files of token ids.
    Tokens(Vec<PathBuf>),
    /// Directory written by [`prepare`](crate::prepare).
    Prepared(PathBuf),
}

impl Files {
    /// Finds the files of a path: a file, a directory, a pattern such as `data/*.parquet`, or the common name of
    /// Megatron-LM's `.bin` and `.idx`.
    ///
    /// A directory is read recursively in the order of names. Hidden files, directories named `target`, and symbolic
    /// links within the directory are left out. In a directory of text, binary files are left out. In a directory of
    /// records, descriptions such as `README.md` and `dataset_info.json` are left out.
    ///
    /// # Errors
    /// Nothing is found, a file can't be read, or the files are of different kinds.
    pub fn find(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let kind = match fs::metadata(path) {
            Err(_) if is_pattern(path) => return Self::of_pattern(path),
            // Megatron-LM names its two files without their extensions.
            Err(_) if with(path, "bin").is_file() && with(path, "idx").is_file() => {
                return Self::find(with(path, "bin"));
            }
            kind => kind.with_context(|| format!("cannot read {}", path.display()))?,
        };
        if kind.is_dir() {
            if shards::is_prepared(path) {
                return Ok(Files { root: path.to_owned(), content: Content::Prepared(path.to_owned()) });
            }
            let content = of_files(path, walk(path)?)?;
            return Ok(Files { root: path.to_owned(), content });
        }
        ensure!(
            kind.is_file(),
            "{} is neither a file nor a directory; every rank must be able to read it",
            path.display()
        );
        if path.file_name() == Some(OsStr::new(shards::INDEX)) && path.parent().is_some_and(shards::is_prepared) {
            return Self::find(path.parent().unwrap_or(path));
        }
        let content = match Format::of_file(path)? {
            Format::Tokens => Content::Tokens(vec![path.to_owned()]),
            format => Content::Documents(vec![CorpusFile { path: path.to_owned(), format }]),
        };
        Ok(Files { root: path.to_owned(), content })
    }

    /// Takes a list of files in this order.
    fn of_list(root: &Path, files: Vec<PathBuf>) -> Result<Self> {
        let content = match &files[..] {
            [file] => return Ok(Files { root: root.to_owned(), ..Self::find(file)? }),
            _ => of_files(root, files)?,
        };
        Ok(Files { root: root.to_owned(), content })
    }

    /// Returns the name of a file within the corpus. It stays the same if the whole corpus moves.
    pub fn name(&self, path: &Path) -> String {
        let name = path.strip_prefix(&self.root).unwrap_or(path);
        let name = if name.as_os_str().is_empty() { Path::new(path.file_name().unwrap_or_default()) } else { name };
        name.to_string_lossy().into_owned()
    }

    fn of_pattern(pattern: &Path) -> Result<Self> {
        let text = pattern.to_str().with_context(|| format!("the pattern {} is not UTF-8", pattern.display()))?;
        let mut files = Vec::new();
        for found in glob::glob_with(text, MATCHING).with_context(|| format!("{text} is not a valid pattern"))? {
            let found = found.with_context(|| format!("cannot list {text}"))?;
            if found.is_file() {
                files.push(found);
            }
        }
        ensure!(!files.is_empty(), "no file matches {text}. Quote the pattern, so that the shell does not expand it");
        files.sort();
        let root: PathBuf = pattern.components().take_while(|part| !is_pattern(part)).collect();
        Self::of_list(&root, files)
    }
}

/// Returns those of `names` that match a pattern, as [`Files::find`] matches paths.
///
/// ```
/// let names = ["data/a.parquet", "data/b.parquet", "README.md"];
/// assert_eq!(fsdp_corpus::files::matching("data/*.parquet", names)?, names[..2]);
/// # anyhow::Ok(())
/// ```
///
/// # Errors
/// The pattern is not valid.
pub fn matching<'a>(pattern: &str, names: impl IntoIterator<Item = &'a str>) -> Result<Vec<&'a str>> {
    let parsed = Pattern::new(pattern).with_context(|| format!("{pattern} is not a valid pattern"))?;
    Ok(names.into_iter().filter(|name| parsed.matches_with(name, MATCHING)).collect())
}

/// Appends an extension to a path.
fn with(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

/// Returns whether a path that does not exist may be a pattern.
pub fn is_pattern(path: impl AsRef<Path>) -> bool {
    path.as_ref().as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte))
}

/// Files of a directory by their kind.
#[derive(Default)]
struct Kinds {
    order: HashMap<PathBuf, usize>,
    tokens: Vec<PathBuf>,
    parquet: Vec<CorpusFile>,
    records: Vec<CorpusFile>,
    json: Vec<CorpusFile>,
    text: Vec<CorpusFile>,
    descriptions: Vec<CorpusFile>,
    unsupported: Vec<(PathBuf, &'static str)>,
}

/// Classifies the files of `root`, and fails if they are of several kinds.
fn of_files(root: &Path, files: Vec<PathBuf>) -> Result<Content> {
    ensure!(!files.is_empty(), "{} holds no visible files", root.display());
    let order = files.iter().enumerate().map(|(index, path)| (path.clone(), index)).collect();
    let mut kinds = Kinds { order, ..Kinds::default() };
    for path in files {
        // An index of Megatron belongs to the .bin file of its name.
        if is(&path, &["idx"]) {
            continue;
        }
        let format = match sniff(&path)? {
            Sniffed::Corpus(format) => format,
            Sniffed::Binary => continue,
            Sniffed::Unsupported(way_out) => {
                kinds.unsupported.push((path, way_out));
                continue;
            }
        };
        let is_json = matches!(format, Format::Json(_)) && is(&path, &["json"]);
        let list = match format {
            Format::Tokens => {
                kinds.tokens.push(path);
                continue;
            }
            Format::Parquet => &mut kinds.parquet,
            Format::Text(_) | Format::Json(_) if describes(&path) => &mut kinds.descriptions,
            Format::JsonLines(_) => &mut kinds.records,
            // Without records beside them, these may be settings of a source tree.
            Format::Json(_) if is_json => &mut kinds.json,
            Format::Json(_) => &mut kinds.records,
            Format::Text(_) => &mut kinds.text,
        };
        list.push(CorpusFile { path, format });
    }
    kinds.content(root)
}

impl Kinds {
    fn content(mut self, root: &Path) -> Result<Content> {
        let is_text = self.json.is_empty() || !self.text.is_empty();
        if is_text && self.tokens.is_empty() && self.parquet.is_empty() && self.records.is_empty() {
            return self.into_text(root);
        }
        self.records.append(&mut self.json);
        self.records.sort_by_key(|file| self.order.get(&file.path));
        let first = |files: &[CorpusFile]| files.first().map(|file| file.path.clone());
        let tables = self.unsupported.first().map(|(path, _)| path.clone());
        let kinds = [
            ("token ids", self.tokens.first().cloned()),
            ("Parquet", first(&self.parquet)),
            ("JSON", first(&self.records)),
            ("text", first(&self.text)),
            ("files of other formats", tables),
        ];
        let found: Vec<String> = kinds
            .into_iter()
            .filter_map(|(kind, path)| path.map(|path| format!("{kind} ({})", path.display())))
            .collect();
        ensure!(
            found.len() == 1,
            "{} holds files of different kinds: {}. Pass one file, or a pattern such as '{}/*.jsonl'",
            root.display(),
            found.join(", "),
            root.display()
        );
        if !self.tokens.is_empty() {
            return Ok(Content::Tokens(self.tokens));
        }
        if !self.parquet.is_empty() {
            return Ok(Content::Documents(self.parquet));
        }
        refuse_copies(&self.records)?;
        Ok(Content::Documents(self.records))
    }

    /// Makes a corpus of text. JSON, tables and Markdown are text beside other text.
    fn into_text(mut self, root: &Path) -> Result<Content> {
        if self.text.is_empty()
            && let Some((path, way_out)) = self.unsupported.first()
        {
            bail!("{} can't be read as a corpus: {way_out}", path.display());
        }
        self.text.append(&mut self.descriptions);
        self.text.append(&mut self.json);
        for file in &mut self.text {
            if let Format::Json(compression) = file.format {
                file.format = Format::Text(compression);
            }
        }
        let tables = self.unsupported.into_iter().map(|(path, _)| path).filter(|path| is(path, &["csv", "tsv"]));
        self.text.extend(tables.map(|path| CorpusFile { path, format: Format::Text(Compression::None) }));
        ensure!(
            !self.text.is_empty(),
            "{} holds no text files (UTF-8 without zero bytes), records or token files",
            root.display()
        );
        self.text.sort_by_key(|file| self.order.get(&file.path));
        refuse_copies(&self.text)?;
        Ok(Content::Documents(self.text))
    }
}

/// Fails if a file is there twice: as it is and compressed.
fn refuse_copies(files: &[CorpusFile]) -> Result<()> {
    let mut seen: BTreeMap<PathBuf, &Path> = BTreeMap::new();
    for CorpusFile { path, .. } in files {
        let inner = if is(path, &["gz", "zst", "zstd"]) { path.with_extension("") } else { path.clone() };
        if let Some(other) = seen.insert(inner, path) {
            bail!(
                "{} and {} seem to be the same data, which would be read twice: remove one of them, or pass a pattern",
                other.display(),
                path.display()
            );
        }
    }
    Ok(())
}

/// Returns whether a file describes the data beside it.
fn describes(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let stem = name.split('.').next().unwrap_or_default();
    DESCRIPTIONS.contains(&&*name) || is(path, &BESIDE) || NAMED.contains(&stem)
}

/// Lists all files below `root` in the same order on every machine, except hidden ones and those in `target`
/// directories.
///
/// A symbolic link to another file or directory is read, and one within `root` is left out, so that nothing is read twice.
fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut targets) = (Vec::new(), HashSet::new());
    let own = root.canonicalize().with_context(|| format!("cannot list {}", root.display()))?;
    for file in entries(root, true)? {
        let Ok(target) = fs::read_link(&file) else {
            files.push(file);
            continue;
        };
        let found = file.canonicalize().with_context(|| {
            format!("{} is a link to {}, which can't be read: mend or remove it", file.display(), target.display())
        })?;
        if found.strip_prefix(&own).is_ok_and(|path| path.iter().all(|name| !is_left_out(name))) {
            continue;
        }
        ensure!(
            !own.starts_with(&found),
            "{} is a link to {}, a directory above it: remove the link",
            file.display(),
            found.display()
        );
        if !targets.insert(found.clone()) {
            continue;
        }
        if found.is_dir() { files.extend(entries(&file, false)?) } else { files.push(file) }
    }
    Ok(files)
}

/// Lists all files below `root` in the same order on every machine, except hidden files, those in directories named
/// `target`, and symbolic links.
///
/// # Errors
/// A directory can't be read.
pub fn list(root: &Path) -> Result<Vec<PathBuf>> {
    entries(root, false)
}

/// Lists as [`list`] does, with symbolic links, which are not followed, if `links` is true.
fn entries(root: &Path, links: bool) -> Result<Vec<PathBuf>> {
    let wanted = |entry: &DirEntry| {
        let is_file = entry.file_type().is_file() && !entry.file_name().as_encoded_bytes().starts_with(b".");
        entry.depth() == 0 || is_file || !is_left_out(entry.file_name())
    };
    let mut files = Vec::new();
    for entry in WalkDir::new(root).sort_by_file_name().into_iter().filter_entry(wanted) {
        let entry = entry.with_context(|| format!("cannot list {}", root.display()))?;
        if entry.file_type().is_file() || links && entry.depth() > 0 && entry.path_is_symlink() {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// Returns whether an entry is hidden, or a directory of this name is left out.
fn is_left_out(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".") || name == "target"
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        directory
    }

    /// Returns the names of the files that are found.
    fn names(path: &Path) -> Result<Vec<String>> {
        let files = Files::find(path)?;
        let paths: Vec<PathBuf> = match &files.content {
            Content::Documents(found) => found.iter().map(|file| file.path.clone()).collect(),
            Content::Tokens(found) => found.clone(),
            Content::Prepared(path) => vec![path.clone()],
        };
        Ok(paths.iter().map(|path| files.name(path)).collect())
    }

    fn message(path: &Path) -> String {
        format!("{:#}", Files::find(path).unwrap_err())
    }

    #[test]
    fn directories_of_text_are_read_recursively_in_order() {
        let root = tree(&[
            ("b.txt", b"b"),
            ("a/z.txt.gz", b""),
            ("a/y/x.md", b""),
            ("a/settings.json", b"{}"),
            ("a/table.csv", b""),
            ("picture.png", b"\x89PNG\0"),
            (".git/config", b""),
            (".hidden", b""),
            ("target/debug/out.txt", b""),
        ]);
        symlink(root.path().join("a"), root.path().join("link")).unwrap();
        let expected = ["a/settings.json", "a/table.csv", "a/y/x.md", "a/z.txt.gz", "b.txt"];
        assert_eq!(names(root.path()).unwrap(), expected);
        symlink("/nowhere", root.path().join("e.txt")).unwrap();
        assert!(message(root.path()).contains("e.txt is a link to /nowhere, which can't be read"));
    }

    fn paths(root: &Path) -> Vec<PathBuf> {
        let Content::Documents(found) = Files::find(root).unwrap().content else { panic!("expected documents") };
        found.into_iter().map(|file| file.path).collect()
    }

    #[test]
    fn links_to_other_files_are_read() {
        let other = tree(&[("blob", b"x"), ("dir/c.txt", b"")]);
        let root = tree(&[(".cache/hidden", b"")]);
        let link = |to: PathBuf, name: &str| symlink(to, root.path().join(name)).unwrap();
        link(other.path().join("blob"), "a.txt");
        link(other.path().join("dir"), "b");
        link(root.path().join(".cache/hidden"), "d.txt");
        let expected = ["a.txt", "b/c.txt", "d.txt"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(paths(root.path()), expected);
        link("/nowhere".into(), "e.txt");
        let message = message(root.path());
        assert!(message.contains("e.txt is a link to /nowhere, which can't be read"), "{message}");
    }

    #[test]
    fn hidden_root_is_read() {
        let root = tree(&[(".data/a.txt", b"")]);
        let path = root.path().join(".data");
        assert_eq!(paths(&path), [path.join("a.txt")]);
    }

    #[test]
    fn directories_of_records_leave_descriptions_out() {
        let root = tree(&[
            ("data/b.jsonl.gz", b"{}"),
            ("data/a.jsonl", b"{}"),
            ("more.json", b"[]"),
            ("dataset_info.json", b"{}"),
            ("README.md", b"A dataset"),
            ("LICENSE", b"MIT"),
            ("picture.png", b"\x89PNG\0"),
        ]);
        assert_eq!(names(root.path()).unwrap(), ["data/a.jsonl", "data/b.jsonl.gz", "more.json"]);
        fs::write(root.path().join("data/a.jsonl.gz"), "{}").unwrap();
        assert!(message(root.path()).contains("seem to be the same data"));
    }

    #[test]
    fn directory_of_only_json_holds_records() {
        let root = tree(&[("a.json", b"[]"), ("README.md", b"A dataset"), ("dataset_info.json", b"{}")]);
        let Content::Documents(files) = Files::find(root.path()).unwrap().content else { panic!() };
        assert_eq!(files.len(), 1);
        assert!(files[0].format.has_fields());
    }

    #[test]
    fn mixed_directories_are_refused() {
        for other in ["b.txt", "b.jsonl", "b.parquet", "b.csv"] {
            let root = tree(&[("1.bin", b""), ("1.idx", b""), (other, b"PAR1")]);
            let message = message(root.path());
            assert!(message.contains("1.bin") && message.contains(other), "{message}");
            assert!(message.contains("different kinds") && message.contains("*.jsonl"), "{message}");
        }
        let root = tree(&[("2.bin", b""), ("1.bin", b""), ("1.idx", b"")]);
        assert_eq!(names(root.path()).unwrap(), ["1.bin", "2.bin"]);
        assert_eq!(names(&root.path().join("1")).unwrap(), ["1.bin"]);
        assert!(message(tree(&[("a.arrow", b"")]).path()).contains("to_parquet"));
        assert!(message(tree(&[("a.csv", b"")]).path()).contains("to_parquet"));
    }

    #[test]
    fn patterns_are_sorted_and_named_from_their_directory() {
        let root = tree(&[("d/b/2.jsonl", b""), ("d/a/1.jsonl", b""), ("d/a/x.txt", b""), ("d/.c/3.jsonl", b"")]);
        assert_eq!(names(&root.path().join("d/*/*.jsonl")).unwrap(), ["a/1.jsonl", "b/2.jsonl"]);
        assert_eq!(names(&root.path().join("d/**/1.jsonl")).unwrap(), ["a/1.jsonl"]);
        assert!(message(&root.path().join("*.parquet")).contains("no file matches"));
        fs::write(root.path().join("[x].txt"), "a name like a pattern").unwrap();
        assert_eq!(names(&root.path().join("[x].txt")).unwrap(), ["[x].txt"]);
    }

    #[test]
    fn missing_and_empty_paths_are_refused() {
        let root = tree(&[]);
        assert!(message(root.path()).contains("holds no visible files"));
        assert!(message(&root.path().join("nowhere")).contains("No such file"));
        assert!(message(Path::new("/dev/null")).contains("neither a file nor a directory"));
        assert!(message(tree(&[("a.png", b"\0")]).path()).contains("holds no text files"));
    }
}
