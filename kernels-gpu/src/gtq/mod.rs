//! Keys and values as codes of a few bits of their rotated rows: TurboQuant-MSE (Zandieh et al., 2025), the
//! quantizer under Block-GTQ, with bytes that are what the bits say.
//!
//! | kernel | what it does |
//! |---|---|
//! | [`encode`](fn@encode) | normalises, rotates, quantizes and packs a chunk's keys and values |
//! | [`encode_parts`](fn@encode_parts) | the same with keys in [parts] of different bits |
//! | [`rope_encode`](fn@rope_encode) | `encode` with the rotary embedding ahead of it |
//! | [`rope_encode_parts`](fn@rope_encode_parts) | the same of `encode_parts` |
//! | [`attend`](fn@attend) | decode attention over the codes: all heads in one launch |
//! | [`attend_parts`](fn@attend_parts) | the same over keys in parts |
//!
//! # Mathematics
//! With H the Hadamard matrix of order D (entries ±1), S a diagonal of fixed signs, and x a key or value:
//!
//! ```text
//! r = |x|    h = H·S·x    code_d = nearest level to h_d / r    x^ = n·S·H·L / √D,  L_d = level(code_d)
//! ```
//!
//! H·S/√D is orthogonal, so h/r is √D times a point of the unit sphere, and each coordinate of it has nearly
//! the density (1 − t²/D)^((D−3)/2) whatever x was: levels are those that are best for that density. n is
//! r/√D, or what one of the other [rules](Rule) says. Scores and outputs need no key or value restored:
//!
//! ```text
//! q·k^ = n/√D · (H·S·q)·L          Σ p_t v^_t = S·H·(Σ p_t n_t L_t) / √D
//! ```
//!
//! so a query is turned once a step, and an output once at its end.
//!
//! The first tokens of a sequence and the most recent ones are read in 16 bits in place of their codes: a
//! [window].
//!
//! Levels are [half-integers](levels) times a step, which costs less than 0.3 % of the error and makes
//! products of queries and keys integers: exact in any order, on any device.

pub mod decode;
pub mod finish;
pub mod layout;
pub mod levels;
pub mod nearest;
mod operands;
pub mod pack;
pub mod parts;
pub mod query;
pub mod raw;
pub mod rotation;
pub mod running;
pub mod scores;
pub mod window;
pub mod write;

pub use decode::{AttendShape, attend, attend_parts};
pub use layout::{Side, TileLayout};
pub use levels::{Codebook, Tables};
pub use nearest::Positive;
pub use raw::{rope_encode, rope_encode_parts};
pub use scores::{Parted, Whole};
pub use window::SlotLayout;
pub use write::{ENCODE_THREADS, EncodeShape, PartBooks, Rule, encode, encode_parts};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    let encode = encode::INSTANCES.iter().chain(encode_parts::INSTANCES);
    let encode = encode.chain(rope_encode::INSTANCES).chain(rope_encode_parts::INSTANCES);
    encode.chain(attend::INSTANCES).chain(attend_parts::INSTANCES)
}
