//! The modules of a package, and the paths by which they name each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The files of a package's `src`, by their paths in it.
pub(crate) type Files = BTreeMap<String, String>;

/// Reads every Rust file below `src`.
pub(crate) fn read(src: &Path) -> Files {
    let mut files = Files::new();
    let mut dirs = vec![src.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(src).unwrap().to_str().unwrap().to_owned();
                files.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

/// A module of a package: a file, or a part of one.
#[derive(Default)]
pub(crate) struct Module {
    pub(crate) file: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// What it defines itself.
    items: BTreeSet<String>,
    /// What it has by `use`, by the name that it has here.
    imports: BTreeMap<String, Vec<String>>,
    /// The modules of which it has everything.
    globs: Vec<Vec<String>>,
    /// All paths that stand in it, those of `use` too.
    pub(crate) mentions: BTreeSet<Vec<String>>,
}

/// The modules of a package. Each program of it is a tree of its own.
pub(crate) struct Package {
    /// What code calls the library.
    library: String,
    pub(crate) modules: Vec<Module>,
    /// The root of the library, if there is one.
    root: Option<usize>,
    /// What can't be read.
    pub(crate) problems: Vec<String>,
}

/// Whether a file is the root of the library or of a program.
pub(crate) fn is_root(file: &str) -> bool {
    let is_program = file.strip_prefix("bin/").is_some_and(|rest| !rest.contains('/') || rest.ends_with("/main.rs"));
    matches!(file, "lib.rs" | "main.rs") || is_program
}

impl Package {
    /// Of the package whose library is called `library`.
    pub(crate) fn new(library: &str, files: &Files) -> Self {
        let mut package = Package { library: library.to_owned(), modules: vec![], root: None, problems: vec![] };
        for file in files.keys().filter(|file| is_root(file)) {
            let root = package.file(files, file, None);
            if file == "lib.rs" {
                package.root = Some(root);
            }
        }
        let read: BTreeSet<&str> = package.modules.iter().map(|module| module.file.as_str()).collect();
        let dead = files.keys().filter(|file| !read.contains(file.as_str()));
        package.problems.extend(dead.map(|file| format!("`{file}` is no module of anything")));
        package
    }

    fn file(&mut self, files: &Files, file: &str, parent: Option<usize>) -> usize {
        let tokens = files[file].parse::<TokenStream>();
        let tokens = tokens.unwrap_or_else(|error| {
            self.problems.push(format!("`{file}` can't be read: {error}"));
            TokenStream::new()
        });
        let (dir, name) = file.rsplit_once('/').unwrap_or(("", file));
        let owns_dir = is_root(file) || name == "mod.rs";
        let dir = if owns_dir { dir } else { file.trim_end_matches(".rs") };
        self.module(files, file, dir, parent, tokens)
    }

    /// Adds a module of `file`, whose children have their files in `dir`.
    fn module(&mut self, files: &Files, file: &str, dir: &str, parent: Option<usize>, tokens: TokenStream) -> usize {
        let module = self.modules.len();
        self.modules.push(Module { file: file.to_owned(), parent, ..Module::default() });
        self.tokens(files, module, dir, tokens, true);
        module
    }

    /// Takes in what stands in a module: on its own level, or deeper, in bodies, attributes and macros.
    fn tokens(&mut self, files: &Files, module: usize, dir: &str, tokens: TokenStream, is_level: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let Some(word) = ident(token) else {
                if let TokenTree::Group(group) = token {
                    self.tokens(files, module, dir, group.stream(), false);
                }
                at += 1;
                continue;
            };
            let next = tokens.get(at + 1);
            match (word.as_str(), next) {
                // `pub(in path)` says who may see something, and imports nothing.
                ("pub", Some(TokenTree::Group(group))) if group.delimiter() == Delimiter::Parenthesis => at += 2,
                ("mod", Some(TokenTree::Ident(name))) => {
                    let name = name.to_string();
                    self.child(files, module, dir, &name, tokens.get(at + 2));
                    at += 3;
                }
                // `use<...>` of a type is no import.
                ("use", Some(next)) if !is_punct(next, '<') => {
                    let end = (at..tokens.len()).find(|&end| is_punct(&tokens[end], ';')).unwrap_or(tokens.len());
                    self.uses(module, &tokens[at + 1..end], is_level);
                    at = end + 1;
                }
                _ => {
                    const ITEMS: [&str; 8] = ["struct", "enum", "union", "trait", "fn", "type", "const", "static"];
                    if is_level && let Some(name) = next.and_then(ident) {
                        if ITEMS.contains(&word.as_str()) {
                            self.modules[module].items.insert(name);
                        }
                    } else if is_level
                        && word == "macro_rules"
                        && let Some(name) = tokens.get(at + 2).and_then(ident)
                    {
                        self.modules[module].items.insert(name);
                    }
                    at = self.path(module, &tokens, at);
                }
            }
        }
    }

    /// Notes the path that begins at a word, if it is one, and says what follows.
    fn path(&mut self, module: usize, tokens: &[TokenTree], mut at: usize) -> usize {
        let mut path: Vec<String> = tokens[at..].iter().take(1).filter_map(ident).collect();
        let is_absolute = at >= 2 && is_punct(&tokens[at - 1], ':') && is_punct(&tokens[at - 2], ':');
        at += 1;
        while let [a, b, word, ..] = &tokens[at..]
            && is_punct(a, ':')
            && is_punct(b, ':')
            && let Some(word) = ident(word)
        {
            path.push(word);
            at += 3;
        }
        if path.len() > 1 && !is_absolute {
            self.modules[module].mentions.insert(path);
        }
        at
    }

    fn child(&mut self, files: &Files, module: usize, dir: &str, name: &str, next: Option<&TokenTree>) {
        let name = name.trim_start_matches("r#");
        let inner = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
        let child = match next {
            Some(TokenTree::Group(body)) => {
                let file = self.modules[module].file.clone();
                self.module(files, &file, &inner, Some(module), body.stream())
            }
            _ => {
                let candidates = [format!("{inner}.rs"), format!("{inner}/mod.rs")];
                let Some(file) = candidates.iter().find(|file| files.contains_key(*file)) else {
                    let file = &self.modules[module].file;
                    self.problems.push(format!("`{file}` has a module `{name}`, which has no file"));
                    return;
                };
                self.file(files, file, Some(module))
            }
        };
        self.modules[module].children.insert(name.to_owned(), child);
    }

    /// Takes in what stands between `use` and its semicolon.
    fn uses(&mut self, module: usize, tree: &[TokenTree], is_level: bool) {
        let mut leaves = Vec::new();
        use_tree(tree, Vec::new(), &mut leaves);
        let module = &mut self.modules[module];
        for (path, name) in leaves {
            if is_level {
                match name {
                    Some(name) => drop(module.imports.insert(name, path.clone())),
                    None => module.globs.push(path.clone()),
                }
            }
            module.mentions.insert(path);
        }
    }

    /// The module that has what `path` names, where that stands in `from`; `None` for what is of no tree of ours.
    pub(crate) fn resolve(&self, from: usize, path: &[String]) -> Option<usize> {
        self.find(from, path, &mut BTreeSet::new())
    }

    fn find(&self, from: usize, path: &[String], seen: &mut BTreeSet<(usize, Vec<String>)>) -> Option<usize> {
        if !seen.insert((from, path.to_vec())) {
            return None;
        }
        let mut module = from;
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                module = self.root_of(module);
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while let [first, others @ ..] = rest
                    && first == "super"
                {
                    (module, rest) = (self.modules[module].parent?, others);
                }
            }
            first => {
                let here = &self.modules[module];
                let is_here = here.children.contains_key(first) || here.items.contains(first);
                if !is_here && first == self.library {
                    (module, rest) = (self.root?, &rest[1..]);
                } else if !is_here {
                    return None;
                }
            }
        }
        self.walk(module, rest, seen)
    }

    /// The module that has what `path` names, seen from outside of `module`.
    fn walk(&self, module: usize, path: &[String], seen: &mut BTreeSet<(usize, Vec<String>)>) -> Option<usize> {
        let Some((first, rest)) = path.split_first() else { return Some(module) };
        let here = &self.modules[module];
        if let Some(&child) = here.children.get(first) {
            return self.walk(child, rest, seen);
        }
        if here.items.contains(first) {
            return Some(module);
        }
        if let Some(import) = here.imports.get(first) {
            let path: Vec<String> = import.iter().chain(rest).cloned().collect();
            return self.find(module, &path, seen);
        }
        let through = here.globs.iter().find_map(|glob| {
            let of = self.find(module, glob, seen)?;
            self.has(of, first).then(|| self.walk(of, path, seen)).flatten()
        });
        // What a macro makes, most likely.
        through.or(Some(module))
    }

    /// The root of the tree that a module is in.
    pub(crate) fn root_of(&self, mut module: usize) -> usize {
        while let Some(parent) = self.modules[module].parent {
            module = parent;
        }
        module
    }

    fn has(&self, module: usize, name: &str) -> bool {
        let module = &self.modules[module];
        module.children.contains_key(name) || module.items.contains(name) || module.imports.contains_key(name)
    }
}

/// The paths of a `use`, each with the name that it brings; without one for all names.
fn use_tree(tokens: &[TokenTree], mut path: Vec<String>, leaves: &mut Vec<(Vec<String>, Option<String>)>) {
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                let parts: Vec<TokenTree> = group.stream().into_iter().collect();
                let parts = parts.split(|token| is_punct(token, ',')).filter(|part| !part.is_empty());
                return parts.for_each(|part| use_tree(part, path.clone(), leaves));
            }
            TokenTree::Punct(punct) if punct.as_char() == '*' => return leaves.push((path, None)),
            TokenTree::Ident(word) if *word == "as" => {
                return leaves.push((path, tokens.get(at + 1).and_then(ident)));
            }
            TokenTree::Ident(word) if *word == "self" && !path.is_empty() => {}
            other => path.extend(ident(other)),
        }
    }
    let name = path.last().cloned();
    leaves.push((path, name));
}

fn ident(token: &TokenTree) -> Option<String> {
    if let TokenTree::Ident(word) = token { Some(word.to_string().trim_start_matches("r#").to_owned()) } else { None }
}

fn is_punct(token: &TokenTree, char: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == char)
}
