//! Work that nothing orders and work that something does, on made-up streams and memory.

use super::*;
use std::panic::Location;

const HERE: Doing = Doing::Copy;

/// The device's order, with streams.
fn with_streams<const N: usize>() -> (Order, [u64; N]) {
    let order = Order::default();
    let streams = std::array::from_fn(|_| order.open());
    (order, streams)
}

fn entries(order: &Order) -> usize {
    order.state().history.len()
}

#[track_caller]
fn write(order: &Order, stream: u64, address: u64, bytes: usize) -> Result<()> {
    order.transfer(stream, (HERE, Location::caller()), None, &[(address, bytes, Touch::Write)])
}

#[track_caller]
fn read(order: &Order, stream: u64, address: u64, bytes: usize) -> Result<()> {
    order.transfer(stream, (HERE, Location::caller()), None, &[(address, bytes, Touch::Read)])
}

fn found(result: Result<()>) -> Unordered {
    match result {
        Err(Error::Unordered(found)) => *found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn conflicts_span_pages_and_end_where_they_end() {
    let (order, [a, b]) = with_streams();
    write(&order, a, 1000, 20_000).unwrap();
    let first = found(read(&order, b, 0, 30_000));
    assert_eq!(first.bytes, 1000..21_000);
    assert_eq!((first.first.stream, first.second.stream, first.memory), (Some(1), Some(2), None));
    assert_eq!((first.first.number, first.second.number), (1, 1));
    // What was refused is not done: nothing is in conflict with it.
    write(&order, a, 21_000, 9000).unwrap();
    assert_eq!(found(read(&order, b, 20_999, 1)).bytes, 20_999..21_000);
    read(&order, b, 0, 1000).unwrap();
    read(&order, b, 30_000, 10_000).unwrap();
}

#[test]
fn memory_given_back_is_new() {
    let (order, [a, b]) = with_streams();
    write(&order, a, 0, 10_000).unwrap();
    order.forget(100, 5000);
    write(&order, b, 100, 5000).unwrap();
    assert_eq!(found(write(&order, b, 99, 1)).bytes, 99..100);
    assert_eq!(found(write(&order, b, 5100, 2)).bytes, 5100..5102);
    order.forget(0, 10_000);
    assert_eq!(entries(&order), 0);
}

#[test]
fn what_the_host_has_waited_for_is_forgotten() {
    let (order, [a, b]) = with_streams();
    for round in 0..1000 {
        write(&order, a, 4096 * round, 4096).unwrap();
        let event = order.record(a);
        order.host_waits(&event);
        assert_eq!(entries(&order), 0);
        write(&order, a, 4096 * round, 4096).unwrap();
        write(&order, b, 1 << 40, 4096).unwrap();
        order.host_waits_for(b);
        assert_eq!(entries(&order), 2);
        order.host_waits_for_all();
        assert_eq!(entries(&order), 0);
    }
    // Where one stream is waited for and another one never is, too.
    write(&order, b, 1 << 40, 1).unwrap();
    for round in 0..100_000 {
        write(&order, a, 4096 * round, 4096).unwrap();
        order.host_waits_for(a);
    }
    assert!(entries(&order) < 10_000, "{}", entries(&order));
}

#[test]
fn work_that_nobody_waits_for_takes_bounded_room() {
    let (order, [a, b]) = with_streams();
    for round in 0..10_000 {
        // The same bytes again, by two streams in turn.
        for (stream, other) in [(a, b), (b, a)] {
            write(&order, stream, 0, 8192).unwrap();
            read(&order, stream, 0, 8192).unwrap();
            let event = order.record(stream);
            order.hold(other, &event);
        }
        assert!(entries(&order) <= 8, "round {round}: {}", entries(&order));
    }
    // Byte by byte, without anything to tell the works apart.
    for byte in 0..4096 {
        write(&order, a, 1 << 40 | byte, 1).unwrap();
    }
    assert!(entries(&order) <= 8 + 16, "{}", entries(&order));
    let merged = found(read(&order, b, 1 << 40 | 5, 1));
    assert!(merged.first.or_before && merged.to_string().contains(", or work before it,"), "{merged}");
    let last = found(read(&order, b, 1 << 40 | 4095, 1));
    assert!(!last.first.or_before, "{last}");
}

#[test]
fn merging_keeps_stretches_apart() {
    let (order, [a, b]) = with_streams();
    let mut events = Vec::new();
    for byte in 0..100 {
        write(&order, a, byte, 1).unwrap();
        events.push(order.record(a));
    }
    for (byte, event) in events.iter().enumerate() {
        order.hold(b, event);
        read(&order, b, 0, byte + 1).unwrap();
        assert_eq!(found(read(&order, b, byte as u64, 100 - byte)).bytes.start, byte as u64 + 1);
        if byte == 98 {
            break;
        }
    }
}

#[test]
fn streams_that_are_gone_leave_nothing() {
    let (order, [a]) = with_streams();
    let mut last = order.record(a);
    for round in 0..1000 {
        let stream = order.open();
        order.hold(stream, &last);
        write(&order, stream, 0, 64).unwrap();
        last = order.record(stream);
        order.hold(a, &last);
        order.close(stream);
        // An event that remembers the stream.
        order.hold(a, &last);
        read(&order, a, 0, 64).unwrap();
        order.host_waits(&last);
        last = order.record(a);
        let state = order.state();
        assert_eq!(state.streams.len(), 1, "round {round}");
        assert!([&state.host, &state.streams[&a].clock].iter().all(|clock| clock.len() <= 1));
    }
    order.host_waits_for_all();
    assert_eq!(entries(&order), 0);
}

#[test]
fn a_stream_of_another_device_is_not_judged() {
    let ((order, [a]), (_, [foreign])) = (with_streams(), with_streams());
    write(&order, a, 0, 64).unwrap();
    write(&order, foreign, 0, 64).unwrap();
    order.hold(foreign, &order.record(a));
    assert_eq!(order.record(foreign), Clock::default());
}

#[test]
fn threads_use_their_streams_at_once() {
    let order = Order::default();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let order = &order;
            scope.spawn(move || {
                for round in 0..200 {
                    let stream = order.open();
                    write(order, stream, thread << 20, 9000).unwrap();
                    read(order, stream, 1 << 40, 9000).unwrap();
                    match round % 3 {
                        0 => order.host_waits_for(stream),
                        1 => order.host_waits(&order.record(stream)),
                        _ => {}
                    }
                    order.close(stream);
                }
            });
        }
    });
    assert_eq!(entries(&order), 0);
}

