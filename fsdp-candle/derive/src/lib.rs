//! The derive macro of `fsdp_candle::Tensors`, which documents it.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error, Fields, Result, parse_quote};

/// Implements `fsdp_candle::Tensors` for a struct or an enum. Each field must implement `Tensors`, except for fields with
/// the attribute `#[tensors(skip)]`, which stay as they are.
#[proc_macro_derive(Tensors, attributes(tensors))]
pub fn derive_tensors(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(mut input: DeriveInput) -> Result<TokenStream> {
    let variants: Vec<(TokenStream, &Fields)> = match &input.data {
        Data::Struct(data) => vec![(quote!(Self), &data.fields)],
        Data::Enum(data) => {
            let path = |name| quote!(Self::#name);
            data.variants.iter().map(|variant| (path(&variant.ident), &variant.fields)).collect()
        }
        Data::Union(_) => return Err(Error::new_spanned(&input, "Tensors can be derived for structs and enums only")),
    };
    if let Some(attr) = input.attrs.iter().find(|attr| attr.path().is_ident("tensors")) {
        return Err(Error::new_spanned(attr, "the attribute `tensors` is for fields"));
    }
    let mut mapped_types = vec![];
    let mut arms = vec![];
    for (path, fields) in variants {
        let mut patterns = vec![];
        let mut values = vec![];
        for (index, field) in fields.iter().enumerate() {
            let member = fields.members().nth(index);
            let bound = format_ident!("field_{index}");
            patterns.push(quote!(#member: #bound));
            if is_skipped(field)? {
                values.push(quote!(#member: #bound));
            } else {
                values.push(quote!(#member: ::fsdp_candle::Tensors::map_tensors(#bound, f)?));
                mapped_types.push(field.ty.clone());
            }
        }
        arms.push(quote!(#path { #(#patterns),* } => #path { #(#values),* }));
    }
    // A bound on a type without parameters would not compile where the type is private and the trait's is not.
    if !input.generics.params.is_empty() {
        let bounds = input.generics.make_where_clause();
        for ty in mapped_types {
            bounds.predicates.push(parse_quote!(#ty: ::fsdp_candle::Tensors));
        }
    }
    let name = &input.ident;
    let (parameters, arguments, bounds) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #parameters ::fsdp_candle::Tensors for #name #arguments #bounds {
            fn map_tensors(
                self,
                f: &mut dyn ::core::ops::FnMut(
                    ::fsdp_candle::derived::Tensor,
                ) -> ::fsdp_candle::derived::Result<::fsdp_candle::derived::Tensor>,
            ) -> ::fsdp_candle::derived::Result<Self> {
                ::core::result::Result::Ok(match self { #(#arms),* })
            }
        }
    })
}

/// Returns whether a field has the attribute `#[tensors(skip)]`. Fails for another argument.
fn is_skipped(field: &syn::Field) -> Result<bool> {
    let mut is_skipped = false;
    for attr in field.attrs.iter().filter(|attr| attr.path().is_ident("tensors")) {
        attr.parse_nested_meta(|meta| match meta.path.is_ident("skip") {
            true => {
                is_skipped = true;
                Ok(())
            }
            false => Err(meta.error("unknown argument, expected `skip`")),
        })?;
    }
    Ok(is_skipped)
}
