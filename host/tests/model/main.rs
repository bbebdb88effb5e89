//! Models: files as they may be, and what is made of them.

mod gguf;
mod tiny;
