//! The lint's rule of kernels that overlap: they wait for the launch ahead of them before what that one could
//! disturb.
//!
//! A launch may start while those ahead of it run, and what it does before its wait must not depend on them,
//! nor they on it: it reads parameters, by `load_ahead` memory that nobody writes, and by `peek` what nothing
//! but hints depends on. On the straight path, where every thread comes by.

use crate::opcodes::{CONVERGENT, MEMORY};
use crate::ptx::{Instruction, Module, Statement};

/// Where the entries that overlap wait for the launch before.
pub(crate) struct Waits<'a> {
    module: &'a Module,
    /// Of targets below sm_90 no launch starts early, and there is no wait.
    may_overlap: bool,
    function: Option<usize>,
    /// Waits of the function so far.
    seen: usize,
}

impl<'a> Waits<'a> {
    pub(crate) fn new(module: &'a Module) -> Self {
        Waits { module, may_overlap: module.target() >= 90, function: None, seen: 0 }
    }

    /// Follows `statement`, and says whether it is one wait too many, or stands before the wait and must not.
    /// An entry without a wait breaks the rule by its first access or branch, its `ret` at the latest.
    pub(crate) fn are_broken_by(&mut self, statement: &Statement) -> bool {
        if statement.function != self.function {
            (self.function, self.seen) = (statement.function, 0);
        }
        let (Some(instruction), Some(function)) = (&statement.instruction, statement.function) else {
            return false;
        };
        let overlaps =
            self.may_overlap && self.module.overlapping.contains(&self.module.functions[function].name);
        if instruction.name() == "griddepcontrol" && instruction.has("wait") {
            self.seen += 1;
            return !overlaps || self.seen > 1 || instruction.predicate.is_some();
        }
        overlaps && self.seen == 0 && !may_come_before_the_wait(instruction)
    }
}

/// Of what touches memory or leaves the straight path: parameters, hints, and the loads that are made for
/// this place. Read-only ones are not: ptxas moves them behind the wait.
fn may_come_before_the_wait(instruction: &Instruction) -> bool {
    match instruction.name() {
        "ld" => {
            let space =
                |name: &str| instruction.modifiers().iter().any(|part| part.split("::").next() == Some(name));
            space("param")
                || space("const")
                || (space("global") && instruction.has("L1::no_allocate") && !instruction.has("nc"))
                || (space("global") && instruction.has("relaxed") && instruction.has("gpu"))
        }
        "prefetch" | "prefetchu" | "cvta" | "mov" => true,
        "cp" => instruction.has("prefetch"),
        name => {
            !BEFORE_THE_WAIT_NOT.contains(&name) && !CONVERGENT.contains(&name) && !MEMORY.contains(&name)
        }
    }
}

/// What else must not stand before the wait.
const BEFORE_THE_WAIT_NOT: [&str; 14] = [
    "bra",
    "brx",
    "call",
    "cp",
    "exit",
    "fence",
    "membar",
    "nanosleep",
    "red",
    "ret",
    "suld",
    "sust",
    "tex",
    "trap",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lint::{self, Rule};
    use crate::ptx;

    /// Which statements break the rule of the wait, in an entry that overlaps.
    fn early(target: u32, body: &str) -> Vec<usize> {
        let text = format!(
            ".version 8.0\n.target sm_{target}\n// simt.overlaps k\n.visible .entry other()\n{{ ret; }}\n\
             .visible .entry k(\n.param .u64 p\n)\n{{\n{body}\n}}\n"
        );
        let module = ptx::parse(&text);
        let mut waits = Waits::new(&module);
        let broken = module.statements.iter().filter(|statement| waits.are_broken_by(statement));
        let found: Vec<usize> = broken.map(|statement| statement.line - 10).collect();
        let count =
            lint::check(&module).iter().filter(|f| f.rule == Rule::Wait).map(|f| f.count).sum::<usize>();
        assert_eq!(count, found.len());
        found
    }

    #[test]
    fn before_the_wait_come_only_loads_that_are_made_for_it() {
        let good = "\
ld.param.b64 %rd1, [p];
cvta.to.global.u64 %rd2, %rd1; mov.u32 %r1, %tid.x; add.s32 %r2, %r1, 1; selp.b32 %r3, %r1, %r2, %p1;
// begin inline asm
{ .reg .b64 g; cvta.to.global.u64 g, %rd1; ld.global.L1::no_allocate.v4.b32 {%r4, %r5, %r6, %r7}, [g]; }
@%p2 cp.async.bulk.prefetch.L2.global [%rd2], %r9; prefetch.global.L2 [%rd2];
{ .reg .b64 g; cvta.to.global.u64 g, %rd1; ld.relaxed.gpu.global.b32 %r8, [g]; }
griddepcontrol.launch_dependents;
griddepcontrol.wait;
// end inline asm
@%p1 bra $L__1;
ld.global.b32 %r1, [%rd2]; st.global.b32 [%rd2], %r1; bar.sync 0; cp.async.commit_group;
$L__1:
ret;";
        assert_eq!(early(90, good), []);
        assert_eq!(early(100, good), []);
        // No wait at all: what first needed one, and all that follows.
        let without = good.replace("griddepcontrol.wait;\n", "");
        assert_eq!(early(90, &without), [8, 9, 9, 9, 9, 11]);
        assert_eq!(early(80, &without), []);
        assert_eq!(early(90, "ret;"), [0]);

        for bad in [
            "ld.global.b32 %r1, [%rd1];",
            "ld.volatile.global.b32 %r1, [%rd1];",
            "ld.acquire.gpu.global.b32 %r1, [%rd1];",
            "ld.relaxed.gpu.shared.b32 %r1, [%r2];",
            "ld.shared.b32 %r1, [%r2];",
            "ld.global.nc.b32 %r1, [%rd1];",
            "ld.global.nc.L1::no_allocate.b32 %r1, [%rd1];",
            "st.global.b32 [%rd1], %r1;",
            "st.shared.b32 [%r1], %r2;",
            "atom.global.add.u32 %r1, [%rd1], 1;",
            "red.global.add.u32 [%rd1], 1;",
            "bar.sync 0;",
            "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
            "fence.acq_rel.gpu;",
            "cp.async.cg.shared.global [%r1], [%rd1], 16;",
            "@%p1 bra $L__2;",
            "bra.uni $L__2;",
            "@%p1 ret;",
            "@%p1 exit;",
            "trap;",
            "@%p1 griddepcontrol.wait;",
        ] {
            let body = format!("ld.param.b64 %rd1, [p];\n{bad}\ngriddepcontrol.wait;\nret;");
            // A wait on a condition is none, and then the next is one too many.
            let found = if bad.contains("griddepcontrol") { vec![1, 2] } else { vec![1] };
            assert_eq!(early(90, &body), found, "{bad}");
        }
        assert_eq!(early(90, "griddepcontrol.wait;\ngriddepcontrol.wait;\nret;"), [1]);
    }
}
