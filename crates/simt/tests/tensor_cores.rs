//! The tensor cores of the GPU that is emulated are those that options, or the environment, name.

use simt::emu::{self, EMULATE_VARIABLE, EmuOptions, Fault, Target};
use simt::{GlobalMut, LaunchShape, kernel, tensor, thread};
use std::process::Command;

/// Products that cancel, 2^12 · 2^12 in steps 0 and 1, and in step 8 one of 2^-4, which is behind them for
/// tensor cores that add eight at a time, and hidden by them for those that add sixteen.
#[kernel]
fn behind_what_cancels(y: GlobalMut<f32>) {
    let lane = thread::thread_idx_x();
    let (large, small) = (0x6c00_6c00, 0x3400);
    // Of a lane's registers: steps 2q and 2q + 1, with 8 more in the second half.
    let first = lane.is_multiple_of(4);
    let a = if first { [large, large, small, small] } else { [0; 4] };
    let b = if first { [large ^ 0x8000_0000, small] } else { [0; 2] };
    let sums = tensor::mma_f16(a, b, [0.0; 4]);
    y.store(lane as usize, sums[0]);
}

fn sum(options: &EmuOptions) -> Result<f32, Fault> {
    let mut y = [f32::NAN; 32];
    // SAFETY: used while `y` lives.
    let y_of = unsafe { GlobalMut::from_raw(y.as_mut_ptr() as u64, y.len()) };
    let (kernel, args) = (behind_what_cancels::kernel(), behind_what_cancels::Args { y: y_of });
    // SAFETY: a warp and its 32 elements.
    unsafe { emu::launch(&kernel, LaunchShape::new(1, 32), args, options) }?;
    assert!(y.iter().all(|x| *x == y[0]), "{y:?}");
    Ok(y[0])
}

fn of(sm: u32) -> EmuOptions {
    EmuOptions { target: Target::new(sm), ..EmuOptions::default() }
}

#[test]
fn options_name_the_gpu() {
    for sm in [70, 75, 80, 86, 89] {
        assert_eq!(sum(&of(sm)).unwrap(), 0.0625, "sm_{sm}");
    }
    for sm in [90, 100, 120] {
        assert_eq!(sum(&of(sm)).unwrap(), 0.0, "sm_{sm}");
    }
    // In every order.
    assert_eq!(sum(&EmuOptions { orders: 3, race_check: true, ..of(80) }).unwrap(), 0.0625);
}

#[kernel]
fn which_targets(y: GlobalMut<f32>) {
    let has = [thread::target_has::<80>(), thread::target_has::<90>(), thread::target_has::<100>()];
    let lane = thread::thread_idx_x() as usize;
    y.store(lane, has.map(u32::from).iter().sum::<u32>() as f32 + 10.0 * tensor::truncation());
}

#[test]
fn kernels_can_ask_for_the_target() {
    let asked = |sm: u32| {
        let mut y = [f32::NAN; 32];
        // SAFETY: used while `y` lives.
        let args = which_targets::Args { y: unsafe { GlobalMut::from_raw(y.as_mut_ptr() as u64, y.len()) } };
        // SAFETY: a warp and its 32 elements.
        unsafe { emu::launch(&which_targets::kernel(), LaunchShape::new(1, 32), args, &of(sm)) }.unwrap();
        y[0]
    };
    assert_eq!([75, 80, 89, 90, 120].map(asked), [20.0, 21.0, 21.0, 12.0, 13.0]);
    // Outside of kernels.
    assert_eq!([thread::target_has::<90>(), thread::target_has::<100>()], [true, false]);
}

#[test]
fn a_block_has_the_shared_memory_of_the_gpu() {
    let refused = |sm: u32, bytes: u32| {
        let mut y = [0f32; 32];
        // SAFETY: used while `y` lives.
        let y_of = unsafe { GlobalMut::from_raw(y.as_mut_ptr() as u64, y.len()) };
        let args = behind_what_cancels::Args { y: y_of };
        let shape = LaunchShape::new(1, 32).shared(bytes);
        // SAFETY: a warp and its 32 elements.
        unsafe { emu::launch(&behind_what_cancels::kernel(), shape, args, &of(sm)) }
            .err()
            .map(|fault| fault.to_string())
    };
    for (sm, most) in [(75, 65536), (80, 166_912), (86, 101_376), (90, 232_448), (120, 101_376)] {
        assert_eq!(refused(sm, most), None);
        let text = refused(sm, most + 1).unwrap();
        let part = format!("{} bytes of shared memory exceed {most}, which sm_{sm} has", most + 1);
        assert!(text.contains("behind_what_cancels") && text.contains(&part), "{text}");
    }
}

/// Run by the test below, in processes of its own.
#[test]
fn as_the_environment_says() {
    let result = sum(&EmuOptions::default());
    match std::env::var(EMULATE_VARIABLE).as_deref() {
        Ok("sm_80") => {
            assert_eq!(result.unwrap(), 0.0625);
            // Options that name a GPU do not ask for it.
            assert_eq!(sum(&of(90)).unwrap(), 0.0);
        }
        Ok("sm_1") => {
            let text = result.unwrap_err().to_string();
            let part = "launch refused: FERROKV_EMULATE: `sm_1` is no GPU that can be emulated: sm_70,";
            assert!(text.contains(part), "{text}");
        }
        _ => assert_eq!(result.unwrap(), 0.0),
    }
}

#[test]
fn the_environment_names_the_gpu() {
    for target in ["sm_80", "sm_1"] {
        let test = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "as_the_environment_says"])
            .env(EMULATE_VARIABLE, target)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&test.stdout);
        assert!(test.status.success() && text.contains("1 passed"), "{target}: {text}");
    }
}
