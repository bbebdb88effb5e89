//! The stacks that emulated threads park on, kept from launch to launch.

use super::MAX_BLOCK_THREADS;
use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

/// Stacks end at page boundaries. If the frames of all threads began there too, they would share the few
/// cache sets of that page offset: so each stack begins a little deeper than the one before, modulo this.
const SPREAD_BYTES: usize = 4096;

/// Two cache lines, so that neighbours also differ for the line that a prefetcher fetches along.
const STEP_BYTES: usize = 128;

/// Whether blocks may take turns on stacks: that needs to be known of them.
pub(super) const CAN_BE_SHARED: bool = cfg!(target_os = "linux");

/// The bytes below a stack that nothing may touch.
#[cfg(target_os = "linux")]
pub(super) fn guard_bytes() -> usize {
    // SAFETY: a query.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn guard_bytes() -> usize {
    0
}

thread_local! {
    /// Stacks that no thread uses: at most as many as one block has threads.
    static IDLE: RefCell<Vec<ThreadStack>> = const { RefCell::new(Vec::new()) };
    static MADE: Cell<usize> = const { Cell::new(0) };
}

/// The stack of one emulated thread, with a guard page below it.
pub(super) struct ThreadStack {
    memory: Memory,
    /// What it was asked to hold.
    bytes: usize,
    /// How far below the end of its memory it begins.
    offset: usize,
}

enum Memory {
    Own(DefaultStack),
    /// Of a [`Lodging`](super::lodging::Lodging): threads of several blocks take turns there.
    Shared(Rc<DefaultStack>),
}

impl ThreadStack {
    /// A stack for at least `bytes`: an idle one of this size, or a new one.
    pub(super) fn get(bytes: usize) -> io::Result<Self> {
        let idle = IDLE.with_borrow_mut(|stacks| {
            if stacks.last().is_some_and(|stack| stack.bytes != bytes) {
                // They served launches with other options: give their memory back.
                stacks.clear();
            }
            stacks.pop()
        });
        if let Some(stack) = idle {
            return Ok(stack);
        }
        let memory = Memory::Own(Self::mapped(bytes)?);
        let made = MADE.get();
        MADE.set(made.wrapping_add(1));
        Ok(ThreadStack { memory, bytes, offset: made.wrapping_mul(STEP_BYTES) % SPREAD_BYTES })
    }

    fn mapped(bytes: usize) -> io::Result<DefaultStack> {
        // Beyond this no machine has memory, and the sum would overflow.
        if bytes > usize::MAX / 4 {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        DefaultStack::new(bytes + SPREAD_BYTES)
    }

    /// The memory of a stack for at least `bytes`, to be shared.
    pub(super) fn memory(bytes: usize) -> io::Result<Rc<DefaultStack>> {
        Self::mapped(bytes).map(Rc::new)
    }

    /// The stack in memory number `place` of those that are shared.
    pub(super) fn shared(memory: Rc<DefaultStack>, bytes: usize, place: usize) -> Self {
        let offset = place.wrapping_mul(STEP_BYTES) % SPREAD_BYTES;
        ThreadStack { memory: Memory::Shared(memory), bytes, offset }
    }

    fn of_memory(&self) -> &DefaultStack {
        match &self.memory {
            Memory::Own(memory) => memory,
            Memory::Shared(memory) => memory,
        }
    }

    /// Keeps the stack for the next thread, if there are not enough yet.
    pub(super) fn put_back(self) {
        if matches!(self.memory, Memory::Shared(_)) {
            return;
        }
        IDLE.with_borrow_mut(|stacks| {
            if stacks.len() < MAX_BLOCK_THREADS as usize {
                stacks.push(self);
            }
        });
    }

    #[cfg(test)]
    pub(super) fn idle() -> usize {
        IDLE.with_borrow(|stacks| stacks.len())
    }
}

// SAFETY: the memory of a `DefaultStack`, less its highest `offset` bytes: fewer than it was enlarged by, and
// a multiple of the stack alignment.
unsafe impl Stack for ThreadStack {
    #[inline]
    fn base(&self) -> StackPointer {
        let base = self.of_memory().base();
        StackPointer::new(base.get() - self.offset).unwrap_or(base)
    }

    #[inline]
    fn limit(&self) -> StackPointer {
        self.of_memory().limit()
    }

    #[cfg(windows)]
    fn teb_fields(&self) -> corosensei::stack::StackTebFields {
        self.of_memory().teb_fields()
    }

    #[cfg(windows)]
    fn update_teb_fields(&mut self, stack_limit: usize, guaranteed_stack_bytes: usize) {
        // On Windows no stack is shared.
        if let Memory::Own(memory) = &mut self.memory {
            memory.update_teb_fields(stack_limit, guaranteed_stack_bytes);
        }
    }
}
