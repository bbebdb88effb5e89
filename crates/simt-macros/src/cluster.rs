//! `cluster = 4` and `cluster = (2, 2, 1)` of `#[kernel]`.

use proc_macro2::Span;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, LitInt, Token, parenthesized};

/// The blocks of a cluster, along x, y and z.
#[derive(Clone, Copy)]
pub struct Cluster {
    pub extent: [u32; 3],
    pub span: Span,
}

impl Parse for Cluster {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let span = input.span();
        let numbers: Vec<LitInt> = if input.peek(syn::token::Paren) {
            let list;
            parenthesized!(list in input);
            Punctuated::<LitInt, Token![,]>::parse_terminated(&list)?.into_iter().collect()
        } else {
            vec![input.parse()?]
        };
        let mut extent = [1; 3];
        for (axis, number) in extent.iter_mut().zip(&numbers) {
            *axis = number.base10_parse()?;
        }
        let blocks = extent.iter().try_fold(1u32, |blocks, axis| blocks.checked_mul(*axis));
        if !(1..=3).contains(&numbers.len()) || !blocks.is_some_and(|blocks| (1..=8).contains(&blocks)) {
            return Err(Error::new(
                span,
                "a cluster has one to eight blocks: `cluster = 4`, `cluster = (2, 2, 1)`",
            ));
        }
        Ok(Cluster { extent, span })
    }
}

#[cfg(test)]
mod tests {
    use crate::kernel::expand;
    use quote::quote;

    #[test]
    fn a_cluster_is_one_to_eight_blocks_of_sm_90() {
        let kernel = |options| expand(options, quote! { fn k(n: u32) {} }).map(|tokens| tokens.to_string());
        for (options, directive) in [
            (quote! { min_sm = 90, cluster = 8 }, "// simt.cluster k 8 1 1"),
            (quote! { cluster = (2, 1, 4), min_sm = 100 }, "// simt.cluster k 2 1 4"),
            (quote! { min_sm = 90, cluster = (3, 2) }, "// simt.cluster k 3 2 1"),
        ] {
            let text = kernel(options).expect("expanded");
            assert!(text.contains(directive), "{text}");
        }
        assert!(!kernel(quote! { min_sm = 90 }).expect("expanded").contains("simt.cluster"));
        for options in [
            quote! { min_sm = 90, cluster = 9 },
            quote! { min_sm = 90, cluster = 0 },
            quote! { min_sm = 90, cluster = (2, 2, 4) },
            quote! { min_sm = 90, cluster = (2, 2, 1, 1) },
            quote! { min_sm = 90, cluster = () },
        ] {
            assert!(kernel(options).expect_err("refused").to_string().contains("one to eight blocks"));
        }
        let old = kernel(quote! { cluster = 2 }).expect_err("refused").to_string();
        assert!(old.contains("write `min_sm = 90`"), "{old}");
    }
}
