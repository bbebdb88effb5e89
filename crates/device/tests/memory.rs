//! Buffers, pinned memory, copies, fills, events: the same checks on both backends.

mod common;

use common::{add, affine, cover, increment, on_both};
use ferrokv_device::{BackendKind, Buffer, Device, Error, Event, Pinned, Stream};

on_both! {
    round_trips_keep_every_bit
    empty_things_work
    fills_reach_exactly_their_range
    copies_between_buffers
    copies_within_a_buffer
    slices_go_through_a_stream
    pinned_memory_round_trip
    kernels_reach_pinned_memory
    ranges_outside_are_refused
    sub_ranges_are_handles
    more_memory_than_there_is
    events_order_and_time
    buffers_drop_on_other_threads
    streams_wait_for_each_other
    a_dropped_stream_has_done_its_work
    the_device_describes_itself
}

fn round_trips_keep_every_bit(device: &Device) {
    let bits: Vec<u32> = (0..100_003_u32)
        .map(|i| i.wrapping_mul(0x9e37_79b9))
        .chain([0x7fc0_0001, 0xff80_0000, 1, 0x8000_0000])
        .collect();
    let values: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
    let mut buffer = Buffer::from_slice(device, &values).unwrap();
    assert_eq!(buffer.len(), bits.len());
    assert_eq!(buffer.bytes(), bits.len() * 4);
    let back: Vec<u32> = buffer.to_vec().unwrap().iter().map(|v| v.to_bits()).collect();
    assert_eq!(back, bits);

    buffer.write(3, &[1.5, 2.5]).unwrap();
    let mut part = [0.0; 4];
    buffer.read(2, &mut part).unwrap();
    assert_eq!(part.map(f32::to_bits), [bits[2], 1.5_f32.to_bits(), 2.5_f32.to_bits(), bits[5]]);

    let zeroed = Buffer::<u64>::zeroed(device, 1000).unwrap();
    assert!(zeroed.to_vec().unwrap().iter().all(|v| *v == 0));
    let odd = Buffer::from_slice(device, &[[1_u8, 2, 3], [4, 5, 6]]).unwrap();
    assert_eq!(odd.to_vec().unwrap(), [[1, 2, 3], [4, 5, 6]]);
}

fn empty_things_work(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut empty = Buffer::<f32>::from_slice(device, &[]).unwrap();
    assert!(empty.is_empty());
    assert_eq!(empty.to_vec().unwrap(), Vec::<f32>::new());
    assert_eq!(empty.global().len(), 0);
    stream.fill_u8(&mut empty, .., 1).unwrap();
    stream.fill_u32(&mut empty, .., 1).unwrap();
    stream.upload(&[], &mut empty, 0).unwrap();
    stream.download(&empty, 0, &mut []).unwrap();
    assert!(Buffer::<f32>::zeroed(device, 0).is_ok());
    let mut pinned = Pinned::<u32>::zeroed(device, 0).unwrap();
    assert!(pinned.is_empty() && pinned.iter_mut().next().is_none());
    assert_eq!(Pinned::<[u32; 0]>::zeroed(device, 5).unwrap().len(), 5);
    assert_eq!(Buffer::<[u32; 0]>::zeroed(device, 5).unwrap().to_vec().unwrap().len(), 5);
}

fn fills_reach_exactly_their_range(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[7_u32; 8]).unwrap();
    stream.fill_u8(&mut buffer, 1..3, 0xab).unwrap();
    stream.fill_u32(&mut buffer, 4..=5, 0x0102_0304).unwrap();
    let ab = 0xabab_abab;
    assert_eq!(buffer.to_vec().unwrap(), [7, ab, ab, 7, 0x0102_0304, 0x0102_0304, 7, 7]);

    let mut bytes = Buffer::from_slice(device, &[9_u8; 12]).unwrap();
    stream.fill_u32(&mut bytes, 4..8, 0x0807_0605).unwrap();
    stream.fill_u8(&mut bytes, 11.., 1).unwrap();
    assert_eq!(bytes.to_vec().unwrap(), [9, 9, 9, 9, 5, 6, 7, 8, 9, 9, 9, 1]);
    for range in [0..6, 1..5] {
        let error = stream.fill_u32(&mut bytes, range, 0).unwrap_err();
        assert!(matches!(error, Error::FillSize { .. }), "{error}");
    }
}

fn copies_between_buffers(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let from = Buffer::from_slice(device, &[1_u16, 2, 3, 4, 5]).unwrap();
    let mut to = Buffer::zeroed(device, 4).unwrap();
    stream.copy(&from, 2.., &mut to, 1).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(to.to_vec().unwrap(), [0, 3, 4, 5]);
    assert!(matches!(stream.copy(&from, 2.., &mut to, 2), Err(Error::Range { .. })));
}

