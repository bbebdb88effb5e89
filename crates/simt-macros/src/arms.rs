//! Calls in the arms of a branch, made such that the host's compiler does not merge them.
//!
//! A helper that holds a barrier and is called in both arms of a branch is two barriers. Where nothing that
//! differs follows the two calls, or comes before them, an optimising compiler makes one of them, and the
//! emulator could not tell. So on the host each call has a mark of its own on both sides, and so has one that
//! is last in its function. The device's code has none.

use proc_macro2::TokenStream;
use quote::quote;
use std::hash::{DefaultHasher, Hash, Hasher};
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Expr, ExprCall, ExprConst, ExprRepeat, Item, Macro, Pat, Stmt, Type};

/// What a path names that is called and holds no barrier that the emulator does not know the place of:
/// numbers' own functions, and the modules of `core` and `simt`.
const NAMED: [&str; 29] = [
    "bool", "char", "f32", "f64", "f16", "bf16", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16",
    "u32", "u64", "u128", "usize", "core", "std", "mem", "cmp", "thread", "warp", "math", "bits", "convert",
    "half2", "Global",
];

/// The function for the host, if it has a call to mark.
pub fn marked(function: &syn::ItemFn) -> Option<syn::ItemFn> {
    if function.sig.constness.is_some() {
        // A mark is nothing for a constant.
        return None;
    }
    let mut function = function.clone();
    let mut calls = Calls { depth: 0, marks: 0, name: function.sig.ident.to_string() };
    calls.visit_block_mut(&mut function.block);
    if let Some(Stmt::Expr(last, _)) = function.block.stmts.last_mut() {
        // A jump in the place of the last call would leave no trace of this function.
        calls.set_around(last);
    }
    (calls.marks > 0).then_some(function)
}

/// `function` for the device, and with marks for the host; as it is if there is none to make.
pub fn on_both_sides(function: TokenStream) -> TokenStream {
    let parsed = syn::parse2::<syn::ItemFn>(function.clone());
    let Some(host) = parsed.ok().and_then(|parsed| marked(&parsed)) else { return function };
    quote! {
        #[cfg(target_arch = "nvptx64")]
        #function
        #[cfg(not(target_arch = "nvptx64"))]
        #[allow(unreachable_code)]
        #host
    }
}

struct Calls {
    /// In how many arms.
    depth: u32,
    marks: u64,
    name: String,
}

impl Calls {
    fn in_arm(&mut self, visit: impl FnOnce(&mut Self)) {
        self.depth += 1;
        visit(self);
        self.depth -= 1;
    }

    /// Sets marks around a call that may lead to a barrier.
    fn set_around(&mut self, expr: &mut Expr) {
        if let Expr::Call(call) = expr
            && may_meet(call)
        {
            let (before, behind) = (self.mark(), self.mark());
            *expr = syn::parse_quote! {
                (match (::simt::emu::mark::<#before>(), #call) {
                    ((), value) => {
                        ::simt::emu::mark::<#behind>();
                        value
                    }
                })
            };
        }
    }

