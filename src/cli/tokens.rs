//! Numbers of tokens and of sequences on the command line and in tables.

use std::str::FromStr;

/// A number that K or M may follow: `8192`, `8K`, `1M`.
///
/// # Errors
/// It is none.
pub fn count(text: &str) -> Result<u32, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1u32),
    };
    let number = digits.parse::<u32>().ok().and_then(|n| n.checked_mul(unit)).filter(|n| *n != 0);
    number.ok_or_else(|| format!("'{text}' is no number from 1 to 2^32 - 1; K and M may follow it"))
}

/// `128K` for 131072.
pub fn short(n: u32) -> String {
    if n >= 1024 && n.is_multiple_of(1024) { format!("{}K", n / 1024) } else { n.to_string() }
}

/// Counts in order, each once: `8K,32K`, or `8K..1M` with what lies between by doubling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Vec<u32>);

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut counts = Vec::new();
        for part in text.split(',') {
            match part.split_once("..") {
                None => counts.push(count(part)?),
                Some((first, last)) => {
                    let (first, last) = (count(first)?, count(last)?);
                    if first > last {
                        return Err(format!("'{part}' ends before it starts"));
                    }
                    let doubled = std::iter::successors(Some(first), |n| n.checked_mul(2));
                    counts.extend(doubled.take_while(|n| *n < last).chain([last]));
                }
            }
        }
        counts.sort_unstable();
        counts.dedup();
        Ok(Counts(counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_short() {
        assert_eq!([1000, 8192, 1 << 20].map(short), ["1000", "8K", "1024K"]);
    }

    #[test]
    fn counts_double_up_to_the_last() {
        let counts = |text: &str| text.parse::<Counts>().map(|counts| counts.0);
        assert_eq!(counts("8K..1M").map(|all| (all.len(), all[0], all[7])), Ok((8, 8192, 1 << 20)));
        assert_eq!(counts("3..10,1"), Ok(vec![1, 3, 6, 10]));
        assert_eq!(counts("2147483649..4294967295"), Ok(vec![2_147_483_649, u32::MAX]));
        for bad in ["", "0", "x", "8K..", "16K..8K", "8K,", "-8", "3G..4"] {
            assert!(counts(bad).is_err(), "{bad}");
        }
    }
}
