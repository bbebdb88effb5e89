//! What the attribute and the environment say of how a test is run.

use crate::failure::Failed;
use std::time::Duration;

/// How many cases a test has.
pub const CASES: &str = "SIMT_TEST_CASES";
/// In how many orders more the emulator runs each case.
pub const ORDERS: &str = "SIMT_TEST_ORDERS";
/// What the cases are drawn from: a number, or `random`.
pub const SEED: &str = "SIMT_TEST_SEED";
/// The one case to run, as a failure names it.
pub const CASE: &str = "SIMT_TEST_CASE";
/// What to do about the GPU: `auto`, `off`, `required` or `emulated`.
pub const GPU: &str = "SIMT_TEST_GPU";
/// How long a case may take on the GPU, in seconds.
pub const GPU_SECONDS: &str = "SIMT_TEST_GPU_SECONDS";

/// What to do about the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gpu {
    /// Run there if there is one.
    Auto,
    /// Do not.
    Off,
    /// Run there, or fail.
    Required,
    /// Run as if there were one: in the other process, on the emulator.
    Emulated,
}

/// What the attribute says. `#[simt::test]` makes it.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Options {
    pub cases: u32,
    pub orders: u32,
}

impl Options {
    /// What a test has whose attribute says nothing.
    pub const DEFAULT: Options = Options { cases: 64, orders: 8 };
}

/// The attribute's word and the environment's.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub cases: u32,
    pub orders: u32,
    pub seed: u64,
    /// Run this case alone.
    pub only: Option<u64>,
    pub gpu: Gpu,
    pub gpu_seconds: u64,
    /// How long shrinking may take.
    pub shrink: Duration,
}

impl Settings {
    /// Those of a test of this name, with variables as `read` gives them.
    pub fn new(
        options: Options,
        test: &str,
        read: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Self, Failed> {
        fn number<N: TryFrom<u64>>(
            variable: &'static str,
            value: Option<String>,
            default: N,
        ) -> Result<N, Failed> {
            let Some(value) = value else { return Ok(default) };
            let parsed = parse(&value).and_then(|number| N::try_from(number).ok());
            parsed.ok_or(Failed::Setting { variable, value, expected: "it may be a number" })
        }
        let seed = match read(SEED) {
            // The bits of a clock are as good as any.
            Some(text) if text == "random" => clock(),
            text => number(SEED, text, seed_of(test))?,
        };
        let gpu = match read(GPU) {
            None => Gpu::Auto,
            Some(value) => match value.as_str() {
                "auto" => Gpu::Auto,
                "off" => Gpu::Off,
                "required" => Gpu::Required,
                "emulated" => Gpu::Emulated,
                _ => {
                    let expected = "it may be auto, off, required or emulated";
                    return Err(Failed::Setting { variable: GPU, value, expected });
                }
            },
        };
        let only = match read(CASE) {
            None => None,
            text => Some(number(CASE, text, 0)?),
        };
        Ok(Settings {
            cases: number(CASES, read(CASES), options.cases)?.max(1),
            orders: number(ORDERS, read(ORDERS), options.orders)?,
            seed,
            only,
            gpu,
            gpu_seconds: number(GPU_SECONDS, read(GPU_SECONDS), 120)?,
            shrink: Duration::from_secs(60),
        })
    }
}

/// A number, also one that begins with `0x`.
fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The same for a name each time, so that a test draws the same cases each time (FNV-1a).
fn seed_of(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn clock() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&'static str, &str)]) -> Result<Settings, Failed> {
        let value = |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
        Settings::new(Options { cases: 5, orders: 2 }, "a", value)
    }

    #[test]
    fn the_environment_has_the_last_word() {
        let plain = with(&[]).unwrap();
        assert_eq!((plain.cases, plain.orders, plain.only, plain.gpu), (5, 2, None, Gpu::Auto));
        assert_eq!(plain.seed, seed_of("a"));
        assert_ne!(plain.seed, seed_of("b"));
        let set = with(&[(CASES, "9"), (ORDERS, "0"), (SEED, "0x10"), (CASE, "0xff"), (GPU, "off")]).unwrap();
        assert_eq!((set.cases, set.orders, set.seed, set.only, set.gpu), (9, 0, 16, Some(255), Gpu::Off));
        assert_ne!(with(&[(SEED, "random")]).unwrap().seed, plain.seed);
        assert_eq!(with(&[(GPU, "emulated")]).unwrap().gpu, Gpu::Emulated);
    }

    #[test]
    fn what_nobody_understands_is_an_error() {
        for (variable, value) in [(CASES, "many"), (CASES, "4294967296"), (SEED, "0xg"), (GPU, "yes")] {
            let error = with(&[(variable, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{variable}={value}: it may be")), "{error}");
        }
    }
}
