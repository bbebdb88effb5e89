//! A kernel that goes astray on a GPU: the error keeps the driver's code, and dropping everything after it
//! neither panics nor crashes. In a process of its own, since the GPU's context is lost with it.

mod common;

use common::increment;
use ferrokv_device::{Buffer, Error, Event, Pinned, Stream};
use simt::{GlobalMut, LaunchShape};

#[test]
fn an_illegal_access_is_reported_and_survived() {
    let Some(device) = common::cuda() else { return };
    let stream = Stream::new(&device).unwrap();
    let buffer = Buffer::from_slice(&device, &[1_u32; 32]).unwrap();
    let _pinned = Pinned::<u32>::zeroed(&device, 32).unwrap();
    let event = Event::new(&device).unwrap();
    let (graph, ()) = stream.capture(|_| Ok(())).unwrap();
    let _exec = graph.instantiate().unwrap();
    stream.record(&event).unwrap();

    // SAFETY: not met, which is the point: nothing is at this address. The GPU stops the kernel.
    let outcome = unsafe {
        let nowhere = GlobalMut::<u32>::from_raw(1 << 20, 32);
        stream.launch(
            &increment::kernel(),
            LaunchShape::new(1, 32),
            increment::Args { y: nowhere, by: 1, n: 32 },
        )
    };
    let error = outcome.and_then(|()| stream.synchronize()).unwrap_err();
    let Error::Cuda { code: 700, name, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert!(error.to_string().contains("cpu backend"), "{error}");
    eprintln!("{error}");

    // Everything fails from now on, with words.
    assert!(matches!(buffer.to_vec(), Err(Error::Cuda { .. })));
    assert!(matches!(Buffer::<u32>::new(&device, 8), Err(Error::Cuda { .. })));
    std::thread::spawn(move || drop(buffer)).join().unwrap();
}
