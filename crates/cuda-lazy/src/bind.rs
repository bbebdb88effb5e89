//! Trampolines, slots and the binder.

use crate::symbols::driver_symbols;
use crate::{DRIVER_VARIABLE, DriverError, DriverLibrary};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

const NO_DEVICE: c_int = 100;
const INVALID_VALUE: c_int = 1;
const NOT_SUPPORTED: c_int = 801;

macro_rules! names {
    ($($name:ident)*) => {
        /// Every driver symbol that this crate defines, sorted, one for each slot.
        pub static SYMBOLS: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("an identifier holds no NUL"),
            },
        )*];
    };
}
driver_symbols!(names);

// One trampoline and one slot for each symbol, and the binder's entry.
//
// The symbols are hidden: the driver and the libraries it loads look names up in the whole process and
// must find the driver's own. `cuda_lazy_next` counts the symbols while the assembler reads the list.
//
// The binder's entry is reached with the symbol's number on top of the stack, above the caller's return
// address. It saves every register that can hold an argument (six integers, eight vectors, and rax, which
// counts the vectors of a variadic call), asks `cuda_lazy_resolve` for the address, and jumps there with
// the stack as the caller left it.
macro_rules! trampolines {
    ($($name:ident)*) => {
        core::arch::global_asm!(
            ".set cuda_lazy_next, 0",
            ".macro cuda_lazy_symbol name",
            ".text",
            ".globl \\name",
            ".hidden \\name",
            ".type \\name, @function",
            ".p2align 4",
            "\\name:",
            ".cfi_startproc",
            "jmp *cuda_lazy_slots+8*cuda_lazy_next(%rip)",
            "1: pushq $cuda_lazy_next",
            ".cfi_adjust_cfa_offset 8",
            "jmp cuda_lazy_binder",
            ".cfi_endproc",
            ".size \\name, . - \\name",
            ".section .data.cuda_lazy_slots, \"aw\", @progbits",
            ".quad 1b",
            ".text",
            ".set cuda_lazy_next, cuda_lazy_next + 1",
            ".endm",
            ".section .data.cuda_lazy_slots, \"aw\", @progbits",
            ".p2align 6",
            ".globl cuda_lazy_slots",
            ".hidden cuda_lazy_slots",
            "cuda_lazy_slots:",
            $(concat!("cuda_lazy_symbol ", stringify!($name)),)*
            ".purgem cuda_lazy_symbol",
            ".text",
            ".p2align 4",
            ".type cuda_lazy_binder, @function",
            "cuda_lazy_binder:",
            ".cfi_startproc",
            ".cfi_def_cfa_offset 16",
            "pushq %rbp",
            ".cfi_def_cfa_offset 24",
            ".cfi_offset %rbp, -24",
            "movq %rsp, %rbp",
            ".cfi_def_cfa_register %rbp",
            "andq $-16, %rsp",
            "subq $192, %rsp",
            "movq %rdi, (%rsp)",
            "movq %rsi, 8(%rsp)",
            "movq %rdx, 16(%rsp)",
            "movq %rcx, 24(%rsp)",
            "movq %r8, 32(%rsp)",
            "movq %r9, 40(%rsp)",
            "movq %rax, 48(%rsp)",
            "movaps %xmm0, 64(%rsp)",
            "movaps %xmm1, 80(%rsp)",
            "movaps %xmm2, 96(%rsp)",
            "movaps %xmm3, 112(%rsp)",
            "movaps %xmm4, 128(%rsp)",
            "movaps %xmm5, 144(%rsp)",
            "movaps %xmm6, 160(%rsp)",
            "movaps %xmm7, 176(%rsp)",
            "movq 8(%rbp), %rdi",
            "callq {resolve}",
            "movq %rax, %r11",
            "movq (%rsp), %rdi",
            "movq 8(%rsp), %rsi",
            "movq 16(%rsp), %rdx",
            "movq 24(%rsp), %rcx",
            "movq 32(%rsp), %r8",
            "movq 40(%rsp), %r9",
            "movq 48(%rsp), %rax",
            "movaps 64(%rsp), %xmm0",
            "movaps 80(%rsp), %xmm1",
            "movaps 96(%rsp), %xmm2",
            "movaps 112(%rsp), %xmm3",
            "movaps 128(%rsp), %xmm4",
            "movaps 144(%rsp), %xmm5",
            "movaps 160(%rsp), %xmm6",
            "movaps 176(%rsp), %xmm7",
            "movq %rbp, %rsp",
            "popq %rbp",
            ".cfi_def_cfa %rsp, 16",
            "addq $8, %rsp",
            ".cfi_def_cfa_offset 8",
            "jmpq *%r11",
            ".cfi_endproc",
            ".size cuda_lazy_binder, . - cuda_lazy_binder",
            resolve = sym resolve,
            options(att_syntax)
        );
    };
}
driver_symbols!(trampolines);

