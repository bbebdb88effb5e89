//! Models: files as they may be, and what is made of them.

mod batch;
mod caches;
mod failing;
mod fetched;
mod forward;
mod gguf;
mod tiny;
mod tokenizer;
