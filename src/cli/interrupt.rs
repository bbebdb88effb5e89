//! Ctrl-C, as a flag that work looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why Ctrl-C cannot be watched for.
#[derive(Debug, thiserror::Error)]
#[error("cannot watch for Ctrl-C: {0}; run the command by itself")]
pub struct Error(#[from] ctrlc::Error);

/// Whether Ctrl-C was pressed; by default nobody watches for it.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches from now on. The first Ctrl-C sets the flag, a second one ends the process.
    ///
    /// # Errors
    /// Somebody else watches.
    pub fn watch() -> Result<Interrupt, Error> {
        let flag = Arc::new(AtomicBool::new(false));
        let pressed = Arc::clone(&flag);
        ctrlc::set_handler(move || {
            if pressed.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        })?;
        Ok(Interrupt(flag))
    }

    /// Whether it was pressed.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