fn copies_within_a_buffer(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[1_u16, 2, 3, 4, 5, 6]).unwrap();
    // Up to its own edge, in both directions.
    stream.copy_within(&mut buffer, 0..2, 2).unwrap();
    stream.copy_within(&mut buffer, 4..=5, 0).unwrap();
    stream.copy_within(&mut buffer, 3..3, 3).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [5, 6, 1, 2, 5, 6]);
    for (range, start) in [(0..2, 1), (2..4, 1), (1..3, 1), (0..6, 0)] {
        let error = stream.copy_within(&mut buffer, range, start).unwrap_err();
        assert!(matches!(error, Error::Overlap { to, .. } if to == start), "{error}");
    }
    for (range, start) in [(0..3, 4), (5..7, 0)] {
        let error = stream.copy_within(&mut buffer, range, start).unwrap_err();
        assert!(matches!(error, Error::Range { .. }), "{error}");
    }
    assert_eq!(buffer.to_vec().unwrap(), [5, 6, 1, 2, 5, 6]);
}

fn slices_go_through_a_stream(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let n = 1000;
    let mut buffer = Buffer::<u32>::new(device, n).unwrap();
    stream.upload(&vec![5; n], &mut buffer, 0).unwrap();
    // SAFETY: the buffer has `n` elements, each thread has its own, and the download below is in order.
    unsafe { stream.launch(&increment::kernel(), cover(n), add(&mut buffer, 2)) }.unwrap();
    let mut part = [0; 10];
    stream.download(&buffer, n - 10, &mut part).unwrap();
    assert_eq!(part, [7; 10]);
}

fn pinned_memory_round_trip(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let values: Vec<i64> = (0..5000).map(|i| i * i - 77).collect();
    let source = Pinned::from_slice(device, &values).unwrap();
    let mut target = Pinned::<i64>::zeroed(device, 5000).unwrap();
    assert!(target.iter().all(|v| *v == 0));
    let mut buffer = Buffer::zeroed(device, 5000).unwrap();
    // SAFETY: nothing is touched or dropped before the wait.
    unsafe {
        stream.upload_async(&source, .., &mut buffer, 0).unwrap();
        stream.download_async(&buffer, 10..20, &mut target, 100).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_vec().unwrap(), values);
    assert_eq!(&target[100..110], &values[10..20]);
    assert!(target[..100].iter().chain(&target[110..]).all(|v| *v == 0));
    // SAFETY: refused before anything is copied.
    unsafe {
        assert!(stream.upload_async(&source, 4999..5001, &mut buffer, 0).is_err());
        assert!(stream.upload_async(&source, .., &mut buffer, 1).is_err());
        assert!(stream.download_async(&buffer, .., &mut target, 1).is_err());
    }
}

fn kernels_reach_pinned_memory(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let n = 300;
    let values: Vec<f32> = (0..n).map(|i| i as f32 * 0.37).collect();
    let x = Pinned::from_slice(device, &values).unwrap();
    let mut y = Pinned::zeroed(device, n).unwrap();
    // SAFETY: both have `n` elements and are left alone until the wait.
    unsafe {
        stream.launch(
            &affine::kernel(),
            cover(n),
            affine::Args { x: x.global(), y: y.global_mut(), a: 3.0, n: n as u32 },
        )
    }
    .unwrap();
    stream.synchronize().unwrap();
    let expected: Vec<f32> = values.iter().map(|v| v * 3.0 + 1.0).collect();
    assert_eq!(&y[..], expected);
}

fn ranges_outside_are_refused(device: &Device) {
    let mut buffer = Buffer::from_slice(device, &[1_u8; 10]).unwrap();
    assert!(buffer.write(9, &[0, 0]).is_err());
    assert!(buffer.write(11, &[]).is_err());
    assert!(buffer.read(usize::MAX, &mut [0]).is_err());
    assert!(buffer.global_range(5..11).is_err());
    assert!(buffer.global_range_mut(11..).is_err());
    let stream = Stream::new(device).unwrap();
    assert!(stream.fill_u8(&mut buffer, 3..11, 0).is_err());
    assert!(stream.upload(&[0; 2], &mut buffer, 9).is_err());
    assert!(stream.download(&buffer, 9, &mut [0; 2]).is_err());
    let text = stream.download(&buffer, 9, &mut [0; 2]).unwrap_err().to_string();
    assert_eq!(text, "range 9..11 is not inside the buffer of 10 elements");
    assert_eq!(buffer.to_vec().unwrap(), [1; 10]);
}

fn sub_ranges_are_handles(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[0_u32; 100]).unwrap();
    let handle = buffer.global_range_mut(10..30).unwrap();
    assert_eq!((handle.len(), handle.address()), (20, buffer.global().address() + 40));
    // SAFETY: the handle has 20 elements, each thread its own.
    unsafe { stream.launch(&increment::kernel(), cover(20), increment::Args { y: handle, by: 1, n: 20 }) }
        .unwrap();
    stream.synchronize().unwrap();
    let values = buffer.to_vec().unwrap();
    assert!((0..100).all(|i| values[i] == u32::from((10..30).contains(&i))));
}

