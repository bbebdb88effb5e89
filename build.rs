//! Compiles the kernels to PTX, checks it and writes the index that `src/lib.rs` includes.

fn main() -> std::process::ExitCode {
    ptx_build::PtxBuild::new("kernels-gpu").watch(["crates/simt", "crates/simt-macros"]).run()
}
