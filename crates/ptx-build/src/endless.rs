//! The lint's rule of loops that nothing leaves: what LLVM makes of a wait for a word that it may read once.
//!
//! `while flag.load(0) == 0 {}` reads the word by a plain load. Nothing says that another thread writes it,
//! so LLVM reads it once ahead of the loop, whose body is then a jump to itself.

use crate::ptx::{Module, Statement};
use std::collections::{BTreeSet, HashMap};

/// The statements, by their place in the module, that begin what never ends: no way leads from them to the
/// end of their function, and one leads to them.
pub(crate) fn endless(module: &Module) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut start = 0;
    while start < module.statements.len() {
        let function = module.statements[start].function;
        let of = module.statements[start..].iter().take_while(|statement| statement.function == function);
        let end = start + of.count();
        if function.is_some() {
            let first = first_endless(&module.statements[start..end]);
            found.extend(first.map(|at| start + at));
        }
        start = end;
    }
    found
}

/// Where control goes from a statement.
#[derive(Default)]
struct Ways {
    /// To these.
    to: Vec<usize>,
    /// Out of the function, or where a label does not tell.
    ends: bool,
}

fn ways(statements: &[Statement]) -> Vec<Ways> {
    // In inline assembly a label may be there more than once, in scopes of its own.
    let mut labels: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, statement) in statements.iter().enumerate() {
        for label in &statement.labels {
            labels.entry(label).or_default().push(at);
        }
    }
    let of = |(at, statement): (usize, &Statement)| {
        let mut ways = Ways::default();
        let mut goes_on = true;
        if let Some(instruction) = &statement.instruction {
            match instruction.name() {
                "bra" => {
                    match labels.get(instruction.operands.trim()) {
                        Some(targets) => ways.to.extend(targets),
                        None => ways.ends = true,
                    }
                    goes_on = instruction.predicate.is_some();
                }
                "brx" | "ret" | "exit" | "trap" => {
                    ways.ends = true;
                    goes_on = instruction.predicate.is_some();
                }
                _ => {}
            }
        }
        if goes_on && at + 1 < statements.len() {
            ways.to.push(at + 1);
        } else if goes_on {
            ways.ends = true;
        }
        ways
    };
    statements.iter().enumerate().map(of).collect()
}

/// The first statement of a function that control comes to and from which it never leaves.
fn first_endless(statements: &[Statement]) -> Option<usize> {
    let ways = ways(statements);
    let mut from: Vec<Vec<usize>> = vec![Vec::new(); ways.len()];
    for (at, ways) in ways.iter().enumerate() {
        ways.to.iter().for_each(|to| from[*to].push(at));
    }
    let all = |roots: Vec<usize>, next: &dyn Fn(usize) -> Vec<usize>| {
        let mut seen = vec![false; ways.len()];
        let mut left = roots;
        while let Some(at) = left.pop() {
            if !std::mem::replace(&mut seen[at], true) {
                left.extend(next(at));
            }
        }
        seen
    };
    let ends = (0..ways.len()).filter(|at| ways[*at].ends).collect();
    let leaves = all(ends, &|at| from[at].clone());
    let comes = all(vec![0], &|at| ways[at].to.clone());
    (0..ways.len()).find(|at| comes[*at] && !leaves[*at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lint::{self, Rule};
    use crate::ptx;

    /// The lines of a function's body whose statements are found, the first being 1.
    fn found(body: &str) -> Vec<usize> {
        let module = ptx::parse(&format!(
            ".version 8.0\n.target sm_90\n.entry other() {{ ret; }}\n.entry k()\n{{\n{body}\n}}\n"
        ));
        let lines: Vec<usize> =
            endless(&module).into_iter().map(|at| module.statements[at].line - 5).collect();
        let of_lint = lint::check(&module).into_iter().filter(|found| found.rule == Rule::EndlessLoop);
        assert_eq!(of_lint.map(|found| found.line - 5).collect::<Vec<_>>(), lines);
        lines
    }

    #[test]
    fn a_jump_to_itself_never_ends() {
        let hoisted = "\
ld.global.b32 %r1, [%rd1];
setp.ne.s32 %p1, %r1, 0;
@%p1 bra $L__BB0_2;
$L__BB0_1:
bra.uni $L__BB0_1;
$L__BB0_2:
ret;";
        assert_eq!(found(hoisted), [5]);
        // Whatever stands in it, and over more than one block.
        let body = "$A: mov.u32 %r1, %r2;\nst.global.b32 [%rd1], %r1; @%p1 bra $B;\nmov.u32 %r2, 1;\n$B:\nbra $A;\nret;";
        assert_eq!(found(body), [1]);
    }

    #[test]
    fn a_loop_that_looks_each_time_may_end() {
        let waits = "$L__BB0_1:\nld.acquire.gpu.global.b32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 0;\n@%p1 bra $L__BB0_1;\nret;";
        assert_eq!(found(waits), []);
        // A way out in the middle, by a return, a trap, or a table of places.
        for way in ["@%p1 ret", "@!%p1 bra $C", "@%p1 trap", "brx.idx %r1, $table"] {
            assert_eq!(found(&format!("$A:\n{way};\nbra $A;\n$C: ret;")), []);
        }
        // The end of a function without a return, and what nobody comes to.
        assert_eq!(found("mov.u32 %r1, 1;"), []);
        assert_eq!(found("ret;\n$A: bra $A;"), []);
        // Scopes of inline assembly that have the same label.
        let scope = "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2; @p bra D; bra W; D: }";
        assert_eq!(found(&format!("{scope}\n{scope}\nret;")), []);
    }
}
