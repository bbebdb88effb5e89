//! The certificate put to the test: steps over caches of every kind, judged by attention in f64.

mod inputs;
mod judge;
mod prove;
mod trial;

pub use inputs::{Batch, Input};
pub use judge::Exact;
pub use prove::{Findings, Layer, Notable, Options, Tally, prove};
pub use trial::{Returned, Trial};
