//! Turns a no_std crate into linted PTX.
