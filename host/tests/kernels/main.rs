//! Kernels by themselves, each over drawn shapes and inputs: against an oracle, the CPU path where there is
//! one, the emulator in its orders, and the GPU.

mod int8;
mod moves;
