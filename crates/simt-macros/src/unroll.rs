//! `unroll!`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Block, Error, Expr, ExprLit, ExprRange, Lit, LitInt, Pat, RangeLimits, Token};

/// More copies than this are a mistake: the code would not fit an instruction cache.
const MOST_COPIES: usize = 256;

struct Loop {
    variable: Pat,
    range: Expr,
    at_most: Option<LitInt>,
    body: Block,
}

impl Parse for Loop {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        input.parse::<Token![for]>()?;
        let variable = Pat::parse_single(input)?;
        input.parse::<Token![in]>()?;
        let range = input.call(Expr::parse_without_eager_brace)?;
        let at_most = if input.parse::<Option<Token![,]>>()?.is_some() {
            let word: syn::Ident = input.parse()?;
            if word != "at_most" {
                return Err(Error::new(word.span(), "expected `at_most N`"));
            }
            Some(input.parse()?)
        } else {
            None
        };
        let body = input.parse()?;
        if !input.is_empty() {
            return Err(input.error("nothing may follow the loop"));
        }
        Ok(Loop { variable, range, at_most, body })
    }
}

fn literal(expr: &Expr) -> Option<usize> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Int(int), .. }) => int.base10_parse().ok(),
        _ => None,
    }
}

pub fn expand(input: TokenStream) -> syn::Result<TokenStream> {
    let Loop { variable, range, at_most, body } = syn::parse2(input)?;
    let Expr::Range(ExprRange { start: Some(start), limits, end: Some(end), .. }) = &range else {
        return Err(Error::new(range.span(), "the range needs both ends: `0..8`"));
    };
    let first = literal(start).ok_or_else(|| Error::new(start.span(), "the range starts at a literal"))?;
    let inclusive = matches!(limits, RangeLimits::Closed(_)) as usize;
    let (past_last, guard) = match (literal(end), &at_most) {
        (Some(end), None) => (end + inclusive, None),
        (None, Some(most)) if inclusive == 0 => (first + most.base10_parse::<usize>()?, Some(end)),
        (Some(_), Some(most)) => {
            return Err(Error::new(most.span(), "a literal range needs no `at_most`"));
        }
        _ => {
            return Err(Error::new(
                end.span(),
                "a range that ends in a constant needs a ceiling: `0..N, at_most 16`",
            ));
        }
    };
    if past_last.saturating_sub(first) > MOST_COPIES {
        return Err(Error::new(range.span(), format!("more than {MOST_COPIES} copies of the body")));
    }
    let ceiling = guard.map(|end| {
        let message = format!("the loop runs past its ceiling of {}", past_last - first);
        quote! { const { ::core::assert!(#end <= #past_last, #message) }; }
    });
    let copies = (first..past_last).map(|i| match guard {
        Some(end) => quote! { if #i < #end { let #variable = #i; #body } },
        None => quote! { { let #variable = #i; #body } },
    });
    Ok(quote! { { #ceiling #(#copies)* } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_the_body_for_each_index() {
        let out = expand(quote! { for i in 2..5 { f(i); } }).unwrap().to_string();
        assert_eq!(out.matches("f (i)").count(), 3);
        assert!(out.contains("let i = 2usize") && out.contains("let i = 4usize") && !out.contains("5usize"));
    }

    #[test]
    fn guards_a_constant_bound() {
        let out = expand(quote! { for i in 0..N, at_most 4 { f(i); } }).unwrap().to_string();
        assert_eq!(out.matches("f (i)").count(), 4);
        assert!(out.contains("if 3usize < N"));
    }

    #[test]
    fn refuses_what_it_cannot_unroll() {
        for bad in
            [quote! { for i in 0..n { } }, quote! { for i in 0.. { } }, quote! { for i in 0..1000 { } }]
        {
            assert!(expand(bad.clone()).is_err(), "{bad}");
        }
    }
}
