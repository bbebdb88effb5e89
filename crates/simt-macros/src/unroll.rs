//! `unroll!`.
//!
//! The device's code has a copy of the body for each index. The host's has a loop: there copies gain nothing,
//! and what they hold would be compiled so many times, each closure in it as a type of its own.

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Error, Expr, ExprLit, ExprRange, Ident, Lit, LitInt, Pat, RangeLimits, Token};

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

/// Finds a `break` or a `continue` of the loop that is written out: a copy is none.
#[derive(Default)]
struct Jumps {
    /// Loops of the body around what is looked at.
    loops: u32,
    found: Option<Span>,
}

impl Jumps {
    fn within(&mut self, visit: impl FnOnce(&mut Self)) {
        self.loops += 1;
        visit(self);
        self.loops -= 1;
    }

    fn jump(&mut self, span: Span, label: Option<&syn::Lifetime>) {
        if self.loops == 0 && label.is_none() {
            self.found.get_or_insert(span);
        }
    }
}

impl VisitMut for Jumps {
    fn visit_expr_break_mut(&mut self, jump: &mut syn::ExprBreak) {
        self.jump(jump.break_token.span, jump.label.as_ref());
        visit_mut::visit_expr_break_mut(self, jump);
    }

    fn visit_expr_continue_mut(&mut self, jump: &mut syn::ExprContinue) {
        self.jump(jump.continue_token.span, jump.label.as_ref());
    }

    fn visit_expr_for_loop_mut(&mut self, inner: &mut syn::ExprForLoop) {
        self.within(|jumps| visit_mut::visit_expr_for_loop_mut(jumps, inner));
    }

    fn visit_expr_while_mut(&mut self, inner: &mut syn::ExprWhile) {
        self.within(|jumps| visit_mut::visit_expr_while_mut(jumps, inner));
    }

    fn visit_expr_loop_mut(&mut self, inner: &mut syn::ExprLoop) {
        self.within(|jumps| visit_mut::visit_expr_loop_mut(jumps, inner));
    }
}

fn literal(expr: &Expr) -> Option<usize> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Int(int), .. }) => int.base10_parse().ok(),
        _ => None,
    }
}

pub fn expand(input: TokenStream) -> syn::Result<TokenStream> {
    let Loop { variable, range, at_most, mut body } = syn::parse2(input)?;
    let mut jumps = Jumps::default();
    jumps.visit_block_mut(&mut body);
    if let Some(span) = jumps.found {
        return Err(Error::new(span, "a loop that is written out has no `break` and no `continue`"));
    }
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
    let past = guard.map_or_else(|| quote! { #past_last }, |end| quote! { #end });
    let counter = Ident::new("counter", Span::mixed_site());
    Ok(quote! {
        {
            #ceiling
            #[cfg(target_arch = "nvptx64")]
            { #(#copies)* }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                let mut #counter = #first;
                while #counter < #past {
                    let #variable = #counter;
                    #counter += 1;
                    #body
                }
            };
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_the_body_for_each_index() {
        let out = expand(quote! { for i in 2..5 { f(i); } }).unwrap().to_string();
        let (device, host) = out.split_once("not (target_arch").unwrap();
        assert_eq!(device.matches("f (i)").count(), 3);
        assert!(device.contains("let i = 2usize") && device.contains("let i = 4usize"));
        assert!(!device.contains("5usize"));
        assert_eq!(host.matches("f (i)").count(), 1);
        assert!(host.contains("let mut counter = 2usize") && host.contains("while counter < 5usize"));
    }

    #[test]
    fn guards_a_constant_bound() {
        let out = expand(quote! { for i in 0..N, at_most 4 { f(i); } }).unwrap().to_string();
        let (device, host) = out.split_once("not (target_arch").unwrap();
        assert_eq!(device.matches("f (i)").count(), 4);
        assert!(device.contains("if 3usize < N") && host.contains("while counter < N"));
    }

    #[test]
    fn refuses_jumps_that_copies_would_give_to_another_loop() {
        for bad in [quote! { { if f(i) { continue; } } }, quote! { { break } }] {
            let error = expand(quote! { for i in 0..4 #bad }).unwrap_err().to_string();
            assert!(error.contains("no `break` and no `continue`"), "{error}");
        }
        for good in [
            quote! { { while f() { break; } } },
            quote! { { for j in 0..i { continue; } } },
            quote! { { if f(i) { continue 'tiles; } } },
        ] {
            assert!(expand(quote! { for i in 0..4 #good }).is_ok(), "{good}");
        }
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
