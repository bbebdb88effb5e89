//! The second code generator: NVIDIA's libNVVM in place of LLVM's own back end.
//!
//! rustc writes the optimised module as text (LLVM IR). [`legal`] makes NVVM IR of it, which is LLVM IR with
//! restrictions, or says by name what it cannot translate; [`library`] hands it to libNVVM, which writes PTX;
//! [`retarget`] gives the PTX back what went around libNVVM, and the target and version that it is shipped
//! for. From there on it goes the way of the other generator's: directives, sites, lint, ptxas.
//!
//! | NVVM target | PTX for |
//! |---|---|
//! | compute_100 and newer | the same, for example sm_100 |
//! | 80 to 90 | compiled for compute_100, then for its own target if ptxas takes it |
//! | 75 | the same; kernels of which ptxas says that they need more are left out ([`crate::lacks`]) |
//!
//! libNVVM reads today's LLVM IR for compute_100 and newer alone; what is below wants that of LLVM 7. An
//! instruction of the PTX means the same for every target that has it (the PTX ISA says from which target on
//! that is), so text for an older target is right if its assembler takes it.

mod error;
pub mod intrinsics;
pub mod legal;
pub mod library;
pub mod retarget;

pub use error::NvvmError;
pub use library::{Compiled, Library, Located};

use legal::Legal;
use std::fs;
use std::path::Path;

/// The targets of `all`: one for each kind of GPU from Turing on.
pub const TARGETS: [u32; 8] = [75, 80, 86, 89, 90, 100, 103, 120];

/// The first target whose IR libNVVM reads in today's form.
pub const MODERN: u32 = 100;

/// The oldest target that the IR is made for: what a GPU before it lacks is left out of its PTX.
pub const OLDEST_IR: u32 = 80;

/// The newest target that the IR is made for: rustc is asked for a PTX version that newer ones do not have.
pub const NEWEST_IR: u32 = 90;

/// What libNVVM compiles a target for.
pub fn compiled_for(sm: u32) -> u32 {
    sm.max(MODERN)
}

/// Compiles a translated module for `sm`, which is [`MODERN`] or newer, and keeps the result beside the file
/// `path` that the module was read from: the same module is not compiled twice by the same library.
///
/// # Errors
/// What libNVVM said against it.
pub fn generate(library: &Library, legal: &Legal, sm: u32, path: &Path) -> Result<Compiled, NvvmError> {
    let kept = path.with_extension(format!("compute_{sm}.ptx"));
    let Located { release, stamp, .. } = library.located();
    let of = crate::fingerprint([&*legal.ir, release, stamp, &library::OPTIONS.concat(), &sm.to_string()]);
    if let Some(ptx) = fs::read_to_string(&kept).ok().as_deref().and_then(|text| unsealed(of, text)) {
        return Ok(Compiled { ptx: ptx.to_owned(), messages: String::new() });
    }
    let compiled = library.compile(&legal.ir, sm)?;
    // Only a cache, and messages are to be seen again. It is there as a whole or not at all, and two builds
    // do not write into one file.
    if compiled.messages.is_empty() {
        let beside = path.with_extension(format!("compute_{sm}.{}.partial", std::process::id()));
        let put = fs::write(&beside, sealed(of, &compiled.ptx)).and_then(|()| fs::rename(&beside, &kept));
        if put.is_err() {
            let _ = fs::remove_file(&beside);
        }
    }
    Ok(compiled)
}

/// A result to be kept: behind what it is `of`, and what it is itself.
fn sealed(of: u64, ptx: &str) -> String {
    format!("// {of:016x} {:016x}\n{ptx}", crate::fingerprint([ptx]))
}

/// The result in a text that was [`sealed`], if it is whole and of this.
fn unsealed(of: u64, text: &str) -> Option<&str> {
    let (_, ptx) = text.split_once('\n')?;
    (sealed(of, ptx) == text).then_some(ptx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_taken_only_as_a_whole_and_of_the_same() {
        let text = sealed(7, ".version 9.5\nret;\n");
        assert_eq!(unsealed(7, &text), Some(".version 9.5\nret;\n"));
        assert_eq!(unsealed(8, &text), None);
        for end in 0..text.len() {
            assert_eq!(unsealed(7, &text[..end]), None, "{end} bytes of {}", text.len());
        }
        assert_eq!(unsealed(7, &text.replace("ret", "bar")), None);
    }
}
