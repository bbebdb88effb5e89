//! The kernel attribute and the unroll macro of simt.
