//! Captures and graphs: the same checks on both backends.

mod common;

use common::{add, cover, increment, narrow, on_both, overlapping};
use ferrokv_device::{Buffer, Device, Error, Event, Graph, NodeId, Pinned, Stream};
use simt::LaunchShape;

on_both! {
    a_capture_runs_nothing_until_launched
    a_graph_replays_and_updates
    a_thousand_launches_in_one_graph
    copies_and_fills_are_captured
    waiting_in_a_capture_is_refused
    a_failed_capture_leaves_the_stream_usable
    nodes_belong_to_their_graph
    overlapping_nodes_take_only_kernels_that_wait
    a_graph_outlives_its_stream
    waiting_for_the_device_spares_captures
    work_before_a_capture_is_waited_for
    uploads_of_one_thread_are_in_no_capture_of_another
}

/// A graph of two launches over `buffer`: add 1, then add 10 to the first `n`.
fn two_steps(stream: &Stream, buffer: &mut Buffer<u32>) -> (Graph, [NodeId; 2]) {
    let n = buffer.len();
    stream
        .capture(|s| {
            // SAFETY: the buffer has `n` elements and outlives the graph's runs; each thread has its own.
            unsafe {
                Ok([
                    s.launch_node(&increment::kernel(), cover(n), add(buffer, 1))?,
                    s.launch_node(&increment::kernel(), cover(n), add(buffer, 10))?,
                ])
            }
        })
        .unwrap()
}

fn a_capture_runs_nothing_until_launched(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::zeroed(device, 200).unwrap();
    let (graph, nodes) = two_steps(&stream, &mut buffer);
    assert_eq!(graph.len(), 2);
    assert!(!graph.is_empty());
    assert_ne!(nodes[0], nodes[1]);
    assert_eq!(buffer.to_vec().unwrap(), [0; 200]);
    let exec = graph.instantiate().unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [0; 200]);
    // SAFETY: the buffer is there.
    unsafe { exec.launch(&stream) }.unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [11; 200]);

    let (empty, ()) = stream.capture(|_| Ok(())).unwrap();
    assert!(empty.is_empty());
    // SAFETY: nothing is in it.
    unsafe { empty.instantiate().unwrap().launch(&stream) }.unwrap();
    stream.synchronize().unwrap();
}

fn a_graph_replays_and_updates(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let n = 200;
    let mut buffer = Buffer::zeroed(device, n).unwrap();
    let mut other = Buffer::zeroed(device, n).unwrap();
    let (graph, nodes) = two_steps(&stream, &mut buffer);
    let (mut exec, untouched) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
    // SAFETY: the buffers are there, with `n` elements; the runs and updates are in one stream's order.
    unsafe {
        for _ in 0..5 {
            exec.launch(&stream).unwrap();
        }
        // Other arguments; then another shape and another kernel.
        exec.update(
            nodes[1],
            &increment::kernel(),
            cover(n),
            increment::Args { y: other.global_mut(), by: 100, n: 50 },
        )
        .unwrap();
        exec.launch(&stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), vec![5 * 11 + 1; n]);
        let values = other.to_vec().unwrap();
        assert!((0..n).all(|i| values[i] == if i < 50 { 100 } else { 0 }));

        exec.update(
            nodes[0],
            &narrow::kernel(),
            LaunchShape::new(1, 64),
            narrow::Args { y: other.global_mut() },
        )
        .unwrap();
        exec.update(
            nodes[1],
            &increment::kernel(),
            LaunchShape::new(1, 32),
            increment::Args { y: other.global_mut(), by: 1, n: 32 },
        )
        .unwrap();
        exec.launch(&stream).unwrap();
        stream.synchronize().unwrap();
        let values = other.to_vec().unwrap();
        assert!((0..64).all(|i| values[i] == i as u32 + u32::from(i < 32)));
        assert_eq!(buffer.to_vec().unwrap(), vec![56; n]);

        // A refused update changes nothing, and neither does an update of another copy.
        assert!(
            exec.update(
                nodes[0],
                &narrow::kernel(),
                LaunchShape::new(1, 0),
                narrow::Args { y: other.global_mut() }
            )
            .is_err()
        );
        exec.launch(&stream).unwrap();
        untouched.launch(&stream).unwrap();
    }
    assert_eq!(buffer.to_vec().unwrap(), vec![67; n]);
}

