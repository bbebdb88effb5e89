//! By which calls a thread has come to a collective.
//!
//! A barrier or a matrix product in a helper that is called in both arms of a branch is two instructions on
//! the device, in one line of the source. So with the race check a thread notes the calls that lead there.
//! That the return addresses on its stack are those of a list that was met is a few loads; what source a new
//! list is takes long, and there are few.

use super::fault::{Place, interned};
use super::history::ByAddress;
use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The calls that lead to a place, the innermost first, as far as the compiler knows their lines.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Calls {
    calls: Vec<Call>,
}

/// A call, and the function that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    place: Place,
    function: &'static str,
}

impl Call {
    /// Of code that it merges the compiler loses lines.
    fn is_known(&self) -> bool {
        self.place.line != 0
    }
}

impl Calls {
    /// Where two lists part: a call that they do not share, of either. `None` if they lead to one place, or
    /// too little is known of them.
    pub(super) fn parting(&self, other: &Calls) -> Option<[Place; 2]> {
        if std::ptr::eq(self, other) {
            return None;
        }
        let parts = |a: &Call, b: &Call| a != b && a.is_known() && b.is_known();
        if self.calls.len() == other.calls.len() {
            let mut pairs = self.calls.iter().zip(&other.calls);
            return pairs.find(|(a, b)| parts(a, b)).map(|(a, b)| [a.place, b.place]);
        }
        // One way is longer, or the compiler has lost a call of it: one that it merged with another, or one
        // at the end of a function, which it made a jump. From the kernel on, the lists are of the same
        // functions up to there.
        let mut pairs = self.calls.iter().rev().zip(other.calls.iter().rev());
        let (a, b) = pairs.find(|(a, b)| a != b)?;
        (a.function == b.function && parts(a, b)).then_some([a.place, b.place])
    }
}

/// So many calls are noted.
#[cfg(unix)]
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
    static MET: RefCell<ByAddress<Vec<Met>>> = RefCell::default();
}

/// Keeps the compiler from making one of two calls: between them and what they might be merged with there is
/// this, and no two have one number.
#[inline(always)]
pub fn mark<const NUMBER: u64>() {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    // SAFETY: a comment, no instruction.
    unsafe {
        core::arch::asm!("/* {} */", const NUMBER, options(nomem, nostack, preserves_flags));
    }
}

/// The calls that lead here from the kernel that runs on this stack.
#[inline(never)]
pub(super) fn here(stack: Range<usize>) -> Option<&'static Calls> {
    let mark = 0u8;
    let here = &raw const mark as usize;
    let depth = stack.end - here;
    let again = |met: &&Met| met.again(stack.end);
    let met = MET.with_borrow(|met| Some(met.get(&(depth as u64))?.iter().find(again)?.calls));
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
    let met = MET.with_borrow(|met| Some(met.get(&(depth as u64))?.iter().find(same)?.calls));
    if met.is_some() {
        return met;
    }
    let calls = intern(calls(&written(&Backtrace::force_capture())));
    MET.with_borrow_mut(|met| met.entry(depth as u64).or_default().push(Met { returns, calls }));
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

/// One list of calls is one value, for good: a program has few.
fn intern(calls: Vec<Call>) -> &'static Calls {
    static ALL: Mutex<Vec<&'static Calls>> = Mutex::new(Vec::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    match all.iter().find(|known| known.calls == calls) {
        Some(known) => known,
        None => {
            let new: &'static Calls = Box::leak(Box::new(Calls { calls }));
            all.push(new);
            new
        }
    }
}

/// The calls of a written backtrace, from the emulator's caller to the kernel.
fn calls(backtrace: &str) -> Vec<Call> {
    let mut calls = Vec::new();
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
            calls.push(Call { place, function: interned(name) });
        }
    }
    calls
}

/// Reads `file:line:column`.
fn place_of(text: &str) -> Option<Place> {
    let (rest, column) = text.rsplit_once(':')?;
    let (file, line) = rest.rsplit_once(':')?;
    let file = interned(file.strip_prefix("./").unwrap_or(file));
    Some(Place { file, line: line.parse().ok()?, column: column.parse().ok()? })
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
        let read = intern(calls(text));
        let call = |file, line, column, function| Call { place: Place { file, line, column }, function };
        assert_eq!(read.calls, [call("/a b/c.rs", 12, 5, "meet"), call("k.rs", 3, 0, "kernel")]);
        assert!(std::ptr::eq(read, intern(calls(text))));
    }

    /// Calls by these functions in these lines, the innermost first.
    fn list(calls: &[(&'static str, u32)]) -> Calls {
        let call = |&(function, line)| Call { place: Place { file: "k.rs", line, column: 1 }, function };
        Calls { calls: calls.iter().map(call).collect() }
    }

    fn lines(a: &[(&'static str, u32)], b: &[(&'static str, u32)]) -> Option<[u32; 2]> {
        let [ab, ba] = [(a, b), (b, a)].map(|(a, b)| list(a).parting(&list(b)));
        assert_eq!(ab, ba.map(|[b, a]| [a, b]), "whichever comes first");
        ab.map(|places| places.map(|place| place.line))
    }

    #[test]
    fn lists_part_at_the_innermost_known_line() {
        let kernel = [("meet", 1), ("helper", 2), ("kernel", 3)];
        assert_eq!(lines(&kernel, &kernel), None);
        assert_eq!(lines(&kernel, &[("meet", 1), ("helper", 0), ("kernel", 3)]), None, "a lost line");
        assert_eq!(lines(&kernel, &[("meet", 1), ("helper", 5), ("kernel", 6)]), Some([2, 5]));
        assert_eq!(lines(&kernel, &[]), None);
    }

    #[test]
    fn a_longer_way_parts_from_a_shorter_one_in_a_function_of_both() {
        let way = [("meet", 1), ("helper", 2), ("kernel", 3)];
        assert_eq!(lines(&way, &[("meet", 1), ("kernel", 4)]), Some([3, 4]));
        assert_eq!(lines(&way, &[("meet", 1), ("kernel", 3)]), None, "helper's call may be a jump");
        assert_eq!(lines(&way, &[("kernel", 3)]), None);
        assert_eq!(lines(&way, &[("meet", 1), ("kernel", 0)]), None, "a lost line");
        let outer = [("meet", 1), ("helper", 2), ("outer", 7), ("kernel", 3)];
        assert_eq!(lines(&outer, &[("meet", 1), ("outer", 8), ("kernel", 3)]), Some([7, 8]));
        assert_eq!(lines(&outer, &way), None, "the call of outer may be a jump");
    }
}