#[test]
fn a_report_that_comes_late_is_ordered_by_when_its_work_began() {
    let (order, [a, b]) = with_streams();
    let begin = |stream| order.begin(stream, (Doing::Launch("k"), Location::caller()), None, Some(false));
    let touched = || vec![(0, Touch::Write, Bits::All)];
    // The launch on `a` comes first, is waited for by `b`, and ends last.
    let early = begin(a).unwrap();
    order.hold(b, &order.record(a));
    let late = begin(b).unwrap();
    order.end(&late, touched(), true).unwrap();
    order.end(&early, touched(), true).unwrap();
    // Without the wait it is found, whichever ends first.
    let (one, other) = (begin(a).unwrap(), begin(b).unwrap());
    order.end(&other, touched(), true).unwrap();
    assert_eq!(found(order.end(&one, touched(), true)).first.stream, Some(2));
}

#[test]
fn later_work_hides_nothing_that_it_does_not_follow() {
    let (order, [a, b, c]) = with_streams();
    // Two readers beside each other; the writer waits for the second.
    read(&order, a, 0, 64).unwrap();
    read(&order, b, 0, 64).unwrap();
    order.hold(c, &order.record(b));
    assert_eq!(found(write(&order, c, 0, 64)).first.stream, Some(1));
    order.hold(c, &order.record(a));
    write(&order, c, 0, 64).unwrap();
    // A stream that reads and then counts: the read is still there for another one that counts.
    let count =
        |stream: u64, touch| order.transfer(stream, (HERE, Location::caller()), None, &[(1 << 40, 8, touch)]);
    count(a, Touch::Read).unwrap();
    count(a, Touch::Atomic).unwrap();
    assert_eq!(found(count(b, Touch::Atomic)).first.access, Access::Read);
    // One that counts hides no other that does.
    order.host_waits_for_all();
    count(a, Touch::Atomic).unwrap();
    count(b, Touch::Atomic).unwrap();
    order.hold(c, &order.record(b));
    assert_eq!(found(count(c, Touch::Read)).first.stream, Some(1));
}