unsafe extern "C" {
    /// Where each trampoline jumps; [`SYMBOLS`] has its order and its length.
    #[link_name = "cuda_lazy_slots"]
    static SLOTS: [AtomicPtr<c_void>; SYMBOLS.len()];
}

/// Binds slot `index` and returns where its trampoline leads from now on. Two threads that bind the same
/// slot store the same address.
extern "C" fn resolve(index: usize) -> *const c_void {
    let target = match driver() {
        Ok(library) => lookup(library.handle, SYMBOLS[index]).unwrap_or(unsupported as *mut c_void),
        Err(_) => without_driver(SYMBOLS[index]),
    };
    // SAFETY: `SLOTS` is the table that the assembly above defines, one slot for each symbol.
    let slots = unsafe { &SLOTS };
    slots[index].store(target, Ordering::Release);
    target
}

fn lookup(handle: usize, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: `handle` came from `dlopen` and is never closed; `name` ends in NUL.
    let address = unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// What a symbol does on a machine with no driver.
fn without_driver(name: &CStr) -> *mut c_void {
    match name.to_bytes() {
        b"cuGetErrorName" => error_name as *mut c_void,
        b"cuGetErrorString" => error_string as *mut c_void,
        _ => no_device as *mut c_void,
    }
}

// A callee may ignore arguments under the C calling convention, so one function stands for all symbols.
extern "C" fn no_device() -> c_int {
    NO_DEVICE
}

extern "C" fn unsupported() -> c_int {
    NOT_SUPPORTED
}

unsafe extern "C" fn error_name(code: c_int, out: *mut *const c_char) -> c_int {
    let name = match code {
        0 => c"CUDA_SUCCESS",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    // SAFETY: the caller of `cuGetErrorName` passes a place to write to, or null.
    unsafe { write_text(out, name) }
}

unsafe extern "C" fn error_string(code: c_int, out: *mut *const c_char) -> c_int {
    let text = match code {
        0 => c"no error",
        NO_DEVICE => c"no CUDA driver could be loaded",
        _ => c"unknown error (no CUDA driver could be loaded)",
    };
    // SAFETY: the caller of `cuGetErrorString` passes a place to write to, or null.
    unsafe { write_text(out, text) }
}

/// # Safety
/// `out` is null or valid for a write.
unsafe fn write_text(out: *mut *const c_char, text: &'static CStr) -> c_int {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and valid for a write by this function's contract.
    unsafe { out.write(text.as_ptr()) };
    0
}

pub(crate) fn driver() -> Result<&'static DriverLibrary, DriverError> {
    static DRIVER: OnceLock<Result<DriverLibrary, DriverError>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<DriverLibrary, DriverError> {
    let named = std::env::var_os(DRIVER_VARIABLE).filter(|file| !file.is_empty());
    let files: &[&OsStr] = match &named {
        Some(file) => &[file],
        // The second is where the Windows Subsystem for Linux keeps it.
        None => &[OsStr::new("libcuda.so.1"), OsStr::new("/usr/lib/wsl/lib/libcuda.so.1")],
    };
    let mut reason = None;
    for file in files {
        match open_file(file) {
            Ok(handle) => return inspect(handle, file),
            // The first file is the one to blame: the others are where some systems hide it.
            Err(why) => reason = reason.or(Some(why)),
        }
    }
    Err(DriverError::NotFound { reason: reason.unwrap_or_default() })
}

fn open_file(file: &OsStr) -> Result<usize, String> {
    let name = CString::new(file.as_bytes()).map_err(|_| format!("{file:?} holds a NUL byte"))?;
    // SAFETY: `name` ends in NUL. The initialisers of the CUDA driver are safe to run at any time.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle as usize);
    }
    // SAFETY: `dlerror` returns null or a string that lives until this thread's next call to it.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    Err(text.unwrap_or_else(|| format!("cannot open {}", file.display())))
}

fn inspect(handle: usize, file: &OsStr) -> Result<DriverLibrary, DriverError> {
    let bad = |reason: &str| DriverError::NotADriver { path: file.into(), reason: reason.into() };
    let Some(symbol) = lookup(handle, c"cuDriverGetVersion") else {
        return Err(bad("it has no cuDriverGetVersion"));
    };
    // SAFETY: in every CUDA driver this symbol is `CUresult cuDriverGetVersion(int *)`.
    let get_version: extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(symbol) };
    let mut version = 0;
    let code = get_version(&mut version);
    if code != 0 {
        return Err(bad(&format!("cuDriverGetVersion returned error {code}")));
    }
    let path = file_of(symbol).unwrap_or_else(|| PathBuf::from(file));
    Ok(DriverLibrary { path, version: version.max(0) as u32, handle })
}

/// The file that `symbol` was loaded from, links resolved.
fn file_of(symbol: *mut c_void) -> Option<PathBuf> {
    // SAFETY: an all-zero `Dl_info` is a valid value of that plain C struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is valid for writes; any address may be asked about.
    if unsafe { libc::dladdr(symbol, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dladdr` filled in a string that lives as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Some(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
}
