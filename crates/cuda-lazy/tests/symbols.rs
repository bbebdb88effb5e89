//! The list of symbols is sorted, complete, and links with the bindings of `cust`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use cuda_lazy::SYMBOLS;

#[path = "../src/symbols.rs"]
mod symbols;

#[test]
fn the_list_is_sorted_and_complete() {
    assert_eq!(SYMBOLS.len(), 355);
    assert!(SYMBOLS.windows(2).all(|pair| pair[0] < pair[1]), "sorted, each once");
    assert!(SYMBOLS.iter().all(|name| name.to_bytes().starts_with(b"cu")));
}

/// The bindings of `cust`, and what they lack.
mod sys {
    pub use cust::sys::*;
    unsafe extern "C" {
        pub fn cuLaunchKernelEx();
        pub fn cuTensorMapEncodeTiled();
    }
}

/// Takes the address of every function of the bindings: this links only if each has a trampoline.
macro_rules! addresses {
    ($($name:ident)*) => {
        &[$((stringify!($name), sys::$name as *const () as usize)),*]
    };
}

#[test]
fn every_binding_has_its_own_trampoline() {
    let addresses: &[(&str, usize)] = symbols::driver_symbols!(addresses);
    assert_eq!(addresses.len(), SYMBOLS.len());
    for ((name, _), symbol) in addresses.iter().zip(SYMBOLS) {
        assert_eq!(name.as_bytes(), symbol.to_bytes());
    }
    let mut distinct: Vec<usize> = addresses.iter().map(|(_, address)| *address).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), addresses.len());
}
