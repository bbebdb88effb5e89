//! The lint: what PTX must not hold if a kernel is to give the CPU's bits and the memory's speed.
//!
//! Tensor-core and asynchronous-copy instructions (`mma`, `ldmatrix`, `cp.async`) have contracts of their own
//! and pass; those that a warp executes together must come from an LLVM intrinsic, not from inline assembly.
//! A finding can be accepted for one entry by a row with a reason in the [allow list](crate::allow).

use crate::endless::endless;
use crate::opcodes::{
    CONVERGENT, MEMORY, has_float, is_atomic, is_state_space, needs_one_target, needs_rounding, needs_sm_90,
};
use crate::ptx::{Instruction, Module, Statement};
use crate::waits::Waits;
use std::collections::HashSet;
use std::fmt;

/// What is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// Float arithmetic that does not say `.rn`.
    Rounding,
    /// `.ftz`: subnormals flushed to zero.
    FlushToZero,
    /// `.approx` or `.full`: the hardware's approximations.
    Approximate,
    /// An atomic float addition: its order is not fixed, and it flushes subnormals.
    FloatAtomic,
    /// A byte stored from a register that holds a float: ptxas 13.0 makes a saturating conversion of it.
    FloatByteStore,
    /// A barrier or an exchange between threads in inline assembly, which LLVM may move into a branch.
    ConvergentAssembly,
    /// A memory access without a state space.
    GenericAddress,
    /// Local memory: an array that did not become registers.
    LocalMemory,
    /// A kernel that may start before the launch ahead of it is done, and does not wait once, on every path
    /// and before all but the loads made for that; or a wait in one that never starts early.
    Wait,
    /// An instruction that the target does not have.
    Target,
    /// An instruction that GPUs of one compute capability alone have, in a kernel that is for others too.
    OneTarget,
    /// A loop that nothing leaves: of a wait for a word that LLVM reads once.
    EndlessLoop,
    /// A call that was not inlined.
    Call,
    /// Registers spilled by ptxas.
    Spill,
    /// A stack frame made by ptxas.
    Stack,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Rule; 15] = [
        Rule::Rounding,
        Rule::FlushToZero,
        Rule::Approximate,
        Rule::FloatAtomic,
        Rule::FloatByteStore,
        Rule::ConvergentAssembly,
        Rule::GenericAddress,
        Rule::LocalMemory,
        Rule::Wait,
        Rule::Target,
        Rule::OneTarget,
        Rule::EndlessLoop,
        Rule::Call,
        Rule::Spill,
        Rule::Stack,
    ];

    /// The name that the allow list uses.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Rounding => "rounding",
            Rule::FlushToZero => "flush-to-zero",
            Rule::Approximate => "approximate",
            Rule::FloatAtomic => "float-atomic",
            Rule::FloatByteStore => "float-byte-store",
            Rule::ConvergentAssembly => "convergent-assembly",
            Rule::GenericAddress => "generic-address",
            Rule::LocalMemory => "local-memory",
            Rule::Wait => "wait",
            Rule::Target => "target",
            Rule::OneTarget => "one-target",
            Rule::EndlessLoop => "endless-loop",
            Rule::Call => "call",
            Rule::Spill => "spill",
            Rule::Stack => "stack",
        }
    }

    /// The rule of that name.
    pub fn from_name(name: &str) -> Option<Rule> {
        Rule::ALL.into_iter().find(|rule| rule.name() == name)
    }

    /// Is it found by ptxas, and not in the PTX?
    pub fn needs_ptxas(self) -> bool {
        matches!(self, Rule::Spill | Rule::Stack)
    }

    /// What to do about a finding.
    pub fn help(self) -> &'static str {
        match self {
            Rule::Rounding => {
                "without .rn ptxas may contract or round otherwise: use plain Rust operators or simt::math, \
                 and write .rn in inline PTX"
            }
            Rule::FlushToZero => "subnormals must survive: remove .ftz from the inline PTX",
            Rule::Approximate => {
                "the CPU cannot reproduce the hardware's approximation: use the shared polynomials of simt::math"
            }
            Rule::FloatAtomic => "the order of the additions is not fixed: reduce in a fixed tree instead",
            Rule::FloatByteStore => {
                "ptxas 13.0 turns this into F2IP.U8, which saturates: make the integer with \
                 simt::math::to_i32_nearest_even, or pack bytes with simt::bits::pack_low_bytes"
            }
            Rule::ConvergentAssembly => {
                "LLVM does not know that the threads must be together there and may copy it into the arms of a \
                 branch: use simt::thread and simt::warp, or an LLVM intrinsic"
            }
            Rule::GenericAddress => {
                "pass Global and GlobalMut as parameters of their own (not inside a struct), and reach shared \
                 memory through Shared"
            }
            Rule::LocalMemory => {
                "an array indexed by a run-time value has no registers: unroll the loop with simt's macro, or \
                 move the array to shared memory"
            }
            Rule::Wait => {
                "a kernel that `overlaps` has one griddepcontrol.wait, on no branch, and before it no access but parameters \
                 and load_ahead: see simt::thread::wait_for_previous"
            }
            Rule::Target => "only GPUs from sm_90 on have it: mark the kernel #[kernel(min_sm = 90)]",
            Rule::OneTarget => {
                "newer GPUs do not have what one compute capability has of its own: mark the kernel \
                 #[kernel(only_sm = 90)]"
            }
            Rule::EndlessLoop => {
                "a plain load may be read once, ahead of the loop: wait with load_acquire, an atomic or a \
                 barrier, which other threads can be waited for by"
            }
            Rule::Call => {
                "mark the callee #[inline(always)]; a call into core is often a check that can be avoided"
            }
            Rule::Spill => "lower the register need, or loosen the entry's launch bounds",
            Rule::Stack => {
                "ptxas found an array it could not keep in registers: unroll the loop that indexes it"
            }
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that the lint objects to: the first of its rule in an entry, and how often it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// The entry or function; empty outside of any.
    pub entry: String,
    /// The line of the PTX, from 1; 0 if ptxas found it.
    pub line: usize,
    /// The statement.
    pub text: String,
    /// How many statements of the entry break the rule.
    pub count: usize,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { rule, entry, line, text, count } = self;
        write!(f, "[{rule}] ")?;
        match entry.as_str() {
            "" => write!(f, "outside of any kernel")?,
            entry => write!(f, "kernel {entry}")?,
        }
        if *line > 0 {
            write!(f, ", PTX line {line}")?;
        }
        write!(f, ": `{text}`")?;
        if *count > 1 {
            write!(f, " and {} more", count - 1)?;
        }
        write!(f, ": {}", rule.help())
    }
}

