//! Golden bits: a digest of what each case writes, kept in files beside the sources.
//!
//! Two devices that agree may both have changed. A digest that is kept says so: what a kernel computes
//! changes when somebody means it to, and the file changes with it.
//!
//! A folder has a file for each system, `SYSTEM.txt`; a line is a case: sixteen hexadecimal digits, the
//! kernels, the label. Lines that begin with `#` are comments. Inputs of a few cases come from the host's
//! logarithm and cosine, which another C library may round otherwise.

use super::{CaseReport, Outcome, Report};
use crate::tensor_file::{self, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Why golden bits cannot be read, compared or written.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// A file that is not there, or cannot be read.
    #[error("cannot read {}: {source}; make it with `ferrokv check --orders 0 --write-golden FOLDER`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line that is none of such a file's.
    #[error("{}, line {line}: '{text}' is not sixteen hexadecimal digits, two spaces and a case", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is there.
        text: String,
    },
    /// Two cases of one name: nobody could say whose digest is whose.
    #[error("two cases of one system are called '{case}': their labels are to name what they differ in")]
    Twice {
        /// The case.
        case: String,
    },
    /// A case that did not end well has no bits to keep.
    #[error("{case} ended as '{outcome}': golden bits are written of cases that all end well")]
    Bad {
        /// The case.
        case: String,
        /// How it ended.
        outcome: Outcome,
    },
    /// A folder to write to that is not there.
    #[error("{} is no folder: make it, or name one that is there", path.display())]
    NoFolder {
        /// What was named.
        path: PathBuf,
    },
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] tensor_file::Error),
}

/// The digests of a folder's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Golden {
    systems: BTreeMap<String, BTreeMap<String, u64>>,
}

fn path_of(folder: &Path, system: &str) -> PathBuf {
    folder.join(format!("{system}.txt"))
}

impl Golden {
    /// What `folder` has of these systems.
    ///
    /// # Errors
    /// [`GoldenError::Read`], [`GoldenError::Line`], [`GoldenError::Twice`].
    pub fn read<'a>(
        folder: &Path,
        systems: impl IntoIterator<Item = &'a str>,
    ) -> Result<Golden, GoldenError> {
        let mut golden = Golden::default();
        for system in systems {
            let path = path_of(folder, system);
            let text = fs::read_to_string(&path)
                .map_err(|source| GoldenError::Read { path: path.clone(), source })?;
            let cases = golden.systems.entry(system.to_owned()).or_default();
            for (line, text) in text.lines().enumerate() {
                if text.starts_with('#') || text.is_empty() {
                    continue;
                }
                let (digest, case) = parse(text).ok_or_else(|| GoldenError::Line {
                    path: path.clone(),
                    line: line + 1,
                    text: text.chars().take(60).collect(),
                })?;
                if cases.insert(case.to_owned(), digest).is_some() {
                    return Err(GoldenError::Twice { case: case.to_owned() });
                }
            }
        }
        Ok(golden)
    }

    /// `report`, in which a case that ended well and wrote other bits than these is [`Outcome::Altered`]. So
    /// is one that has none here.
    pub fn hold(&self, mut report: Report) -> Report {
        for case in &mut report.cases {
            if !case.outcome.is_good() {
                continue;
            }
            let kept = self.systems.get(&case.system).and_then(|cases| cases.get(&name(case)));
            let message = match (kept, case.digest) {
                (Some(kept), Some(digest)) if *kept == digest => continue,
                (Some(kept), Some(digest)) => {
                    format!("its outputs have the digest {digest:016x}, golden is {kept:016x}")
                }
                _ => "there are no golden bits of it: write them with --write-golden".to_owned(),
            };
            case.outcome = Outcome::Altered;
            case.message = Some(message);
        }
        Report::new(report.reference, report.other, report.cases)
    }

    /// Cases of the files that `report`, of all cases of these systems, has not.
    pub fn stale(&self, report: &Report) -> Vec<String> {
        let mut left = self.systems.clone();
        for case in &report.cases {
            if let Some(cases) = left.get_mut(&case.system) {
                cases.remove(&name(case));
            }
        }
        left.into_iter()
            .flat_map(|(system, cases)| cases.into_keys().map(move |case| format!("{system}: {case}")))
            .collect()
    }

    /// Whether there is a folder to write to: before a run, which takes its time.
    ///
    /// # Errors
    /// [`GoldenError::NoFolder`].
    pub fn writable(folder: &Path) -> Result<(), GoldenError> {
        if folder.is_dir() { Ok(()) } else { Err(GoldenError::NoFolder { path: folder.to_owned() }) }
    }

    /// Writes the digests of a report's cases into `folder`, a file for each system, in place of those there.
    ///
    /// # Errors
    /// [`GoldenError::Bad`], [`GoldenError::Twice`], with nothing written; [`GoldenError::Write`], with each
    /// file as it was or new.
    pub fn write(report: &Report, folder: &Path) -> Result<(), GoldenError> {
        let mut systems: BTreeMap<&str, String> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for case in &report.cases {
            let (true, Some(digest)) = (case.outcome.is_good(), case.digest) else {
                return Err(GoldenError::Bad { case: name(case), outcome: case.outcome });
            };
            if !names.insert((&case.system, name(case))) {
                return Err(GoldenError::Twice { case: name(case) });
            }
            let text = systems.entry(&case.system).or_insert_with(|| {
                "# Digests of what the small cases write: ferrokv check --orders 0 --golden FOLDER\n"
                    .to_owned()
            });
            *text += &format!("{digest:016x}  {}\n", name(case));
        }
        let targets: Vec<(Target, String)> = systems
            .into_iter()
            .map(|(system, text)| Ok((Target::new(&path_of(folder, system), true, None)?, text)))
            .collect::<Result<_, GoldenError>>()?;
        for (target, text) in targets {
            target.write(text.as_bytes())?;
        }
        Ok(())
    }
}