    /// A number that no other mark has.
    fn mark(&mut self) -> u64 {
        self.marks += 1;
        let mut hasher = DefaultHasher::new();
        (&self.name, self.marks).hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether the call may lead to a barrier.
fn may_meet(call: &ExprCall) -> bool {
    let Expr::Path(path) = &*call.func else { return false };
    let mut segments = path.path.segments.iter().rev().map(|segment| segment.ident.to_string());
    let is_function =
        segments.next().is_some_and(|name| name.starts_with(|c: char| c.is_lowercase() || c == '_'));
    is_function && !segments.any(|name| NAMED.contains(&name.as_str()))
}

impl VisitMut for Calls {
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        match expr {
            Expr::If(branch) => {
                self.visit_expr_mut(&mut branch.cond);
                self.in_arm(|calls| calls.visit_block_mut(&mut branch.then_branch));
                if let Some((_, other)) = &mut branch.else_branch {
                    self.in_arm(|calls| calls.visit_expr_mut(other));
                }
            }
            Expr::Match(branch) => {
                self.visit_expr_mut(&mut branch.expr);
                for arm in &mut branch.arms {
                    self.in_arm(|calls| calls.visit_expr_mut(&mut arm.body));
                }
            }
            _ => visit_mut::visit_expr_mut(self, expr),
        }
        if self.depth > 0 {
            self.set_around(expr);
        }
    }

    /// The body of `unroll!` is kernel code.
    fn visit_macro_mut(&mut self, called: &mut Macro) {
        if called.path.segments.last().is_none_or(|segment| segment.ident != "unroll") {
            return;
        }
        let mut tokens: Vec<_> = called.tokens.clone().into_iter().collect();
        let Some(last) = tokens.pop() else { return };
        let Ok(mut body) = syn::parse2::<Block>(last.into()) else { return };
        self.visit_block_mut(&mut body);
        tokens.extend(quote! { #body });
        called.tokens = tokens.into_iter().collect();
    }

    // What follows is no code that runs, or code of its own.
    fn visit_expr_const_mut(&mut self, _: &mut ExprConst) {}
    fn visit_item_mut(&mut self, _: &mut Item) {}
    fn visit_pat_mut(&mut self, _: &mut Pat) {}
    fn visit_type_mut(&mut self, _: &mut Type) {}
    fn visit_generic_argument_mut(&mut self, _: &mut syn::GenericArgument) {}

    fn visit_expr_repeat_mut(&mut self, repeat: &mut ExprRepeat) {
        self.visit_expr_mut(&mut repeat.expr);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many calls of `f` have a mark on both sides, and how many there are.
    fn count(body: TokenStream) -> (usize, usize) {
        let function = quote! { fn kernel() { #body } };
        let both = on_both_sides(function.clone()).to_string();
        let host = both.split_once("unreachable_code").map_or("", |(_, host)| host);
        (host.matches("mark ::").count() / 2, function.to_string().matches("f (").count())
    }

    #[test]
    fn calls_in_arms_are_marked() {
        assert_eq!(count(quote! { if c { f(); } else { f(); } }), (2, 2));
        assert_eq!(count(quote! { match c { 0 => f(1), 1 => { let x = a::f(2); } _ => {} } }), (2, 2));
        assert_eq!(count(quote! { if c { unroll!(for i in 0..4 { f(i); }); } }), (1, 1));
        assert_eq!(count(quote! { f(1); if c { f(2); return; } f(3); }), (2, 3));
        assert_eq!(count(quote! { if c { while d { x = 1 + f(f(2)); } } }), (2, 2));
    }

    #[test]
    fn others_are_not() {
        assert_eq!(count(quote! { f(); for i in 0..f(3) { f(i); } }), (0, 3));
        assert_eq!(count(quote! { if f(1) == 2 { thread::sync_threads(); y.f(1); Some(1); } }), (0, 2));
        assert_eq!(
            count(quote! { if c { const { f(1) }; let x = [0; f(2)]; const X: u32 = f(3); } }),
            (0, 3)
        );
        assert_eq!(count(quote! { if c { u32::from(x); core::mem::swap(a, b); assert!(f(1)); } }), (0, 1));
    }

    #[test]
    fn the_device_has_the_function_as_it_was() {
        let function = quote! { #[inline(always)] pub fn k(c: bool) { if c { f(1); } f(2); } };
        let (both, device) = (
            on_both_sides(function.clone()).to_string(),
            quote! {
                #[cfg(target_arch = "nvptx64")]
                #function
                #[cfg(not(target_arch = "nvptx64"))]
            },
        );
        assert!(both.starts_with(&device.to_string()), "{both}");
    }

    #[test]
    fn constant_functions_stay_as_they_are() {
        let function = quote! { const fn g(c: bool) -> u32 { if c { f(1) } else { f(2) } } };
        assert_eq!(on_both_sides(function.clone()).to_string(), function.to_string());
    }

    #[test]
    fn every_mark_is_another() {
        let both = on_both_sides(quote! { fn k() { if c { f(); } else { f(); } } }).to_string();
        let mut marks: Vec<&str> =
            both.split("mark :: < ").skip(1).filter_map(|rest| rest.split(' ').next()).collect();
        marks.sort_unstable();
        marks.dedup();
        assert_eq!(marks.len(), 4, "{both}");
    }
}
