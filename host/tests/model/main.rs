//! Models: files as they may be, and what is made of them.

mod fetched;
mod gguf;
mod tiny;
mod tokenizer;
