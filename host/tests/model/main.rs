//! Models: files as they may be, and what is made of them.

#[path = "../common/artifact.rs"]
mod artifact;
mod batch;
mod caches;
mod failing;
mod fetched;
mod forward;
mod gguf;
mod tiny;
mod tokenizer;
