//! The CUDA driver symbols, bound on first use.
