//! Ferrokv.
