//! Mistakes that the check does not find, and why.

use crate::case::{Found, Given, N, cases, down, twice, twice_of};
use ferrokv_device::Result;
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

/// y := x where `which` says so.
#[kernel(system = stream_test)]
fn select(which: Global<u32>, x: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    if which.load(i) != 0 {
        y.store(i, x.load(i));
    }
}

fn a_branch_that_no_value_takes(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, which) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &x, &mut y)?;
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    let args = select::Args { which: which.global(), x: x.global(), y: y.global_mut() };
    // SAFETY: memory of N elements, of which each thread has its own; the emulator runs it in this call.
    unsafe { given.b.launch(&select::kernel(), LaunchShape::new(1, N as u32), args) }?;
    given.device.synchronize()
}

fn a_pointer_that_the_host_kept(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    let kept = to.as_ptr();
    down(&given.a, &x, &mut to)?;
    if !bug {
        given.a.synchronize()?;
    }
    // SAFETY: the memory is there, and the emulator has copied.
    assert_eq!(unsafe { kept.read() }, 3);
    given.device.synchronize()
}

fn a_thread_that_waits_for_itself(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let y = y.global_mut();
    twice_of(&given.a, x.global(), y, 0..N)?;
    // The other thread does not say that it has waited; on a GPU it may come later.
    std::thread::scope(|scope| scope.spawn(|| given.a.synchronize()).join().unwrap())?;
    if !bug {
        given.a.synchronize()?;
    }
    twice_of(&given.b, y.as_const(), z.global_mut(), 0..N)?;
    given.device.synchronize()
}

cases! { "missed";
    a_branch_that_no_value_takes: "a launch that would write, had it other inputs", Found::Missed("only what this run touches is known");
    a_pointer_that_the_host_kept: "a pointer into pinned memory, from before the copy", Found::Missed("the check sees when a slice is taken");
    a_thread_that_waits_for_itself: "another thread waits, and says nothing to this one", Found::Missed("threads of the host count as one");
}
