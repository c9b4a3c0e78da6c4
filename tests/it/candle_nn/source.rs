//! A library's source as a tree of modules, and the targets of its public paths.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use syn::{Attribute, GenericArgument, Ident, Item, PathArguments, Type, UseTree, Visibility};

/// A module's path from the root.
pub(super) type ModulePath = Vec<String>;

/// The target of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// An item of a tree: tree name, module, item name and kind.
    Item(&'static str, ModulePath, String, &'static str),
    /// A module of a tree.
    Module(&'static str, ModulePath),
    /// An item of another crate.
    Elsewhere(String),
}

/// Imports that are being followed: tree, module and path.
type Seen = BTreeSet<(&'static str, ModulePath, Vec<String>)>;

/// A `use` of one name.
struct Import {
    path: Vec<String>,
    binds: String,
    is_public: bool,
}

#[derive(Default)]
pub(super) struct Module {
    pub(super) items: Vec<Item>,
    imports: Vec<Import>,
    /// Submodules, and whether they are public.
    modules: BTreeMap<String, bool>,
}

pub(super) struct Tree {
    name: &'static str,
    /// Prefix of the crate's own paths.
    root: &'static [&'static str],
    pub(super) modules: HashMap<ModulePath, Module>,
}

impl Tree {
    /// Reads the tree below a file.
    pub(super) fn read(name: &'static str, root: &'static [&'static str], file: &Path) -> Tree {
        let mut tree = Tree { name, root, modules: HashMap::new() };
        let items = parse(file);
        tree.add(vec![], items, file.parent().unwrap());
        tree
    }

    fn add(&mut self, path: ModulePath, items: Vec<Item>, dir: &Path) {
        let mut module = Module::default();
        for item in items.into_iter().filter(|item| is_built(attributes(item))) {
            match item {
                Item::Mod(inner) => {
                    let name = inner.ident.to_string();
                    module.modules.insert(name.clone(), is_public(&inner.vis));
                    let (flat, folder) = (dir.join(format!("{name}.rs")), dir.join(&name).join("mod.rs"));
                    let items = match inner.content {
                        Some((_, items)) => items,
                        None => parse(if flat.exists() { &flat } else { &folder }),
                    };
                    self.add([&path[..], std::slice::from_ref(&name)].concat(), items, &dir.join(name));
                }
                Item::Use(item) => flatten(&item.tree, &mut vec![], is_public(&item.vis), &mut module.imports),
                item => module.items.push(item),
            }
        }
        self.modules.insert(path, module);
    }

    /// Returns every public path and its targets. `others` are trees whose items this one re-exports.
    pub(super) fn public(&self, others: &[&Tree]) -> BTreeMap<String, BTreeSet<Target>> {
        let mut found = BTreeMap::new();
        self.collect(&vec![], "", others, &mut found);
        found
    }

    fn collect(
        &self,
        module: &ModulePath,
        prefix: &str,
        others: &[&Tree],
        found: &mut BTreeMap<String, BTreeSet<Target>>,
    ) {
        let here = &self.modules[module];
        for item in &here.items {
            if let Some((name, kind)) = named(item) {
                let target = Target::Item(self.name, module.clone(), name.clone(), kind);
                found.entry(format!("{prefix}{name}")).or_default().insert(target);
            }
        }
        for (name, _) in here.modules.iter().filter(|(_, is_public)| **is_public) {
            let inner = [&module[..], std::slice::from_ref(name)].concat();
            self.collect(&inner, &format!("{prefix}{name}::"), others, found);
        }
        for import in here.imports.iter().filter(|import| import.is_public) {
            for target in self.resolve(module, &import.path, others, &mut BTreeSet::new()) {
                let path = format!("{prefix}{}", import.binds);
                match &target {
                    Target::Module(tree, inner) => {
                        let tree = others.iter().copied().chain([self]).find(|it| it.name == *tree).unwrap();
                        let within = if import.binds == "*" { prefix.into() } else { format!("{path}::") };
                        tree.collect(inner, &within, others, found);
                    }
                    _ => {
                        found.entry(path).or_default().insert(target);
                    }
                }
            }
        }
    }

    /// Returns the targets of a path within a module.
    fn resolve(&self, module: &ModulePath, path: &[String], others: &[&Tree], seen: &mut Seen) -> BTreeSet<Target> {
        if !seen.insert((self.name, module.clone(), path.to_vec())) {
            return BTreeSet::new();
        }
        let first = path[0].as_str();
        let mut targets = match first {
            "crate" => {
                let own = 1 + self.root.len();
                if !path[1..].iter().zip(self.root).all(|(a, b)| a == b) {
                    return BTreeSet::from([Target::Elsewhere(self.name.into())]);
                }
                return self.follow(BTreeSet::from([Target::Module(self.name, vec![])]), &path[own..], others, seen);
            }
            "self" => BTreeSet::from([Target::Module(self.name, module.clone())]),
            "super" => BTreeSet::from([Target::Module(self.name, module[..module.len() - 1].to_vec())]),
            _ => self.lookup(module, first, others, seen),
        };
        if targets.is_empty() {
            let tree = others.iter().find(|tree| tree.name == first);
            targets.insert(tree.map_or(Target::Elsewhere(first.into()), |tree| Target::Module(tree.name, vec![])));
        }
        let found = self.follow(targets, &path[1..], others, seen);
        seen.remove(&(self.name, module.clone(), path.to_vec()));
        found
    }

    fn follow(
        &self,
        mut targets: BTreeSet<Target>,
        path: &[String],
        others: &[&Tree],
        seen: &mut Seen,
    ) -> BTreeSet<Target> {
        for name in path.iter().filter(|name| *name != "self") {
            let step = |target: Target, seen: &mut _| match target {
                Target::Module(tree, module) => {
                    let tree = others.iter().copied().chain([self]).find(|it| it.name == tree).unwrap();
                    match name == "*" {
                        true => BTreeSet::from([Target::Module(tree.name, module)]),
                        false => tree.lookup(&module, name, others, seen),
                    }
                }
                Target::Elsewhere(path) => BTreeSet::from([Target::Elsewhere(format!("{path}::{name}"))]),
                Target::Item(..) => BTreeSet::new(),
            };
            targets = targets.into_iter().flat_map(|target| step(target, seen)).collect();
        }
        targets
    }

    /// Returns the targets of a name in a module.
    fn lookup(&self, module: &ModulePath, name: &str, others: &[&Tree], seen: &mut Seen) -> BTreeSet<Target> {
        let here = &self.modules[module];
        let items = here.items.iter().filter_map(named).filter(|(own, _)| own == name);
        let mut found: BTreeSet<_> =
            items.map(|(name, kind)| Target::Item(self.name, module.clone(), name, kind)).collect();
        if here.modules.contains_key(name) {
            found.insert(Target::Module(self.name, [&module[..], &[name.into()]].concat()));
        }
        for import in here.imports.iter().filter(|import| import.binds == name) {
            found.extend(self.resolve(module, &import.path, others, seen));
        }
        for import in here.imports.iter().filter(|import| import.binds == "*") {
            let path = &import.path[..import.path.len() - 1];
            // Contents of other crates are unknown. None of them is public here.
            for target in self.resolve(module, path, others, seen) {
                if matches!(target, Target::Module(..)) {
                    found.extend(self.follow(BTreeSet::from([target]), &[name.into()], others, seen));
                }
            }
        }
        found
    }
}

fn parse(file: &Path) -> Vec<Item> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display())).items
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Mod(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Const(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        _ => &[],
    }
}

