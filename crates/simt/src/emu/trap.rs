//! Kernels that need more stack than an emulated thread has: a fault in the place of a signal.
//!
//! Below each stack lies a page that nothing may touch. A thread that touches it gets a signal, on a stack of
//! the signal's own. If the thread is an emulated one, and the page its own, its coroutine is made to return,
//! as one that overflowed; any other signal goes to who handled it before.

/// How a coroutine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its threads are done.
    Done,
    /// Its stack is full.
    #[cfg_attr(
        not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))),
        expect(dead_code)
    )]
    Overflow,
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod on {
    use super::End;
    use corosensei::trap::{CoroutineTrapHandler, TrapHandlerRegs};
    use libc::{SIGBUS, SIGSEGV, c_int, c_void, siginfo_t, ucontext_t};
    use std::cell::Cell;
    use std::mem::zeroed;
    use std::sync::OnceLock;

    thread_local! {
        static RUNNING: Cell<Option<CoroutineTrapHandler<End>>> = const { Cell::new(None) };
        static HAS_SIGNAL_STACK: Cell<bool> = const { Cell::new(false) };
    }

    /// The coroutine that this OS thread runs from here on.
    #[inline]
    pub(in super::super) fn enter(coroutine: CoroutineTrapHandler<End>) {
        RUNNING.set(Some(coroutine));
    }

    /// It has parked or ended.
    #[inline]
    pub(in super::super) fn leave() {
        RUNNING.set(None);
    }

    struct Earlier {
        segv: libc::sigaction,
        bus: libc::sigaction,
    }

    static EARLIER: OnceLock<Earlier> = OnceLock::new();

    /// Makes this OS thread ready to run coroutines.
    pub(in super::super) fn watch() {
        EARLIER.get_or_init(|| Earlier { segv: install(SIGSEGV), bus: install(SIGBUS) });
        if !HAS_SIGNAL_STACK.replace(true) {
            give_signal_stack();
        }
    }

    fn install(signal: c_int) -> libc::sigaction {
        // SAFETY: both are plain data, for which zeros are valid; the handler has the signature that the
        // flags promise. If it cannot be installed, the earlier one stays.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            let mut earlier: libc::sigaction = zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &action, &mut earlier);
            earlier
        }
    }

    /// The standard library gives one to threads that it starts; others may have none.
    fn give_signal_stack() {
        // SAFETY: plain data, and a query.
        let mut stack: libc::stack_t = unsafe { zeroed() };
        // SAFETY: as above.
        unsafe { libc::sigaltstack(std::ptr::null(), &mut stack) };
        if stack.ss_flags & libc::SS_DISABLE == 0 {
            return;
        }
        let memory: &'static mut [u8] = Box::leak(vec![0; 64 * 1024].into_boxed_slice());
        stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: memory.len() };
        // SAFETY: the memory is never freed: signals may come as long as the thread lives.
        unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
    }

    extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: what the kernel hands to a handler with `SA_SIGINFO`.
        let (registers, address) =
            unsafe { (&mut *context.cast::<ucontext_t>(), (*info).si_addr() as usize) };
        // Of its stack only the page below it cannot be touched; the bounds are those of both.
        let is_full = |coroutine: &CoroutineTrapHandler<End>| {
            coroutine.stack_ptr_in_bounds(stack_pointer(registers)) && coroutine.stack_ptr_in_bounds(address)
        };
        match RUNNING.get().filter(is_full) {
            Some(coroutine) => {
                RUNNING.set(None);
                // SAFETY: the coroutine is the one that the signal interrupted, by the check above, and the
                // registers are set. Memory that it was writing is not read as Rust values any more: the
                // launch ends with a fault.
                unsafe { set(registers, coroutine.setup_trap_handler(|| End::Overflow)) };
            }
            None => pass_on(signal, info, context),
        }
    }

    fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let earlier =
            EARLIER.get().map(|earlier| if signal == SIGSEGV { &earlier.segv } else { &earlier.bus });
        let has_handler =
            |action: &&libc::sigaction| ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        match earlier.filter(has_handler) {
            Some(action) if action.sa_flags & libc::SA_SIGINFO == 0 => {
                // SAFETY: a handler without `SA_SIGINFO` has this signature.
                let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(action.sa_sigaction) };
                handler(signal);
            }
            Some(action) => {
                // SAFETY: a handler with `SA_SIGINFO` has this signature.
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    unsafe { std::mem::transmute(action.sa_sigaction) };
                handler(signal, info, context);
            }
            // The instruction runs again, and this time the signal does what it does by itself.
            // SAFETY: plain data, for which zeros are valid.
            None => unsafe {
                let mut action: libc::sigaction = zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            },
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn stack_pointer(context: &ucontext_t) -> usize {
        context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
    }

    #[cfg(target_arch = "x86_64")]
    fn set(context: &mut ucontext_t, registers: TrapHandlerRegs) {
        let TrapHandlerRegs { rip, rsp, rbp, rdi, rsi } = registers;
        let all = &mut context.uc_mcontext.gregs;
        let places = [
            (libc::REG_RIP, rip),
            (libc::REG_RSP, rsp),
            (libc::REG_RBP, rbp),
            (libc::REG_RDI, rdi),
            (libc::REG_RSI, rsi),
        ];
        places.iter().for_each(|(place, value)| all[*place as usize] = *value as i64);
    }

    #[cfg(target_arch = "aarch64")]
    fn stack_pointer(context: &ucontext_t) -> usize {
        context.uc_mcontext.sp as usize
    }

    #[cfg(target_arch = "aarch64")]
    fn set(context: &mut ucontext_t, registers: TrapHandlerRegs) {
        let TrapHandlerRegs { pc, sp, x0, x1, x29, lr } = registers;
        let all = &mut context.uc_mcontext;
        (all.pc, all.sp) = (pc, sp);
        [(0, x0), (1, x1), (29, x29), (30, lr)].iter().for_each(|(place, value)| all.regs[*place] = *value);
    }
}

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod on {
    use super::End;
    use corosensei::trap::CoroutineTrapHandler;

    pub(in super::super) fn watch() {}
    pub(in super::super) fn enter(_: CoroutineTrapHandler<End>) {}
    pub(in super::super) fn leave() {}
}

pub(super) use on::{enter, leave, watch};
