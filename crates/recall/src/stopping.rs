//! A kernel that panics in several ways: the GPU's error is the emulator's, word for word.

#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, device, kernel, thread};

/// Ways to panic that [`stopping`](fn@stopping) has.
pub const WAYS: u32 = 8;

/// The way to panic in a function that the kernel calls: the emulator names the line of the call, a GPU that
/// of the panic.
pub const IN_A_FUNCTION: u32 = 5;

/// Thread 70 panics, in the way that `how` says.
#[kernel]
pub fn stopping(x: Global<f32>, n: u32, how: u32) {
    let i = thread::index_1d();
    if i >= n as usize {
        return;
    }
    let value = x.load(i);
    match how {
        0 => assert!(x.load(i) != 70.0 && i < 100),
        1 => assert!(value != 70.0, "{value} of element {i}, at most {:.2}; {{{n:#06x}}}", 69.5_f32),
        2 => assert_eq!((i == 70) as u32 * n, 0),
        3 => {
            let left = i + 1;
            assert_ne!(value, 70.0, "element {left}");
        }
        4 if value == 70.0 => panic!("is {:?}\nas {}", i < 71, -(i as i32)),
        5 if value == 70.0 => never(value),
        6 if value == 70.0 => todo!(),
        7 if value == 70.0 => panic!("ü"),
        _ => {}
    }
}

#[device]
fn never(x: f32) {
    unreachable!("with {x}")
}

/// Launches the kernel; the error that it makes.
#[cfg(not(target_arch = "nvptx64"))]
pub fn launch(device: &ferrokv_device::Device, how: u32) -> Result<(), ferrokv_device::Error> {
    let stream = ferrokv_device::Stream::new(device)?;
    let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
    let x = ferrokv_device::Buffer::from_slice(device, &x)?;
    let args = stopping::Args { x: x.global(), n: 100, how };
    // SAFETY: 100 elements, which live until the wait is over.
    unsafe { stream.launch(&stopping::kernel(), LaunchShape::new(2, 64), args) }?;
    stream.synchronize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrokv_device::{Device, Error};
    use simt::emu::EmuOptions;

    #[test]
    fn the_emulator_names_thread_line_and_message() {
        let device = Device::cpu(EmuOptions::default());
        let fault = |how| match launch(&device, how) {
            Err(Error::Fault(fault)) => fault.to_string(),
            other => panic!("{other:?}"),
        };
        let messages = [
            "assertion failed: x.load(i) != 70.0 && i < 100",
            "70 of element 70, at most 69.50; {0x0064}",
            "assertion `left == right` failed\n  left: 100\n right: 0",
            "assertion `left != right` failed: element 71\n  left: 70.0\n right: 70.0",
            "is true\nas -70",
            "internal error: entered unreachable code: with 70",
            "not yet implemented",
            "ü",
        ];
        assert_eq!(messages.len() as u32, WAYS);
        for (how, message) in (0..).zip(messages) {
            let said = fault(how);
            assert!(said.starts_with("kernel stopping, block (1,0,0) thread (6,0,0), at "), "{said}");
            assert!(said.ends_with(&format!("the kernel panicked: {message}")), "{said}");
        }
        assert!(launch(&device, WAYS).is_ok());
    }
}
