//! How long kernels take on a GPU, by one code generator or by two side by side.

use super::{Case, CaseError};
use crate::{Device, Error, KernelTimes};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// How often each case runs with each generator's kernels; of a launch the fastest of its runs counts.
pub const ROUNDS: usize = 3;

/// A kernel loses if its time is above that of the first generator by more than this, as a part of it.
pub const LOSS: f64 = 0.03;

/// Why kernels could not be timed.
#[derive(Debug, thiserror::Error)]
pub enum TimesError {
    /// The device does not time launches, or one of them failed.
    #[error(transparent)]
    Device(#[from] Error),
    /// A run of a case failed.
    #[error("timing {} ({label}) by {generator}: {error}", kernels.join(" + "))]
    Case {
        /// The entries that the case launches.
        kernels: Vec<&'static str>,
        /// Its parameters.
        label: String,
        /// Whose kernels ran.
        generator: String,
        /// What the run ended with.
        error: CaseError,
    },
}

/// How long a kernel's launches took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedKernel {
    /// The entry.
    pub kernel: String,
    /// Its launches in all cases, each counted once.
    pub launches: u64,
    /// The microseconds of these in sum, by generator.
    pub microseconds: Vec<f64>,
    /// The second generator's time over the first one's: the geometric mean over the launches.
    pub ratio: Option<f64>,
}

/// How long kernels took, to be shown or written as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Whose kernels ran: one generator, or two that are compared.
    pub generators: Vec<String>,
    /// The kernels, the highest first: with two generators by [`ratio`](TimedKernel::ratio), with one by
    /// time.
    pub kernels: Vec<TimedKernel>,
    /// The geometric mean of the kernels' ratios.
    pub ratio: Option<f64>,
    /// The kernels that lose by more than [`LOSS`], the worst first.
    pub losers: Vec<String>,
    /// Launches left out, because not every run of their case had as many of the kernel.
    pub unpaired: u64,
    /// Kernels of cases of which no launch was timed: in captured graphs none is.
    pub untimed: Vec<String>,
}

/// Runs every case [`ROUNDS`] times on each device, in turns, and says how long its launches took. The
/// devices are one GPU with the kernels of one generator, or of two, which go by the names given.
///
/// A time is from an event ahead of a launch to one behind it ([`Device::record_times`]): it holds some 2 µs
/// of launching, which bring the ratios of small kernels closer to 1.
///
/// # Errors
/// A device that does not time launches, or a case that fails.
pub fn time_cases<'a>(
    cases: impl IntoIterator<Item = &'a Case>,
    devices: &[(&str, &Device)],
    mut progress: impl FnMut(&Case),
) -> Result<Times, TimesError> {
    let mut sums = Sums::default();
    // What others had timed is none of these cases', nor is what a case that fails has launched anybody's.
    let forget = || devices.iter().try_for_each(|(_, device)| device.take_times().map(drop));
    let time = || -> Result<(), TimesError> {
        forget()?;
        devices.iter().try_for_each(|(_, device)| device.record_times(true))?;
        for case in cases {
            sums.expect(case.kernels());
            sums.add(&runs(case, devices)?);
            progress(case);
        }
        Ok(())
    };
    let timed = time();
    let ended = devices.iter().try_for_each(|(_, device)| device.record_times(false));
    let forgotten = forget();
    timed?;
    ended.and(forgotten)?;
    Ok(sums.times(devices.iter().map(|(name, _)| (*name).to_owned()).collect()))
}

/// The times of a case: by generator, by round, by kernel.
type Runs = Vec<Vec<Vec<KernelTimes>>>;

