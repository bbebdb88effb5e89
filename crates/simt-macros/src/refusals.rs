//! What `#[kernel]` refuses, and what to write in its place.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{Error, FnArg, GenericArgument, ItemFn, PathArguments, Type};

/// What stands in the place of a kernel that is refused: the message, and the function as it is, so that
/// rustc does not call everything unused that only its body uses.
pub fn mistaken(error: &Error, item: TokenStream) -> TokenStream {
    let message = error.to_compile_error();
    let Ok(mut function) = syn::parse2::<ItemFn>(item) else { return message };
    for argument in &mut function.sig.inputs {
        if let FnArg::Typed(argument) = argument {
            argument.attrs.retain(|attribute| !attribute.path().is_ident("doc"));
        }
    }
    quote! { #message #[allow(dead_code, unused_variables, unused_mut, clippy::all)] #function }
}

/// Refuses types that no launch can pass, and says what to write.
pub fn launchable(ty: &Type) -> syn::Result<()> {
    let memory = |element: &str, mutable: bool| {
        let (handle, calls) =
            if mutable { ("GlobalMut", "`.load(i)` and `.store(i, x)`") } else { ("Global", "`.load(i)`") };
        format!("a kernel's memory is a handle: write `{handle}<{element}>`, and {calls} for its elements")
    };
    let what = match ty {
        Type::Reference(reference) => match &*reference.elem {
            Type::Path(path) if path.path.is_ident("str") => memory("u8", false),
            elem => memory(&element(elem), reference.mutability.is_some()),
        },
        Type::Ptr(pointer) => memory(&element(&pointer.elem), pointer.mutability.is_some()),
        Type::Slice(slice) => memory(&element(&slice.elem), false),
        Type::Path(path) => {
            let Some(last) = path.path.segments.last() else { return Ok(()) };
            match last.ident.to_string().as_str() {
                "Vec" | "Box" | "Buffer" | "Pinned" if first(&last.arguments).is_some() => {
                    memory(&element(ty), true)
                }
                "String" => memory("u8", false),
                "Global" | "GlobalMut" if owns(&last.arguments) => format!(
                    "an element of `{}` is plain data, the same bytes on both sides: a number, or a struct that derives \
                     `Pod`",
                    last.ident
                ),
                "usize" | "isize" => {
                    let with = if last.ident == "usize" { "u32" } else { "i32" };
                    return Err(Error::new(
                        ty.span(),
                        format!("`{}` has no fixed size: write `{with}`, or `u64`", last.ident),
                    ));
                }
                _ => return Ok(()),
            }
        }
        Type::ImplTrait(_) => {
            "a kernel's instances have names: write a generic parameter, and `instances(…)` in the attribute"
                .to_string()
        }
        _ => return Ok(()),
    };
    Err(Error::new(ty.span(), what))
}

/// The type that memory of type `ty` has elements of: below references, slices and what owns its memory.
fn element(ty: &Type) -> String {
    match ty {
        Type::Slice(slice) => element(&slice.elem),
        Type::Array(array) => element(&array.elem),
        Type::Reference(reference) => element(&reference.elem),
        Type::Path(path) => {
            let last = path.path.segments.last();
            let owner =
                last.filter(|last| ["Vec", "Box", "Buffer", "Pinned"].iter().any(|name| last.ident == name));
            match owner.and_then(|owner| first(&owner.arguments)) {
                Some(inner) => element(inner),
                None => ty.to_token_stream().to_string().replace(' ', ""),
            }
        }
        other => other.to_token_stream().to_string(),
    }
}

/// The first type in angle brackets.
fn first(arguments: &PathArguments) -> Option<&Type> {
    let PathArguments::AngleBracketed(list) = arguments else { return None };
    match list.args.first()? {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    }
}

/// Whether the first argument of a handle is something that holds memory of its own.
fn owns(arguments: &PathArguments) -> bool {
    match first(arguments) {
        Some(Type::Path(path)) => path
            .path
            .segments
            .last()
            .is_some_and(|last| ["Vec", "String", "Box"].iter().any(|name| last.ident == name)),
        Some(Type::Reference(_) | Type::Slice(_)) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::kernel::expand;
    use quote::quote;

    fn refused(item: proc_macro2::TokenStream) -> String {
        expand(quote! {}, item).expect_err("refused").to_string()
    }

    #[test]
    fn memory_is_a_handle() {
        for (item, handle) in [
            (quote! { fn k(x: &mut [u32]) {} }, "write `GlobalMut<u32>`, and `.load(i)` and `.store(i, x)`"),
            (quote! { fn k(x: &[f32]) {} }, "write `Global<f32>`, and `.load(i)` for"),
            (quote! { fn k(n: u32, x: *mut f32) {} }, "write `GlobalMut<f32>`"),
            (quote! { fn k(x: Vec<f32>) {} }, "write `GlobalMut<f32>`"),
            (quote! { fn k(x: host::Buffer<u8>) {} }, "write `GlobalMut<u8>`"),
            (quote! { fn k(x: &str) {} }, "write `Global<u8>`"),
            (quote! { fn k(x: &[f32; 4]) {} }, "write `Global<f32>`"),
            (quote! { fn k(x: &mut Vec<glam::UVec4>) {} }, "write `GlobalMut<glam::UVec4>`"),
            (quote! { fn k(x: Box<[f32]>) {} }, "write `GlobalMut<f32>`"),
        ] {
            let message = refused(item);
            assert!(message.contains(handle), "{message}");
        }
    }

    #[test]
    fn arguments_have_one_size_on_both_sides() {
        assert!(refused(quote! { fn k(n: usize) {} }).contains("write `u32`"));
        assert!(refused(quote! { fn k(n: isize) {} }).contains("write `i32`"));
        assert!(refused(quote! { fn k(x: simt::Global<String>) {} }).contains("plain data"));
        assert!(refused(quote! { fn k(x: GlobalMut<Vec<u32>>) {} }).contains("plain data"));
        assert!(refused(quote! { fn k(x: impl Copy) {} }).contains("instances(…)"));
        for fine in [
            quote! { fn k(x: Global<Word>, n: u32) {} },
            quote! { fn k(x: [u32; 4], y: Shape) {} },
            quote! { fn k(x: shapes::Box) {} },
        ] {
            assert!(expand(quote! {}, fine).is_ok());
        }
    }

    /// The function stays, so that rustc has nothing to say about what only it uses.
    #[test]
    fn one_mistake_is_one_message() {
        let item = quote! { fn k(#[doc = "Memory."] x: &mut [u32]) { x[0] = other(); } };
        let error = expand(quote! {}, item.clone()).expect_err("refused");
        let shown = super::mistaken(&error, item).to_string();
        assert_eq!(shown.matches("compile_error").count(), 1, "{shown}");
        assert!(shown.contains("other ()") && !shown.contains("Memory"), "{shown}");
    }
}