fn a_thousand_launches_in_one_graph(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[0_u32; 64]).unwrap();
    let (graph, ()) = stream
        .capture(|s| {
            for step in 0..1000 {
                // SAFETY: the buffer has 64 elements, each thread its own.
                unsafe { s.launch(&increment::kernel(), LaunchShape::new(1, 64), add(&mut buffer, step)) }?;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(graph.len(), 1000);
    let exec = graph.instantiate().unwrap();
    for _ in 0..3 {
        // SAFETY: the buffer is there.
        unsafe { exec.launch(&stream) }.unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [3 * 999 * 500; 64]);
}

fn copies_and_fills_are_captured(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut input = Pinned::<u32>::from_slice(device, &[1; 40]).unwrap();
    let mut output = Pinned::<u32>::zeroed(device, 40).unwrap();
    let mut a = Buffer::zeroed(device, 40).unwrap();
    let mut b = Buffer::zeroed(device, 40).unwrap();
    let (graph, ()) = stream
        .capture(|s| {
            // SAFETY: all outlive the graph's runs, and the host waits before it touches them.
            unsafe {
                s.upload_async(&input, .., &mut a, 0)?;
                s.launch(&increment::kernel(), cover(40), add(&mut a, 5))?;
                s.fill_u32(&mut b, .., 9)?;
                s.fill_u8(&mut b, 30.., 0)?;
                s.copy(&a, ..10, &mut b, 0)?;
                s.download_async(&b, .., &mut output, 0)
            }
        })
        .unwrap();
    assert_eq!(graph.len(), 6);
    let exec = graph.instantiate().unwrap();
    for value in [1, 70] {
        input.fill(value);
        // SAFETY: everything is there, and the host waits.
        unsafe { exec.launch(&stream) }.unwrap();
        stream.synchronize().unwrap();
        let expected: Vec<u32> = (0..40)
            .map(|i| {
                if i < 10 {
                    value + 5
                } else if i < 30 {
                    9
                } else {
                    0
                }
            })
            .collect();
        assert_eq!(&output[..], expected);
    }
}

fn waiting_in_a_capture_is_refused(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let other = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[4_u32; 4]).unwrap();
    let event = Event::new(device).unwrap();
    let (empty, ()) = stream.capture(|_| Ok(())).unwrap();
    let exec = empty.instantiate().unwrap();
    let (graph, refused) = stream
        .capture(|s| {
            let mut slice = [0; 4];
            let refused = [
                s.synchronize(),
                s.record(&event),
                s.wait(&event),
                s.upload(&slice, &mut buffer, 0),
                s.download(&buffer, 0, &mut slice),
                s.capture(|_| Ok(())).map(drop),
                // SAFETY: an empty graph.
                unsafe { exec.launch(s) },
            ];
            // What does not wait for this stream goes on, also what waits for all others.
            device.synchronize()?;
            assert_eq!(buffer.to_vec()?, [4; 4]);
            buffer.write(1, &[4])?;
            assert_eq!(other.download(&buffer, 0, &mut slice).map(|()| slice).unwrap(), [4; 4]);
            drop(Buffer::from_slice(device, &[1_u32; 100])?);
            s.fill_u8(&mut buffer, .., 0)?;
            Ok(refused)
        })
        .unwrap();
    for (i, outcome) in refused.into_iter().enumerate() {
        assert!(matches!(outcome, Err(Error::Capturing { .. })), "case {i}: {outcome:?}");
    }
    assert_eq!(graph.len(), 1);
    assert_eq!(buffer.to_vec().unwrap(), [4; 4]);

    // And a node is made in a capture only.
    // SAFETY: refused, so nothing runs.
    let error =
        unsafe { stream.launch_node(&increment::kernel(), cover(4), add(&mut buffer, 1)) }.unwrap_err();
    assert!(matches!(error, Error::NotCapturing { kernel: "host_test_increment" }), "{error}");
}

fn a_failed_capture_leaves_the_stream_usable(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::zeroed(device, 8).unwrap();
    let error = stream
        .capture(|s| {
            // SAFETY: the buffer has 8 elements, each thread its own.
            unsafe { s.launch(&increment::kernel(), cover(8), add(&mut buffer, 1)) }?;
            Err::<(), _>(Error::ForeignNode)
        })
        .unwrap_err();
    assert!(matches!(error, Error::ForeignNode), "{error}");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture(|_| -> ferrokv_device::Result<()> { panic!("in a capture") }).map(drop)
    }));
    assert!(panicked.is_err());
    // SAFETY: the buffer has 8 elements, each thread its own.
    unsafe { stream.launch(&increment::kernel(), cover(8), add(&mut buffer, 1)) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [1; 8]);
    let (graph, _) = two_steps(&stream, &mut buffer);
    assert_eq!(graph.len(), 2);
}

