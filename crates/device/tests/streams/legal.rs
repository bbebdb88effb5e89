//! Programs that look like mistakes and are none.

use crate::case::{Found, Given, N, cases, count_in, down, twice, twice_of, up};
use ferrokv_device::{Buffer, Event, Pinned, Result, Stream};

fn two_readers(given: &Given, _: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &x, &mut y)?;
    given.b.copy(&x, .., &mut z, 0)?;
    given.device.synchronize()
}

fn disjoint_parts(given: &Given, _: bool) -> Result<()> {
    let (x, mut y) = (given.buffer(3), given.buffer(0));
    let (y, streams) = (y.global_mut(), [&given.a, &given.b, &given.c]);
    // Each handle is the whole buffer. Rows of 4 elements, and single ones behind them.
    for row in 0..12 {
        twice_of(streams[row % 3], x.global(), y, 4 * row..4 * row + 4)?;
    }
    for element in 48..64 {
        twice_of(streams[element % 2], x.global(), y, element..element + 1)?;
    }
    given.device.synchronize()
}

fn waits_of_the_host(given: &Given, _: bool) -> Result<()> {
    let (from, mut x) = (given.pinned(3), given.buffer(0));
    let (mut y, mut to) = (given.buffer(0), given.pinned(0));
    up(&given.a, &from, &mut x)?;
    given.a.synchronize()?;
    twice(&given.b, &x, &mut y)?;
    given.device.synchronize()?;
    down(&given.c, &y, &mut to)?;
    let event = Event::new(&given.device)?;
    given.c.record(&event)?;
    event.synchronize()?;
    assert_eq!(to.try_slice()?, [6; N]);
    // To read a buffer waits for the device.
    twice(&given.a, &y, &mut x)?;
    assert_eq!(x.to_vec()?, [12; N]);
    twice(&given.b, &x, &mut y)?;
    y.write(0, &[1])?;
    given.b.download(&x, 0, &mut [0; N])?;
    given.device.synchronize()
}

fn chain_of_two_events(given: &Given, _: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &x, &mut y)?;
    given.order(&given.a, &given.b)?;
    given.order(&given.b, &given.c)?;
    twice(&given.c, &y, &mut z)?;
    given.device.synchronize()
}

fn one_stream(given: &Given, _: bool) -> Result<()> {
    let (from, mut x, mut to) = (given.pinned(3), given.buffer(0), given.pinned(0));
    let mut y = given.buffer(0);
    for _ in 0..3 {
        up(&given.a, &from, &mut x)?;
        twice(&given.a, &x, &mut y)?;
        given.a.copy(&y, ..32, &mut x, 32)?;
        down(&given.a, &x, &mut to)?;
    }
    given.a.synchronize()?;
    assert_eq!((to[0], to[63]), (3, 6));
    Ok(())
}

fn two_that_count(given: &Given, _: bool) -> Result<()> {
    let mut counter = given.buffer(0);
    for stream in [&given.a, &given.b, &given.c, &given.a] {
        count_in(stream, &mut counter)?;
    }
    assert_eq!(counter.to_vec()?[0], 128);
    Ok(())
}

fn one_instance_of_a_graph(given: &Given, _: bool) -> Result<()> {
    let (x, mut y) = (given.buffer(3), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| twice(stream, &x, &mut y))?;
    let graph = graph.instantiate()?;
    for stream in [&given.a, &given.b, &given.c, &given.a] {
        // SAFETY: the buffers live, and the emulator runs it in this call.
        unsafe { graph.launch(stream) }?;
    }
    given.device.synchronize()
}

fn buffer_dropped(given: &Given, _: bool) -> Result<()> {
    for _ in 0..3 {
        // The memory of one round may be that of the next.
        let (x, mut y) = (given.buffer(3), given.buffer(0));
        twice(&given.a, &x, &mut y)?;
        drop(x);
        drop(y);
        let (x, mut y) = (given.buffer(3), given.buffer(0));
        twice(&given.b, &x, &mut y)?;
    }
    given.device.synchronize()
}

fn stream_dropped(given: &Given, _: bool) -> Result<()> {
    let (x, mut y, mut to) = (given.buffer(3), given.buffer(0), given.pinned(0));
    for _ in 0..3 {
        let stream = Stream::new(&given.device)?;
        twice(&stream, &x, &mut y)?;
        down(&stream, &y, &mut to)?;
        drop(stream);
        assert_eq!(to.try_slice()?, [6; N]);
    }
    Ok(())
}

fn two_buffers_in_turn(given: &Given, _: bool) -> Result<()> {
    let mut pinned = [given.pinned(0), given.pinned(0)];
    let (mut x, mut y) = ([given.buffer(0), given.buffer(0)], given.buffer(0));
    let copied = [Event::new(&given.device)?, Event::new(&given.device)?];
    let used = [Event::new(&given.device)?, Event::new(&given.device)?];
    for round in 0..6 {
        let turn = round % 2;
        if round > 1 {
            copied[turn].synchronize()?;
            given.a.wait(&used[turn])?;
        }
        pinned[turn].try_slice_mut()?.fill(round as u32);
        up(&given.a, &pinned[turn], &mut x[turn])?;
        given.a.record(&copied[turn])?;
        given.b.wait(&copied[turn])?;
        twice(&given.b, &x[turn], &mut y)?;
        given.b.record(&used[turn])?;
    }
    given.device.synchronize()?;
    assert_eq!(y.to_vec()?, [10; N]);
    Ok(())
}

fn length_of_pinned_memory(given: &Given, _: bool) -> Result<()> {
    let (x, mut to) = (given.buffer(3), given.pinned(0));
    down(&given.a, &x, &mut to)?;
    assert_eq!((to.len(), to.is_empty(), to.bytes()), (N, false, 4 * N));
    given.device.synchronize()
}

fn nothing_at_all(given: &Given, _: bool) -> Result<()> {
    let mut empty = Pinned::<u32>::zeroed(&given.device, 0)?;
    let mut buffer = Buffer::<u32>::zeroed(&given.device, 0)?;
    up(&given.a, &empty, &mut buffer)?;
    down(&given.b, &buffer, &mut empty)?;
    assert!(empty.try_slice()?.is_empty() && empty.try_slice_mut()?.is_empty());
    Ok(())
}

cases! { "legal";
    two_readers: "two streams read one buffer", Found::Legal;
    disjoint_parts: "streams write parts of one buffer that share no byte", Found::Legal;
    waits_of_the_host: "the host waits for a stream, an event, the device, and goes on with another stream", Found::Legal;
    chain_of_two_events: "a chain of two events over three streams", Found::Legal;
    one_stream: "copies and launches of one stream", Found::Legal;
    two_that_count: "launches on several streams count in one word by atomics", Found::Legal;
    one_instance_of_a_graph: "one instance of a graph on several streams: each run waits for the last", Found::Legal;
    buffer_dropped: "a buffer is dropped while a launch may use it: that waits", Found::Legal;
    stream_dropped: "a stream is dropped, and what it did is used: that waits", Found::Legal;
    two_buffers_in_turn: "two pinned buffers in turn, with events both ways", Found::Legal;
    length_of_pinned_memory: "the length of pinned memory is asked while a copy is under way", Found::Legal;
    nothing_at_all: "copies of nothing", Found::Legal;
}
