//! Compiles the kernels of this package to PTX, and checks it.

fn main() -> std::process::ExitCode {
    ptx_build::PtxBuild::this_package().run()
}
