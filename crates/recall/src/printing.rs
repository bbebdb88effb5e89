//! Kernels that print: what a GPU's host puts together is what the emulator writes, character for character.

#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::{Buffer, Device, Error, Stream};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::half::{bf16, f16};
#[cfg(not(target_arch = "nvptx64"))]
use simt::print::{Printed, Sink};
use simt::{Global, GlobalMut, device, kernel, thread};
#[cfg(not(target_arch = "nvptx64"))]
use std::sync::{Arc, Mutex, PoisonError};

/// Every sort of value in many formats, from element `i` of `x` and `y`, `n` elements each.
#[kernel]
pub fn values(x: Global<f32>, y: Global<u32>, n: u32) {
    let i = thread::index_1d();
    if i >= n as usize {
        return;
    }
    let (f, u) = (x.load(i), y.load(i));
    let (wide, small) = (f as f64 / 3.0, f16::from_bits(u as u16));
    println!("{i} of {n}: {f} {f:?} {f:.3} {f:+10.2e} {{{f:*^12}}}");
    let (byte, signed, short) = (u as u8, u as i8, u as i16);
    println!("{u} {u:#010x} {byte:b} {signed:>+6} {short:<6}|{:X} {:#o} {:e}", -1i16, u >> 7, u as u16);
    println!("{wide} {wide:?} {:08.3} {small} {small:?} {:.1}", wide, bf16::from_bits(u as u16));
    let letter = char::from(byte % 26 + b'a');
    println!("{:?} {:>7} {} {:5}| ünïcode \\ \"quoted\" {letter}", u % 2 == 0, f > 0.0, 'ü', 'n');
    println!("{} {} {:x} {:x} {signed:x} {short:x}", u as i64, u as i32, -(u as i64), u as i32);
    below(f);
    if u % 2 == 0 {
        println!();
    }
}

/// A function's line is its own, on both sides.
#[device]
fn below(f: f32) {
    println!("below: {}, {f}", { f } as i32);
}

/// Thread `i` prints `times` lines, and writes so to element `i` of `y`.
#[kernel]
pub fn counted(y: GlobalMut<u32>, times: u32) {
    let i = thread::index_1d();
    let mut t = 0;
    while t < times {
        println!("thread {i}, line {t}");
        t += 1;
    }
    y.store(i, times);
}

/// Prints, and stops the grid unless element 0 of `y` is 0.
#[kernel]
pub fn stopped(y: Global<u32>) {
    let value = y.load(0usize);
    println!("about to stop: {value}");
    assert!(value == 0, "it is {value}");
}

/// Lines of a device that nobody has taken.
#[cfg(not(target_arch = "nvptx64"))]
struct Taken(Arc<Mutex<Vec<Printed>>>);

#[cfg(not(target_arch = "nvptx64"))]
impl Taken {
    fn of(device: &Device) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let into = lines.clone();
        let sink: Sink = Arc::new(move |printed: &Printed| {
            into.lock().unwrap_or_else(PoisonError::into_inner).push(printed.clone());
        });
        device.print_to(Some(sink));
        Taken(lines)
    }

    /// What was printed since the last time, in the order of the threads; a thread's lines keep theirs.
    fn sorted(&self) -> Vec<String> {
        let mut lines = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let dim = |at: simt::Dim3| (at.z, at.y, at.x);
        lines.sort_by_key(|printed| match printed {
            Printed::Line(line) => Some((dim(line.thread.block), dim(line.thread.thread))),
            _ => None,
        });
        let place = |printed: &Printed| match printed {
            Printed::Line(line) => format!("{printed} ({})", line.place),
            _ => printed.to_string(),
        };
        lines.iter().map(place).collect()
    }
}

/// What the kernels print on a device: by a launch, by graphs, by a kernel that stops the grid, in parts.
///
/// # Errors
/// What the device reports, but for the grid that stops.
#[cfg(not(target_arch = "nvptx64"))]
pub fn printed(device: &Device) -> Result<Vec<Vec<String>>, Error> {
    let (stream, taken) = (Stream::new(device)?, Taken::of(device));
    let mut parts = Vec::new();
    let x: Vec<f32> = (0..70).map(|i| (i - 35) as f32 / 7.0 * if i % 9 == 0 { 1e20 } else { 1.0 }).collect();
    let y: Vec<u32> = (0..70u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> (i % 5)).collect();
    let (x, y) = (Buffer::from_slice(device, &x)?, Buffer::from_slice(device, &y)?);
    let args = values::Args { x: x.global(), y: y.global(), n: 70 };
    // SAFETY: 70 elements each, which live until the wait is over.
    unsafe { stream.launch(&values::kernel(), LaunchShape::new(3, 32), args) }?;
    stream.synchronize()?;
    parts.push(taken.sorted());

    let mut out = Buffer::from_slice(device, &[0u32; 64])?;
    let args = counted::Args { y: out.global_mut(), times: 3 };
    let (graph, _) = stream.capture(|stream| {
        // SAFETY: 64 elements, which live until all is done.
        unsafe { stream.launch(&counted::kernel(), LaunchShape::new(2, 32), args) }
    })?;
    let graph = graph.instantiate()?;
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }?;
    }
    stream.synchronize()?;
    parts.push(taken.sorted());
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }?;
    device.synchronize()?;
    parts.push(taken.sorted());
    // Often enough that places are used again.
    for _ in 0..50 {
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }?;
        stream.synchronize()?;
    }
    let lines = taken.sorted();
    parts.push(vec![format!("{} lines", lines.len()), lines[0].clone(), lines[lines.len() - 1].clone()]);

    let args = stopped::Args { y: y.global_range(1..2)? };
    // SAFETY: one element.
    let launched = unsafe { stream.launch(&stopped::kernel(), LaunchShape::new(1, 1), args) };
    let stopped = launched.and_then(|()| stream.synchronize());
    let mut said = taken.sorted();
    said.push(stopped.err().map_or("it did not stop".into(), |error| error.to_string()));
    parts.push(said);
    Ok(parts)
}

