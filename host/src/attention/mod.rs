//! What every attention system shares: the formula in f64 that each is judged by.

pub mod oracle;