/// Checks a module. The findings come in the order of the text, one for each rule and entry.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    let mut floats = FloatRegisters::default();
    let mut waits = Waits::new(module);
    let before_sm_90 = (1..90).contains(&module.target());
    let endless = endless(module);
    for (at, statement) in module.statements.iter().enumerate() {
        let mut rules = rules_broken_by(statement);
        if endless.contains(&at) {
            rules.push(Rule::EndlessLoop);
        }
        if floats.are_stored_as_bytes(statement) {
            rules.push(Rule::FloatByteStore);
        }
        let is_of_one = |index: usize| module.of_one_target.contains(&module.functions[index].name);
        if statement.instruction.as_ref().is_some_and(needs_one_target) {
            if !statement.function.is_some_and(is_of_one) {
                rules.push(Rule::OneTarget);
            }
        } else if before_sm_90 && statement.instruction.as_ref().is_some_and(needs_sm_90) {
            rules.push(Rule::Target);
        }
        if waits.are_broken_by(statement) {
            rules.push(Rule::Wait);
        }
        let convergent = |instruction: &Instruction| {
            // Of f16 operands there is no other way: LLVM's intrinsic takes a vector type that rustc passes
            // to no function. Its intrinsics of `wgmma` are not for the target that all are compiled for.
            CONVERGENT.contains(&instruction.name())
                && !(instruction.name() == "mma" && instruction.has("f16"))
                && instruction.name() != "wgmma"
        };
        if statement.instruction.as_ref().is_some_and(convergent) && module.is_inline_assembly(statement) {
            rules.push(Rule::ConvergentAssembly);
        }
        for rule in rules {
            let entry = statement.function.map_or("", |index| module.functions[index].name.as_str());
            match findings.iter_mut().find(|finding| finding.rule == rule && finding.entry == entry) {
                Some(finding) => finding.count += 1,
                None => findings.push(Finding {
                    rule,
                    entry: entry.to_owned(),
                    line: statement.line,
                    text: statement.text.clone(),
                    count: 1,
                }),
            }
        }
    }
    findings
}

