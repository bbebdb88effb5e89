//! Messages of kernels: a literal with values in it, `"{} of {n:#x}", x`.
//!
//! What a message says is known at compile time; at run time there are only its values. So it becomes a text
//! in which each value is called by its number, `{0} of {1:#x}`, and the values in that order.

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::parse::ParseStream;
use syn::spanned::Spanned;
use syn::{Error, Expr, LitStr, Token};

/// A message and what stands in it: `"{} of {n}", x`.
#[derive(Default)]
pub struct Message {
    /// The text, in which `{0:x}` is the first value in base 16; braces that stand for themselves are two.
    pub text: String,
    /// An expression for each value.
    pub values: Vec<TokenStream>,
    /// What the text calls the values by: numbers of arguments, names.
    pub names: Vec<String>,
}

impl Message {
    /// Reads what follows a macro's own arguments; nothing if nothing follows. `values` are those that the
    /// macro adds itself, and `most` is what a record has room for.
    pub fn parse(input: ParseStream<'_>, values: Vec<TokenStream>, most: usize) -> syn::Result<Option<Self>> {
        if input.is_empty() {
            return Ok(None);
        }
        let literal: LitStr = input.parse().map_err(|error| {
            Error::new(error.span(), "on the device a message is a literal, with values behind it")
        })?;
        let (mut positional, mut named) = (Vec::new(), Vec::new());
        while !input.is_empty() {
            input.parse::<Token![,]>()?;
            if input.is_empty() {
                break;
            }
            if input.peek(syn::Ident) && input.peek2(Token![=]) && !input.peek2(Token![==]) {
                let name: Ident = input.parse()?;
                input.parse::<Token![=]>()?;
                named.push((name.to_string(), input.parse::<Expr>()?));
            } else {
                positional.push(input.parse::<Expr>()?);
            }
        }
        let names = values.iter().map(|_| String::new()).collect();
        let mut message = Message { text: String::new(), values, names };
        message.read(&literal, &positional, &named)?;
        if message.values.len() > most {
            let room = format!("on the device a message has up to {most} values");
            return Err(Error::new(literal.span(), room));
        }
        Ok(Some(message))
    }

    fn read(&mut self, literal: &LitStr, positional: &[Expr], named: &[(String, Expr)]) -> syn::Result<()> {
        let wrong = |what: String| Error::new(literal.span(), what);
        let text = literal.value();
        let (mut rest, mut next) = (text.as_str(), 0);
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            self.text.push_str(before);
            if from.starts_with("{{") || from.starts_with("}}") {
                self.text.push_str(&from[..2]);
                rest = &from[2..];
                continue;
            }
            let end = from.find('}').filter(|_| from.starts_with('{'));
            let end = end.ok_or_else(|| wrong("a brace without its other half".into()))?;
            let (name, format) = from[1..end].split_once(':').unwrap_or((&from[1..end], ""));
            let name = if name.is_empty() {
                next += 1;
                (next - 1).to_string()
            } else {
                name.to_owned()
            };
            let value = if let Ok(index) = name.parse::<usize>() {
                positional.get(index).map(|value| quote! { #value })
            } else if let Some((_, value)) = named.iter().find(|(other, _)| *other == name) {
                Some(quote! { #value })
            } else {
                let name: Ident = syn::parse_str(&name).map_err(|_| wrong(format!("no name: `{name}`")))?;
                let name = Ident::new(&name.to_string(), literal.span());
                Some(quote! { #name })
            };
            let value = value.ok_or_else(|| wrong(format!("no value for `{}`", &from[..=end])))?;
            known(format).map_err(wrong)?;
            self.place(name, value, format);
            rest = &from[end + 1..];
        }
        self.text.push_str(rest);
        let unused = |name: &str| !self.names.iter().any(|used| used == name);
        let positional = positional.iter().enumerate().map(|(i, value)| (i.to_string(), value));
        let named = named.iter().map(|(name, value)| (name.clone(), value));
        match positional.chain(named).find(|(name, _)| unused(name)) {
            Some((_, value)) => Err(Error::new(value.span(), "the message does not name this value")),
            None => Ok(()),
        }
    }

    fn place(&mut self, name: String, value: TokenStream, format: &str) {
        let place = self.names.iter().position(|other| *other == name).unwrap_or_else(|| {
            self.names.push(name);
            self.values.push(value);
            self.values.len() - 1
        });
        let format = if format.is_empty() { String::new() } else { format!(":{format}") };
        self.text.push_str(&format!("{{{place}{format}}}"));
    }
}

/// Whether the host can write a value in this format:
/// `[[fill]< ^ >][+][#][0][width][.precision][? x X b o e E]`.
fn known(format: &str) -> Result<(), String> {
    let mut rest = format;
    let mut begin = format.chars();
    if let (Some(fill), Some('<' | '^' | '>')) = (begin.next(), begin.next()) {
        // It stands between braces, in a comment.
        if !(' '..='~').contains(&fill) || "{}\\".contains(fill) {
            return Err(format!("on the device a value is not filled up with `{fill}`"));
        }
        rest = begin.as_str();
    } else if rest.starts_with(['<', '^', '>']) {
        rest = &rest[1..];
    }
    let digits = |rest: &'_ str| rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    for flag in ['+', '#'] {
        rest = rest.strip_prefix(flag).unwrap_or(rest);
    }
    rest = &rest[digits(rest)..];
    if let Some(precision) = rest.strip_prefix('.') {
        rest = &precision[digits(precision)..];
    }
    if ["", "?", "x", "X", "b", "o", "e", "E"].contains(&rest) {
        return Ok(());
    }
    Err(format!(
        "on the device a value is not written as `{{:{format}}}`; there are `?`, `x`, `X`, `b`, `o`, `e`, `E`, \
         flags, a width, a precision"
    ))
}

/// A text as a comment of one line in a template of inline assembly.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '{' | '}' => escaped.extend([c, c]),
            '\\' => escaped.push_str("\\\\"),
            ' '..='~' => escaped.push(c),
            other => escaped.extend(other.escape_unicode().flat_map(|c| {
                // `\u{…}` has braces, which a template doubles.
                [Some(c), (c == '{' || c == '}').then_some(c)].into_iter().flatten()
            })),
        }
    }
    escaped
}
