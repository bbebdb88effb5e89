//! Compiles the kernels to PTX and embeds them.
fn main() {}