/// A case's kernels and label, as `check --list` prints them.
fn name(case: &CaseReport) -> String {
    format!("{}  {}", case.kernels.join(" + "), case.label)
}

fn parse(line: &str) -> Option<(u64, &str)> {
    let (digits, case) = line.split_once("  ")?;
    let hexadecimal = digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let digest = hexadecimal.then(|| u64::from_str_radix(digits, 16).ok())??;
    (!case.is_empty()).then_some((digest, case))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::check::{Case, OutputBuffer, run_cases};
    use kernels_gpu::probe::barriers::barriers;
    use simt::emu::EmuOptions;

    fn report(label: &str, values: Vec<f32>) -> Report {
        let case = Case::new(barriers::kernel().info(), label, move |_| {
            Ok(vec![OutputBuffer::new("bytes", vec![1u8, 2]), OutputBuffer::new("values", values.clone())])
        });
        run_cases(&[case.of_system("probe")], &Device::cpu(EmuOptions::default()), None, |_| {})
    }

    #[test]
    fn what_is_written_is_read_and_holds() {
        let folder = tempfile::tempdir().unwrap();
        let first = report("a label", vec![1.0, f32::NAN]);
        Golden::write(&first, folder.path()).unwrap();
        let golden = Golden::read(folder.path(), ["probe"]).unwrap();
        // Any NaN is any other; another number, sign of zero or length is not.
        for (values, holds) in [
            (vec![1.0, f32::from_bits(0xffc0_0001)], true),
            (vec![1.0, f32::INFINITY], false),
            (vec![-1.0, f32::NAN], false),
            (vec![1.0, f32::NAN, 0.0], false),
            (vec![1.0], false),
        ] {
            let held = golden.hold(report("a label", values));
            assert_eq!(held.passed(), holds);
            assert_eq!(held.cases[0].outcome, if holds { Outcome::NoGpu } else { Outcome::Altered });
            assert_eq!(held.totals.altered, u64::from(!holds));
            assert!(golden.stale(&held).is_empty());
        }
        let held = golden.hold(report("another", vec![1.0, f32::NAN]));
        assert!(held.cases[0].message.as_ref().unwrap().contains("no golden bits"));
        assert_eq!(golden.stale(&held), ["probe: probe_barriers  a label"]);
    }

    #[test]
    fn two_cases_of_one_name_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (report("twice", vec![1.0]), report("twice", vec![2.0]));
        let cases = [first.cases.clone(), second.cases].concat();
        let wrong = Golden::write(&Report::new(String::new(), None, cases), folder.path()).unwrap_err();
        assert!(wrong.to_string().contains("  twice'"), "{wrong}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        Golden::write(&first, folder.path()).unwrap();
        let path = folder.path().join("probe.txt");
        let line = fs::read_to_string(&path).unwrap().lines().last().unwrap().to_owned();
        fs::write(&path, format!("{line}\n{line}\n")).unwrap();
        let wrong = Golden::read(folder.path(), ["probe"]).unwrap_err();
        assert!(wrong.to_string().contains("  twice'"), "{wrong}");
    }

    #[test]
    fn what_is_no_golden_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("probe.txt");
        let missing = Golden::read(folder.path(), ["probe"]).unwrap_err().to_string();
        assert!(missing.contains("probe.txt") && missing.contains("--write-golden"), "{missing}");
        let good = "0123456789abcdef  kernel  label";
        for bad in [
            "0123456789abcde  kernel  label",
            "0123456789abcdef kernel",
            "+123456789abcdef  kernel",
            "0123456789abcdef  ",
        ] {
            fs::write(&path, format!("# text\n{good}\n{bad}\n")).unwrap();
            let wrong = Golden::read(folder.path(), ["probe"]).unwrap_err().to_string();
            assert!(wrong.contains("line 3") && wrong.contains(bad.trim_end()), "{wrong}");
        }
        fs::write(&path, format!("{good}\n")).unwrap();
        assert!(Golden::read(folder.path(), ["probe"]).is_ok());
    }

    #[test]
    fn bits_of_a_bad_case_are_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let case = Case::new(barriers::kernel().info(), "fails", |_| Err("no such thing".into()));
        let report = run_cases(&[case], &Device::cpu(EmuOptions::default()), None, |_| {});
        let wrong = Golden::write(&report, folder.path()).unwrap_err().to_string();
        assert!(wrong.contains("fails") && wrong.contains("error"), "{wrong}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
