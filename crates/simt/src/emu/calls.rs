//! By which calls a thread has come to a collective.
//!
//! A barrier or a matrix product in a helper that is called in both arms of a branch is two instructions on
//! the device, in one line of the source. So with the race check a thread notes the calls that lead there.
//! The addresses of the calls cost little; what source they are is found out once for each new list.

use super::fault::Place;
use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The calls that lead to a place, the innermost first, as far as the compiler knows their lines.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Calls {
    places: Vec<Place>,
}

impl Calls {
    /// Where two lists part: the innermost call that they do not share, of either. `None` if they lead to one
    /// place, or too little is known of them.
    pub(super) fn parting(&self, other: &Calls) -> Option<[Place; 2]> {
        if self.places.len() != other.places.len() {
            return None;
        }
        let known = |place: &Place| place.line != 0;
        let mut pairs = self.places.iter().zip(&other.places);
        pairs.find(|(a, b)| a != b && known(a) && known(b)).map(|(a, b)| [*a, *b])
    }
}

/// So many calls are noted.
const DEPTH: usize = 64;

thread_local! {
    static KNOWN: RefCell<HashMap<Vec<usize>, &'static Calls>> = RefCell::default();
}

/// The calls that lead here from the kernel that runs on this stack.
#[inline(never)]
pub(super) fn here(stack: Range<usize>) -> Option<&'static Calls> {
    let addresses = addresses(stack);
    if addresses.is_empty() {
        return None;
    }
    KNOWN.with_borrow_mut(|known| match known.get(&addresses) {
        Some(calls) => Some(*calls),
        None => {
            let calls = intern(places(&Backtrace::force_capture().to_string()));
            known.insert(addresses, calls);
            Some(calls)
        }
    })
}

/// One list of places is one value, for good: a program has few.
fn intern(places: Vec<Place>) -> &'static Calls {
    static ALL: Mutex<Vec<&'static Calls>> = Mutex::new(Vec::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    match all.iter().find(|calls| calls.places == places) {
        Some(calls) => calls,
        None => {
            let calls: &'static Calls = Box::leak(Box::new(Calls { places }));
            all.push(calls);
            calls
        }
    }
}

/// The places of a written backtrace, from the emulator's caller to the kernel.
fn places(backtrace: &str) -> Vec<Place> {
    let mut places = Vec::new();
    let mut inside = false;
    let mut name = "";
    for line in backtrace.lines().map(str::trim) {
        let Some(place) = line.strip_prefix("at ") else {
            name = line.split_once(": ").map_or(line, |(_, name)| name);
            if name.contains("corosensei") || name.contains("start_worker") {
                break;
            }
            continue;
        };
        // The emulator's own calls come first.
        inside |= !name.contains("simt::emu");
        if let Some(place) = place_of(place).filter(|_| inside) {
            places.push(place);
        }
    }
    places
}

/// Reads `file:line:column`.
fn place_of(text: &str) -> Option<Place> {
    let (rest, column) = text.rsplit_once(':')?;
    let (file, line) = rest.rsplit_once(':')?;
    Some(Place { file: name(file), line: line.parse().ok()?, column: column.parse().ok()? })
}

/// The name of a file, for good.
fn name(file: &str) -> &'static str {
    static ALL: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let file = file.strip_prefix("./").unwrap_or(file);
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    match all.iter().find(|known| **known == file) {
        Some(known) => known,
        None => {
            let file: &'static str = Box::leak(file.into());
            all.push(file);
            file
        }
    }
}

#[cfg(unix)]
fn addresses(stack: Range<usize>) -> Vec<usize> {
    use std::ffi::{c_int, c_void};

    // What the standard library's own backtraces are made with.
    unsafe extern "C-unwind" {
        fn _Unwind_Backtrace(
            visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            data: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(context: *mut c_void) -> usize;
        fn _Unwind_GetCFA(context: *mut c_void) -> usize;
    }

    struct Found {
        stack: Range<usize>,
        addresses: Vec<usize>,
    }

    /// The end of the stack.
    const STOP: c_int = 5;

    extern "C" fn visit(context: *mut c_void, data: *mut c_void) -> c_int {
        // SAFETY: `data` is the `Found` below, and `context` what the unwinder hands out for this call.
        let (found, at, frame) =
            unsafe { (&mut *data.cast::<Found>(), _Unwind_GetIP(context), _Unwind_GetCFA(context)) };
        if !found.stack.contains(&frame) || found.addresses.len() >= DEPTH {
            return STOP;
        }
        found.addresses.push(at);
        0
    }

    let mut found = Found { stack, addresses: Vec::with_capacity(DEPTH) };
    // SAFETY: the callback gets what it expects, for the length of the call.
    unsafe { _Unwind_Backtrace(visit, (&raw mut found).cast()) };
    found.addresses
}

#[cfg(not(unix))]
fn addresses(_: Range<usize>) -> Vec<usize> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_backtrace_is_read() {
        let text = "   0: simt::emu::calls::here\n             at ./src/emu/calls.rs:44:1\n   1: meet\n\
                    \x20            at /a b/c.rs:12:5\n   2: kernel\n             at ./k.rs:3:0\n\
                    \x20  3: <unknown>\n   4: corosensei::on\n             at x.rs:1:1\n";
        let calls = intern(places(text));
        let place = |file, line, column| Place { file, line, column };
        assert_eq!(calls.places, [place("/a b/c.rs", 12, 5), place("k.rs", 3, 0)]);
        assert!(std::ptr::eq(calls, intern(places(text))));
    }

    #[test]
    fn lists_part_at_the_innermost_known_line() {
        let calls = |lines: [u32; 3]| Calls {
            places: lines.map(|line| Place { file: "k.rs", line, column: 1 }).to_vec(),
        };
        assert_eq!(calls([1, 2, 3]).parting(&calls([1, 2, 3])), None);
        assert_eq!(calls([1, 2, 3]).parting(&calls([1, 0, 3])), None, "a line that is not known");
        let parting = calls([1, 2, 3]).parting(&calls([1, 5, 6]));
        assert_eq!(parting.map(|places| places.map(|place| place.line)), Some([2, 5]));
        assert_eq!(calls([1, 2, 3]).parting(&Calls { places: vec![] }), None);
    }
}
