//! By which calls a thread has come to a collective.
//!
//! A barrier or a matrix product in a helper that is called in both arms of a branch is two instructions on
//! the device, in one line of the source. So with the race check a thread notes the calls that lead there.
//! That the return addresses on its stack are those of a list that was met is a few loads; what source a new
//! list is takes long, and there are few.

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
        // Of code that it merges the compiler loses lines and calls: then the numbers of calls differ.
        if std::ptr::eq(self, other) || self.places.len() != other.places.len() {
            return None;
        }
        let known = |place: &Place| place.line != 0;
        let mut pairs = self.places.iter().zip(&other.places);
        pairs.find(|(a, b)| a != b && known(a) && known(b)).map(|(a, b)| [*a, *b])
    }
}

/// So many calls are noted.
const DEPTH: usize = 64;

/// The search needs so many bytes of the stack, the page below it included. Where fewer are left nothing is
/// known.
const ROOM: usize = 20 * 1024;

/// A list of calls that was met, as it lies on the stack: return addresses, and how far from the stack's end
/// each of them is.
struct Met {
    returns: Vec<(usize, usize)>,
    calls: &'static Calls,
}

thread_local! {
    /// By how deep the stack was.
    static MET: RefCell<HashMap<usize, Vec<Met>>> = RefCell::default();
}

/// The calls that lead here from the kernel that runs on this stack.
#[inline(never)]
pub(super) fn here(stack: Range<usize>) -> Option<&'static Calls> {
    let mark = 0u8;
    let here = &raw const mark as usize;
    let depth = stack.end - here;
    let met = MET.with_borrow(|met| Some(met.get(&depth)?.iter().find(|met| met.again(stack.end))?.calls));
    if met.is_some() {
        return met;
    }
    // An overflow in the search would keep the standard library's locks for good.
    let room = here - stack.start;
    let mut returns = if room < ROOM { Vec::new() } else { returns(&stack) };
    if returns.is_empty() {
        return None;
    }
    // Below are those of the search itself.
    returns.retain(|(slot, _)| *slot < depth);
    let same = |met: &&Met| met.returns == returns;
    let met = MET.with_borrow(|met| Some(met.get(&depth)?.iter().find(same)?.calls));
    if met.is_some() {
        return met;
    }
    let calls = intern(places(&written(&Backtrace::force_capture())));
    MET.with_borrow_mut(|met| met.entry(depth).or_default().push(Met { returns, calls }));
    Some(calls)
}

/// The backtrace as text. That takes much stack, and so one of its own.
fn written(backtrace: &Backtrace) -> String {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || backtrace.to_string());
        thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_default()
    })
}

impl Met {
    /// Whether the stack that ends at `end` has the same return addresses in the same places: then the same
    /// calls have led here.
    #[cfg(target_arch = "x86_64")]
    fn again(&self, end: usize) -> bool {
        // SAFETY: words of the stack that this code runs on, above its own frame.
        let value = |slot: usize| unsafe { ((end - slot) as *const usize).read_volatile() };
        self.returns.iter().all(|(slot, address)| value(*slot) == *address)
    }

    /// Where return addresses lie is not known: the stack has to be searched for them.
    #[cfg(not(target_arch = "x86_64"))]
    fn again(&self, _: usize) -> bool {
        false
    }
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

/// The return addresses on this stack, and how far from its end each lies.
#[cfg(unix)]
fn returns(stack: &Range<usize>) -> Vec<(usize, usize)> {
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

    struct Found<'a> {
        stack: &'a Range<usize>,
        returns: Vec<(usize, usize)>,
    }

    /// The end of the stack.
    const STOP: c_int = 5;

    extern "C" fn visit(context: *mut c_void, data: *mut c_void) -> c_int {
        // SAFETY: `data` is the `Found` below, and `context` what the unwinder hands out for this call.
        let (found, address, frame) =
            unsafe { (&mut *data.cast::<Found>(), _Unwind_GetIP(context), _Unwind_GetCFA(context)) };
        if !found.stack.contains(&frame) || found.returns.len() >= DEPTH {
            return STOP;
        }
        // The call that leads out of a frame left its return address right below the caller's frame.
        found.returns.push((found.stack.end - (frame - size_of::<usize>()), address));
        0
    }

    let mut found = Found { stack, returns: Vec::with_capacity(DEPTH) };
    // SAFETY: the callback gets what it expects, for the length of the call.
    unsafe { _Unwind_Backtrace(visit, (&raw mut found).cast()) };
    found.returns
}

#[cfg(not(unix))]
fn returns(_: &Range<usize>) -> Vec<(usize, usize)> {
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
