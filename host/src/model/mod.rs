//! Language models: files, configuration, tokenizer, weights, and the forward pass.
//!
//! | | |
//! | --- | --- |
//! | [`gguf`] | the file: metadata and packed tensors |

pub mod gguf;
