//! Compiles the kernels with the planted bugs to PTX.

fn main() -> std::process::ExitCode {
    ptx_build::PtxBuild::member("../..", "crates/recall", "simt-recall")
        .watch(["crates/simt", "crates/simt-macros"])
        .run()
}
