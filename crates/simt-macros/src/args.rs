//! The struct of a kernel's arguments.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::{Attribute, GenericParam, Generics, Path, Type};

/// A parameter of a kernel.
pub struct Parameter {
    pub name: Ident,
    pub ty: Type,
    /// Its doc comment.
    pub docs: Vec<Attribute>,
}

impl Parameter {
    /// The name of its field: a leading underscore only says that the kernel does not use it.
    fn field(&self) -> Ident {
        let name = self.name.to_string();
        match name.strip_prefix('_').map(syn::parse_str::<Ident>) {
            Some(Ok(field)) => format_ident!("{field}", span = self.name.span()),
            _ => self.name.clone(),
        }
    }
}

/// What the module of a kernel says of its arguments.
pub struct Args {
    /// The struct `Args`, and `PARAMETERS`.
    pub items: TokenStream,
    /// The struct's type, by the kernel's own generic parameters.
    pub ty: TokenStream,
    /// A pattern that takes the struct apart, into [`variables`](Self::variables).
    pub pattern: TokenStream,
    /// A variable for each parameter.
    pub variables: Vec<Ident>,
}

/// Makes the arguments of `kernel`; with `shared`, its struct is that of the kernel of that path.
pub fn expand(kernel: &Ident, generics: &Generics, parameters: &[Parameter], shared: Option<&Path>) -> Args {
    let fields: Vec<_> = parameters.iter().map(Parameter::field).collect();
    let types: Vec<_> = parameters.iter().map(|parameter| &parameter.ty).collect();
    let variables: Vec<_> = (0..parameters.len()).map(|i| format_ident!("argument{i}")).collect();
    let names_of_fields: Vec<_> =
        fields.iter().map(|field| field.to_string().trim_start_matches("r#").to_string()).collect();
    let names = &names_of_fields;
    let names = quote! { &[#(#names),*] };

    let used = occurring(generics, &quote! { #(#types)* });
    let (declared, type_generics, where_clause) = used.split_for_impl();
    let ty = quote! { Args #type_generics };
    let pattern = quote! { Args { #(#fields: #variables),* } };

    let items = if let Some(path) = shared {
        let message =
            format!("the parameters of `{kernel}` are not those of the kernel in `args`, in its order");
        quote! {
            pub use #path::{Args, PARAMETERS};

            const _: () = ::core::assert!(::simt::same_names(PARAMETERS, #names), #message);
        }
    } else {
        let doc = format!(
            "The arguments of the kernel [`{kernel}`](fn@super::{kernel}), by the names of its parameters."
        );
        let docs = parameters.iter().zip(&fields).map(|(parameter, field)| match &parameter.docs[..] {
            [] => {
                let doc = format!("The kernel's parameter `{field}`.");
                quote! { #[doc = #doc] }
            }
            docs => quote! { #(#docs)* },
        });
        let (count, indices) = (parameters.len(), 0..parameters.len());
        quote! {
            /// The names of the kernel's parameters, in their order.
            pub const PARAMETERS: &[&str] = #names;

            const _: () = ::core::assert!(#count <= ::simt::MAX_PARAMS, "a kernel takes at most 64 parameters");

            #[doc = #doc]
            #[derive(Clone, Copy, Debug)]
            pub struct Args #declared #where_clause {
                #(#docs pub #fields: #types,)*
            }

            impl #declared ::simt::KernelArgs for #ty #where_clause {
                const COUNT: usize = #count;

                #[allow(unused_variables)]
                fn params(&self, out: &mut [*const ::core::ffi::c_void; ::simt::MAX_PARAMS]) {
                    #( out[#indices] = ::simt::KernelArg::param(&self.#fields); )*
                }

                #[allow(unused_variables)]
                fn memory(&self, visit: &mut dyn ::core::ops::FnMut(&'static str, ::simt::ArgMemory)) {
                    #(
                        if let ::core::option::Option::Some(memory) = ::simt::KernelArg::memory(&self.#fields) {
                            visit(#names_of_fields, memory);
                        }
                    )*
                }
            }
        }
    };
    Args { items, ty, pattern, variables }
}

/// The generic parameters that occur in the arguments' types: a struct may have no others. A bound that names
/// one that does not occur is left out as well.
fn occurring(generics: &Generics, types: &TokenStream) -> Generics {
    let named = |parameter: &GenericParam, tokens: TokenStream| match parameter {
        GenericParam::Type(p) => names(tokens, &p.ident),
        GenericParam::Const(p) => names(tokens, &p.ident),
        GenericParam::Lifetime(_) => false,
    };
    let (used, unused): (Vec<_>, Vec<_>) =
        generics.params.iter().cloned().partition(|p| named(p, types.clone()));
    let stands = |bound: TokenStream| !unused.iter().any(|p| named(p, bound.clone()));
    let mut kept = Generics { params: used.into_iter().collect(), ..Generics::default() };
    for parameter in &mut kept.params {
        if let GenericParam::Type(p) = parameter {
            p.bounds = p.bounds.iter().filter(|bound| stands(quote! { #bound })).cloned().collect();
        }
    }
    if let Some(clause) = &generics.where_clause {
        let stand = clause.predicates.iter().filter(|predicate| stands(quote! { #predicate }));
        kept.make_where_clause().predicates.extend(stand.cloned());
    }
    kept
}

/// Whether an identifier stands anywhere in the tokens.
fn names(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => names(group.stream(), name),
        _ => false,
    })
}
