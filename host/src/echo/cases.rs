//! The system's cases for `ferrokv check`: every f16 there is.

use super::run;
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::echo::{MOST_DROPPED, round};

/// The cases of every instance.
pub(super) fn cases(coverage: Coverage) -> Vec<Case> {
    let counts: &[usize] = match coverage {
        Coverage::Huge => &[],
        Coverage::Small => &[1, 300],
        Coverage::Quick | Coverage::Full => &[1, 255, 257, 1 << 16],
    };
    let mut cases = Vec::new();
    for &count in counts {
        for dropped in [0, 4, MOST_DROPPED] {
            let label = format!("elements={count} dropped={dropped}");
            let case = Case::new(round::kernel().info(), label, move |device| one(device, count, dropped));
            cases.push(if count < 1000 { case.race_checked() } else { case });
        }
    }
    cases
}

fn one(device: &Device, count: usize, dropped: u32) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    // An odd factor: every number once in 2^16 of them, near ones far apart.
    let numbers = |factor: usize| (0..count).map(|i| f16::from_bits((i * factor) as u16)).collect::<Vec<_>>();
    let keys = Buffer::from_slice(device, &numbers(1))?;
    let values = Buffer::from_slice(device, &numbers(40503))?;
    let (mut rounded_keys, mut rounded_values) = (poisoned(&stream, count)?, poisoned(&stream, count)?);
    let args = round::Args {
        keys: keys.global(),
        values: values.global(),
        rounded_keys: rounded_keys.global_mut(),
        rounded_values: rounded_values.global_mut(),
        count: count as u32,
        dropped,
    };
    // SAFETY: buffers of this device with `count` elements each.
    unsafe { run(&stream, args) }?;
    Ok(vec![
        OutputBuffer::download("keys", &rounded_keys)?,
        OutputBuffer::download("values", &rounded_values)?,
    ])
}