fn runs(case: &Case, devices: &[(&str, &Device)]) -> Result<Runs, TimesError> {
    let mut runs: Runs = vec![Vec::with_capacity(ROUNDS); devices.len()];
    for round in 0..ROUNDS {
        // In turns, each first every other time: what warms the GPU up does so for either.
        for turn in 0..devices.len() {
            let at = if round % 2 == 0 { turn } else { devices.len() - 1 - turn };
            let (generator, device) = devices[at];
            case.run(device).map_err(|error| TimesError::Case {
                kernels: case.kernels.clone(),
                label: case.label.clone(),
                generator: generator.to_owned(),
                error,
            })?;
            runs[at].push(device.take_times()?);
        }
    }
    Ok(runs)
}

/// What is known of kernels after some of the cases.
#[derive(Default)]
struct Sums {
    kernels: Vec<Sum>,
    places: HashMap<String, usize>,
    expected: Vec<&'static str>,
    /// Kernels of which launches were left out.
    partial: HashSet<&'static str>,
    unpaired: u64,
}

struct Sum {
    kernel: String,
    launches: u64,
    microseconds: Vec<f64>,
    /// Logarithms of the ratios of those launches that have one.
    logarithms: Mean,
}

/// A mean of numbers, which come one by one.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    /// The geometric mean of the numbers whose logarithms were added.
    fn geometric(&self) -> Option<f64> {
        (self.count != 0).then(|| (self.sum / self.count as f64).exp())
    }
}

impl Sums {
    /// Kernels that a case says it launches.
    fn expect(&mut self, kernels: &[&'static str]) {
        self.expected.extend(kernels);
    }

    /// Adds the launches of a case: each in every run the same one of its kernel's, counted from the first.
    fn add(&mut self, runs: &[Vec<Vec<KernelTimes>>]) {
        let mut seen = HashSet::new();
        for KernelTimes { kernel, .. } in runs.iter().flatten().flatten() {
            if !seen.insert(*kernel) {
                continue;
            }
            let rounds = || runs.iter().flatten().map(|run| launches(run, kernel));
            let (least, most) = (rounds().map(<[f32]>::len).min(), rounds().map(<[f32]>::len).max());
            if least == most {
                let fastest: Vec<Vec<f32>> = runs.iter().map(|rounds| fastest(rounds, kernel)).collect();
                self.sum(kernel, runs.len()).add(&fastest);
            } else {
                self.partial.insert(kernel);
                self.unpaired += most.unwrap_or(0) as u64;
            }
        }
    }

    fn sum(&mut self, kernel: &str, generators: usize) -> &mut Sum {
        let place = *self.places.entry(kernel.to_owned()).or_insert_with(|| {
            self.kernels.push(Sum {
                kernel: kernel.to_owned(),
                launches: 0,
                microseconds: vec![0.0; generators],
                logarithms: Mean::default(),
            });
            self.kernels.len() - 1
        });
        &mut self.kernels[place]
    }

    fn times(self, generators: Vec<String>) -> Times {
        let known = |kernel: &&str| self.places.contains_key(*kernel) || self.partial.contains(*kernel);
        let untimed: HashSet<&str> = self.expected.iter().copied().filter(|kernel| !known(kernel)).collect();
        let mut untimed: Vec<String> = untimed.into_iter().map(str::to_owned).collect();
        untimed.sort();
        let mut kernels: Vec<TimedKernel> = self.kernels.into_iter().map(Sum::timed).collect();
        // The key of a kernel without one is below all others.
        let key = |kernel: &TimedKernel| match generators.len() {
            1 => kernel.microseconds.iter().sum(),
            _ => kernel.ratio.unwrap_or(f64::NEG_INFINITY),
        };
        kernels.sort_by(|a, b| key(b).total_cmp(&key(a)).then_with(|| a.kernel.cmp(&b.kernel)));
        let mut logarithms = Mean::default();
        kernels.iter().filter_map(|kernel| kernel.ratio).for_each(|ratio| logarithms.add(ratio.ln()));
        let loses = |kernel: &&TimedKernel| kernel.ratio.is_some_and(|ratio| ratio > 1.0 + LOSS);
        let losers = kernels.iter().filter(loses).map(|kernel| kernel.kernel.clone()).collect();
        let ratio = logarithms.geometric();
        Times { generators, kernels, ratio, losers, unpaired: self.unpaired, untimed }
    }
}

impl Sum {
    /// Adds launches, as many of each generator.
    fn add(&mut self, fastest: &[Vec<f32>]) {
        self.launches += fastest.first().map_or(0, Vec::len) as u64;
        for (sum, times) in self.microseconds.iter_mut().zip(fastest) {
            *sum += times.iter().map(|time| f64::from(*time)).sum::<f64>();
        }
        if let [first, second] = fastest {
            for (first, second) in first.iter().zip(second) {
                // An event's clock goes in steps: of a time of none of them there is no ratio.
                if *first > 0.0 && *second > 0.0 {
                    self.logarithms.add((f64::from(*second) / f64::from(*first)).ln());
                }
            }
        }
    }

