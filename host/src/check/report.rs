//! What a check found.

use super::compare::{Difference, OutputBuffer, compare};
use super::{Case, CaseError, is_fault};
use crate::Device;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every bit agrees.
    Equal,
    /// Some bit does not.
    Different,
    /// The emulator caught a mistake of the kernel.
    Fault,
    /// The run failed otherwise.
    Error,
    /// The bits are others than the golden ones.
    Altered,
    /// The emulator ran it without a fault, and there was nothing to compare with.
    NoGpu,
}

impl Outcome {
    /// Whether the case is in order.
    pub fn is_good(self) -> bool {
        matches!(self, Outcome::Equal | Outcome::NoGpu)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Equal => "equal",
            Outcome::Different => "different",
            Outcome::Fault => "fault",
            Outcome::Error => "error",
            Outcome::Altered => "altered",
            Outcome::NoGpu => "no gpu",
        })
    }
}

/// What became of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseReport {
    /// The system whose case it is; empty where none is said.
    pub system: String,
    /// The entries launched, the one that the case is about first.
    pub kernels: Vec<String>,
    /// The parameters.
    pub label: String,
    /// How it ended.
    pub outcome: Outcome,
    /// What went wrong, where an error or a fault says so.
    pub message: Option<String>,
    /// Elements that the reference device wrote.
    pub outputs: u64,
    /// Of what it wrote; see [`Golden`](super::Golden). JSON has sixteen hexadecimal digits.
    #[serde(with = "hexadecimal")]
    pub digest: Option<u64>,
    /// Elements compared.
    pub compared: u64,
    /// Elements that differ.
    pub differing_elements: u64,
    /// Bits that differ.
    pub differing_bits: u64,
    /// The first difference.
    pub first_difference: Option<Difference>,
    /// Time on the reference device, transfers included.
    pub reference_ms: f64,
    /// Time on the other device, transfers included.
    pub other_ms: f64,
}

impl CaseReport {
    pub(super) fn new(case: &Case) -> Self {
        CaseReport {
            system: case.system.to_string(),
            kernels: case.kernels().iter().map(|name| name.to_string()).collect(),
            label: case.label().to_string(),
            outcome: Outcome::NoGpu,
            message: None,
            outputs: 0,
            digest: None,
            compared: 0,
            differing_elements: 0,
            differing_bits: 0,
            first_difference: None,
            reference_ms: 0.0,
            other_ms: 0.0,
        }
    }

    pub(super) fn failed(
        mut self,
        error: &(dyn std::error::Error + Send + Sync + 'static),
        on: &Device,
    ) -> Self {
        self.outcome = if is_fault(error) { Outcome::Fault } else { Outcome::Error };
        self.message = Some(format!("on {}: {error}", on.info().name));
        self
    }

    /// The other device has no such kernel: there is nothing to compare with.
    pub(super) fn without(
        mut self,
        error: &(dyn std::error::Error + Send + Sync + 'static),
        on: &Device,
    ) -> Self {
        self.message = Some(format!("on {}: {error}", on.info().name));
        self
    }

    pub(super) fn compare(&mut self, reference: &[OutputBuffer], other: &[OutputBuffer]) {
        self.outcome = Outcome::Equal;
        if let Err(message) = same_shape(reference, other) {
            self.outcome = Outcome::Error;
            self.message = Some(message.to_string());
            return;
        }
        for (reference, other) in reference.iter().zip(other) {
            let comparison = compare(reference, other);
            self.compared += comparison.elements;
            self.differing_elements += comparison.differing_elements;
            self.differing_bits += comparison.differing_bits;
            if self.first_difference.is_none() {
                self.first_difference = comparison.first;
            }
        }
        if self.differing_elements != 0 {
            self.outcome = Outcome::Different;
        }
    }
}

/// Two runs of one case must hand back the same outputs.
fn same_shape(reference: &[OutputBuffer], other: &[OutputBuffer]) -> Result<(), CaseError> {
    let shape = |outputs: &[OutputBuffer]| {
        let texts: Vec<String> = outputs
            .iter()
            .map(|o| format!("{}: {} bytes of {:?}", o.name(), o.bytes().len(), o.kind()))
            .collect();
        texts.join(", ")
    };
    let (reference, other) = (shape(reference), shape(other));
    if reference == other {
        return Ok(());
    }
    Err(format!("the devices wrote different outputs: [{reference}] and [{other}]; the case must not depend on the device").into())
}

/// Sums over all cases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// All cases.
    pub cases: u64,
    /// Those in which every bit agrees.
    pub equal: u64,
    /// Those in which some bit does not.
    pub different: u64,
    /// Those in which the emulator caught a mistake.
    pub fault: u64,
    /// Those that failed otherwise.
    pub error: u64,
    /// Those whose bits are not the golden ones.
    pub altered: u64,
    /// Those that ran on the emulator only.
    pub no_gpu: u64,
    /// Elements that the reference device wrote.
    pub outputs: u64,
    /// Elements compared.
    pub compared: u64,
    /// Elements that differ.
    pub differing_elements: u64,
    /// Bits that differ.
    pub differing_bits: u64,
    /// Seconds on the reference device.
    pub reference_seconds: f64,
    /// Seconds on the other device.
    pub other_seconds: f64,
}

/// What a check found, to be shown or written as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The reference device.
    pub reference: String,
    /// The device compared with it.
    pub other: Option<String>,
    /// Sums over all cases.
    pub totals: Totals,
    /// Every case, in the order run.
    pub cases: Vec<CaseReport>,
}

impl Report {
    pub(super) fn new(reference: String, other: Option<String>, cases: Vec<CaseReport>) -> Self {
        let totals = Totals::of(&cases);
        Report { reference, other, totals, cases }
    }

    /// Whether no case found a difference, a fault or an error.
    pub fn passed(&self) -> bool {
        self.cases.iter().all(|case| case.outcome.is_good())
    }

    /// The sums for each kernel that cases are about, in the order first run: the rows of a table.
    pub fn by_kernel(&self) -> Vec<(&str, Totals)> {
        let mut rows: Vec<(&str, Vec<&CaseReport>)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        for case in &self.cases {
            let kernel = case.kernels.first().map_or("", String::as_str);
            let place = *places.entry(kernel).or_insert_with(|| {
                rows.push((kernel, Vec::new()));
                rows.len() - 1
            });
            rows[place].1.push(case);
        }
        rows.into_iter().map(|(kernel, cases)| (kernel, Totals::of(cases))).collect()
    }
}

impl Totals {
    fn of<'a>(cases: impl IntoIterator<Item = &'a CaseReport>) -> Totals {
        let mut totals = Totals::default();
        for case in cases {
            totals.cases += 1;
            *match case.outcome {
                Outcome::Equal => &mut totals.equal,
                Outcome::Different => &mut totals.different,
                Outcome::Fault => &mut totals.fault,
                Outcome::Error => &mut totals.error,
                Outcome::Altered => &mut totals.altered,
                Outcome::NoGpu => &mut totals.no_gpu,
            } += 1;
            totals.outputs += case.outputs;
            totals.compared += case.compared;
            totals.differing_elements += case.differing_elements;
            totals.differing_bits += case.differing_bits;
            totals.reference_seconds += case.reference_ms / 1e3;
            totals.other_seconds += case.other_ms / 1e3;
        }
        totals
    }
}

/// A digest in JSON: text, as numbers there lose bits from 2^53 on.
mod hexadecimal {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(digest: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
        digest.map(|digest| format!("{digest:016x}")).serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Option<u64>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| u64::from_str_radix(&text, 16).map_err(D::Error::custom)).transpose()
    }
}
