//! Turns a crate of kernels into linted PTX, from a build script.
//!
//! ```no_run
//! // build.rs of a crate that has kernels of its own
//! fn main() -> std::process::ExitCode {
//!     ptx_build::PtxBuild::this_package().run()
//! }
//! ```
//! and in the crate: `ferrokv_device::embedded_ptx!()`, which is what a GPU is opened with; or
//! `include!(concat!(env!("OUT_DIR"), "/ptx_index.rs"));` ([`index`] says what that file holds). Kernels that
//! are a package beside the build script's are built by [`PtxBuild::new`] or [`PtxBuild::member`].
//!
//! For the device the library of the package is compiled as if it began with `#![no_std]` and
//! `#![feature(abi_ptx, asm_experimental_arch)]`: it needs no attributes for it, and no profile in its
//! workspace. A **library below it** that has kernels, too, needs both, behind
//! `cfg_attr(target_arch = "nvptx64", …)`.
//!
//! The stages, each a module that can be used alone:
//!
//! | stage | module | what it does |
//! |---|---|---|
//! | find | [`toolchain`] | a rustc of the pinned version with its library source |
//! | compile | [`mod@compile`] | one run of cargo for all targets, in a target folder that persists |
//! | generate | [`mod@codegen`], [`mod@nvvm`] | on demand a second code generator, NVIDIA's libNVVM |
//! | directives | [`directives`] | launch bounds and clusters, carried as comments through the compiler |
//! | targets | [`since`], [`needs`], [`lacks`] | lines and kernels of newer targets go from older ones |
//! | version | [`version`] | a newer PTX version, where an instruction needs it |
//! | stand-ins | [`stand_ins`] | instructions that LLVM would refuse for the lowest target |
//! | sites | [`sites`] | places where a kernel stops with a message, or prints, get their numbers |
//! | lint | [`lint`], [`allow`] | numerics contract and memory rules, over parsed instructions ([`ptx`]) |
//! | assemble | [`ptxas`] | registers, stack and spills of every entry, where a `ptxas` is found |
//! | ship | [`shipped`] | the PTX in the package, for users without a device compiler |
//! | embed | [`index`] | the PTX and a generated Rust file that holds it |
//!
//! With no device compiler the build goes on: the table is empty and a note says why.

pub mod allow;
pub mod codegen;
pub mod compile;
pub mod cubin;
pub mod directives;
mod endless;
pub mod index;
pub mod lacks;
pub mod lint;
pub mod needs;
pub mod nvvm;
mod opcodes;
pub mod ptx;
pub mod ptxas;
mod script;
pub mod shipped;
pub mod since;
pub mod sites;
pub mod stand_ins;
mod target;
pub mod toolchain;
pub mod version;
mod waits;

pub use codegen::Codegen;
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
