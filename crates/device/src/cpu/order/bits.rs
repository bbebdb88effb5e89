//! Bytes of a page.

use simt::emu::traffic::{PAGE, PageBits, Touch};

/// Some bytes of a page, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bits {
    All,
    Some(Box<PageBits>),
}

const ALL: PageBits = [u64::MAX; PAGE as usize / 64];
const NONE: PageBits = [0; PAGE as usize / 64];

/// What work does to some pages, in ascending order.
pub(super) type Touched = Vec<(u64, Touch, Bits)>;

impl Bits {
    /// `None` for no byte.
    pub(super) fn of(bits: &PageBits) -> Option<Bits> {
        match *bits {
            NONE => None,
            ALL => Some(Bits::All),
            _ => Some(Bits::Some(Box::new(*bits))),
        }
    }

    /// The bytes of a page from `start` to `end`.
    pub(super) fn between(start: u64, end: u64) -> Option<Bits> {
        let below = |end: u64| match end {
            0 => 0,
            1..64 => (1 << end) - 1,
            _ => u64::MAX,
        };
        Self::of(&std::array::from_fn(|word| {
            let first = word as u64 * 64;
            below(end.saturating_sub(first)) & !below(start.saturating_sub(first))
        }))
    }

    pub(super) fn words(&self) -> &PageBits {
        match self {
            Bits::All => &ALL,
            Bits::Some(bits) => bits,
        }
    }

    /// The bytes of both.
    pub(super) fn and(&self, other: &Bits) -> PageBits {
        std::array::from_fn(|word| self.words()[word] & other.words()[word])
    }

    /// The bytes of either.
    pub(super) fn or(&self, other: &Bits) -> Bits {
        let either: PageBits = std::array::from_fn(|word| self.words()[word] | other.words()[word]);
        Self::of(&either).unwrap_or(Bits::All)
    }

    /// The bytes that are not in `other`.
    pub(super) fn without(&self, other: &Bits) -> Option<Bits> {
        match other {
            Bits::All => None,
            Bits::Some(_) => Self::of(&std::array::from_fn(|word| self.words()[word] & !other.words()[word])),
        }
    }
}

/// The first byte of some.
pub(super) fn first(bits: &PageBits) -> Option<u64> {
    let word = bits.iter().position(|word| *word != 0)?;
    Some(word as u64 * 64 + u64::from(bits[word].trailing_zeros()))
}

/// How many bytes follow each other from `start` on.
pub(super) fn run(bits: &PageBits, start: u64) -> u64 {
    let has = |byte: &u64| bits[*byte as usize / 64] >> (byte % 64) & 1 == 1;
    (start..PAGE).take_while(has).count() as u64
}

/// The pages of `bytes` bytes from `address` on, and the bytes of each.
pub(super) fn pages(address: u64, bytes: usize) -> impl Iterator<Item = (u64, Bits)> {
    let end = address + bytes as u64;
    (address / PAGE..end.div_ceil(PAGE)).filter_map(move |number| {
        let page = number * PAGE;
        let inside = Bits::between(address.saturating_sub(page), (end - page).min(PAGE));
        inside.map(|bits| (page, bits))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(bits: &Bits) -> Vec<u64> {
        (0..PAGE).filter(|byte| bits.words()[*byte as usize / 64] >> (byte % 64) & 1 == 1).collect()
    }

    #[test]
    fn ranges_have_their_bytes() {
        for (start, end) in [(0, 1), (0, 64), (63, 65), (64, 128), (5, 4096), (4095, 4096), (100, 200)] {
            let bits = Bits::between(start, end).unwrap();
            assert_eq!(bytes(&bits), (start..end).collect::<Vec<_>>());
            assert_eq!(first(bits.words()), Some(start));
            assert_eq!(run(bits.words(), start), end - start);
        }
        assert_eq!(Bits::between(0, 4096), Some(Bits::All));
        assert_eq!(Bits::between(7, 7), None);
    }

    #[test]
    fn sets_are_combined() {
        let (a, b) = (Bits::between(10, 100).unwrap(), Bits::between(50, 200).unwrap());
        assert_eq!(Bits::of(&a.and(&b)), Bits::between(50, 100));
        assert_eq!(Some(a.or(&b)), Bits::between(10, 200));
        assert_eq!(a.without(&b), Bits::between(10, 50));
        assert_eq!(a.without(&Bits::All), None);
        assert_eq!(Bits::All.without(&Bits::between(0, 4000).unwrap()), Bits::between(4000, 4096));
    }

    #[test]
    fn memory_falls_into_pages() {
        let found: Vec<(u64, Bits)> = pages(2 * PAGE - 10, PAGE as usize + 20).collect();
        let expected = [(PAGE, PAGE - 10, PAGE), (2 * PAGE, 0, PAGE), (3 * PAGE, 0, 10)];
        assert_eq!(found, expected.map(|(page, start, end)| (page, Bits::between(start, end).unwrap())));
        assert_eq!(pages(5 * PAGE, PAGE as usize).collect::<Vec<_>>(), [(5 * PAGE, Bits::All)]);
    }
}
