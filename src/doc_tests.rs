//! The Rust blocks of the documents, compiled and run as doc tests.

#[doc = include_str!("../README.md")]
mod readme {}

#[doc = include_str!("../docs/kernel-guide.md")]
mod kernel_guide {}

#[doc = include_str!("../docs/library.md")]
mod library {}

#[doc = include_str!("../docs/models.md")]
mod models {}
