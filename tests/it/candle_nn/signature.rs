//! Signatures as comparable text, without names of arguments and without path prefixes.

use std::collections::{BTreeMap, BTreeSet};

use quote::ToTokens;
use syn::visit_mut::{VisitMut, visit_path_mut, visit_type_mut};
use syn::{
    FnArg, GenericParam, Generics, Ident, ImplItem, Item, Path, ReturnType, Signature, Type, Visibility, WherePredicate,
};

use super::source::{ModulePath, Tree, instance};

/// Shortens each path to its last name.
struct Shorten;

impl VisitMut for Shorten {
    fn visit_path_mut(&mut self, path: &mut Path) {
        let last = path.segments.pop().unwrap().into_value();
        path.segments.clear();
        path.segments.push(last);
        path.leading_colon = None;
        visit_path_mut(self, path);
    }
}

pub(super) fn text(tokens: impl ToTokens) -> String {
    tokens.to_token_stream().to_string().replace(' ', "")
}

fn of_type(ty: &Type) -> String {
    let mut ty = ty.clone();
    Shorten.visit_type_mut(&mut ty);
    // `candle_core::Result` has this error type as its default.
    text(ty).replace(",Error>", ">")
}

/// Returns the generic parameters with their bounds.
fn of_generics(generics: &Generics) -> String {
    let mut generics = generics.clone();
    Shorten.visit_generics_mut(&mut generics);
    let mut bounds: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for param in &generics.params {
        match param {
            GenericParam::Type(it) => {
                bounds.entry(it.ident.to_string()).or_default().extend(it.bounds.iter().map(text))
            }
            other => {
                bounds.entry(text(other)).or_default();
            }
        }
    }
    for predicate in generics.where_clause.iter().flat_map(|clause| &clause.predicates) {
        match predicate {
            WherePredicate::Type(it) => {
                bounds.entry(text(&it.bounded_ty)).or_default().extend(it.bounds.iter().map(text));
            }
            other => {
                bounds.entry(text(other)).or_default();
            }
        }
    }
    if bounds.is_empty() { String::new() } else { format!("{bounds:?}") }
}

fn of_signature(signature: &Signature) -> String {
    let arguments: Vec<String> = signature
        .inputs
        .iter()
        .map(|argument| match argument {
            FnArg::Receiver(it) => match (&it.reference, &it.mutability) {
                (Some(_), Some(_)) => "&mut self".into(),
                (Some(_), None) => "&self".into(),
                (None, _) => "self".into(),
            },
            FnArg::Typed(it) => of_type(&it.ty),
        })
        .collect();
    let output = match &signature.output {
        ReturnType::Default => "()".into(),
        ReturnType::Type(_, ty) => of_type(ty),
    };
    let unsafety = if signature.unsafety.is_some() { "unsafe " } else { "" };
    format!("{unsafety}fn{}({}) -> {output}", of_generics(&signature.generics), arguments.join(", "))
}

/// Replaces a type parameter by a type.
struct Substitute<'a>(&'a Ident, &'a Type);

impl VisitMut for Substitute<'_> {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        match ty {
            Type::Path(of) if of.path.is_ident(self.0) => *ty = self.1.clone(),
            _ => visit_type_mut(self, ty),
        }
    }
}

/// Returns the items of a module, and for an alias of a generic struct also the struct with its methods: under the
/// alias's name, and with its type argument.
fn items_with_alias(tree: &Tree, module: &ModulePath, name: &str) -> Vec<Item> {
    let mut items = tree.modules[module].items.clone();
    let aliased = tree.modules[module].items.iter().find_map(|item| match item {
        Item::Type(it) if it.ident == name => instance(&it.ty),
        _ => None,
    });
    let Some((generic, argument)) = aliased else { return items };
    for item in &mut items {
        let generics = match item {
            Item::Struct(it) if it.ident == *generic => {
                it.ident = Ident::new(name, it.ident.span());
                &mut it.generics
            }
            Item::Impl(it) if instance(&it.self_ty).is_some_and(|(own, _)| own == generic) => {
                *it.self_ty = syn::parse_str(name).unwrap();
                &mut it.generics
            }
            _ => continue,
        };
        let parameter = std::mem::take(generics).type_params().next().unwrap().ident.clone();
        Substitute(&parameter, argument).visit_item_mut(item);
    }
    items
}

/// Returns an item's signature and those of its public fields, variants, methods and traits.
pub(super) fn of_item(tree: &Tree, module: &ModulePath, name: &str, kind: &str) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for item in &items_with_alias(tree, module, name) {
        match item {
            Item::Fn(it) if kind == "fn" && it.sig.ident == name => {
                lines.insert("the function".into(), of_signature(&it.sig));
            }
            Item::Const(it) if kind == "const" && it.ident == name => {
                lines.insert("the constant".into(), of_type(&it.ty));
            }
            Item::Type(it) if kind == "type" && it.ident == name => {
                lines.insert("the type".into(), of_type(&it.ty));
            }
            Item::Struct(it) if kind == "struct" && it.ident == name => {
                lines.insert("the struct".into(), of_generics(&it.generics));
                for field in it.fields.iter().filter(|field| matches!(field.vis, Visibility::Public(_))) {
                    let field_name = field.ident.as_ref().map_or("0".into(), ToString::to_string);
                    lines.insert(format!("field `{field_name}`"), of_type(&field.ty));
                }
                derives(&it.attrs, &mut lines);
            }
            Item::Enum(it) if kind == "enum" && it.ident == name => {
                for variant in &it.variants {
                    let fields: Vec<_> = variant
                        .fields
                        .iter()
                        .map(|it| (it.ident.as_ref().map(ToString::to_string), of_type(&it.ty)))
                        .collect();
                    lines.insert(format!("variant `{}`", variant.ident), format!("{fields:?}"));
                }
                derives(&it.attrs, &mut lines);
            }
            Item::Impl(it) if kind != "fn" => {
                let Type::Path(of) = &*it.self_ty else { continue };
                if of.path.segments.last().unwrap().ident != name {
                    continue;
                }
                if let Some((_, path, _)) = &it.trait_ {
                    let mut path = path.clone();
                    Shorten.visit_path_mut(&mut path);
                    lines.insert(format!("trait `{}`", text(path)), String::new());
                    continue;
                }
                for item in &it.items {
                    if let ImplItem::Fn(method) = item
                        && matches!(method.vis, Visibility::Public(_))
                    {
                        lines.insert(format!("method `{}`", method.sig.ident), of_signature(&method.sig));
                    }
                }
            }
            _ => {}
        }
    }
    lines
}

fn derives(attributes: &[syn::Attribute], lines: &mut BTreeMap<String, String>) {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let _ = attribute.parse_nested_meta(|meta| {
            let name = meta.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default();
            lines.insert(format!("trait `{name}`"), String::new());
            Ok(())
        });
    }
}
