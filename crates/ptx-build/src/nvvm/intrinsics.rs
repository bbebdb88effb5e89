//! LLVM's intrinsics: which of them libNVVM has, which are written otherwise, and which are refused.
//!
//! Kept is what libNVVM compiles to the operation that LLVM defines, without the mathematics library: its
//! bits are those that the emulator gives. Its library (`__nv_*`) is never used, as its functions' last bits
//! are nobody's contract.

/// What becomes of an intrinsic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// It stays.
    Kept,
    /// Another one of the same meaning takes its place: its name up to the type.
    Renamed(&'static str),
    /// The sign bit is cleared, by integer operations.
    Absolute,
    /// There is no translation; what to do instead.
    Refused(&'static str),
}

/// Those that stay, by name up to the types. Their operation is exact, or correctly rounded in LLVM's
/// definition and in PTX.
const KEPT: [&str; 48] = [
    "abs",
    "assume",
    "bitreverse",
    "bswap",
    "ceil",
    "copysign",
    "ctlz",
    "ctpop",
    "cttz",
    "experimental.noalias.scope.decl",
    "floor",
    "fma",
    "fptosi.sat",
    "fptoui.sat",
    "fshl",
    "fshr",
    "is.fpclass",
    "maximum",
    "maximumnum",
    "memcpy",
    "memmove",
    "memset",
    "minimum",
    "minimumnum",
    "roundeven",
    "sadd.sat",
    "sadd.with.overflow",
    "scmp",
    "smax",
    "smin",
    "smul.with.overflow",
    "sqrt",
    "ssub.sat",
    "ssub.with.overflow",
    "trap",
    "trunc",
    "uadd.sat",
    "uadd.with.overflow",
    "ucmp",
    "umax",
    "umin",
    "umul.with.overflow",
    "usub.sat",
    "usub.with.overflow",
    "vector.reduce.add",
    "vector.reduce.and",
    "vector.reduce.or",
    "vector.reduce.xor",
];

const BY_HAND: &str = "write it with simt::math, whose bits are the same on the CPU";

/// What becomes of the intrinsic `name`, as the IR writes it (`llvm.fabs.f32`).
pub fn treatment(name: &str) -> Treatment {
    let Some(name) = name.strip_prefix("llvm.") else {
        return Treatment::Refused("a kernel calls nothing outside of its module: have the callee inlined");
    };
    if base(name) == "nvvm.reflect" {
        return Treatment::Refused("what it asks for is set outside of the module, and may let bits change");
    }
    if name.starts_with("nvvm.") {
        // libNVVM's own. One that it does not know shows as an external function of the PTX, and is refused
        // there.
        return Treatment::Kept;
    }
    match base(name) {
        // In the default floating-point environment, which is the only one here, the three are one.
        "rint" | "nearbyint" => Treatment::Renamed("roundeven"),
        "fabs" => Treatment::Absolute,
        "fmuladd" => {
            Treatment::Refused("whether it rounds once or twice is left open: use mul_add, or two operations")
        }
        // PTX's max and min are those of `maximumnum`, which LLVM does not promise of these.
        "maxnum" | "minnum" => {
            Treatment::Refused("which zero and which NaN it gives is left open: use simt::math")
        }
        "round" => Treatment::Refused("libNVVM has no rounding half away from zero: use simt::math"),
        base if KEPT.binary_search(&base).is_ok() => Treatment::Kept,
        _ => Treatment::Refused(BY_HAND),
    }
}

/// The name without its types: `fptosi.sat` of `fptosi.sat.i32.f32`.
pub fn base(name: &str) -> &str {
    let mut base = name;
    while let Some((head, last)) = base.rsplit_once('.')
        && is_type(last)
    {
        base = head;
    }
    base
}

/// Is it a type as names of intrinsics write it: `i32`, `f16`, `bf16`, `v2f32`, `p0`?
fn is_type(part: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let scalar = |text: &str| ["bf", "i", "f", "p"].iter().any(|s| text.strip_prefix(s).is_some_and(digits));
    let vector = part.strip_prefix('v').is_some_and(|rest| {
        let element = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        element.len() < rest.len() && scalar(element)
    });
    vector || scalar(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_sorted_for_the_search() {
        assert!(KEPT.is_sorted());
    }

    #[test]
    fn types_are_no_part_of_a_name() {
        assert_eq!(base("fptosi.sat.i32.f32"), "fptosi.sat");
        assert_eq!(base("memset.p0.i64"), "memset");
        assert_eq!(base("fma.v2f32"), "fma");
        assert_eq!(base("fma.bf16"), "fma");
        assert_eq!(base("assume"), "assume");
        assert_eq!(base("uadd.with.overflow.i64"), "uadd.with.overflow");
    }

    #[test]
    fn each_intrinsic_has_its_treatment() {
        assert_eq!(treatment("llvm.nvvm.shfl.sync.idx.i32"), Treatment::Kept);
        assert_eq!(treatment("llvm.fma.f32"), Treatment::Kept);
        assert_eq!(treatment("llvm.fptoui.sat.i8.f32"), Treatment::Kept);
        assert_eq!(treatment("llvm.rint.f64"), Treatment::Renamed("roundeven"));
        assert_eq!(treatment("llvm.nearbyint.f32"), Treatment::Renamed("roundeven"));
        assert_eq!(treatment("llvm.fabs.f32"), Treatment::Absolute);
        for refused in ["llvm.exp2.f32", "llvm.fmuladd.f32", "llvm.round.f32", "llvm.sin.f64", "memcpy"] {
            assert!(matches!(treatment(refused), Treatment::Refused(_)), "{refused}");
        }
        for refused in ["llvm.nvvm.reflect", "llvm.nvvm.reflect.p0", "llvm.maxnum.f32", "llvm.minnum.v2f32"] {
            assert!(matches!(treatment(refused), Treatment::Refused(_)), "{refused}");
        }
    }
}
