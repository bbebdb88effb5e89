//! The certificate put to the test: steps over caches of every kind, judged by attention in f64.

mod judge;
mod prove;
mod scheme;
mod trial;

pub use crate::attention::inputs::{Batch, Input};
pub use crate::kv::proof::{Layer, Options};
pub use judge::Exact;
pub use prove::{Findings, Notable, POLICIES, Tally, Tried, prove};
pub(super) use scheme::prove_scheme;
pub use trial::{Returned, Trial};
