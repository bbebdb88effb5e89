//! Runs the kernel on the GPU, or under the emulator where there is none.

use @LIB@::{add_scaled, ptx};
use ferrokv_device::{Buffer, Device, Error, Stream};
use simt::emu::EmuOptions;

fn main() -> Result<(), Error> {
    let (device, reason) = Device::auto(EmuOptions::default(), ptx());
    if let Some(reason) = reason {
        println!("under the emulator: {reason}");
    }
    let stream = Stream::new(&device)?;
    let x = Buffer::from_slice(&device, &(0..1000).map(|i| i as f32).collect::<Vec<_>>())?;
    let mut y = Buffer::from_slice(&device, &[1f32; 1000])?;
    add_scaled(&stream, 0.5, &x, &mut y)?;
    println!("{}: the last element is {}", device.info().name, y.to_vec()?[999]);
    Ok(())
}
