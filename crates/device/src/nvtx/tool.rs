//! Where ranges go: the tables that a profiler fills.
//!
//! A profiler's library has the function `InitializeInjectionNvtx2`. It is handed one that gives tables by
//! number, asks for the one with [`functions_of`], and that for the places of each module's functions, into
//! which it writes its own.

use super::Functions;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The variable in which a profiler names its library.
pub(super) const LIBRARY_VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// What that library begins with.
const BEGIN: &CStr = c"InitializeInjectionNvtx2";

/// Tables by number: that of the modules' functions, and that of versions.
const CALLBACKS: u32 = 1;
const VERSION: u32 = 3;

/// Modules are numbered from 1. How many functions each has, counting number 0, which no function has: ranges
/// and marks, names of the driver's things, of OpenCL's, of the runtime's, domains, locks.
const FUNCTIONS: [usize; 6] = [16, 9, 15, 7, 16, 7];
const MOST_FUNCTIONS: usize = 16;
/// The module of ranges and marks, and numbers of its functions.
const CORE: usize = 1;
const MARK: usize = 2;
const PUSH: usize = 9;
const POP: usize = 11;

type GetTable = extern "C" fn(u32) -> *const c_void;
type Begin = unsafe extern "C" fn(GetTable) -> c_int;
/// A place for a function.
type Slot = AtomicPtr<c_void>;

/// The places of one module's functions.
type Slots = [Slot; MOST_FUNCTIONS];
static SLOTS: [Slots; FUNCTIONS.len()] =
    [const { [const { Slot::new(null_mut()) }; MOST_FUNCTIONS] }; FUNCTIONS.len()];

/// The addresses of one module's places, those without a function null, and a null at the end.
struct Addresses([*const Slot; MOST_FUNCTIONS + 1]);

// SAFETY: addresses of statics.
unsafe impl Send for Addresses {}
// SAFETY: as above.
unsafe impl Sync for Addresses {}

#[repr(C)]
struct Callbacks {
    bytes: usize,
    functions_of: extern "C" fn(c_uint, *mut *const *const Slot, *mut c_uint) -> c_int,
}

#[repr(C)]
struct Version {
    bytes: usize,
    version: u32,
    reserved: u32,
    /// The profiler says which version it knows.
    told: extern "C" fn(u32),
}

extern "C" fn told(_: u32) {}

/// Where the functions of a module go; 0 if there is no such module.
extern "C" fn functions_of(module: c_uint, table: *mut *const *const Slot, count: *mut c_uint) -> c_int {
    static ADDRESSES: OnceLock<[Addresses; FUNCTIONS.len()]> = OnceLock::new();
    let addresses = ADDRESSES.get_or_init(|| {
        std::array::from_fn(|module| {
            let address = |function: usize| match function {
                0 => null(),
                _ if function >= FUNCTIONS[module] => null(),
                _ => &raw const SLOTS[module][function],
            };
            Addresses(std::array::from_fn(address))
        })
    });
    let Some(module) = (module as usize).checked_sub(1).filter(|module| *module < FUNCTIONS.len()) else {
        return 0;
    };
    // SAFETY: the profiler passes places to write to, or null.
    unsafe {
        if !table.is_null() {
            table.write(addresses[module].0.as_ptr());
        }
        if !count.is_null() {
            count.write(FUNCTIONS[module] as c_uint);
        }
    }
    1
}

/// A table by its number.
extern "C" fn table(number: u32) -> *const c_void {
    static TABLE: Callbacks = Callbacks { bytes: size_of::<Callbacks>(), functions_of };
    static VERSIONS: Version = Version { bytes: size_of::<Version>(), version: 3, reserved: 0, told };
    match number {
        CALLBACKS => (&raw const TABLE).cast(),
        VERSION => (&raw const VERSIONS).cast(),
        _ => null(),
    }
}

/// Lets a profiler's library begin; what it has put into the tables, or why that is nothing.
///
/// # Safety
/// `begin` is the library's function of that name.
unsafe fn begin(begin: Begin) -> Result<Functions, &'static str> {
    // SAFETY: says the caller.
    if unsafe { begin(table) } == 0 {
        return Err("the library does not begin");
    }
    let function = |number: usize| {
        let function = SLOTS[CORE - 1][number].load(Ordering::Acquire);
        (!function.is_null()).then_some(function)
    };
    let found = [PUSH, POP, MARK].map(function);
    if found == [None; 3] {
        return Err("the library takes neither ranges nor marks");
    }
    // SAFETY: what a profiler puts there has the type that NVTX gives the function of that number.
    Ok(unsafe { typed(found) })
}

/// # Safety
/// They are `int(const char *)`, `int()` and `void(const char *)`.
unsafe fn typed([push, pop, mark]: [Option<*mut c_void>; 3]) -> Functions {
    // SAFETY: says the caller; a function's address is as large as a pointer.
    unsafe {
        Functions {
            push: push.map(|f| transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(f)),
            pop: pop.map(|f| transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(f)),
            mark: mark.map(|f| transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(f)),
        }
    }
}

/// A library that a profiler has named.
pub(super) struct Found {
    pub(super) library: OsString,
    /// What it takes, or why that is nothing.
    pub(super) functions: Result<Functions, &'static str>,
}

/// Loads the library that a profiler has named, if one has. Nothing is logged here: a log may have ranges.
pub(super) fn find() -> Option<Found> {
    let library = std::env::var_os(LIBRARY_VARIABLE).filter(|file| !file.is_empty())?;
    let functions = match CString::new(library.as_bytes()).ok().and_then(|file| symbol(&file, BEGIN)) {
        // SAFETY: the function of that name has this type.
        Some(address) => unsafe { begin(transmute::<*mut c_void, Begin>(address)) },
        None => Err("it names no library of a profiler"),
    };
    Some(Found { library, functions })
}

/// Opens a library for good, and looks a symbol up.
fn symbol(file: &CStr, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends in NUL; a profiler's initialisers are safe to run at any time.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if library.is_null() {
        return None;
    }
    // SAFETY: an open library, and a name that ends in NUL.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}
