//! Why a module does not become PTX by libNVVM.

use super::legal::Refused;
use super::library::REMEDY;
use std::path::PathBuf;

/// Why there is no PTX of libNVVM's.
#[derive(Debug, thiserror::Error)]
pub enum NvvmError {
    /// There is no library that can be used.
    #[error("the code generator nvvm needs libNVVM: {reason}; {REMEDY}, or build with FERROKV_CODEGEN=llvm")]
    NoLibrary {
        /// What was found wanting, place by place.
        reason: String,
    },
    /// Nothing accepts its PTX.
    #[error("the code generator nvvm needs ptxas, which accepts its PTX for each target: {reason}")]
    NoPtxas {
        /// What was found wanting, and how to get one.
        reason: String,
    },
    /// The IR holds what is not translated.
    #[error("{}: {refused}", path.display())]
    Refused {
        /// The IR.
        path: PathBuf,
        /// What, where, and the way out.
        refused: Refused,
    },
    /// libNVVM does not do what it was asked.
    #[error("{}: {call} failed with code {code} for {arch}:\n{messages}", library.display())]
    Library {
        /// The library.
        library: PathBuf,
        /// The function of libNVVM that failed.
        call: &'static str,
        /// Its code.
        code: i32,
        /// What was compiled for, for example `compute_100`.
        arch: String,
        /// What it said.
        messages: String,
    },
    /// Its PTX has no header of the known form.
    #[error(
        "libNVVM's PTX has no line `{directive}`, which its target and version are read from: use another release of libNVVM"
    )]
    Header {
        /// The line that is missing.
        directive: &'static str,
    },
    /// The PTX calls what is not in it.
    #[error("this libNVVM does not know {names}: use release 13.3 or newer ({REMEDY})")]
    Unknown {
        /// The functions.
        names: String,
    },
}