fn more_memory_than_there_is(device: &Device) {
    let error = Buffer::<u64>::new(device, 1 << 45).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { requested: 0x1_0000_0000_0000, .. }), "{error}");
    assert!(error.to_string().contains(&device.info().name), "{error}");
    let error = Buffer::<u64>::new(device, usize::MAX / 2).unwrap_err();
    assert!(matches!(error, Error::TooLarge { element_bytes: 8, .. }), "{error}");
    let error = Pinned::<u8>::zeroed(device, 1 << 46).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    // The device still works.
    assert_eq!(Buffer::from_slice(device, &[3_u8]).unwrap().to_vec().unwrap(), [3]);
}

fn events_order_and_time(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (start, end) = (Event::new(device).unwrap(), Event::new(device).unwrap());
    assert!(matches!(start.synchronize(), Err(Error::EventNotRecorded)));
    assert!(matches!(end.elapsed_ms(&start), Err(Error::EventNotRecorded)));
    assert!(matches!(stream.wait(&start), Err(Error::EventNotRecorded)));
    let mut buffer = Buffer::zeroed(device, 1 << 16).unwrap();
    stream.record(&start).unwrap();
    // SAFETY: the buffer has 2^16 elements, each thread its own.
    unsafe { stream.launch(&increment::kernel(), cover(1 << 16), add(&mut buffer, 1)) }.unwrap();
    stream.record(&end).unwrap();
    let forth = end.elapsed_ms(&start).unwrap();
    assert!(forth > 0.0 && forth.is_finite(), "{forth}");
    assert_eq!(start.elapsed_ms(&end).unwrap(), -forth);
    assert!(buffer.to_vec().unwrap().iter().all(|v| *v == 1));
}

fn buffers_drop_on_other_threads(device: &Device) {
    let buffers: Vec<_> = (0..8_u32).map(|i| Buffer::from_slice(device, &[i; 1000]).unwrap()).collect();
    let threads: Vec<_> = buffers
        .into_iter()
        .enumerate()
        .map(|(i, buffer)| {
            std::thread::spawn(move || {
                assert_eq!(buffer.to_vec().unwrap(), [i as u32; 1000]);
                let device = buffer.device().clone();
                drop(buffer);
                let stream = Stream::new(&device).unwrap();
                let mut own = Buffer::zeroed(&device, 100).unwrap();
                // SAFETY: the buffer has 100 elements, each thread its own.
                unsafe { stream.launch(&increment::kernel(), cover(100), add(&mut own, 3)) }.unwrap();
                let mut values = [0; 100];
                stream.download(&own, 0, &mut values).unwrap();
                assert_eq!(values, [3; 100]);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

fn streams_wait_for_each_other(device: &Device) {
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let n = 1 << 16;
    let mut buffer = Buffer::zeroed(device, n).unwrap();
    for _ in 0..20 {
        for (stream, other) in [(&first, &second), (&second, &first)] {
            // SAFETY: the buffer has `n` elements, each thread its own; the event orders the streams.
            unsafe { stream.launch(&increment::kernel(), cover(n), add(&mut buffer, 1)) }.unwrap();
            let event = Event::new(device).unwrap();
            stream.record(&event).unwrap();
            other.wait(&event).unwrap();
        }
    }
    device.synchronize().unwrap();
    assert!(buffer.to_vec().unwrap().iter().all(|v| *v == 40));
}

fn a_dropped_stream_has_done_its_work(device: &Device) {
    let n = 1 << 20;
    let mut buffer = Buffer::zeroed(device, n).unwrap();
    let stream = Stream::new(device).unwrap();
    for _ in 0..20 {
        // SAFETY: the buffer has `n` elements, each thread its own.
        unsafe { stream.launch(&increment::kernel(), cover(n), add(&mut buffer, 1)) }.unwrap();
    }
    drop(stream);
    assert!(buffer.to_vec().unwrap().iter().all(|v| *v == 20));
}

fn the_device_describes_itself(device: &Device) {
    let info = device.info();
    assert!(!info.name.is_empty() && info.multiprocessors > 0);
    assert!(info.max_shared_bytes >= 48 * 1024);
    assert_eq!(info.backend, device.kind());
    let attributes = device.kernel_attributes(increment::kernel().info()).unwrap();
    match device.kind() {
        BackendKind::Cpu => assert_eq!((info.compute_capability, attributes), (None, None)),
        BackendKind::Cuda => {
            let attributes = attributes.expect("a GPU knows its kernels");
            assert!(attributes.registers > 0 && attributes.max_threads >= 256, "{attributes:?}");
            assert_eq!((attributes.local_bytes, attributes.static_shared_bytes), (0, 0));
            assert!(
                info.compute_capability >= Some(80) && info.l2_bytes > Some(0) && info.memory_bytes > Some(0)
            );
            assert!(ferrokv_device::cuda_devices().unwrap().contains(info));
        }
    }
}
