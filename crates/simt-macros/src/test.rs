//! `#[simt::test]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Error, Expr, FnArg, Ident, ItemFn, Pat, ReturnType, Token};

#[derive(Default)]
struct Options {
    cases: Option<Expr>,
    orders: Option<Expr>,
    ptx: Option<Expr>,
    result: bool,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut options = Options::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            let place = match key.to_string().as_str() {
                "cases" => Some(&mut options.cases),
                "orders" => Some(&mut options.orders),
                "ptx" => Some(&mut options.ptx),
                "result" => None,
                _ => return Err(Error::new(key.span(), "expected `cases`, `orders`, `ptx` or `result`")),
            };
            match place {
                Some(place) => {
                    input.parse::<Token![=]>()?;
                    *place = Some(input.parse()?);
                }
                None => options.result = true,
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(options)
    }
}

pub fn expand(options: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let options: Options = syn::parse2(options)?;
    let mut function: ItemFn = syn::parse2(item)?;
    let signature = &function.sig;
    let unusual = signature.unsafety.is_some() || signature.asyncness.is_some() || signature.abi.is_some();
    if unusual || signature.constness.is_some() || !signature.generics.params.is_empty() {
        return Err(Error::new(signature.span(), "a test is a plain `fn` without generics"));
    }
    if matches!(signature.output, ReturnType::Default) {
        let what = "a test returns what is to be launched: `-> simt_test::Trial`";
        return Err(Error::new(signature.ident.span(), what));
    }

    let mut draws = Vec::new();
    let mut names = Vec::new();
    for argument in &mut function.sig.inputs {
        let FnArg::Typed(argument) = argument else {
            return Err(Error::new(argument.span(), "a test has no `self`"));
        };
        let Pat::Ident(pattern) = &*argument.pat else {
            return Err(Error::new(argument.pat.span(), "a test's parameter has a plain name"));
        };
        let (mut sources, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut argument.attrs).into_iter().partition(|a| a.path().is_ident("draw"));
        // What only later parameters are drawn from, the function need not look at.
        argument.attrs = vec![syn::parse_quote! { #[allow(unused_variables)] }];
        argument.attrs.extend(others);
        let (Some(source), true) = (sources.pop(), sources.is_empty()) else {
            let what = "a test's parameter says what it is drawn from, once: \
                        `#[draw(simt_test::sizes(1..=1000))] n: usize`";
            return Err(Error::new(pattern.ident.span(), what));
        };
        let source: Expr = source.parse_args()?;
        let (name, ty) = (&pattern.ident, &argument.ty);
        let text = name.to_string();
        draws.push(quote! { let #name: #ty = __draws.draw(#text, #source)?; });
        names.push(name.clone());
    }

    let or_default = |given: &Option<Expr>, default: TokenStream| match given {
        Some(given) => quote! { #given },
        None => default,
    };
    let cases = or_default(&options.cases, quote! { ::simt_test::Options::DEFAULT.cases });
    let orders = or_default(&options.orders, quote! { ::simt_test::Options::DEFAULT.orders });
    let images = match &options.ptx {
        Some(images) => quote! { ::core::option::Option::Some(#images) },
        None => quote! { ::core::option::Option::None },
    };
    let (attributes, visibility) = (std::mem::take(&mut function.attrs), function.vis.clone());
    function.vis = syn::Visibility::Inherited;
    let name = function.sig.ident.clone();
    let text = name.to_string();
    let check = quote! {
        #[allow(clippy::needless_pass_by_value, clippy::too_many_arguments)]
        #function

        let __site = ::simt_test::Site {
            path: ::core::concat!(::core::module_path!(), "::", #text),
            package: ::core::env!("CARGO_PKG_NAME"),
            debug: ::core::cfg!(debug_assertions),
        };
        let __options = ::simt_test::Options { cases: #cases, orders: #orders };
        ::simt_test::check(&__site, __options, &|| #images, &|__draws: &mut ::simt_test::Draws<'_>| {
            #(#draws)*
            ::simt_test::IntoTrial::into_trial(#name(#(#names),*))
        })
    };
    if options.result {
        return Ok(quote! {
            #(#attributes)*
            #visibility fn #name() -> ::core::result::Result<::simt_test::Report, ::simt_test::Failed> {
                #check
            }
        });
    }
    Ok(quote! {
        #(#attributes)*
        #[::core::prelude::v1::test]
        #visibility fn #name() {
            let __checked: ::core::result::Result<::simt_test::Report, ::simt_test::Failed> = { #check };
            if let ::core::result::Result::Err(__failed) = __checked {
                ::core::panic!("{__failed}");
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(options: TokenStream, item: TokenStream) -> String {
        expand(options, item).map_or_else(|error| error.to_string(), |tokens| panic!("{tokens}"))
    }

    #[test]
    fn misuse_is_told_with_the_way_out() {
        let good = quote! { fn test(#[draw(s())] n: usize) -> Trial { t(n) } };
        assert!(expand(quote! { cases = 3, orders = 1, ptx = images(), result }, good.clone()).is_ok());
        let cases = [
            (quote! {}, quote! { fn test(n: usize) -> Trial {} }, "#[draw(simt_test::sizes(1..=1000))]"),
            (quote! {}, quote! { fn test(#[draw(a)] #[draw(b)] n: usize) -> Trial {} }, "once"),
            (quote! {}, quote! { fn test(#[draw(a)] (n, m): (u8, u8)) -> Trial {} }, "a plain name"),
            (quote! {}, quote! { fn test(#[draw(a)] n: usize) {} }, "-> simt_test::Trial"),
            (quote! {}, quote! { fn test<T>(#[draw(a)] n: T) -> Trial {} }, "without generics"),
            (quote! {}, quote! { async fn test(#[draw(a)] n: u8) -> Trial {} }, "a plain `fn`"),
            (quote! {}, quote! { fn test(&self) -> Trial {} }, "no `self`"),
            (quote! { seeds = 3 }, good.clone(), "expected `cases`, `orders`, `ptx` or `result`"),
            (quote! { cases }, good.clone(), "expected `=`"),
        ];
        for (options, item, part) in cases {
            let text = error(options, item);
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn other_attributes_stay() {
        let item = quote! {
            #[ignore]
            pub fn test(#[draw(s())] n: usize) -> Trial { t(n) }
        };
        let text = expand(quote! {}, item).unwrap().to_string();
        assert!(text.starts_with("# [ignore] # [:: core :: prelude :: v1 :: test] pub fn test ()"), "{text}");
    }
}
