//! How distant blocks are ranked: by what, and for whom.

use super::bounds::checked;
use super::{Asked, Error, GatherElement, HEAD_DIMS, Result, UP_TO_128, WINDOW};
use crate::attention::StepProblem;
use crate::kv::Selection;
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::{BY_BOUNDS, BY_CODES, BY_MEANS};

/// What a block is scored by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Score {
    /// Its largest and its smallest key, channel by channel: no key of it has a larger product with the
    /// query.
    #[default]
    Bounds,
    /// The same in 8 bits, rounded outward.
    Codes,
    /// Its mean key.
    Mean,
}

impl Score {
    /// What the kernels are told.
    pub(super) fn summary(self) -> u32 {
        match self {
            Score::Bounds => BY_BOUNDS,
            Score::Codes => BY_CODES,
            Score::Mean => BY_MEANS,
        }
    }

    /// A problem that there are kernels for.
    ///
    /// # Errors
    /// Those of the problem; [`Error::HeadDim`], [`Error::TooLong`].
    pub(super) fn checked(self, problem: StepProblem) -> Result<StepProblem> {
        match self {
            Score::Codes => checked(problem, "gather/bounds=8", &UP_TO_128),
            Score::Bounds | Score::Mean => checked(problem, "gather", &HEAD_DIMS),
        }
    }
}

/// Who has a list of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum List {
    /// A KV head, by the largest score of its query heads.
    #[default]
    KvHead,
    /// A query head.
    QueryHead,
}

/// How the distant blocks are ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ranking {
    /// By what.
    pub score: Score,
    /// For whom.
    pub list: List,
}

impl Ranking {
    /// What a selection says for heads of `head_dim`; if it does not say how many bits a bound has, 8 where
    /// there are kernels for them (`codes`: for the keys' type and so many query heads), else 16.
    pub(super) fn of(selection: &Selection, head_dim: u32, codes: bool) -> Self {
        let narrow = codes
            && UP_TO_128.contains(&head_dim)
            && selection.preset() != Some(WINDOW)
            && !matches!(Asked::of(selection), Asked::Certified(_));
        let bits = selection.word("bounds", if narrow { "8" } else { "16" });
        let score = match (selection.word("score", "bounds"), bits) {
            ("mean", _) => Score::Mean,
            (_, "8") => Score::Codes,
            _ => Score::Bounds,
        };
        Ranking {
            score,
            list: if selection.word("list", "kv") == "query" { List::QueryHead } else { List::KvHead },
        }
    }

    /// What a selection says for a problem of element type `E`.
    pub(super) fn fitting<E: GatherElement>(selection: &Selection, problem: StepProblem) -> Self {
        let group = problem.q_heads.checked_div(problem.kv_heads).unwrap_or(0);
        let codes = E::IS_F16 || group <= ROWS || selection.word("list", "kv") == "query";
        Ranking::of(selection, problem.head_dim, codes)
    }

    /// Lists of a KV head of `group` query heads.
    pub(super) fn lists(self, group: u32) -> u32 {
        match self.list {
            List::KvHead => 1,
            List::QueryHead => group,
        }
    }

    /// Whether a selection gives none of the options where they do not go.
    ///
    /// # Errors
    /// [`Error::Ranking`].
    pub(super) fn check(selection: &Selection) -> Result<()> {
        let with = match Asked::of(selection) {
            Asked::Certified(_) => ":certified",
            Asked::InHost(..) => "staging",
            Asked::OnDevice(_) | Asked::Codes(_) if selection.preset() == Some(WINDOW) => ":window",
            Asked::OnDevice(_) if selection.word("score", "bounds") == "mean" => "score=mean",
            // What does not go with codes is looked at on its own.
            Asked::OnDevice(_) | Asked::Codes(_) => return Ok(()),
        };
        let all = ["bounds", "score", "list"];
        let options = match with {
            "score=mean" => &all[..1],
            "staging" => &all[1..],
            _ => &all[..],
        };
        match options.iter().copied().find(|option| selection.value(option).is_some()) {
            Some(option) => {
                Err(Error::Ranking { option, value: selection.word(option, "").to_owned(), with })
            }
            None => Ok(()),
        }
    }
}
