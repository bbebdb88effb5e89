//! Turns a `no_std` crate of kernels into linted PTX, from a build script.
//!
//! ```no_run
//! // build.rs
//! fn main() -> std::process::ExitCode {
//!     ptx_build::PtxBuild::new("kernels-gpu")
//!         .watch(["crates/simt", "crates/simt-macros"])
//!         .run()
//! }
//! ```
//! and in the crate: `include!(concat!(env!("OUT_DIR"), "/ptx_index.rs"));` ([`index`] says what that file
//! holds).
//!
//! The stages, each a module that can be used alone:
//!
//! | stage | module | what it does |
//! |---|---|---|
//! | find | [`toolchain`] | a rustc of the pinned version with its library source |
//! | compile | [`mod@compile`] | one run of cargo a target, in a target folder that persists |
//! | directives | [`directives`] | launch bounds, carried as comments through the compiler |
//! | lint | [`lint`], [`allow`] | numerics contract and memory rules, over parsed instructions ([`ptx`]) |
//! | assemble | [`ptxas`] | registers, stack and spills of every entry, where a `ptxas` is found |
//! | embed | [`index`] | the PTX and a generated Rust file that holds it |
//!
//! With no device compiler the build goes on: the table is empty and a note says why.

pub mod allow;
pub mod compile;
pub mod directives;
pub mod index;
pub mod lint;
pub mod ptx;
pub mod ptxas;
mod script;
pub mod toolchain;
mod waits;

pub use script::PtxBuild;

/// FNV-1a, 64 bits: tells texts apart (it is no defence against forgery).
pub fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        // A separator that no UTF-8 text holds, so that moving text between parts changes the hash.
        for byte in part.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_fingerprint_is_fnv1a_and_sees_the_parts() {
        // FNV-1a of the single byte 0xff, computed by hand from its definition.
        let one = (0xcbf2_9ce4_8422_2325_u64 ^ 0xff).wrapping_mul(0x0100_0000_01b3);
        assert_eq!(super::fingerprint([""]), one);
        assert_ne!(super::fingerprint(["ab", "c"]), super::fingerprint(["a", "bc"]));
    }
}
