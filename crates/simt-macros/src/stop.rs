//! `assert!`, `panic!` and their kin as they are on the device: the grid stops, and the host reads why.
//!
//! A macro leaves a comment, `// simt.site FILE:LINE:COLUMN MESSAGE`, and instructions that write the site's
//! number, the thread and up to four values to memory of the host. `ptx-build` gives the numbers and puts the
//! entry's name beside them; the device layer reads the comment, and puts the values into the message. So no
//! text and no formatting is in the kernel.

use crate::message::{Message, escaped};
use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Expr, Token};

/// Values that a record has room for.
const MOST_VALUES: usize = 4;

/// The macros that a kernel's body sees in place of those of `core`.
const NAMES: [&str; 7] =
    ["assert", "assert_eq", "assert_ne", "panic", "todo", "unimplemented", "unreachable"];

/// What comes first in the body of a function for the device: the names of this module's macros there, and
/// `println!` on both sides.
pub fn names() -> TokenStream {
    let names = NAMES.map(|name| Ident::new(name, Span::call_site()));
    let println = Ident::new("println", Span::call_site());
    quote! {
        #[cfg(target_arch = "nvptx64")]
        #[allow(unused_imports)]
        use ::simt::on_device::{#(#names),*};
        #[allow(unused_imports)]
        use ::simt::#println;
    }
}

/// `function` with [`names`] in its body; as it is if it has none.
pub fn with_names(function: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = function.into_iter().collect();
    if let Some(TokenTree::Group(body)) = tokens.last()
        && body.delimiter() == proc_macro2::Delimiter::Brace
    {
        let (names, rest, span) = (names(), body.stream(), body.span());
        let mut body = proc_macro2::Group::new(proc_macro2::Delimiter::Brace, quote! { #names #rest });
        body.set_span(span);
        tokens.pop();
        tokens.push(TokenTree::Group(body));
    }
    tokens.into_iter().collect()
}

impl Message {
    /// The expression that stops the grid.
    fn stop(&self) -> TokenStream {
        let text = escaped(&self.text);
        let places: Vec<Ident> = (0..MOST_VALUES).map(|i| format_ident!("value_{i}")).collect();
        let given = self.values.iter().map(|value| quote! { ::simt::on_device::packed(#value) });
        let none = (self.values.len()..MOST_VALUES).map(|_| quote! { (0u64, 0u32) });
        let shifts = (0..MOST_VALUES).map(|i| 8 * i as u32);
        quote! {
            {
                let [#(#places),*] = [#(#given,)* #(#none),*];
                let kinds = 0 #(| #places.1 << #shifts)*;
                // SAFETY: the grid ends here; what is written is the record that the host has made for it.
                unsafe {
                    ::simt::on_device::stop!(#text, kinds, #(#places.0),*)
                }
            }
        }
    }
}

/// `panic!` and those like it: what their message begins with, and what it is without one.
pub fn panic(input: TokenStream, prefix: &str, bare: &str) -> syn::Result<TokenStream> {
    let parser = |input: ParseStream<'_>| Message::parse(input, Vec::new(), MOST_VALUES);
    let message = syn::parse::Parser::parse2(parser, input)?;
    let message = match message {
        Some(message) => Message { text: format!("{prefix}{}", message.text), ..message },
        None => Message { text: bare.to_owned(), ..Message::default() },
    };
    let stop = message.stop();
    Ok(quote! { (#stop) })
}

struct Assert {
    condition: Expr,
    message: Option<Message>,
}

impl Parse for Assert {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let condition = input.parse()?;
        input.parse::<Option<Token![,]>>()?;
        Ok(Assert { condition, message: Message::parse(input, Vec::new(), MOST_VALUES)? })
    }
}

/// `assert!`.
pub fn assert(input: TokenStream) -> syn::Result<TokenStream> {
    // As the author wrote it: a parsed expression has lost where its spaces were.
    let written = input.to_string().trim_end_matches([',', ' ']).replace('{', "{{").replace('}', "}}");
    let Assert { condition, message } = syn::parse2(input)?;
    let bare = || Message { text: format!("assertion failed: {written}"), ..Message::default() };
    let stop = message.unwrap_or_else(bare).stop();
    Ok(quote! { if !(#condition) { #stop } })
}

struct Compare {
    left: Expr,
    right: Expr,
    message: Option<Message>,
}

/// The names of what is compared, which an author's `left` is not.
fn compared() -> [TokenStream; 2] {
    ["left", "right"].map(|name| {
        let name = Ident::new(name, Span::mixed_site());
        quote! { #name }
    })
}

impl Parse for Compare {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let left = input.parse()?;
        input.parse::<Token![,]>()?;
        let right = input.parse()?;
        input.parse::<Option<Token![,]>>()?;
        Ok(Compare { left, right, message: Message::parse(input, compared().into(), MOST_VALUES)? })
    }
}

/// `assert_eq!` and `assert_ne!`: `sign` is what holds.
pub fn compare(input: TokenStream, sign: TokenStream) -> syn::Result<TokenStream> {
    let Compare { left, right, message } = syn::parse2(input)?;
    let said = message.as_ref().map_or_else(String::new, |message| format!(": {}", message.text));
    let [l, r] = compared();
    let mut message =
        message.unwrap_or_else(|| Message { values: vec![l.clone(), r.clone()], ..Message::default() });
    message.text = format!("assertion `left {sign} right` failed{said}\n  left: {{0:?}}\n right: {{1:?}}");
    let stop = message.stop();
    Ok(quote! {
        match (#left, #right) {
            (#l, #r) => if !(#l #sign #r) { #stop }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of the comment that a macro leaves, as a template has it.
    fn text(tokens: syn::Result<TokenStream>) -> String {
        let tokens = tokens.unwrap_or_else(|error| panic!("{error}")).to_string();
        let from = tokens.find("stop ! (\"").expect("it stops") + 9;
        tokens[from..].split("\" , kinds").next().expect("kinds").to_owned()
    }

    fn error(tokens: syn::Result<TokenStream>) -> String {
        tokens.map_or_else(|error| error.to_string(), |tokens| panic!("{tokens}"))
    }

    #[test]
    fn messages_keep_their_places() {
        let flags = text(panic(quote! { "{x:>+8.2} {x:*^#010b} {x:-<9e}" }, "", ""));
        assert_eq!(flags, "{{0:>+8.2}} {{0:*^#010b}} {{0:-<9e}}");
        let own = quote! { "{} of {n}, {n:#06x}: {{}} {1:.2} {}", i + 1, x, n = y };
        assert_eq!(text(panic(own, "", "")), "{{0}} of {{1}}, {{1:#06x}}: {{{{}}}} {{2:.2}} {{2}}");
        assert_eq!(text(panic(quote! {}, "", "explicit panic")), "explicit panic");
        let said = text(panic(quote! { "\u{fc}ber\n" }, "not here: ", ""));
        assert_eq!(said, r"not here: \\u{{fc}}ber\\u{{a}}");
        let twice = text(panic(quote! { "{} {}, {a} {a}", f(), f() }, "", ""));
        assert_eq!(twice, "{{0}} {{1}}, {{2}} {{2}}");
        let said = text(assert(quote! { a < b }));
        assert!(said.starts_with("assertion failed: a < b"), "{said}");
        let said = text(compare(quote! { a, b, "at {i}" }, quote! { == }));
        assert!(said.starts_with("assertion `left == right` failed: at {{2}}"), "{said}");
        assert!(said.ends_with("right: {{1:?}}"), "{said}");
    }

    #[test]
    fn what_the_device_cannot_say_is_an_error_that_says_so() {
        assert!(error(panic(quote! { text }, "", "")).contains("a literal"));
        assert!(error(panic(quote! { "{:x?}", x }, "", "")).contains("there are `?`, `x`"));
        assert!(error(panic(quote! { "{:\u{fc}<5}", x }, "", "")).contains("filled up with"));
        assert!(error(panic(quote! { "{}", x, y }, "", "")).contains("does not name this value"));
        assert!(error(panic(quote! { "{x}", x = x, y = y }, "", "")).contains("does not name this value"));
        assert!(error(panic(quote! { "{}" }, "", "")).contains("no value for `{}`"));
        assert!(error(panic(quote! { "{" }, "", "")).contains("brace"));
        assert!(error(panic(quote! { "{a}{b}{c}{d}{e}" }, "", "")).contains("up to 4 values"));
        assert!(error(compare(quote! { a, b, "{c}{d}{e}" }, quote! { == })).contains("up to 4"));
    }

    #[test]
    fn a_body_begins_with_the_names() {
        let text = with_names(quote! { pub fn f(x: u32) -> u32 { x } }).to_string();
        assert!(text.contains("{ # [cfg (target_arch = \"nvptx64\")]"), "{text}");
        assert!(text.contains("assert_ne") && text.ends_with("x }"), "{text}");
        assert_eq!(with_names(quote! { fn f(); }).to_string(), "fn f () ;");
    }
}