fn rules_broken_by(statement: &Statement) -> Vec<Rule> {
    let Some(instruction) = &statement.instruction else {
        let is_local = statement.text.split_whitespace().any(|word| word == ".local");
        return if is_local { vec![Rule::LocalMemory] } else { Vec::new() };
    };
    let mut rules = Vec::new();
    if instruction.has("ftz") {
        rules.push(Rule::FlushToZero);
    }
    let approximate = instruction.has("approx") || instruction.has("full");
    if approximate {
        rules.push(Rule::Approximate);
    } else if needs_rounding(instruction) && !instruction.has("rn") {
        rules.push(Rule::Rounding);
    }
    if is_atomic(instruction) && instruction.has("add") && has_float(instruction) {
        rules.push(Rule::FloatAtomic);
    }
    // A tensor map's address is a generic one where the map lies in global memory.
    if MEMORY.contains(&instruction.name()) && !instruction.has("tensormap") {
        if instruction.has("local") {
            rules.push(Rule::LocalMemory);
        } else if !instruction.modifiers().iter().any(|part| is_state_space(part)) {
            rules.push(Rule::GenericAddress);
        }
    }
    if instruction.name() == "cvta" && instruction.has("local") {
        rules.push(Rule::LocalMemory);
    }
    if instruction.name() == "call" {
        rules.push(Rule::Call);
    }
    rules
}

/// The registers of one function that float arithmetic has written.
#[derive(Default)]
struct FloatRegisters {
    function: Option<usize>,
    names: HashSet<String>,
}

