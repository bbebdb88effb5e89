//! Which code generators make PTX of the kernels.

use crate::nvvm::TARGETS;
use std::fmt;

/// Names the code generators of a build, separated by commas: `llvm`, `nvvm`, `llvm,nvvm`. What a program
/// runs is the first one's; the second's is held beside it, to compare.
pub const CODEGEN_ENV: &str = "FERROKV_CODEGEN";

/// Names the targets of the generator [`Codegen::Nvvm`], separated by commas: `90,100`; or `all`, which are
/// [`nvvm::TARGETS`](crate::nvvm::TARGETS).
pub const NVVM_TARGETS_ENV: &str = "FERROKV_NVVM_TARGETS";

/// A code generator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Codegen {
    /// LLVM's own back end, which is in the device compiler.
    #[default]
    Llvm,
    /// NVIDIA's libNVVM ([`mod@crate::nvvm`]).
    Nvvm,
}

/// Why a build's generators or targets cannot be what it names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// A word that is no generator.
    #[error("{CODEGEN_ENV}={list}: `{word}` is no code generator; write llvm, nvvm, llvm,nvvm or nvvm,llvm")]
    Codegen {
        /// The list.
        list: String,
        /// The word.
        word: String,
    },
    /// A word that is no target.
    #[error("{origin}={list}: `{word}` is no target; write numbers from 75 on, as in 90,100,120, or all")]
    Target {
        /// Where the list stands: [`NVVM_TARGETS_ENV`], or the call of the build script.
        origin: &'static str,
        /// The list.
        list: String,
        /// The word.
        word: String,
    },
    /// PTX that is to be shipped, and would not be of the generator that ships.
    #[error("PTX is shipped of the code generator llvm alone, not of {list}: build with {CODEGEN_ENV}=llvm")]
    Ships {
        /// The generators of the build.
        list: String,
    },
}

impl Codegen {
    /// The name that lists and files have.
    pub fn name(self) -> &'static str {
        match self {
            Codegen::Llvm => "llvm",
            Codegen::Nvvm => "nvvm",
        }
    }

    /// Reads a list; each generator counts once.
    ///
    /// # Errors
    /// The first word that is no generator.
    pub fn list(list: &str) -> Result<Vec<Codegen>, ListError> {
        let mut generators = Vec::new();
        for word in list.split(',').map(str::trim) {
            let named = [Codegen::Llvm, Codegen::Nvvm].into_iter().find(|codegen| codegen.name() == word);
            let codegen =
                named.ok_or_else(|| ListError::Codegen { list: list.to_owned(), word: word.to_owned() })?;
            if !generators.contains(&codegen) {
                generators.push(codegen);
            }
        }
        Ok(generators)
    }
}

/// Reads a list of targets, and sorts it; `origin` is for the message. `all` are those of
/// [`nvvm::TARGETS`](crate::nvvm::TARGETS).
///
/// # Errors
/// The first word that is no target, which of an empty list is an empty one.
pub fn target_list(origin: &'static str, list: &str) -> Result<Vec<u32>, ListError> {
    if list.trim() == "all" {
        return Ok(TARGETS.to_vec());
    }
    let target = |word: &str| word.parse::<u32>().ok().filter(|sm| (TARGETS[0]..1000).contains(sm));
    let mut targets = Vec::new();
    for word in list.split(',').map(str::trim) {
        targets.push(target(word).ok_or_else(|| ListError::Target {
            origin,
            list: list.to_owned(),
            word: word.to_owned(),
        })?);
    }
    targets.sort_unstable();
    targets.dedup();
    Ok(targets)
}

impl fmt::Display for Codegen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_each_generator_once_and_keep_the_order() {
        assert_eq!(Codegen::list("llvm"), Ok(vec![Codegen::Llvm]));
        assert_eq!(Codegen::list("nvvm, llvm,nvvm"), Ok(vec![Codegen::Nvvm, Codegen::Llvm]));
        for wrong in ["", "llvm,", "NVVM", "llvm nvvm"] {
            let text = Codegen::list(wrong).unwrap_err().to_string();
            assert!(text.contains("is no code generator; write llvm, nvvm"), "{text}");
        }
    }

    #[test]
    fn targets_are_sorted_numbers_from_75_on() {
        assert_eq!(target_list(NVVM_TARGETS_ENV, "120, 90,100,90,75"), Ok(vec![75, 90, 100, 120]));
        assert_eq!(target_list(NVVM_TARGETS_ENV, "all"), Ok(TARGETS.to_vec()));
        assert!(TARGETS.is_sorted());
        for wrong in ["", "sm_90", "70", "90,", "9000", "all,90"] {
            let text = target_list(NVVM_TARGETS_ENV, wrong).unwrap_err().to_string();
            assert!(text.starts_with(&format!("FERROKV_NVVM_TARGETS={wrong}: ")), "{text}");
            assert!(text.contains("numbers from 75 on"), "{text}");
        }
    }
}
