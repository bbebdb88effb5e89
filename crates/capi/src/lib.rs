//! Ferrokv for other languages: a C interface over memory and streams that the caller owns.
//!
//! `include/ferrokv.h` is its description, for people who call it; `python/` is a package over it. Here is
//! what holds on this side:
//!
//! - A function returns a [`Status`]; where that is not 0, [`ferrokv_last_error`] has a message, of the
//!   calling thread. None panics: a panic inside is caught and is [`Status::Internal`].
//! - A handle is made by a `create` or `open` and ends with its `destroy` or `close`, which take null. A plan
//!   and a cache keep their device, so handles may end in any order.
//! - What has scratch is locked for the length of a call: handles may be used from several threads. But the
//!   work of two calls of one handle uses the same scratch on the GPU: they go into one stream, or the caller
//!   orders their streams by an event. A run of a captured call counts as one.
//! - A tensor is address, number of elements and type. Its number and type are checked against the plan
//!   before anything is launched; that the memory is there is the caller's word.
//! - A `run`, `quantize`, `append` or `attend` puts launches into the given stream, allocates nothing, and
//!   waits for nothing on a GPU: it can be captured. On the CPU it has finished when it returns, by the CPU's
//!   own path, which gives the kernels' bits.
//!
//! | module | what |
//! | --- | --- |
//! | [`device`] | opening a GPU or the CPU |
//! | [`dense`] | exact attention over paged f16 and bf16 pools |
//! | [`int8`] | quantizing a matrix to 8 bits, and back |
//! | [`cache`] | keys and values as any scheme of `--kv` keeps them |

// Names as C has them.
#![allow(non_camel_case_types)]

pub mod cache;
pub mod dense;
pub mod device;
pub mod int8;
mod status;
mod tensor;

pub use status::{Status, ferrokv_last_error};
pub use tensor::{Dtype, ferrokv_tensor, ferrokv_tensor_from_dlpack};

use std::ffi::{CStr, c_char};
use std::sync::LazyLock;

/// The number of this interface: raised when a caller that was compiled against an older header would no
/// longer work.
pub const ABI: u32 = 1;

/// [`ABI`] of the library that is loaded.
#[unsafe(no_mangle)]
pub extern "C" fn ferrokv_abi() -> u32 {
    ABI
}

/// The version of the library, such as `0.1.0`; it lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn ferrokv_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// The schemes that a cache can be made by, with spaces between; it lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn ferrokv_schemes() -> *const c_char {
    static NAMES: LazyLock<std::ffi::CString> = LazyLock::new(|| {
        let names: Vec<&str> = host::schemes().map(|scheme| scheme.name).collect();
        std::ffi::CString::new(names.join(" ")).unwrap_or_default()
    });
    NAMES.as_ptr()
}
