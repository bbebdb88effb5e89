//! Buffers, streams, graphs and the systems above the kernels.