/// Returns whether an item with these attributes is built without features and outside tests.
fn is_built(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.map(super::signature::text).all(|condition| {
        condition.contains("not(feature") || !(condition.contains("feature") || condition.contains("test"))
    })
}

/// Returns a public item's name and kind.
fn named(item: &Item) -> Option<(String, &'static str)> {
    let (visibility, name, kind) = match item {
        Item::Fn(it) => (&it.vis, &it.sig.ident, "fn"),
        Item::Struct(it) => (&it.vis, &it.ident, "struct"),
        Item::Enum(it) => (&it.vis, &it.ident, "enum"),
        Item::Trait(it) => (&it.vis, &it.ident, "trait"),
        Item::Type(it) if instance(&it.ty).is_some() => (&it.vis, &it.ident, "struct"),
        Item::Type(it) => (&it.vis, &it.ident, "type"),
        Item::Const(it) => (&it.vis, &it.ident, "const"),
        _ => return None,
    };
    is_public(visibility).then(|| (name.to_string(), kind))
}

/// Returns the name and the argument of a generic struct with one type argument, whose alias stands for a struct.
pub(super) fn instance(ty: &Type) -> Option<(&Ident, &Type)> {
    let Type::Path(of) = ty else { return None };
    let last = of.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.iter().collect::<Vec<_>>()[..] {
        [GenericArgument::Type(argument)] => Some((&last.ident, argument)),
        _ => None,
    }
}

fn flatten(tree: &UseTree, path: &mut Vec<String>, is_public: bool, imports: &mut Vec<Import>) {
    let mut import = |path: Vec<String>, binds: String| imports.push(Import { path, binds, is_public });
    match tree {
        UseTree::Path(inner) => {
            path.push(inner.ident.to_string());
            flatten(&inner.tree, path, is_public, imports);
            path.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, path, is_public, imports)),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            let binds = if name == "self" { path.last().unwrap().clone() } else { name.clone() };
            import([&path[..], &[name]].concat(), binds);
        }
        UseTree::Rename(it) => import([&path[..], &[it.ident.to_string()]].concat(), it.rename.to_string()),
        UseTree::Glob(_) => import([&path[..], &["*".into()]].concat(), "*".into()),
    }
}
