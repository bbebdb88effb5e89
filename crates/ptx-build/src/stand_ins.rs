//! Instructions that others stand for until the target is known.
//!
//! A package is compiled for the lowest target of its build, and LLVM refuses intrinsics that this one has
//! not. Inline assembly would do, but for instructions that threads execute together: LLVM does not know it
//! as convergent. Such an instruction is compiled as a block barrier of a number that no GPU has, which LLVM
//! keeps where it is; here it becomes what it stands for. An assembler refuses one that was forgotten.

/// By the number, the instruction.
pub const STAND_INS: [(&str, &str); 2] =
    [("9001", "barrier.cluster.arrive.aligned;"), ("9002", "barrier.cluster.wait.aligned;")];

/// The text with the instructions in the places of what stands for them.
pub fn replace(source: String) -> String {
    if !STAND_INS.iter().any(|(number, _)| source.contains(number)) {
        return source;
    }
    let mut text = String::with_capacity(source.len());
    for line in source.split_inclusive('\n') {
        match stands_for(line) {
            Some(instruction) => {
                text.push_str(&line[..line.len() - line.trim_start().len()]);
                text.push_str(instruction);
                text.push_str(&line[line.trim_end().len()..]);
            }
            None => text.push_str(line),
        }
    }
    text
}

fn stands_for(line: &str) -> Option<&'static str> {
    let (opcode, number) = line.trim().strip_suffix(';')?.split_once(char::is_whitespace)?;
    let is_barrier = opcode.starts_with("bar.") || opcode.starts_with("barrier.");
    STAND_INS.iter().find(|(known, _)| is_barrier && *known == number.trim()).map(|(_, stands)| *stands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_no_barrier_has_is_an_instruction() {
        let source =
            "\tbar.sync \t9001;\n\tbarrier.sync 9002;\r\n\tbar.sync \t0;\n// 9001\nadd.s32 %r1, 9001;";
        let text = "\tbarrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;\r\n\tbar.sync \t0;\n// 9001\nadd.s32 %r1, 9001;";
        assert_eq!(replace(source.to_owned()), text);
        for same in ["bar.sync \t%r9001;\n", "bar.sync 9001, 32;", "mov.b32 %r1, 9001;", ""] {
            assert_eq!(replace(same.to_owned()), same);
        }
    }
}
