//! Where a block's shared memory begins, read once.
//!
//! From sm_90 on ptxas makes the address of the dynamic shared memory from a special register, the block's place
//! in its cluster, and it does so again wherever the address is wanted: reading such a register takes longer than
//! the load behind it. So an entry gets the address from a shuffle, which ptxas cannot do twice, and keeps it.
//!
//! Entries with bulk copies, barriers in shared memory or `wgmma` are left alone. These want addresses in uniform
//! registers, and a shuffle's result is not in one.

use crate::ptx::Module;

/// The first target whose shared memory has an address that is read.
const FIRST: u32 = 90;
/// The array that `simt`'s handles are in.
const ARRAY: &str = "simt_dynamic_shared";
/// The register with its address.
pub(crate) const BASE: &str = "%simt_shared_base";
/// What wants addresses in uniform registers.
const UNIFORM: [&str; 4] = ["wgmma.", "cp.async.bulk", "mbarrier.", "mapa."];

/// The text for `sm`, where entries that name the array more than once read its address once. `module` is what
/// [`crate::ptx::parse`] reads from `text`.
pub fn read_once(text: String, module: &Module, sm: u32) -> String {
    if sm < FIRST || !text.contains(ARRAY) {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for function in module.functions.iter().filter(|function| function.is_entry && function.is_defined) {
        let body = function.header.end..function.end;
        let Some(brace) = text[body.clone()].find('{') else { continue };
        let start = body.start + brace + 1;
        let inside = &text[start..function.end];
        let wanted = inside.matches(ARRAY).count() > 1;
        if !wanted || UNIFORM.iter().any(|opcode| inside.contains(opcode)) {
            continue;
        }
        out.push_str(&text[from..start]);
        out.push_str(&format!(
            "\n\t.reg .b32 {BASE}, {BASE}_mask;\n\tmov.u32 {BASE}, {ARRAY};\n\tactivemask.b32 {BASE}_mask;\n\t\
             shfl.sync.idx.b32 {BASE}, {BASE}, 0, 31, {BASE}_mask;"
        ));
        for line in inside.split_inclusive('\n') {
            match of_lane(line) {
                Some(register) => out.push_str(&format!("\tmov.u32 {register}, {BASE};\n")),
                None => out.push_str(&line.replace(&format!(", {ARRAY};"), &format!(", {BASE};"))),
            }
        }
        from = function.end;
    }
    out.push_str(&text[from..]);
    out
}

/// The register that a line puts the address in, if it does so lane by lane: a shuffle's result is of a lane in any
/// case.
fn of_lane(line: &str) -> Option<&str> {
    if !line.contains("%lanemask_eq") {
        return None;
    }
    let (_, rest) = line.split_once(ARRAY)?;
    let (_, rest) = rest.split_once("add.u32 ")?;
    rest.split_once(',').map(|(register, _)| register.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx;

    const ENTRY: &str = "\
.visible .entry a(
\t.param .u64 a_0
)
.maxntid 128, 1, 1
{
\t.reg .b32 \t%r<4>;

\tmov.u32 %r1, simt_dynamic_shared;
\t{ .reg .b32 l, m; mov.u32 l, %laneid; mov.u32 m, %lanemask_eq; and.b32 l, l, m; mov.u32 m, simt_dynamic_shared; add.u32 %r2, m, l; }
\tret;
}
";

    fn read_once(text: &str, sm: u32) -> String {
        super::read_once(text.to_owned(), &ptx::parse(text), sm)
    }

    #[test]
    fn an_entry_reads_the_address_once() {
        let source = format!(".extern .shared .align 1024 .b8 {ARRAY}[];\n{ENTRY}");
        let text = read_once(&source, 90);
        assert_eq!(text.matches(ARRAY).count(), 2, "{text}");
        for line in [
            "\tmov.u32 %simt_shared_base, simt_dynamic_shared;\n",
            "\tmov.u32 %r1, %simt_shared_base;\n",
            "\tmov.u32 %r2, %simt_shared_base;\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(!text.contains("%lanemask_eq"), "{text}");
        assert_eq!(read_once(&source, 89), source, "older targets have the address");
        // Once is once.
        let (first, last) = ENTRY.split_once("\t{ .reg").unwrap();
        let once = format!("{first}{}", last.split_once('\n').unwrap().1);
        assert_eq!(read_once(&once, 90), once);
    }

    #[test]
    fn what_wants_uniform_registers_is_left_alone() {
        for instruction in ["wgmma.fence.sync.aligned;", "mbarrier.init.shared.b64 [%r1], 1;"] {
            let source = ENTRY.replace("\tret;", &format!("\t{instruction}\n\tret;"));
            assert_eq!(read_once(&source, 90), source);
        }
        let both = format!("{}{ENTRY}", ENTRY.replace("\tret;", "\tcp.async.bulk.wait_group 0;\n\tret;"));
        assert_eq!(read_once(&both, 90).matches(ARRAY).count(), 3);
    }
}
