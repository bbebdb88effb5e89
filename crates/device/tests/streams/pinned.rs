//! Pinned memory, and the host that looks at it too early.

use crate::case::{Found, Given, N, cases, down, twice_of, up};
use ferrokv_device::{Event, Result, Stream};

fn read_before_the_wait(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    down(&given.a, &x, &mut to)?; // FIRST
    if !bug {
        given.a.synchronize()?;
    }
    assert_eq!(to.try_slice()?, [3; N]); // SECOND
    given.device.synchronize()
}

fn read_of_what_a_kernel_writes(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    twice_of(&given.a, x.global(), to.global_mut(), 16..32)?; // FIRST
    if !bug {
        given.device.synchronize()?;
    }
    assert_eq!(to.try_slice()?[16], 6); // SECOND
    given.device.synchronize()
}

fn overwritten_before_the_wait(given: &Given, bug: bool) -> Result<()> {
    let (mut from, mut x) = (given.pinned(3), given.buffer(0));
    up(&given.a, &from, &mut x)?; // FIRST
    if !bug {
        given.a.synchronize()?;
    }
    from.try_slice_mut()?.fill(4); // SECOND
    given.device.synchronize()
}

fn another_stream_is_waited_for(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    down(&given.a, &x, &mut to)?; // FIRST
    if bug {
        given.b.synchronize()?
    } else {
        given.a.synchronize()?
    }
    assert_eq!(to.try_slice()?[0], 3); // SECOND
    given.device.synchronize()
}

fn event_too_early(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    let event = Event::new(&given.device)?;
    given.a.record(&event)?;
    down(&given.a, &x, &mut to)?; // FIRST
    if !bug {
        given.a.record(&event)?;
    }
    event.synchronize()?;
    assert_eq!(to.try_slice()?[0], 3); // SECOND
    given.device.synchronize()
}

fn one_buffer_for_two_uploads(given: &Given, bug: bool) -> Result<()> {
    let (mut from, mut other) = (given.pinned(3), given.pinned(4));
    let (mut x, mut y) = (given.buffer(0), given.buffer(0));
    up(&given.a, &from, &mut x)?; // FIRST
    let second = if bug { &mut from } else { &mut other };
    second.try_slice_mut()?.fill(5); // SECOND
    up(&given.a, second, &mut y)?;
    given.device.synchronize()
}

fn copies_of_two_streams_meet(given: &Given, bug: bool) -> Result<()> {
    let (x, y, mut to) = (given.buffer(3), given.buffer(4), given.pinned(0));
    // SAFETY: the emulator copies in these calls.
    unsafe {
        given.a.download_async(&x, ..32, &mut to, 0)?; // FIRST
        given.b.download_async(&y, ..32, &mut to, if bug { 16 } else { 32 })?; // SECOND
    }
    given.device.synchronize()
}

fn dropped_before_the_wait(given: &Given, bug: bool) -> Result<()> {
    let (from, mut x) = (given.pinned(3), given.buffer(0));
    up(&given.a, &from, &mut x)?; // FIRST
    if !bug {
        given.a.synchronize()?;
    }
    drop(from);
    given.device.synchronize()
}

fn used_as_a_slice(given: &Given, bug: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    down(&given.a, &x, &mut to)?; // FIRST
    if !bug {
        given.a.synchronize()?;
    }
    let sum: u32 = to.iter().sum(); // SECOND
    assert_eq!(sum, 3 * N as u32);
    given.device.synchronize()
}

fn upload_of_a_slice(given: &Given, bug: bool) -> Result<()> {
    let (x, mut middle, mut y) = (given.buffer(3), given.pinned(0), given.buffer(0));
    down(&given.a, &x, &mut middle)?; // FIRST
    let stream: &Stream = &given.b;
    if !bug {
        given.a.synchronize()?;
    }
    stream.upload(middle.try_slice()?, &mut y, 0)?; // SECOND
    given.device.synchronize()
}

cases! { "pinned";
    read_before_the_wait: "pinned memory is read before the wait for the copy", Found::As("the host reads what a copy writes", 0..256);
    read_of_what_a_kernel_writes: "the same of what a kernel writes there", Found::As("the host reads what a launch writes", 64..128);
    overwritten_before_the_wait: "pinned memory is overwritten while it is copied", Found::As("the host writes what a copy reads", 0..256);
    another_stream_is_waited_for: "the host waits for the stream that does not copy", Found::As("the host reads what a copy writes", 0..256);
    event_too_early: "the host waits for an event ahead of the copy", Found::As("the host reads what a copy writes", 0..256);
    one_buffer_for_two_uploads: "pinned memory is filled again for the next upload", Found::As("the host writes what a copy reads", 0..256);
    copies_of_two_streams_meet: "two streams copy to the same part of pinned memory", Found::As("a copy writes what a copy writes", 64..128);
    upload_of_a_slice: "pinned memory is the source of an upload too early", Found::As("the host reads what a copy writes", 0..256);
    dropped_before_the_wait: "pinned memory is dropped before the wait", Found::Panic("the host drops what a copy reads", 0..256);
    used_as_a_slice: "pinned memory is used as a slice before the wait", Found::Panic("the host reads what a copy writes", 0..256);
}