/// How many lines come of so many blocks of 256 threads that print one each, and how many are said to be
/// lost, which under the emulator none is.
///
/// # Errors
/// What the device reports.
#[cfg(not(target_arch = "nvptx64"))]
pub fn flood(device: &Device, blocks: u32) -> Result<(u64, u64), Error> {
    let (stream, taken) = (Stream::new(device)?, Taken::of(device));
    let mut out = Buffer::from_slice(device, &vec![0u32; 256 * blocks as usize])?;
    let args = counted::Args { y: out.global_mut(), times: 1 };
    // SAFETY: an element for each thread.
    unsafe { stream.launch(&counted::kernel(), LaunchShape::new(blocks, 256), args) }?;
    assert!(out.to_vec()?.iter().all(|&times| times == 1), "every thread has gone on");
    let printed = std::mem::take(&mut *taken.0.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(printed.iter().fold((0, 0), |(lines, lost), printed| match printed {
        Printed::Lost { lines: more } => (lines, lost + more),
        _ => (lines + 1, lost),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::emu::EmuOptions;

    #[test]
    fn lines_are_what_the_standard_library_makes_of_their_values() {
        let parts = printed(&Device::cpu(EmuOptions::default())).unwrap();
        let thread = |block, thread| format!("kernel values, block ({block},0,0) thread ({thread},0,0): ");
        let said = |part: usize, who: &str| -> Vec<&str> {
            parts[part].iter().filter_map(|line| line.strip_prefix(who)).collect()
        };
        let first = said(0, &thread(0, 0));
        let at = "(crates/recall/src/printing.rs:";
        assert_eq!(first.len(), 7, "{first:?}");
        let f = -35.0_f32 / 7.0 * 1e20;
        assert!(first[0].starts_with(&format!("0 of 70: {f} {f:?} {f:.3} {f:+10.2e} {{{f:*^12}}} {at}")));
        assert!(
            first[1].starts_with(&format!("0 0x00000000 0     +0 0     |FFFF 0o0 0e0 {at}")),
            "{first:?}"
        );
        assert!(first[3].starts_with(&format!("true   false ü n    | ünïcode \\ \"quoted\" a {at}")));
        assert!(first[5].starts_with(&format!("below: {}, {f} {at}", f as i32)), "{first:?}");
        assert!(first[6].starts_with(&format!(" {at}")), "{first:?}");
        let (u, last) = (69u32.wrapping_mul(0x9e37_79b9) >> 4, said(0, &thread(2, 5)));
        assert!(last[4].starts_with(&format!(
            "{} {} {:x} {:x} {:x} {:x} {at}",
            u as i64,
            u as i32,
            -(u as i64),
            u as i32,
            u as i8,
            u as i16
        )));
        assert!(said(0, &thread(2, 6)).is_empty());
        let counted = |block, thread| {
            let who = format!("kernel counted, block ({block},0,0) thread ({thread},0,0): thread ");
            [1, 2].map(|part| said(part, &who).len())
        };
        assert_eq!([counted(0, 0), counted(1, 31)], [[6, 3], [6, 3]]);
        assert_eq!(parts[3][0], format!("{} lines", 50 * 64 * 3));
        assert!(parts[4][0].contains(": about to stop: "), "{:?}", parts[4]);
        assert!(parts[4][1].contains("the kernel panicked: it is "), "{:?}", parts[4]);
    }

    #[test]
    fn the_emulator_loses_no_line() {
        assert_eq!(flood(&Device::cpu(EmuOptions::default()), 40).unwrap(), (40 * 256, 0));
    }

    /// A launch in several orders prints once.
    #[test]
    fn the_first_order_prints() {
        assert_eq!(flood(&Device::cpu(EmuOptions::thorough()), 1).unwrap(), (256, 0));
    }
}
