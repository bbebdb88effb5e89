//! Two streams, and the events between them.

use crate::case::{Found, Given, N, cases, count_in, down, twice, twice_of, up};
use ferrokv_device::{Event, Result};

fn copy_then_launch(given: &Given, bug: bool) -> Result<()> {
    let (from, mut x, mut y) = (given.pinned(3), given.buffer(0), given.buffer(0));
    up(&given.a, &from, &mut x)?; // FIRST
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    twice(&given.b, &x, &mut y)?; // SECOND
    given.device.synchronize()
}

fn launch_then_copy_back(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut to) = (given.buffer(3), given.buffer(0), given.pinned(0));
    twice(&given.a, &x, &mut y)?; // FIRST
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    down(&given.b, &y, &mut to)?; // SECOND
    given.b.synchronize()?;
    assert_eq!(to.try_slice()?, [6; N]);
    given.device.synchronize()
}

fn two_launches_write(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y) = (given.buffer(3), given.buffer(0));
    let y = y.global_mut();
    twice_of(&given.a, x.global(), y, 0..32)?; // FIRST
    twice_of(&given.b, x.global(), y, if bug { 0..32 } else { 32..64 })?; // SECOND
    given.device.synchronize()
}

fn rows_that_share_an_element(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y) = (given.buffer(3), given.buffer(0));
    let y = y.global_mut();
    twice_of(&given.a, x.global(), y, 0..32 + usize::from(bug))?; // FIRST
    twice_of(&given.b, x.global(), y, 32..64)?; // SECOND
    given.device.synchronize()
}

fn fill_beside_a_reader(given: &Given, bug: bool) -> Result<()> {
    let (mut x, mut y) = (given.buffer(3), given.buffer(0));
    twice(&given.a, &x, &mut y)?; // FIRST
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    given.b.fill_u32(&mut x, 8..16, 0)?; // SECOND
    given.device.synchronize()
}

fn copy_beside_a_writer(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    given.a.copy(&y, .., &mut z, 0)?; // FIRST
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    twice(&given.b, &x, &mut y)?; // SECOND
    given.device.synchronize()
}

fn event_too_early(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let event = Event::new(&given.device)?;
    given.a.record(&event)?;
    twice(&given.a, &x, &mut y)?; // FIRST
    if !bug {
        given.a.record(&event)?;
    }
    given.b.wait(&event)?;
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn wait_on_the_wrong_stream(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &x, &mut y)?; // FIRST
    given.order(&given.a, if bug { &given.c } else { &given.b })?;
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn wait_behind_the_use(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let event = Event::new(&given.device)?;
    twice(&given.a, &x, &mut y)?; // FIRST
    given.a.record(&event)?;
    if !bug {
        given.b.wait(&event)?;
    }
    twice(&given.b, &y, &mut z)?; // SECOND
    given.b.wait(&event)?;
    given.device.synchronize()
}

fn event_that_moved(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (event, other) = (Event::new(&given.device)?, Event::new(&given.device)?);
    twice(&given.a, &x, &mut y)?; // FIRST
    given.a.record(&event)?;
    given.c.record(if bug { &event } else { &other })?;
    given.b.wait(&event)?;
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn chain_with_a_gap(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (first, second) = (Event::new(&given.device)?, Event::new(&given.device)?);
    twice(&given.a, &x, &mut y)?; // FIRST
    given.a.record(&first)?;
    if bug {
        given.b.record(&second)?;
        given.b.wait(&first)?;
    } else {
        given.b.wait(&first)?;
        given.b.record(&second)?;
    }
    given.c.wait(&second)?;
    twice(&given.c, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn way_back_is_missing(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    for round in 0..3 {
        if round == 0 {
            twice(&given.a, &x, &mut y)?;
        } else {
            twice(&given.a, &x, &mut y)?; // SECOND
        }
        given.order(&given.a, &given.b)?;
        twice(&given.b, &y, &mut z)?; // FIRST
        if !bug {
            given.order(&given.b, &given.a)?;
        }
    }
    given.device.synchronize()
}

fn another_stream_is_waited_for(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    twice(&given.a, &x, &mut y)?; // FIRST
    if bug {
        given.c.synchronize()?
    } else {
        given.a.synchronize()?
    }
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn threads_that_hand_over(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            twice(&given.a, &x, &mut y)?; // FIRST
            if bug { Ok(()) } else { given.a.synchronize() }
        });
        first.join().unwrap()
    })?;
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn counted_and_read(given: &Given, bug: bool) -> Result<()> {
    let (mut x, mut y) = (given.buffer(0), given.buffer(0));
    count_in(&given.a, &mut x)?; // FIRST
    if bug {
        twice(&given.b, &x, &mut y)?; // SECOND
    } else {
        count_in(&given.b, &mut x)?;
    }
    given.device.synchronize()
}

cases! { "events";
    copy_then_launch: "copied on one stream, used on another", Found::As("a launch reads what a copy writes", 0..256);
    launch_then_copy_back: "computed on one stream, copied back on another", Found::As("a copy reads what a launch writes", 0..256);
    two_launches_write: "two launches write the same half of a buffer", Found::As("a launch writes what a launch writes", 0..128);
    rows_that_share_an_element: "two launches whose rows share an element", Found::As("a launch writes what a launch writes", 128..132);
    fill_beside_a_reader: "a fill of what a launch may be reading", Found::As("a fill writes what a launch reads", 32..64);
    copy_beside_a_writer: "a launch overwrites what a copy may be reading", Found::As("a launch writes what a copy reads", 0..256);
    event_too_early: "the event is recorded ahead of the launch", Found::As("a launch reads what a launch writes", 0..256);
    wait_on_the_wrong_stream: "a third stream waits for the event", Found::As("a launch reads what a launch writes", 0..256);
    wait_behind_the_use: "the wait comes behind the launch that needs it", Found::As("a launch reads what a launch writes", 0..256);
    event_that_moved: "the event is recorded once more, on a third stream", Found::As("a launch reads what a launch writes", 0..256);
    chain_with_a_gap: "a chain of two events, the second recorded ahead of the wait for the first", Found::As("a launch reads what a launch writes", 0..256);
    way_back_is_missing: "a loop over two streams, without the event that leads back", Found::As("a launch writes what a launch reads", 0..256);
    another_stream_is_waited_for: "the host waits for a third stream", Found::As("a launch reads what a launch writes", 0..256);
    threads_that_hand_over: "two threads, each with its stream, hand over without a wait", Found::As("a launch reads what a launch writes", 0..256);
    counted_and_read: "a counter is read while launches count", Found::As("a launch reads what a launch counts up", 0..4);
}
