//! What the lint asks of an instruction by its opcode.

use crate::ptx::Instruction;

/// Instructions that the threads of a warp or of a block execute together.
pub(crate) const CONVERGENT: [&str; 11] =
    ["bar", "barrier", "shfl", "vote", "match", "redux", "elect", "mma", "wgmma", "ldmatrix", "stmatrix"];

/// Instructions that access memory through an address and may name its state space.
pub(crate) const MEMORY: [&str; 11] = [
    "ld",
    "ldu",
    "st",
    "atom",
    "red",
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "mbarrier",
    "multimem",
];

/// Is it an instruction that GPUs before sm_90 do not have?
pub(crate) fn needs_sm_90(instruction: &Instruction) -> bool {
    if instruction.has("shared::cluster") {
        return true;
    }
    match instruction.name() {
        "cp" => instruction.has("bulk"),
        "mbarrier" => instruction.has("expect_tx") || instruction.has("try_wait"),
        "fence" => {
            let proxy = |part: &String| part.starts_with("async") || part.starts_with("tensormap");
            instruction.has("proxy") && instruction.modifiers().iter().any(proxy)
                || instruction.has("mbarrier_init")
        }
        "prefetch" => instruction.has("tensormap"),
        "barrier" => instruction.has("cluster"),
        "mov" => ["%cluster", "%nclusterid"].iter().any(|register| instruction.operands.contains(register)),
        "st" | "red" => instruction.has("async"),
        name => matches!(name, "elect" | "getctarank" | "mapa" | "multimem"),
    }
}

/// What GPUs of one compute capability alone have: PTX for it names the target with features of its own,
/// `sm_90a`.
pub(crate) fn needs_one_target(instruction: &Instruction) -> bool {
    matches!(instruction.name(), "setmaxnreg" | "wgmma")
}

pub(crate) fn is_state_space(part: &str) -> bool {
    let space = part.split("::").next().unwrap_or(part);
    matches!(space, "global" | "shared" | "const" | "param" | "local")
}

pub(crate) fn is_atomic(instruction: &Instruction) -> bool {
    matches!(instruction.name(), "atom" | "red" | "multimem")
}

/// Bits of a float type's significand and of the whole element; None for other parts of an opcode.
pub(crate) fn float_type(part: &str) -> Option<(u32, u32)> {
    Some(match part {
        "f64" | "f64x2" => (53, 64),
        "f32" | "f32x2" => (24, 32),
        "tf32" | "tf32x2" => (11, 32),
        "f16" | "f16x2" => (11, 16),
        "bf16" | "bf16x2" => (8, 16),
        "e4m3" | "e4m3x2" | "e4m3x4" => (4, 8),
        "e5m2" | "e5m2x2" | "e5m2x4" => (3, 8),
        "e2m3x2" | "e2m3x4" => (4, 6),
        "e3m2x2" | "e3m2x4" => (3, 6),
        "e2m1x2" | "e2m1x4" => (2, 4),
        "ue8m0x2" => (1, 8),
        _ => return None,
    })
}

pub(crate) fn has_float(instruction: &Instruction) -> bool {
    instruction.modifiers().iter().any(|part| float_type(part).is_some())
}

/// Does the instruction's result depend on a rounding that the opcode must name?
pub(crate) fn needs_rounding(instruction: &Instruction) -> bool {
    match instruction.name() {
        "add" | "sub" | "mul" | "fma" | "mad" | "div" | "sqrt" | "rcp" | "rsqrt" => has_float(instruction),
        // The conversions name the target's type first and the source's behind it.
        "cvt" => {
            let is_type = |part: &&String| {
                let mut letters = part.chars();
                let integer = matches!(letters.next(), Some('s' | 'u' | 'b'))
                    && letters.next().is_some_and(|c| c.is_ascii_digit());
                integer || float_type(part).is_some()
            };
            let mut types = instruction.modifiers().iter().filter(is_type);
            let (Some(target), Some(source)) = (types.next(), types.next()) else { return false };
            let Some((target_digits, target_bits)) = float_type(target) else { return false };
            match float_type(source) {
                // The integral rounding of a float in its own type says its direction (.rni, .rzi and so on).
                Some((digits, bits)) if (digits, bits) == (target_digits, target_bits) => false,
                // Exact only into a wider element that has no fewer digits (f16 and bf16 do not hold each
                // other).
                Some((digits, bits)) => digits > target_digits || bits >= target_bits,
                None => true,
            }
        }
        _ => false,
    }
}
