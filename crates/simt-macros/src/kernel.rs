//! `#[kernel]`.

use crate::args::{self, Parameter};
use crate::cluster::Cluster;
use crate::refusals;
use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Error, Expr, FnArg, GenericParam, Ident, ItemFn, Lit, LitInt, Pat, Path, ReturnType, Token, Type,
    parenthesized,
};

#[derive(Default)]
struct Options {
    system: Option<Ident>,
    args: Option<Path>,
    instances: Option<Vec<Instance>>,
    max_threads: Option<LitInt>,
    min_blocks: Option<LitInt>,
    min_sm: Option<LitInt>,
    only_sm: Option<LitInt>,
    cluster: Option<Cluster>,
    overlaps: Overlaps,
}

/// How a launch meets the one ahead of it.
#[derive(Clone, Copy, Default, PartialEq)]
enum Overlaps {
    /// It starts when that one is done.
    #[default]
    No,
    /// It may start before; the entry waits.
    FromEntry,
    /// The same, and the next launch is let in behind the wait.
    InTurn,
    /// It may start before, and the author's code waits.
    Late,
    /// The same, and the next launch is let in where the author's code says so.
    ByHand,
}

/// The generic arguments of one instance.
struct Instance {
    arguments: Vec<Argument>,
    /// Its own `max_threads`.
    max_threads: Option<LitInt>,
    span: Span,
}

enum Argument {
    Type(Type),
    Constant(Expr),
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut options = Options::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            match key.to_string().as_str() {
                "system" => {
                    input.parse::<Token![=]>()?;
                    options.system = Some(input.parse()?);
                }
                "args" => {
                    input.parse::<Token![=]>()?;
                    options.args = Some(input.parse()?);
                }
                "max_threads" => {
                    input.parse::<Token![=]>()?;
                    options.max_threads = Some(input.parse()?);
                }
                "min_blocks" => {
                    input.parse::<Token![=]>()?;
                    options.min_blocks = Some(input.parse()?);
                }
                "min_sm" => {
                    input.parse::<Token![=]>()?;
                    options.min_sm = Some(input.parse()?);
                }
                "only_sm" => {
                    input.parse::<Token![=]>()?;
                    options.only_sm = Some(input.parse()?);
                }
                "cluster" => {
                    input.parse::<Token![=]>()?;
                    options.cluster = Some(input.parse()?);
                }
                "overlaps" => {
                    options.overlaps = Overlaps::FromEntry;
                    if input.peek(Token![=]) {
                        input.parse::<Token![=]>()?;
                        let when: Ident = input.parse()?;
                        options.overlaps = if when == "late" {
                            Overlaps::Late
                        } else if when == "in_turn" {
                            Overlaps::InTurn
                        } else if when == "by_hand" {
                            Overlaps::ByHand
                        } else {
                            let known =
                                "expected `overlaps`, or `overlaps = ` and `in_turn`, `late` or `by_hand`";
                            return Err(Error::new(when.span(), known));
                        };
                    }
                }
                "instances" => {
                    let list;
                    parenthesized!(list in input);
                    let list = Punctuated::<Instance, Token![,]>::parse_terminated(&list)?;
                    options.instances = Some(list.into_iter().collect());
                }
                _ => {
                    let known = "expected `system`, `instances`, `args`, `max_threads`, `min_blocks`, `min_sm`, \
                                 `only_sm`, `cluster` or `overlaps`";
                    return Err(Error::new(key.span(), known));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(options)
    }
}

impl Parse for Instance {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let span = input.span();
        let arguments = if input.peek(syn::token::Paren) {
            let list;
            parenthesized!(list in input);
            Punctuated::<Argument, Token![,]>::parse_terminated(&list)?.into_iter().collect()
        } else {
            vec![input.parse()?]
        };
        let max_threads = match input.parse::<Option<Token![=>]>>()? {
            Some(_) => Some(input.parse()?),
            None => None,
        };
        Ok(Instance { arguments, max_threads, span })
    }
}

impl Parse for Argument {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.peek(Lit) || input.peek(syn::token::Brace) {
            return Ok(Argument::Constant(input.parse()?));
        }
        Ok(Argument::Type(input.parse()?))
    }
}

