//! Devices that emulate another GPU than the usual one.

use ferrokv_device::{Buffer, Device, Error, Stream};
use simt::emu::{EmuOptions, Target};
use simt::{GlobalMut, LaunchShape, kernel, thread};

#[kernel(max_threads = 64)]
fn ones(y: GlobalMut<u32>) {
    y.store(thread::index_1d(), 1);
}

fn of(sm: u32) -> Device {
    Device::cpu(EmuOptions { target: Target::new(sm), ..EmuOptions::default() })
}

#[test]
fn a_device_is_of_the_gpu_that_its_options_name() {
    let (ampere, usual) =
        (of(86), Device::cpu(EmuOptions { target: Some(Target::HOPPER), ..EmuOptions::default() }));
    assert_eq!((ampere.target().number(), usual.target()), (86, Target::HOPPER));
    assert!(ampere.info().name.starts_with("CPU emulator of sm_86 ("), "{}", ampere.info().name);
    assert!(usual.info().name.starts_with("CPU emulator ("), "{}", usual.info().name);
    assert_eq!((ampere.info().max_shared_bytes, usual.info().max_shared_bytes), (99 * 1024, 227 * 1024));
    // Code of the host follows the tensor cores of Hopper alone.
    for (sm, has) in [(75, false), (80, false), (89, false), (90, true), (100, true), (120, true)] {
        assert_eq!(of(sm).has_host_paths(), has, "sm_{sm}");
    }
}

#[test]
fn a_plan_hears_what_a_launch_would_report() {
    let (kernel, device) = (ones::kernel(), of(86));
    let stream = Stream::new(&device).unwrap();
    let mut y = Buffer::<u32>::zeroed(&device, 64).unwrap();
    let cases = [
        (LaunchShape::new(1, 64).shared(99 * 1024), None),
        (
            LaunchShape::new(1, 64).shared(100 * 1024),
            Some("102400 bytes of shared memory; 101376 is the device's most"),
        ),
        (LaunchShape::new(1, 65), Some("the kernel declares 64 as its most")),
    ];
    for (shape, expected) in cases {
        let prepared = device.prepare(&kernel, shape);
        // SAFETY: a block of at most 64 threads and their elements.
        let launched = unsafe { stream.launch(&kernel, shape, ones::Args { y: y.global_mut() }) };
        for result in [prepared, launched] {
            match (result, expected) {
                (Ok(()), None) => {}
                (Err(error @ Error::Shape { kernel: "ones", .. }), Some(part)) => {
                    let text = error.to_string();
                    assert!(text.starts_with("cannot launch ones with") && text.contains(part), "{text}");
                }
                (result, _) => panic!("{result:?} of {shape:?}"),
            }
        }
    }
    // Of a grid that is not known yet.
    assert!(device.prepare(&kernel, LaunchShape::new(0, 64)).is_ok());
}
