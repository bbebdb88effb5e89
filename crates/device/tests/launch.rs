//! Launches, devices and their errors: the same checks on both backends.

mod common;

use common::{IMAGES, affine, cover, cpu, cuda, increment, missing, narrow, on_both, reverse};
use ferrokv_device::{BackendKind, Buffer, Device, Error, PtxImage, Stream};
use simt::LaunchShape;
use simt::emu::{EmuOptions, FaultKind};

on_both! {
    a_launch_computes
    a_launch_takes_much_shared_memory
    shapes_are_refused_before_the_backend
    a_kernel_that_the_ptx_lacks
}

fn a_launch_computes(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for n in [1, 127, 128, 129, 10_000] {
        let values: Vec<f32> = (0..n).map(|i| (i as f32 - 50.0) * 0.013).collect();
        let x = Buffer::from_slice(device, &values).unwrap();
        let mut y = Buffer::<f32>::new(device, n).unwrap();
        // SAFETY: both have `n` elements, each thread its own.
        unsafe {
            stream.launch(
                &affine::kernel(),
                cover(n),
                affine::Args { x: x.global(), y: y.global_mut(), a: -1.7, n: n as u32 },
            )
        }
        .unwrap();
        stream.synchronize().unwrap();
        let expected: Vec<u32> = values.iter().map(|v| (v * -1.7 + 1.0).to_bits()).collect();
        let found: Vec<u32> = y.to_vec().unwrap().iter().map(|v| v.to_bits()).collect();
        assert_eq!(found, expected);
    }
}

fn a_launch_takes_much_shared_memory(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let values: Vec<u32> = (0..256).collect();
    let reversed: Vec<u32> = (0..256).rev().collect();
    // 4 KiB, then the usual limit of 48 KiB, then beyond it.
    for stride in [4, 48, 64, 100] {
        let mut buffer = Buffer::from_slice(device, &values).unwrap();
        let shape = LaunchShape::new(1, 256).shared(256 * stride * 4);
        // SAFETY: one block of 256 threads over 256 elements, with the shared memory the kernel lays out.
        unsafe { stream.launch(&reverse::kernel(), shape, reverse::Args { y: buffer.global_mut(), stride }) }
            .unwrap();
        stream.synchronize().unwrap();
        assert_eq!(buffer.to_vec().unwrap(), reversed, "stride {stride}");
    }
}

fn shapes_are_refused_before_the_backend(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::from_slice(device, &[0_u32; 4]).unwrap();
    let too_much = device.info().max_shared_bytes + 1;
    let refused = [
        (LaunchShape::new(0, 32), "no block"),
        (LaunchShape::new(1, (32, 0)), "no thread"),
        (LaunchShape::new(1, 257), "declares 256"),
        (LaunchShape::new(1, (32, 64)), "1024 is the most"),
        (LaunchShape::new((1, 70_000), 32), "a grid may be"),
        (LaunchShape::new(1, 32).shared(too_much), "is the device's most"),
    ];
    for (shape, part) in refused {
        // SAFETY: refused, so nothing runs.
        let error = unsafe {
            stream.launch(&reverse::kernel(), shape, reverse::Args { y: buffer.global_mut(), stride: 1 })
        }
        .unwrap_err();
        let Error::Shape { kernel: "host_test_reverse", shape: named, reason } = &error else {
            panic!("{error}")
        };
        assert_eq!(*named, shape);
        assert!(reason.contains(part), "{reason}");
        let (outcome, _) = stream
            .capture(|s| {
                // SAFETY: refused, so nothing is recorded.
                Ok(unsafe {
                    s.launch_node(
                        &reverse::kernel(),
                        shape,
                        reverse::Args { y: buffer.global_mut(), stride: 1 },
                    )
                }
                .is_err())
            })
            .map(|(graph, refused)| (refused, graph))
            .unwrap();
        assert!(outcome);
    }
    assert_eq!(buffer.to_vec().unwrap(), [0; 4]);
}

fn a_kernel_that_the_ptx_lacks(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut buffer = Buffer::zeroed(device, 32).unwrap();
    for _ in 0..2 {
        // SAFETY: one thread for each of 32 elements.
        let outcome = unsafe {
            stream.launch(
                &missing::kernel(),
                LaunchShape::new(1, 32),
                missing::Args { y: buffer.global_mut() },
            )
        };
        match device.kind() {
            // The emulator runs the Rust function; it needs no PTX.
            BackendKind::Cpu => outcome.unwrap(),
            BackendKind::Cuda => {
                let error = outcome.unwrap_err();
                assert!(
                    matches!(error, Error::KernelMissing { kernel: "host_test_missing", sm: 80 }),
                    "{error}"
                );
                let error = device.kernel_attributes(missing::kernel().info()).unwrap_err();
                assert!(matches!(error, Error::KernelMissing { .. }), "{error}");
            }
        }
    }
}