impl Argument {
    fn tokens(&self) -> TokenStream {
        match self {
            Argument::Type(t) => quote! { #t },
            Argument::Constant(c) => quote! { { #c } },
        }
    }

    /// The argument as a part of an entry name.
    fn tag(&self) -> syn::Result<String> {
        let named = |span, text: String| {
            let ok = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if ok { Ok(text) } else { Err(Error::new(span, "cannot make a part of an entry name of this")) }
        };
        match self {
            Argument::Type(Type::Path(path)) => {
                let last = path.path.segments.last().map(|s| s.ident.to_string());
                named(path.span(), last.unwrap_or_default())
            }
            Argument::Type(other) => Err(Error::new(other.span(), "an instance names a type by a path")),
            Argument::Constant(expr) => named(expr.span(), quote!(#expr).to_string().replace(' ', "")),
        }
    }
}

pub fn expand(options: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let options: Options = syn::parse2(options)?;
    let mut function: ItemFn = syn::parse2(item)?;
    let arguments = launch_parameters(&mut function)?;
    let names = crate::stop::names();
    let names: syn::Block = syn::parse2(quote! { { #names } })?;
    function.block.stmts.splice(0..0, names.stmts);
    let signature = &function.sig;
    let name = &signature.ident;
    if !matches!(signature.output, ReturnType::Default) {
        return Err(Error::new(signature.output.span(), "a kernel returns nothing"));
    }
    let unusual = signature.unsafety.is_some() || signature.asyncness.is_some() || signature.abi.is_some();
    if unusual || signature.constness.is_some() || signature.variadic.is_some() {
        return Err(Error::new(signature.span(), "a kernel is a plain `fn`: its launch is what is unsafe"));
    }

    let mut parameters = Vec::new();
    for parameter in &signature.generics.params {
        match parameter {
            GenericParam::Type(p) => parameters.push((p.ident.clone(), None)),
            GenericParam::Const(p) => parameters.push((p.ident.clone(), Some(p.ty.clone()))),
            GenericParam::Lifetime(p) => {
                return Err(Error::new(p.span(), "a kernel has no lifetime parameter"));
            }
        }
    }
    let instances = match (options.instances, parameters.is_empty()) {
        (None, true) => vec![Instance { arguments: Vec::new(), max_threads: None, span: name.span() }],
        (Some(list), false) if !list.is_empty() => list,
        (_, true) => {
            return Err(Error::new(name.span(), "a kernel without generics has no `instances`"));
        }
        (_, false) => {
            let what = "a generic kernel lists its instances: `#[kernel(instances(f32, f16))]`";
            return Err(Error::new(name.span(), what));
        }
    };

    let bounds = (options.max_threads.as_ref(), options.min_blocks.as_ref());
    let max_threads = match bounds.0 {
        Some(literal) => literal.base10_parse::<u32>()?,
        None => 1024,
    };
    let min_blocks = match bounds.1 {
        Some(literal) => literal.base10_parse::<u32>()?,
        None => 0,
    };
    let number = |literal: Option<&LitInt>| literal.map_or(Ok(0), LitInt::base10_parse::<u32>);
    let only_sm = number(options.only_sm.as_ref())?;
    let min_sm = number(options.min_sm.as_ref())?;
    if let (Some(literal), Some(_)) = (&options.min_sm, &options.only_sm) {
        return Err(Error::new(literal.span(), "`only_sm` names the one target: leave `min_sm` out"));
    }
    let cluster = options.cluster.map_or([1; 3], |cluster| cluster.extent);
    if let Some(cluster) = options.cluster.filter(|_| min_sm.max(only_sm) < 90) {
        return Err(Error::new(
            cluster.span,
            "only GPUs from sm_90 on have clusters: write `min_sm = 90`, too",
        ));
    }
    let overlaps = options.overlaps;
    let (may_overlap, waits_late) =
        (overlaps != Overlaps::No, matches!(overlaps, Overlaps::Late | Overlaps::ByHand));
    let args = args::expand(name, &signature.generics, &arguments, options.args.as_ref());
    let mut entries = Vec::new();
    let mut infos = Vec::new();
    let mut names = Vec::new();
    for (index, instance) in instances.iter().enumerate() {
        if instance.arguments.len() != parameters.len() {
            let what = format!("expected {} generic arguments", parameters.len());
            return Err(Error::new(instance.span, what));
        }
        let mut entry = match &options.system {
            Some(system) => format!("{system}_{name}"),
            None => name.to_string(),
        };
        for argument in &instance.arguments {
            entry = format!("{entry}_{}", argument.tag()?);
        }
        let max_threads = match &instance.max_threads {
            Some(literal) => literal.base10_parse::<u32>()?,
            None => max_threads,
        };
        entries.push(device_entry(
            name,
            &entry,
            &parameters,
            instance,
            &arguments,
            (max_threads, min_blocks, min_sm, only_sm, options.cluster),
            overlaps,
        ));
        let [x, y, z] = cluster;
        infos.push(quote! {
            ::simt::KernelInfo { name: #entry, module: ::core::module_path!(), file: ::core::file!(), line: ::core::line!(), max_threads: #max_threads, overlaps: #may_overlap, waits_late: #waits_late, min_sm: #min_sm, only_sm: #only_sm, cluster: ::simt::Dim3 { x: #x, y: #y, z: #z } }
        });
        names.push(host_body(name, &entry, &parameters, instance, &args, index));
    }

    let args::Args { items: args, ty: args_type, .. } = args;
    let visibility = &function.vis;
    let (_, type_generics, where_clause) = signature.generics.split_for_impl();
    let declared = &signature.generics.params;
    let predicates = where_clause.map(|clause| &clause.predicates);
    let phantom: Vec<_> = signature
        .generics
        .type_params()
        .map(|p| {
            let ident = &p.ident;
            quote! { ::core::marker::PhantomData<#ident> }
        })
        .collect();
    let no_instance = format!("the kernel `{name}` has no instance `{{Self}}`");
    let listed = instances.iter().map(|instance| {
        let arguments: Vec<_> = instance
            .arguments
            .iter()
            .map(|argument| argument.tokens().to_string().replace(' ', ""))
            .collect();
        format!("`{}`", arguments.join(", "))
    });
    let listed = format!(
        "its instances are {}; `instances(…)` in the kernel's attribute is where to add one",
        listed.collect::<Vec<_>>().join(", ")
    );
    let doc = format!("Handles to the instances of the kernel [`{name}`](fn@{name}), and their arguments.");
    let function = crate::arms::on_both_sides(quote! {
        // An entry is its kernel: a call would pass parameters through memory.
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        // Handles are parameters of their own: in a struct they would lose their state space.
        #[allow(clippy::too_many_arguments)]
        #function
    });
    Ok(quote! {
        #function

        #(#entries)*

        #[cfg(not(target_arch = "nvptx64"))]
        #[doc = #doc]
        #visibility mod #name {
            #[allow(unused_imports)]
            use super::*;

            /// Every instance, in the attribute's order.
            pub const INSTANCES: &[::simt::KernelInfo] = &[#(#infos),*];

            /// An instance that the attribute lists.
            #[doc(hidden)]
            #[diagnostic::on_unimplemented(
                message = #no_instance, label = "no such instance", note = #listed
            )]
            pub trait Named<Arguments> {
                const INFO: &'static ::simt::KernelInfo;
                const BODY: fn(Arguments);
            }

            /// Names an instance by its generic arguments.
            #[doc(hidden)]
            #[allow(dead_code)]
            pub struct Instance<#declared>(#(#phantom),*) where #predicates;

            #(#names)*

            #args

            /// The handle to one instance.
            pub const fn kernel<#declared>() -> ::simt::Kernel<#args_type>
            where
                Instance #type_generics: Named<#args_type>,
                #predicates
            {
                ::simt::Kernel::new(
                    <Instance #type_generics as Named<#args_type>>::INFO,
                    <Instance #type_generics as Named<#args_type>>::BODY,
                )
            }
        }
    })
}

/// The generic parameters as local aliases of the instance's own arguments, for the types that name them.
fn aliases(parameters: &[(Ident, Option<Type>)], instance: &Instance) -> Vec<TokenStream> {
    let alias = |((parameter, constant), argument): (&(Ident, Option<Type>), &Argument)| {
        let value = argument.tokens();
        match constant {
            Some(ty) => quote! { const #parameter: #ty = #value; },
            None => quote! { type #parameter = #value; },
        }
    };
    parameters.iter().zip(&instance.arguments).map(alias).collect()
}

/// The instance's generic arguments behind the kernel's name; nothing for a kernel without generics.
fn generics(instance: &Instance) -> TokenStream {
    if instance.arguments.is_empty() {
        return quote! {};
    }
    let generics = instance.arguments.iter().map(Argument::tokens);
    quote! { ::<#(#generics),*> }
}

/// What the emulator calls for one instance: a function without generics, so that the crate of the kernel
/// compiles it, once, and not each crate that launches the kernel.
fn host_body(
    name: &Ident,
    entry: &str,
    parameters: &[(Ident, Option<Type>)],
    instance: &Instance,
    args: &args::Args,
    index: usize,
) -> TokenStream {
    let module = format_ident!("host_{entry}");
    let (aliases, generics) = (aliases(parameters, instance), generics(instance));
    let args::Args { ty, pattern, variables, .. } = args;
    quote! {
        #[allow(non_snake_case, unused_imports, dead_code, clippy::upper_case_acronyms)]
        mod #module {
            use super::*;
            #(#aliases)*

            #[inline(never)]
            fn body(#pattern: #ty) {
                super::super::#name #generics (#(#variables),*)
            }

            impl Named<#ty> for Instance #generics {
                const INFO: &'static ::simt::KernelInfo = &INSTANCES[#index];
                const BODY: fn(#ty) = body;
            }
        }
    }
}

/// The parameters of a kernel. Takes their doc comments out of the function, where rustc allows none.
fn launch_parameters(function: &mut ItemFn) -> syn::Result<Vec<Parameter>> {
    let mut parameters = Vec::new();
    for argument in &mut function.sig.inputs {
        let FnArg::Typed(argument) = argument else {
            return Err(Error::new(argument.span(), "a kernel has no `self`"));
        };
        let Pat::Ident(pattern) = &*argument.pat else {
            return Err(Error::new(argument.pat.span(), "a kernel's parameter has a plain name"));
        };
        let (docs, others) =
            std::mem::take(&mut argument.attrs).into_iter().partition(|a| a.path().is_ident("doc"));
        argument.attrs = others;
        refusals::launchable(&argument.ty)?;
        parameters.push(Parameter { name: pattern.ident.clone(), ty: (*argument.ty).clone(), docs });
    }
    Ok(parameters)
}

/// The `extern "ptx-kernel"` entry of one instance. Generic parameters in the argument types become the
/// instance's own arguments through local aliases.
fn device_entry(
    name: &Ident,
    entry: &str,
    parameters: &[(Ident, Option<Type>)],
    instance: &Instance,
    arguments: &[Parameter],
    (max_threads, min_blocks, min_sm, only_sm, cluster): (u32, u32, u32, u32, Option<Cluster>),
    overlaps: Overlaps,
) -> TokenStream {
    let entry_ident = Ident::new(entry, name.span());
    let module = format_ident!("device_{entry}");
    let (aliases, generics) = (aliases(parameters, instance), generics(instance));
    let names: Vec<_> = arguments.iter().map(|argument| &argument.name).collect();
    let types = arguments.iter().map(|argument| &argument.ty);
    let bounds = (max_threads != 1024 || min_blocks != 0).then(|| {
        // ptx-build reads this comment and writes the entry's directives: rustc has no attribute for them.
        let text = format!("// simt.launch_bounds {entry} {max_threads} {min_blocks}");
        quote! { ::core::arch::global_asm!(#text); }
    });
    let needs = (min_sm != 0 || only_sm != 0).then(|| {
        // The same: it leaves the entry out of other targets' PTX.
        let text = if only_sm == 0 {
            format!("// simt.min_sm {entry} {min_sm}")
        } else {
            format!("// simt.only_sm {entry} {only_sm}")
        };
        quote! { ::core::arch::global_asm!(#text); }
    });
    let cluster = cluster.map(|Cluster { extent: [x, y, z], .. }| {
        let text = format!("// simt.cluster {entry} {x} {y} {z}");
        quote! { ::core::arch::global_asm!(#text); }
    });
    let overlap = (overlaps != Overlaps::No).then(|| {
        // ptx-build's lint reads it: what may come before the wait.
        let text = format!("// simt.overlaps {entry}");
        // In the entry, where nothing of the author's can come before. The next launch is let in first: its
        // blocks take what room is left as soon as all of this one's have begun, and each launch still ends
        // after the one before it.
        let wait = quote! { ::simt::thread::wait_for_previous(); };
        let let_in = quote! { ::simt::thread::let_next_start(); };
        let begin = match overlaps {
            Overlaps::InTurn => quote! { #wait #let_in },
            Overlaps::Late => let_in,
            Overlaps::ByHand => quote! {},
            _ => quote! { #let_in #wait },
        };
        (quote! { ::core::arch::global_asm!(#text); }, begin)
    });
    let (overlap_word, overlap) = overlap.unzip();
    quote! {
        #[cfg(target_arch = "nvptx64")]
        #[allow(non_snake_case, unused_imports, dead_code, clippy::upper_case_acronyms)]
        mod #module {
            use super::*;
            #(#aliases)*
            #bounds
            #needs
            #cluster
            #overlap_word
            /// The device's entry.
            ///
            /// # Safety
            /// The launch's contract.
            #[unsafe(no_mangle)]
            pub unsafe extern "ptx-kernel" fn #entry_ident(#(#names: #types),*) {
                #overlap
                super::#name #generics (#(#names),*)
            }
        }
    }
}
