//! What a step reads of a sequence's cache, by its length.

use super::Error;
use super::least_squares::{Equation, solve};
use super::traffic::Cell;
use host::kv::Selection;

/// By how much of a row's bytes a rule may be off.
const EXACT: f64 = 0.005;
/// Channels of a head that models have.
const HEAD_DIMS: [u32; 4] = [128, 64, 96, 256];

/// Bytes of one sequence.
#[derive(Debug)]
pub enum Bytes {
    /// As the scheme itself counts them.
    Counted {
        /// The scheme.
        selection: Selection,
        /// KV heads of all layers.
        heads: f64,
        /// Channels of each.
        head_dim: u32,
    },
    /// A line through the rows' bytes.
    Line {
        /// With no tokens.
        base: f64,
        /// Of a token.
        token: f64,
    },
}

impl Bytes {
    /// Of one scheme's cells: as the scheme counts, where that gives every row's bytes, otherwise as a line.
    ///
    /// # Errors
    /// Neither is possible: the scheme's count is not that of the rows, and there is one context.
    pub fn new(kv: &str, cells: &[Cell]) -> Result<Bytes, Error> {
        let own: Vec<&Cell> = cells.iter().filter(|cell| cell.kv == kv).collect();
        if let Some(counted) = kv.parse().ok().and_then(|selection| Bytes::counted(&selection, &own)) {
            return Ok(counted);
        }
        let equation = |cell: &&Cell| Equation {
            terms: vec![1.0, cell.place.context.into()],
            value: cell.kv_bytes as f64 / f64::from(cell.place.batch),
            weight: 1.0,
        };
        let solution = solve(&own.iter().map(equation).collect::<Vec<_>>());
        let [base, token] = solution.as_ref().map_or(&[][..], |solution| &solution.values) else {
            return Err(Error::Bytes { kv: kv.to_owned() });
        };
        Ok(Bytes::Line { base: *base, token: *token })
    }

    /// The number of heads follows from any row, their channels are those that give all rows' bytes.
    fn counted(selection: &Selection, cells: &[&Cell]) -> Option<Bytes> {
        let first = cells.first()?;
        let of_head =
            |head_dim, context: u32| (selection.scheme().step_bytes)(selection, head_dim, context.into());
        let each = |cell: &Cell| cell.kv_bytes as f64 / f64::from(cell.place.batch);
        let candidate = |head_dim| {
            let heads = (each(first) / of_head(head_dim, first.place.context)).round();
            let off = |cell: &&Cell| (heads * of_head(head_dim, cell.place.context) / each(cell) - 1.0).abs();
            let worst = cells.iter().map(off).fold(0.0, f64::max);
            (heads >= 1.0 && heads.is_finite() && worst < EXACT).then_some((worst, heads, head_dim))
        };
        let best = HEAD_DIMS.into_iter().filter_map(candidate).min_by(|a, b| a.0.total_cmp(&b.0));
        best.map(|(_, heads, head_dim)| Bytes::Counted { selection: selection.clone(), heads, head_dim })
    }

    /// Of a sequence of so many tokens.
    pub fn of(&self, context: u32) -> f64 {
        match self {
            Bytes::Counted { selection, heads, head_dim } => {
                heads * (selection.scheme().step_bytes)(selection, *head_dim, context.into())
            }
            Bytes::Line { base, token } => (base + token * f64::from(context)).max(0.0),
        }
    }

    /// Where they are from, in words.
    pub fn source(&self) -> &'static str {
        match self {
            Bytes::Counted { .. } => "as the scheme counts them",
            Bytes::Line { .. } => "a line through the record's bytes",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Place;
    use super::*;

    fn cell(kv: &str, context: u32, batch: u32, kv_bytes: u64) -> Cell {
        Cell { kv: kv.into(), place: Place { context, batch }, weight_bytes: 1, kv_bytes, us: 1.0 }
    }

    #[test]
    fn a_scheme_counts_beyond_what_was_measured() {
        // 32 layers of 8 KV heads of 128: blocks of 128, 37 of them kept, bounds for all that are ranked.
        let gather = |n: u64| 256 * 512 * (37 * 128 + n / 128 - 5 + 5);
        let cells = [cell("gather", 8192, 4, 4 * gather(8192)), cell("gather", 131_072, 1, gather(131_072))];
        let bytes = Bytes::new("gather", &cells).expect("counted");
        assert!(matches!(bytes, Bytes::Counted { .. }), "{bytes:?}");
        for context in [8192, 131_072, 1 << 20] {
            assert!((bytes.of(context) / gather(context.into()) as f64 - 1.0).abs() < EXACT, "{context}");
        }
        // Below what it keeps it reads what there is: no line says that.
        assert!((bytes.of(1024) / (256.0 * 512.0 * 1024.0) - 1.0).abs() < 0.01);

        let dense = Bytes::new("dense", &[cell("dense", 64, 1, 64 * 512 * 90)]).expect("counted");
        assert_eq!(dense.of(1 << 20), 512.0 * 90.0 * f64::from(1 << 20));
    }

    #[test]
    fn a_scheme_that_is_not_known_has_a_line() {
        let cells = [cell("int8-int4", 100, 1, 1300), cell("int8-int4", 200, 2, 2 * 2300)];
        let bytes = Bytes::new("int8-int4", &cells).expect("a line");
        assert!(matches!(bytes, Bytes::Line { .. }) && (bytes.of(1000) - 10_300.0).abs() < 1e-6);
        // Two layers of this one attend to everything, which its count for a head does not know.
        let quest = [cell("gather:quest", 1 << 16, 1, 1 << 31), cell("gather:quest", 1 << 18, 1, 3 << 31)];
        let bytes = Bytes::new("gather:quest", &quest).expect("a line");
        assert!(matches!(bytes, Bytes::Line { .. }), "{bytes:?}");

        let error = Bytes::new("int8-int4", &cells[..1]).expect_err("one context").to_string();
        assert!(error.contains("int8-int4") && error.contains("--contexts"), "{error}");
        assert!(Bytes::new("absent", &cells).is_err());
    }
}
