//! Nothing but tests: what this repository computes beside what other people's implementations compute.
//!
//! Run `cargo test --release -p reference`. The first build takes minutes, since it builds all of `candle`,
//! so plain `cargo test` leaves this package out.
