//! Page-locked memory of the host that a module's kernels write to, which they find by a variable of theirs.

use super::ffi::{Relaxed, cu, name, note};
use cust::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUmodule};
use std::ffi::{CString, c_void};
use std::ptr::{NonNull, null_mut};

/// Such memory. Dropping it frees it, whether kernels still know of it or not.
pub(super) struct Mapped(NonNull<u32>);

// SAFETY: page-locked memory is any thread's; how it is accessed is up to who has it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Gives a module so many bytes, if it has the variable: zeros, but for what `begin` writes there. The
    /// variable has `N` 64-bit words: the memory's address on the device, then zeros. `without` says what
    /// becomes of a module whose memory could not be had. The context is bound.
    pub fn of<const N: usize>(
        (module, text): (CUmodule, &str),
        variable: &str,
        bytes: usize,
        without: &'static str,
        begin: impl FnOnce(NonNull<u32>),
    ) -> Option<Self> {
        // A driver that is asked for what is not there reports an error to tools that watch its calls.
        if !text.contains(variable) {
            return None;
        }
        let _relaxed = Relaxed::enter();
        let symbol = CString::new(variable).ok()?;
        let (mut variable, mut size) = (0, 0);
        // SAFETY: both are valid for a write, the module is loaded, the name ends in NUL.
        let code = unsafe { cu!(cuModuleGetGlobal_v2(&mut variable, &mut size, module, symbol.as_ptr())) };
        if code != 0 || size != 8 * N {
            return None;
        }
        let failed = |code, doing: &str| tracing::warn!(code, name = name(code), doing, "{without}");
        let mut host: *mut c_void = null_mut();
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: `host` is valid for a write.
        let code = unsafe { cu!(cuMemHostAlloc(&mut host, bytes, flags)) };
        let Some(words) = NonNull::new(host.cast::<u32>()).filter(|_| code == 0) else {
            failed(code, "allocating page-locked memory");
            return None;
        };
        let mapped = Mapped(words);
        // SAFETY: just allocated with so many bytes.
        unsafe { words.cast::<u8>().as_ptr().write_bytes(0, bytes) };
        begin(words);
        let mut start = [0_u64; N];
        // SAFETY: the first word is valid for a write; the memory was allocated for mapping.
        let code = unsafe { cu!(cuMemHostGetDevicePointer_v2(&mut start[0], host, 0)) };
        if code != 0 {
            failed(code, "mapping page-locked memory");
            return None;
        }
        // SAFETY: the variable has the bytes that are read, as seen above.
        let code = unsafe { cu!(cuMemcpyHtoD_v2(variable, start.as_ptr().cast(), size)) };
        if code != 0 {
            failed(code, "telling the kernels where");
            return None;
        }
        Some(mapped)
    }

    /// Its words.
    pub fn words(&self) -> NonNull<u32> {
        self.0
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // SAFETY: allocated by `of`; who has it drops it when its module's kernels have ended or are stopped
        // for good.
        note(unsafe { cu!(cuMemFreeHost(self.0.as_ptr().cast())) }, "freeing page-locked memory");
    }
}