    fn timed(self) -> TimedKernel {
        let Sum { kernel, launches, microseconds, logarithms } = self;
        TimedKernel { kernel, launches, microseconds, ratio: logarithms.geometric() }
    }
}

/// The times of a kernel's launches in a run.
fn launches<'a>(run: &'a [KernelTimes], kernel: &str) -> &'a [f32] {
    run.iter().find(|times| times.kernel == kernel).map_or(&[], |times| &times.microseconds)
}

/// The fastest time of each launch over rounds, which have as many.
fn fastest(rounds: &[Vec<KernelTimes>], kernel: &str) -> Vec<f32> {
    let mut fastest: Vec<f32> = Vec::new();
    for run in rounds {
        let times = launches(run, kernel);
        if fastest.is_empty() {
            fastest = times.to_vec();
        }
        fastest.iter_mut().zip(times).for_each(|(least, time)| *least = least.min(*time));
    }
    fastest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(kernels: &[(&'static str, &[f32])]) -> Vec<KernelTimes> {
        let times =
            |&(kernel, times): &(&'static str, &[f32])| KernelTimes { kernel, microseconds: times.to_vec() };
        kernels.iter().map(times).collect()
    }

    fn of(cases: &[Runs], generators: &[&str]) -> Times {
        let mut sums = Sums::default();
        cases.iter().for_each(|runs| sums.add(runs));
        sums.times(generators.iter().map(|&name| name.to_owned()).collect())
    }

    fn kernel(kernel: &str, launches: u64, microseconds: &[f64], ratio: Option<f64>) -> TimedKernel {
        TimedKernel { kernel: kernel.to_owned(), launches, microseconds: microseconds.to_vec(), ratio }
    }

    const TWO: &[&str] = &["llvm", "nvvm"];

    #[test]
    fn a_launch_is_compared_with_the_same_one_and_its_fastest_run_counts() {
        // Ratios of 4 and 1/4 of the fastest runs; of the sums it would be 17/8, of first runs others.
        let first = vec![run(&[("k", &[5.0, 8.0])]), run(&[("k", &[4.0, 9.0])]), run(&[("k", &[6.0, 4.0])])];
        let second = vec![run(&[("k", &[16.0, 3.0])]), run(&[("k", &[32.0, 1.0])])];
        let times = of(&[vec![first, second]], TWO);
        assert_eq!(times.kernels, [kernel("k", 2, &[8.0, 17.0], Some(1.0))]);
        assert_eq!((times.ratio, times.losers.len()), (Some(1.0), 0));
    }

    #[test]
    fn cases_add_up_and_the_worst_kernel_comes_first() {
        let case = |first: &[(&'static str, &[f32])], second: &[(&'static str, &[f32])]| {
            vec![vec![run(first)], vec![run(second)]]
        };
        let cases = [
            case(&[("even", &[1.0]), ("wins", &[8.0])], &[("even", &[1.0]), ("wins", &[2.0])]),
            case(&[("loses", &[1.0, 2.0])], &[("loses", &[2.0, 4.0])]),
            case(&[("loses", &[1.0]), ("close", &[100.0])], &[("loses", &[16.0]), ("close", &[103.0])]),
        ];
        let times = of(&cases, TWO);
        let names: Vec<&str> = times.kernels.iter().map(|kernel| &*kernel.kernel).collect();
        assert_eq!(names, ["loses", "close", "even", "wins"]);
        // The cube root of 2 * 2 * 16; a kernel counts once, however many launches it has.
        assert_eq!(times.kernels[0].microseconds, [4.0, 22.0]);
        assert!((times.kernels[0].ratio.unwrap() - 4.0).abs() < 1e-12);
        assert!((times.ratio.unwrap() - 1.03_f64.powf(0.25)).abs() < 1e-12);
        assert_eq!(times.losers, ["loses"]);
    }

    #[test]
    fn launches_that_not_every_run_has_are_left_out_and_counted() {
        let cases = [
            vec![vec![run(&[("k", &[1.0, 1.0]), ("m", &[3.0])])], vec![run(&[("k", &[9.0]), ("m", &[3.0])])]],
            vec![vec![run(&[("k", &[2.0])])], vec![run(&[("k", &[2.0])])]],
            vec![vec![run(&[])], vec![run(&[("only", &[1.0, 2.0, 3.0])])]],
        ];
        let times = of(&cases, TWO);
        assert_eq!(
            times.kernels,
            [kernel("k", 1, &[2.0, 2.0], Some(1.0)), kernel("m", 1, &[3.0, 3.0], Some(1.0))]
        );
        assert_eq!(times.unpaired, 5);
    }

    #[test]
    fn a_time_of_nothing_has_no_ratio() {
        let cases = [vec![
            vec![run(&[("none", &[0.0]), ("some", &[0.0, 1.0])])],
            vec![run(&[("none", &[1.0]), ("some", &[1.0, 2.0])])],
        ]];
        let times = of(&cases, TWO);
        assert_eq!(times.kernels[1], kernel("none", 1, &[0.0, 1.0], None));
        assert_eq!((times.kernels[0].ratio, times.ratio), (Some(2.0), Some(2.0)));
    }

    #[test]
    fn of_one_generator_the_longest_comes_first_and_nothing_is_compared() {
        let cases = [vec![vec![run(&[("short", &[1.0, 2.0]), ("long", &[9.0])])]]];
        let times = of(&cases, &["llvm"]);
        assert_eq!(times.kernels, [kernel("long", 1, &[9.0], None), kernel("short", 2, &[3.0], None)]);
        assert_eq!((times.ratio, times.losers.len()), (None, 0));
        assert_eq!(of(&[], TWO).kernels, []);
    }

    #[test]
    fn kernels_without_a_time_are_named_once() {
        let mut sums = Sums::default();
        sums.expect(&["timed", "captured"]);
        sums.expect(&["captured", "also_captured"]);
        sums.add(&[vec![run(&[("timed", &[1.0])])]]);
        assert_eq!(sums.times(vec!["llvm".into()]).untimed, ["also_captured", "captured"]);
    }

    #[test]
    fn json_has_all_of_it() {
        let times = of(&[vec![vec![run(&[("k", &[1.0])])], vec![run(&[("k", &[2.0])])]]], TWO);
        let json = serde_json::to_value(&times).unwrap();
        assert_eq!(json["generators"], serde_json::json!(["llvm", "nvvm"]));
        assert_eq!(json["kernels"][0]["microseconds"], serde_json::json!([1.0, 2.0]));
        assert_eq!((&json["kernels"][0]["kernel"], &json["losers"][0]), (&"k".into(), &"k".into()));
        assert_eq!(serde_json::from_value::<Times>(json).unwrap(), times);
    }

    #[test]
    fn the_emulator_is_not_timed() {
        let device = Device::cpu(simt::emu::EmuOptions::default());
        let error = time_cases([], &[("llvm", &device)], |_| {}).unwrap_err();
        assert!(matches!(error, TimesError::Device(Error::NotTimed)), "{error}");
    }
}
