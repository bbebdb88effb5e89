//! Where a dimension of queries and keys is in the contractions of the tensor cores.

/// In which order a kernel contracts over the dimensions of queries and keys: 16 at a time.
pub(crate) trait Order {
    /// Contraction and step in it of dimension `d`. Even steps are of even dimensions, the next dimension is
    /// the next step.
    fn step_of(d: usize) -> (usize, usize);
    /// The dimension of a step of a contraction.
    fn dimension(contraction: usize, step: usize) -> usize;
}

/// That of `Queries::scores`: lanes load chunks of eight dimensions.
pub(crate) struct Eights;

impl Order for Eights {
    #[inline(always)]
    fn step_of(d: usize) -> (usize, usize) {
        (2 * (d / 32) + d / 4 % 2, 4 * (d / 8 % 4) + d % 4)
    }

    #[inline(always)]
    fn dimension(contraction: usize, step: usize) -> usize {
        32 * (contraction / 2) + 8 * (step / 4) + 4 * (contraction % 2) + step % 4
    }
}

/// That of the certified kernels: lanes load chunks of sixteen dimensions.
pub(crate) struct Sixteens;

impl Order for Sixteens {
    #[inline(always)]
    fn step_of(d: usize) -> (usize, usize) {
        (4 * (d / 64) + d / 4 % 4, 4 * (d / 16 % 4) + d % 4)
    }

    #[inline(always)]
    fn dimension(contraction: usize, step: usize) -> usize {
        64 * (contraction / 4) + 16 * (step / 4) + 4 * (contraction % 4) + step % 4
    }
}
