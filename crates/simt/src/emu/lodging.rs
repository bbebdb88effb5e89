//! Blocks that wait in great number share one set of stacks.
//!
//! A stack of its own for every thread takes a mapping with a guard page, of which a process may have only so
//! many. So blocks beyond a number are guests: their threads run on the same stacks, and what a thread has on
//! its stack is put away when one of another block goes on there. It comes back to where it was, so that
//! pointers into it hold.

use super::stack::ThreadStack;
use corosensei::stack::DefaultStack;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::rc::Rc;

/// The stacks of one core's guests: blocks, by their numbers.
pub(super) struct Lodging {
    /// How much each of them is asked to hold.
    bytes: usize,
    stacks: RefCell<Vec<Shared>>,
}

struct Shared {
    memory: Rc<DefaultStack>,
    /// The guest that is in, and what it uses.
    inside: Option<(u64, Range<usize>)>,
    /// What was put away of the others.
    away: HashMap<u64, Kept>,
}

/// A part of a stack: where it belongs, and what was there.
struct Kept {
    start: usize,
    contents: Box<[MaybeUninit<u8>]>,
}

impl Lodging {
    pub(super) fn new(bytes: usize) -> Rc<Self> {
        Rc::new(Lodging { bytes, stacks: RefCell::default() })
    }

    /// Stack number `place`, for a thread of `guest` that starts.
    pub(super) fn stack(&self, guest: u64, place: usize) -> io::Result<ThreadStack> {
        let mut stacks = self.stacks.borrow_mut();
        while stacks.len() <= place {
            let memory = ThreadStack::memory(self.bytes)?;
            stacks.push(Shared { memory, inside: None, away: HashMap::new() });
        }
        stacks[place].let_in(guest);
        Ok(ThreadStack::shared(stacks[place].memory.clone(), self.bytes, place))
    }

    /// The thread of `guest` on stack number `place` goes on: what it has there is there.
    pub(super) fn enter(&self, guest: u64, place: usize) {
        self.stacks.borrow_mut()[place].let_in(guest);
    }

    /// It has parked, and uses so much.
    pub(super) fn rest(&self, guest: u64, place: usize, used: Range<usize>) {
        self.stacks.borrow_mut()[place].inside = Some((guest, used));
    }

    /// Nothing on stack number `place` is needed any more.
    pub(super) fn leave(&self, place: usize) {
        self.stacks.borrow_mut()[place].inside = None;
    }
}

impl Shared {
    fn let_in(&mut self, guest: u64) {
        if self.inside.as_ref().is_some_and(|(inside, _)| *inside == guest) {
            return;
        }
        if let Some((other, used)) = self.inside.take() {
            self.away.insert(other, Kept::of(used));
        }
        let kept = self.away.remove(&guest);
        let used = kept.map_or(0..0, |kept| kept.put_back());
        self.inside = Some((guest, used));
    }
}

impl Kept {
    fn of(used: Range<usize>) -> Self {
        let mut contents = Box::new_uninit_slice(used.len());
        let from = used.start as *const MaybeUninit<u8>;
        // SAFETY: a part of a stack of this lodging, on which no code runs now: its thread is parked.
        unsafe { contents.as_mut_ptr().cast::<MaybeUninit<u8>>().copy_from_nonoverlapping(from, used.len()) };
        // SAFETY: bytes that may be uninitialised are what it holds.
        Kept { start: used.start, contents: unsafe { contents.assume_init() } }
    }

    fn put_back(self) -> Range<usize> {
        let to = self.start as *mut MaybeUninit<u8>;
        // SAFETY: where it was taken from. Who was in has been put away, or is done.
        unsafe { to.copy_from_nonoverlapping(self.contents.as_ptr(), self.contents.len()) };
        self.start..self.start + self.contents.len()
    }
}
