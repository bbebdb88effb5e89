//! The kernel language, and the emulator that runs it on the CPU.