impl FloatRegisters {
    /// Follows `statement`, and says whether it stores the low byte of a float's bits.
    fn are_stored_as_bytes(&mut self, statement: &Statement) -> bool {
        if statement.function != self.function {
            self.function = statement.function;
            self.names.clear();
        }
        let Some(instruction) = &statement.instruction else { return false };
        let mut registers =
            instruction.operands.split(|c: char| !(c.is_alphanumeric() || "%_$.".contains(c)));
        let last_type = instruction.modifiers().last().map_or("", String::as_str);
        match instruction.name() {
            // Data after the address: `[%rd1], %r2` or `[%rd1+4], {%r2, %r3}`.
            "st" => {
                let data = instruction.operands.split_once(']').map_or("", |(_, data)| data);
                let stored = data.split(|c: char| !(c.is_alphanumeric() || "%_$".contains(c)));
                matches!(last_type, "b8" | "u8" | "s8") && { stored }.any(|name| self.names.contains(name))
            }
            // What moves or narrows the bits keeps them a float's.
            "mov" | "cvt" if !has_float(instruction) => {
                let target = registers.next().unwrap_or_default().to_owned();
                if registers.any(|name| self.names.contains(name)) {
                    self.names.insert(target);
                }
                false
            }
            "add" | "sub" | "mul" | "fma" | "div" | "sqrt" | "rcp" | "min" | "max" | "abs" | "neg" => {
                if last_type == "f32" {
                    self.names.insert(registers.next().unwrap_or_default().to_owned());
                }
                false
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx;

    fn rules(body: &str) -> Vec<Rule> {
        rules_for(90, body)
    }

    fn rules_for(target: u32, body: &str) -> Vec<Rule> {
        let text = format!(
            ".version 8.0\n.target sm_{target}\n.visible .entry k(\n.param .u64 p\n)\n{{\n{body}\n}}\n"
        );
        check(&ptx::parse(&text)).into_iter().map(|finding| finding.rule).collect()
    }

    /// Each rule fires on the left and not on the corrected right.
    #[test]
    fn every_rule_has_a_bad_and_a_good_form() {
        use Rule::*;
        let pairs = [
            (Rounding, "add.f32 %f1, %f2, %f3;", "add.rn.f32 %f1, %f2, %f3;"),
            (Rounding, "sub.f64 %d1, %d2, %d3;", "sub.rn.f64 %d1, %d2, %d3;"),
            (Rounding, "mul.f16x2 %r1, %r2, %r3;", "mul.rn.f16x2 %r1, %r2, %r3;"),
            (Rounding, "add.rz.f32 %f1, %f2, %f3;", "add.rn.sat.f32 %f1, %f2, %f3;"),
            (Rounding, "fma.rz.f32 %f1, %f2, %f3, %f4;", "fma.rn.bf16x2 %r1, %r2, %r3, %r4;"),
            (Rounding, "mad.f32 %f1, %f2, %f3, %f4;", "mad.lo.s32 %r1, %r2, %r3, %r4;"),
            (Rounding, "sqrt.f32 %f1, %f2;", "sqrt.rn.f32 %f1, %f2;"),
            (Rounding, "rcp.rm.f32 %f1, %f2;", "rcp.rn.f32 %f1, %f2;"),
            (Rounding, "@%p1 div.f32 %f1, %f2, %f3;", "@%p1 div.rn.f32 %f1, %f2, %f3;"),
            (Rounding, "cvt.rz.f32.s32 %f1, %r1;", "cvt.rn.f32.s32 %f1, %r1;"),
            (Rounding, "cvt.rz.f16.f32 %h1, %f1;", "cvt.f32.f16 %f1, %h1;"),
            (Rounding, "cvt.rz.f16x2.f32 %r1, %f1, %f2;", "cvt.rn.f16x2.f32 %r1, %f1, %f2;"),
            (Rounding, "cvt.f16.bf16 %h1, %h2;", "cvt.f32.bf16 %f1, %h2;"),
            (Rounding, "cvt.rna.tf32.f32 %r1, %f1;", "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;"),
            (Rounding, "cvt.rm.f32.f64 %f1, %d1;", "cvt.f64.f32 %d1, %f1;"),
            (FlushToZero, "mul.rn.ftz.f32 %f1, %f2, %f3;", "mul.rn.f32 %f1, %f2, %f3;"),
            (FlushToZero, "setp.lt.ftz.f32 %p1, %f2, %f3;", "setp.lt.f32 %p1, %f2, %f3;"),
            (FlushToZero, "cvt.ftz.f32.f16 %f1, %h1;", "cvt.rzi.s32.f32 %r1, %f1;"),
            (Approximate, "ex2.approx.f32 %f1, %f2;", "cvt.rni.f32.f32 %f1, %f2;"),
            (Approximate, "sqrt.approx.f32 %f1, %f2;", "sqrt.rn.f64 %d1, %d2;"),
            (Approximate, "rsqrt.approx.f32 %f1, %f2;", "neg.f32 %f1, %f2;"),
            (Approximate, "div.full.f32 %f1, %f2, %f3;", "div.rn.f32 %f1, %f2, %f3;"),
            (FloatAtomic, "atom.global.add.f32 %f1, [%rd1], %f2;", "atom.global.add.u32 %r1, [%rd1], %r2;"),
            (FloatAtomic, "red.shared.add.noftz.f16x2 [%r1], %r2;", "red.shared.max.s32 [%r1], %r2;"),
            (
                FloatByteStore,
                "add.rn.f32 %r1, %r2, 0f4B400000; st.global.b8 [%rd1], %r1;",
                "add.rn.f32 %r1, %r2, 0f4B400000; st.global.b32 [%rd1], %r1;",
            ),
            (
                FloatByteStore,
                "add.rn.f32 %r1, %r2, %r3; cvt.u16.u32 %rs1, %r1; st.global.cs.b8 [%rd1+1], %rs1;",
                "add.rn.f32 %r1, %r2, %r3; cvt.rni.s32.f32 %r4, %r1; st.global.b8 [%rd1], %r4;",
            ),
            (
                ConvergentAssembly,
                "// begin inline asm\n{ .reg .pred p; bar.sync 0; }\n// end inline asm",
                "// begin inline asm\nmov.u32 %r1, %laneid;\n// end inline asm\nbar.sync 0;",
            ),
            (
                ConvergentAssembly,
                "// begin inline asm\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};\n// end inline asm",
                "// begin inline asm\nmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};\n// end inline asm",
            ),
            (
                ConvergentAssembly,
                "// begin inline asm\nvote.sync.all.pred %p1, %p2, -1;\n// end inline asm",
                "vote.sync.all.pred %p1, %p2, -1;",
            ),
            (
                ConvergentAssembly,
                "// begin inline asm\nshfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;\n// end inline asm",
                "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
            ),
            (GenericAddress, "ld.b32 %r1, [%rd1];", "ld.global.nc.b32 %r1, [%rd1];"),
            (GenericAddress, "ld.volatile.u32 %r1, [%rd1];", "ld.volatile.shared.u32 %r1, [%r2];"),
            (
                GenericAddress,
                "st.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};",
                "st.shared::cta.v4.b32 [%r9], {%r1, %r2, %r3, %r4};",
            ),
            (
                GenericAddress,
                "atom.cas.b32 %r1, [%rd1], %r2, %r3;",
                "atom.global.cas.b32 %r1, [%rd1], %r2, %r3;",
            ),
            (GenericAddress, "red.add.u32 [%rd1], 1;", "red.global.add.u32 [%rd1], 1;"),
            (GenericAddress, "prefetch.L2 [%rd1];", "prefetch.global.L2 [%rd1];"),
            (LocalMemory, ".local .align 4 .b8 __local_depot0[16];", ".shared .align 4 .b8 pad[16];"),
            (LocalMemory, "ld.local.b32 %r1, [%rd1];", "ld.param.b32 %r1, [p];"),
            (LocalMemory, "cvta.local.u64 %SP, %SPL;", "cvta.to.global.u64 %rd1, %rd2;"),
            (Wait, "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"),
            (
                Target,
                "cp.async.bulk.commit_group;",
                "cp.async.commit_group; mbarrier.arrive.shared::cta.b64 _, [%r1];",
            ),
            (
                Target,
                "mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;",
                "mbarrier.init.shared::cta.b64 [%r1], 1;",
            ),
            (Target, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;", "fence.acq_rel.gpu;"),
            (Target, "fence.proxy.async;", "fence.sc.gpu;"),
            (Target, "fence.proxy.tensormap::generic.acquire.sys [%rd1], 128;", "fence.acq_rel.sys;"),
            (Target, "barrier.cluster.arrive.aligned;", "bar.sync 0;"),
            (Target, "mov.u32 %r1, %cluster_ctarank;", "mov.u32 %r1, %ctaid.x;"),
            (Target, "ld.shared::cluster.b32 %r1, [%r2];", "ld.shared::cta.b32 %r1, [%r2];"),
            (Target, "atom.shared::cluster.add.u32 %r1, [%r2], 1;", "atom.shared.add.u32 %r1, [%r2], 1;"),
            (OneTarget, "wgmma.fence.sync.aligned;", "fence.proxy.async;"),
            (OneTarget, "setmaxnreg.inc.sync.aligned.u32 232;", "elect.sync %r1|%p1, -1;"),
            (EndlessLoop, "$A: mov.u32 %r1, 1; bra.uni $A;", "$A: mov.u32 %r1, 1; @%p1 bra $A; ret;"),
            (Call, "{ // callseq 0, 0\ncall.uni (retval0), f, (param0);\n}", "bra.uni $L__BB0_1;"),
        ];
        for (rule, bad, good) in pairs {
            let target = if rule == Target { 80 } else { 90 };
            assert_eq!(rules_for(target, bad), [rule], "{bad}");
            assert_eq!(rules_for(target, good), [], "{good}");
            assert!(rule != Target || rules(bad).is_empty(), "{bad}");
        }
        for rule in Rule::ALL.into_iter().filter(|rule| !rule.needs_ptxas()) {
            assert!(pairs.iter().any(|pair| pair.0 == rule), "no pair for {rule}");
        }
    }

    #[test]
    fn instructions_with_a_contract_of_their_own_pass() {
        let body = "\
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;
cp.async.commit_group; cp.async.wait_group 2;
mov.f32 %f1, 0f3F800000; min.f32 %f1, %f2, %f3; abs.f32 %f1, %f2; fma.rn.f32 %f1, %f2, %f3, %f4;
// begin inline asm
griddepcontrol.launch_dependents;
// end inline asm
shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1; dp4a.s32.s32 %r1, %r2, %r3, %r4; prmt.b32 %r1, %r2, %r3, 0x5140;";
        assert_eq!(rules(body), []);
    }

    /// In a kernel that is for one target, `wgmma` is allowed, in inline assembly too.
    #[test]
    fn what_one_target_has_is_for_kernels_of_that_target() {
        let entry = ".entry k()\n{\n// begin inline asm\n{ .reg .pred p; setp.ne.b32 p, 0, 0; \
                     wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1, %r2, %r3, %r4}, %rd1, %rd2, p; }\n\
                     // end inline asm\n}\n";
        let found = |text: &str| check(&ptx::parse(text)).iter().map(|found| found.rule).collect::<Vec<_>>();
        assert_eq!(found(&format!(".target sm_90\n{entry}")), [Rule::OneTarget]);
        assert_eq!(found(&format!(".target sm_80\n{entry}")), [Rule::OneTarget]);
        let text = format!(".target sm_90a\n// simt.only_begin k 90\n{entry}// simt.only_end k\n");
        assert_eq!(found(&text), []);
        let other = text.replace("begin k", "begin j");
        assert_eq!(found(&other), [Rule::OneTarget]);
    }

    #[test]
    fn comments_and_names_do_not_fire() {
        assert_eq!(
            rules("// add.ftz.f32 %f1, %f2, %f3;\n/* ld.b32 %r1, [%rd1]; */\nmov.u32 %r1, add_f32;"),
            []
        );
    }

    #[test]
    fn several_on_a_line_and_repeats_are_counted_with_the_first_line() {
        let text = ".entry a()\n{\nret; ld.b32 %r1, [%rd1]; add.f32 %f1,\n%f2, %f3; ld.b32 %r2, [%rd1];\n}\n.entry b()\n{\n@!%p ld.u8 %r1, [%rd1];\n}\n";
        let found = check(&ptx::parse(text));
        let short: Vec<_> = found.iter().map(|f| (f.rule, f.entry.as_str(), f.line, f.count)).collect();
        assert_eq!(
            short,
            [
                (Rule::GenericAddress, "a", 3, 2),
                (Rule::Rounding, "a", 3, 1),
                (Rule::GenericAddress, "b", 8, 1)
            ]
        );
        let line = found[0].to_string();
        assert!(
            line.contains("[generic-address] kernel a, PTX line 3: `ld.b32 %r1, [%rd1]` and 1 more: "),
            "{line}"
        );
    }

    #[test]
    fn names_lead_back_to_their_rules() {
        for rule in Rule::ALL {
            assert_eq!(Rule::from_name(rule.name()), Some(rule));
        }
        assert_eq!(Rule::from_name("speed"), None);
    }
}