#[test]
fn the_emulators_fault_is_carried_as_it_is() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::zeroed(&device, 10).unwrap();
    // SAFETY: the emulator checks the bounds that the kernel breaks.
    let error = unsafe {
        stream.launch(
            &increment::kernel(),
            cover(11),
            increment::Args { y: buffer.global_mut(), by: 1, n: 11 },
        )
    }
    .unwrap_err();
    let Error::Fault(fault) = error else { panic!("{error}") };
    assert_eq!(fault.kernel, "host_test_increment");
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { index: 10, len: 10, .. }), "{fault}");

    // In a graph it comes at the launch that makes it, and the steps after it do not run.
    let (graph, ()) = stream
        .capture(|s| {
            // SAFETY: as above.
            unsafe {
                s.launch(
                    &increment::kernel(),
                    cover(11),
                    increment::Args { y: buffer.global_mut(), by: 1, n: 11 },
                )
            }?;
            s.fill_u8(&mut buffer, .., 0xff)
        })
        .unwrap();
    // SAFETY: as above.
    let error = unsafe { graph.instantiate().unwrap().launch(&stream) }.unwrap_err();
    assert!(matches!(error, Error::Fault(_)), "{error}");
    assert!(buffer.to_vec().unwrap().iter().all(|v| *v != u32::MAX));
}

#[test]
fn things_of_two_devices_do_not_mix() {
    let (Some(cpu), Some(cuda)) = (cpu(), cuda()) else { return };
    let on_cpu = Stream::new(&cpu).unwrap();
    let mut on_gpu = Buffer::<u32>::zeroed(&cuda, 4).unwrap();
    assert!(matches!(on_cpu.fill_u8(&mut on_gpu, .., 1), Err(Error::WrongDevice { .. })));
    assert!(matches!(on_cpu.upload(&[1], &mut on_gpu, 0), Err(Error::WrongDevice { .. })));
    let (graph, ()) = on_cpu.capture(|_| Ok(())).unwrap();
    let gpu_stream = Stream::new(&cuda).unwrap();
    // SAFETY: an empty graph.
    let outcome = unsafe { graph.instantiate().unwrap().launch(&gpu_stream) };
    assert!(matches!(outcome, Err(Error::WrongDevice { .. })));
    // Two handles on one GPU are one device.
    let again = common::cuda().unwrap();
    Stream::new(&again).unwrap().fill_u8(&mut on_gpu, .., 1).unwrap();
    again.synchronize().unwrap();
    assert_eq!(on_gpu.to_vec().unwrap(), [0x0101_0101; 4]);
}

#[test]
fn two_emulators_are_one_device() {
    let (a, b) = (cpu().unwrap(), Device::cpu(EmuOptions::race_checked()));
    let mut buffer = Buffer::<u32>::zeroed(&a, 4).unwrap();
    Stream::new(&b).unwrap().fill_u8(&mut buffer, .., 1).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [0x0101_0101; 4]);
}

#[test]
fn auto_falls_back_and_says_why() {
    let (device, reason) = Device::auto(EmuOptions::default(), &[]);
    assert_eq!(device.kind(), BackendKind::Cpu);
    let reason = reason.expect("no PTX was given");
    assert!(matches!(reason, Error::NoPtx | Error::NoDriver(_) | Error::NoDevice { .. }), "{reason}");
}

#[test]
fn the_loader_picks_and_refuses_images() {
    let Some(device) = cuda() else { return };
    let capability = device.info().compute_capability.unwrap();

    let error = Device::cuda(0, &[]).unwrap_err();
    assert!(matches!(error, Error::NoPtx), "{error}");
    let error = Device::cuda(0, &[PtxImage::new(capability + 1, common::PTX)]).unwrap_err();
    assert!(matches!(error, Error::GpuTooOld { .. }), "{error}");
    let error = Device::cuda(99, IMAGES).unwrap_err();
    assert!(matches!(error, Error::NoDevice { ordinal: 99, count: 1.. }), "{error}");

    let broken = PtxImage::new(capability, ".version 7.0\n.target sm_80\n.address_size 64\nnonsense;\n");
    let error = Device::cuda(0, &[broken]).unwrap_err();
    let Error::PtxRefused { refusals, .. } = &error else { panic!("{error}") };
    assert_eq!((refusals.len(), refusals[0].code), (1, 218));
    assert!(refusals[0].log.contains("line 4"), "{error}");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    eprintln!("{error}");

    // The highest image is refused, the next one is taken; one for a newer GPU is not tried.
    let newer = PtxImage::new(capability + 1, "not tried");
    let device = Device::cuda(0, &[IMAGES[0], newer, broken]).unwrap();
    a_launch_computes(&device);

    // Machine code that is none: the driver gets the text. An ELF file without any section it refuses itself.
    let mut empty = [0; 64];
    empty[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    for scrap in [&b"\x7fELF and no more"[..], &*Box::leak(Box::new(empty))] {
        let image = PtxImage { sm: capability, machine_code: scrap, ..IMAGES[0] };
        a_launch_computes(&Device::cuda(0, &[image]).unwrap());
    }
}

#[test]
fn registers_and_maxntid_limit_a_block() {
    let Some(device) = cuda() else { return };
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::zeroed(&device, 128).unwrap();
    // SAFETY: refused, so nothing runs.
    let error = unsafe {
        stream.launch(&narrow::kernel(), LaunchShape::new(1, 65), narrow::Args { y: buffer.global_mut() })
    }
    .unwrap_err();
    let Error::Shape { reason, .. } = &error else { panic!("{error}") };
    assert!(reason.contains("64 is the most on this GPU"), "{reason}");
    assert_eq!(device.kernel_attributes(narrow::kernel().info()).unwrap().unwrap().max_threads, 64);
}
