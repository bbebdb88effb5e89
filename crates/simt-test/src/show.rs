//! What a message shows of a value: short, with the bits of floats.

use crate::element::Element;
use half::{bf16, f16};
use std::any::Any;
use std::fmt::Debug;

/// How many runs of equal elements a message shows of an array.
const RUNS: usize = 12;
/// How many characters it shows of anything else.
const CHARACTERS: usize = 400;

/// A drawn value in short form.
pub(crate) fn value<T: Debug + 'static>(value: &T) -> String {
    let any: &dyn Any = value;
    macro_rules! known {
        ($($ty:ident)*) => {$(
            if let Some(x) = any.downcast_ref::<$ty>() {
                return x.show();
            }
            if let Some(array) = any.downcast_ref::<Vec<$ty>>() {
                return elements(array);
            }
        )*};
    }
    known!(f64 f32 f16 bf16 u8 u16 u32 u64 i8 i16 i32 i64);
    let text = format!("{value:?}");
    match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{} … ({} characters)", &text[..end], text.chars().count()),
        None => text,
    }
}

/// An array as runs of equal bits: `[0.0 (0x00000000) ×31, 1.0 (0x3f800000)], 32 elements`.
fn elements<T: Element>(array: &[T]) -> String {
    let mut runs = Vec::new();
    let mut rest = array;
    while let Some(first) = rest.first() {
        if runs.len() == RUNS {
            runs.push("…".to_string());
            break;
        }
        let equal = rest.iter().take_while(|x| x.bits() == first.bits()).count();
        runs.push(if equal == 1 { first.show() } else { format!("{} ×{equal}", first.show()) });
        rest = &rest[equal..];
    }
    format!("[{}], {} elements of {}", runs.join(", "), array.len(), T::NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_runs_and_long_ones_end() {
        let mut array = vec![0f32; 31];
        array.push(1.0);
        let text = "[0.0 (0x00000000) ×31, 1.0 (0x3f800000)], 32 elements of f32";
        assert_eq!(value(&array), text);
        let long: Vec<u32> = (0..1000).collect();
        assert_eq!(value(&long), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, …], 1000 elements of u32");
        assert_eq!(value(&Vec::<u8>::new()), "[], 0 elements of u8");
        // Zeros of two signs are two values.
        assert_eq!(value(&vec![0f32, -0.0]), "[0.0 (0x00000000), -0.0 (0x80000000)], 2 elements of f32");
    }

    #[test]
    fn other_values_are_cut() {
        assert_eq!(value(&(1, "é")), "(1, \"é\")");
        let text = value(&"é".repeat(1000));
        assert!(text.ends_with("… (1002 characters)") && text.chars().count() < 440, "{text}");
    }
}