fn nodes_belong_to_their_graph(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::zeroed(device, 8).unwrap();
    let (first, _) = two_steps(&stream, &mut buffer);
    let (_second, nodes) = two_steps(&stream, &mut buffer);
    let mut exec = first.instantiate().unwrap();
    // SAFETY: refused, so nothing changes.
    let outcome = unsafe { exec.update(nodes[0], &increment::kernel(), cover(8), add(&mut buffer, 9)) };
    assert!(matches!(outcome, Err(Error::ForeignNode)), "{outcome:?}");
}

fn a_graph_outlives_its_stream(device: &Device) {
    let mut buffer = Buffer::zeroed(device, 8).unwrap();
    let (mut exec, nodes) = {
        let stream = Stream::new(device).unwrap();
        let (graph, nodes) = two_steps(&stream, &mut buffer);
        (graph.instantiate().unwrap(), nodes)
    };
    let stream = Stream::new(device).unwrap();
    // SAFETY: the buffer is there, with 8 elements.
    unsafe {
        exec.update(nodes[0], &increment::kernel(), cover(8), add(&mut buffer, 2)).unwrap();
        exec.launch(&stream).unwrap();
    }
    assert_eq!(buffer.to_vec().unwrap(), [12; 8]);
}

fn overlapping_nodes_take_only_kernels_that_wait(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::zeroed(device, 8).unwrap();
    let (kernel, shape) = (&overlapping::increment::kernel(), cover(8));
    let (graph, nodes) = stream
        .capture(|s| {
            // SAFETY: the buffer has 8 elements and outlives the graph's runs; each thread has its own.
            unsafe {
                Ok([
                    s.launch_node(&increment::kernel(), shape, add(&mut buffer, 1))?,
                    s.launch_node(kernel, shape, add(&mut buffer, 10))?,
                ])
            }
        })
        .unwrap();
    let mut exec = graph.instantiate().unwrap();
    // SAFETY: as above.
    unsafe {
        let error = exec.update(nodes[1], &increment::kernel(), shape, add(&mut buffer, 5)).unwrap_err();
        assert!(matches!(error, Error::OverlappingNode { kernel: "host_test_increment" }), "{error}");
        exec.launch(&stream).unwrap();
        exec.update(nodes[0], kernel, shape, add(&mut buffer, 100)).unwrap();
        exec.update(nodes[1], kernel, shape, add(&mut buffer, 1000)).unwrap();
        exec.launch(&stream).unwrap();
    }
    assert_eq!(buffer.to_vec().unwrap(), [1111; 8]);
}

fn waiting_for_the_device_spares_captures(device: &Device) {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = Stream::new(device).unwrap();
                let mut buffer = Buffer::zeroed(device, 16).unwrap();
                for round in 1..=20 {
                    let (graph, _) = two_steps(&stream, &mut buffer);
                    // SAFETY: the buffer is there.
                    unsafe { graph.instantiate().unwrap().launch(&stream) }.unwrap();
                    device.synchronize().unwrap();
                    assert_eq!(buffer.to_vec().unwrap(), [11 * round; 16]);
                }
            });
        }
    });
}

fn work_before_a_capture_is_waited_for(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let n = 1 << 20;
    let mut buffer = Buffer::zeroed(device, n).unwrap();
    for _ in 0..20 {
        // SAFETY: the buffer has `n` elements, each thread its own.
        unsafe { stream.launch(&increment::kernel(), cover(n), add(&mut buffer, 1)) }.unwrap();
    }
    let (_, values) = stream.capture(|_| buffer.to_vec()).unwrap();
    assert!(values.iter().all(|v| *v == 20));
}

fn uploads_of_one_thread_are_in_no_capture_of_another(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut captured = Buffer::<u32>::zeroed(device, 16).unwrap();
    std::thread::scope(|scope| {
        let uploads = scope.spawn(|| {
            let mut uploaded = Buffer::<u32>::zeroed(device, 16).unwrap();
            let mut refused = 0;
            for round in 1..=2000 {
                match stream.upload(&[round; 16], &mut uploaded, 0) {
                    Ok(()) => assert_eq!(uploaded.to_vec().unwrap(), [round; 16], "said to be there"),
                    Err(Error::Capturing { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            refused
        });
        while !uploads.is_finished() {
            let (graph, ()) = stream.capture(|stream| stream.fill_u8(&mut captured, .., 7)).unwrap();
            assert_eq!(graph.len(), 1, "an upload was recorded");
        }
        println!("{} of 2000 uploads met a capture", uploads.join().unwrap());
    });
}
