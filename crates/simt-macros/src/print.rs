//! `println!` in kernels: a line of text with values in it, on both sides.
//!
//! On the device a call leaves a comment, `// simt.print FILE:LINE:COLUMN TEXT`, and instructions that write
//! the comment's number, the thread and the values to memory of the host, as [`crate::stop`] does for what
//! stops a grid. On the host it is the standard library's formatting.

use crate::message::{Message, escaped};
use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote};
use syn::LitStr;
use syn::parse::ParseStream;

/// Values that a line has room for.
const MOST_VALUES: usize = 8;

/// Where in a record the first one is, in bytes.
const FIRST_VALUE: usize = 48;

/// `println!`.
pub fn line(input: TokenStream) -> syn::Result<TokenStream> {
    let parser = |input: ParseStream<'_>| Message::parse(input, Vec::new(), MOST_VALUES);
    let Message { text, values, .. } = syn::parse::Parser::parse2(parser, input)?.unwrap_or_default();
    // Names that an author's expression cannot mean.
    let place = |i| format_ident!("value_{i}", span = Span::mixed_site());
    let places: Vec<Ident> = (0..values.len()).map(place).collect();
    let shifts = (0..values.len()).map(|i| 8 * i as u32);
    let offsets = (0..values.len()).map(|i| proc_macro2::Literal::usize_unsuffixed(FIRST_VALUE + 8 * i));
    let comment = escaped(&text);
    let literal = LitStr::new(&text, Span::call_site());
    Ok(quote! {
        {
            #[cfg(target_arch = "nvptx64")]
            {
                #(let #places = ::simt::on_device::packed(#values);)*
                let kinds = 0u64 #(| (#places.1 as u64) << #shifts)*;
                // SAFETY: what is written is a record in memory that the host has made for it.
                unsafe {
                    ::simt::on_device::print!(#comment, kinds #(, #offsets #places #places.0)*)
                }
            }
            #[cfg(not(target_arch = "nvptx64"))]
            ::simt::print::line(
                (::core::file!(), ::core::line!(), ::core::column!()),
                ::core::format_args!(#literal #(, ::simt::on_device::value(#values))*),
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_text_on_both_sides_and_its_values_once_on_each() {
        let said = line(quote! { "{} of {n:>4}, {{{0:x}}}", f(), n = g() }).unwrap().to_string();
        assert!(said.contains(r#"print ! ("{{0}} of {{1:>4}}, {{{{{{0:x}}}}}}" , kinds"#), "{said}");
        assert!(said.contains(r#"format_args ! ("{0} of {1:>4}, {{{0:x}}}""#), "{said}");
        assert_eq!((said.matches("f ()").count(), said.matches("g ()").count()), (2, 2), "{said}");
        let empty = line(quote! {}).unwrap().to_string();
        assert!(empty.contains(r#"print ! ("" , kinds)"#), "{empty}");
    }

    #[test]
    fn a_line_has_room_for_eight_values() {
        assert!(line(quote! { "{a}{b}{c}{d}{e}{f}{g}{h}" }).is_ok());
        let error = line(quote! { "{a}{b}{c}{d}{e}{f}{g}{h}{i}" }).unwrap_err().to_string();
        assert!(error.contains("up to 8 values"), "{error}");
        assert!(line(quote! { text }).unwrap_err().to_string().contains("a literal"));
    }
}
