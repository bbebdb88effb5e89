//! Launches that may overlap the launches ahead of them in their stream.

use crate::case::{Found, Given, N, cases, step, twice, up};
use ferrokv_device::{Buffer, Event, Result, Stream};
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

/// y += x, with x read ahead of the wait.
#[kernel(system = stream_test, overlaps = late)]
fn add_ahead(x: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let value = x.load_ahead(i);
    thread::wait_for_previous();
    y.store(i, y.load(i) + value);
}

/// y += 1, and a look at x ahead of the wait.
#[kernel(system = stream_test, overlaps = late)]
fn add_with_a_peek(x: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let _ = x.peek(i, true);
    thread::wait_for_previous();
    y.store(i, y.load(i) + 1);
}

#[track_caller]
fn add(stream: &Stream, x: &Buffer<u32>, y: &mut Buffer<u32>) -> Result<()> {
    let args = add_ahead::Args { x: x.global(), y: y.global_mut() };
    // SAFETY: memory of N elements, of which each thread has its own; the emulator runs it in this call.
    unsafe { stream.launch(&add_ahead::kernel(), LaunchShape::new(1, N as u32), args) }
}

fn ahead_of_a_plain_launch(given: &Given, bug: bool) -> Result<()> {
    let (w, mut x, mut y) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &w, &mut x)?; // FIRST
    add(&given.a, if bug { &x } else { &w }, &mut y)?; // SECOND
    given.device.synchronize()
}

fn ahead_of_a_chain(given: &Given, bug: bool) -> Result<()> {
    let (mut x, mut y) = (given.buffer(0), given.buffer(0));
    given.a.fill_u32(&mut x, .., 1)?;
    // The first launch of a chain waits for the fill as a whole, the second may still be at it.
    step(&given.a, &mut x)?; // FIRST
    step(&given.a, &mut y)?;
    if !bug {
        given.a.fill_u32(&mut y, .., 1)?;
    }
    step(&given.a, &mut y)?;
    add(&given.a, &x, &mut y)?; // SECOND
    given.device.synchronize()
}

fn behind_a_launch_that_waits_for_all(given: &Given, bug: bool) -> Result<()> {
    let (w, mut x, mut y) = (given.buffer(3), given.buffer(0), given.buffer(0));
    step(&given.a, &mut x)?; // FIRST
    if bug {
        step(&given.a, &mut y)?;
    } else {
        // It has no part in overlapping: when it starts, the launch ahead of it has ended.
        twice(&given.a, &w, &mut y)?;
    }
    add(&given.a, &x, &mut y)?; // SECOND
    given.device.synchronize()
}

fn between_two_streams(given: &Given, bug: bool) -> Result<()> {
    let (mut x, mut y) = (given.buffer(0), given.buffer(0));
    step(&given.a, &mut x)?; // FIRST
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    step(&given.b, &mut y)?;
    add(&given.b, &x, &mut y)?; // SECOND
    given.device.synchronize()
}

fn in_a_graph(given: &Given, bug: bool) -> Result<()> {
    let (w, mut x, mut y) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| {
        add(stream, &w, &mut x)?; // FIRST
        if !bug {
            stream.fill_u32(&mut y, .., 0)?;
        }
        add(stream, &x, &mut y) // SECOND
    })?;
    let graph = graph.instantiate()?;
    for _ in 0..2 {
        // SAFETY: the buffers live, and the emulator runs it in this call.
        unsafe { graph.launch(&given.a) }?;
    }
    given.device.synchronize()
}

fn the_order_of_a_stream(given: &Given, _: bool) -> Result<()> {
    let (from, w, mut x, mut y) = (given.pinned(1), given.buffer(3), given.buffer(0), given.buffer(0));
    // What is copied is there before a launch behind the copy starts.
    up(&given.a, &from, &mut x)?;
    add(&given.a, &x, &mut y)?;
    for _ in 0..3 {
        step(&given.a, &mut x)?;
        add(&given.a, &w, &mut x)?;
        // A peek brings what is there, or was.
        let args = add_with_a_peek::Args { x: x.global(), y: y.global_mut() };
        // SAFETY: memory of N elements, of which each thread has its own; the emulator runs it in this call.
        unsafe { given.a.launch(&add_with_a_peek::kernel(), LaunchShape::new(1, N as u32), args) }?;
    }
    given.a.synchronize()?;
    add(&given.a, &x, &mut y)?;
    given.device.synchronize()
}

fn other_work_between(given: &Given, _: bool) -> Result<()> {
    let (mut x, mut y, mut z) = (given.buffer(0), given.buffer(0), given.buffer(0));
    let event = Event::new(&given.device)?;
    given.b.record(&event)?;
    let (graph, ()) = given.a.capture(|stream| stream.fill_u8(&mut z, .., 0))?;
    let graph = graph.instantiate()?;
    // A launch behind any of these starts when all ahead of it is done.
    let others: [&dyn Fn() -> Result<()>; 5] = [
        &|| given.a.record(&event),
        &|| given.a.wait(&event),
        &|| given.a.capture(|_| Ok(())).map(drop),
        // SAFETY: the buffer lives, and the emulator runs it in this call.
        &|| unsafe { graph.launch(&given.a) },
        &|| given.device.synchronize(),
    ];
    for other in others {
        step(&given.a, &mut x)?;
        step(&given.a, &mut x)?;
        other()?;
        add(&given.a, &x, &mut y)?;
    }
    given.device.synchronize()
}

cases! { "overlap";
    ahead_of_a_plain_launch: "a late launch reads ahead what the launch before it writes", Found::As("a launch reads ahead what a launch writes", 0..256);
    ahead_of_a_chain: "the same of a launch further ahead in a chain", Found::As("a launch reads ahead what a launch writes", 0..256);
    behind_a_launch_that_waits_for_all: "the same, and no launch between that overlaps nothing", Found::As("a launch reads ahead what a launch writes", 0..256);
    in_a_graph: "the same in a graph", Found::As("a launch reads ahead what a launch writes", 0..256);
    between_two_streams: "the same of a launch on another stream", Found::As("a launch reads ahead what a launch writes", 0..256);
    the_order_of_a_stream: "launches of one stream that overlap, and wait", Found::Legal;
    other_work_between: "an event, a graph, a capture or a wait between such launches", Found::Legal;
}
