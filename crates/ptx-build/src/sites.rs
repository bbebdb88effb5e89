//! Places where a kernel may stop with a message: `// simt.site FILE:LINE:COLUMN MESSAGE`.
//!
//! `assert!` and `panic!` leave such a comment in their inline assembly, and the name `simt_site` where the
//! site's number is wanted. Here each gets one, from 1 on, and the comment becomes
//! `// simt.site NUMBER ENTRY FILE:LINE:COLUMN MESSAGE`, which the device layer reads when a grid has
//! stopped.

use crate::ptx;

/// What the comment starts with, behind `//`.
const SITE: &str = "// simt.site ";
/// What the number takes the place of.
const NUMBER: &str = "simt_site";
/// The variable that holds the address of what the host reads, ahead of the first function.
const RECORD: &str = ".visible .global .align 8 .u64 simt_stop_record = 0;\n";
/// Ahead of this directive's end nothing may be declared.
const ADDRESS_SIZE: &str = ".address_size";

/// The text with every site numbered.
pub fn number(source: String) -> String {
    if !source.contains(SITE) {
        return source;
    }
    let module = ptx::parse(&source);
    let mut text = String::with_capacity(source.len() + 64 * 1024);
    let (mut number, mut declared, mut offset) = (0, false, 0);
    for line in source.split_inclusive('\n') {
        let indented = line.trim_start();
        if let Some(site) = indented.strip_prefix(SITE) {
            number += 1;
            let function = module.functions.iter().rfind(|f| f.is_defined && f.header.start <= offset);
            let entry = function.map_or("?", |function| function.name.as_str());
            let indent = &line[..line.len() - indented.len()];
            text.push_str(&format!("{indent}{SITE}{number} {entry} {site}"));
        } else if line.contains(NUMBER) {
            text.push_str(&line.replace(NUMBER, &number.to_string()));
        } else {
            text.push_str(line);
        }
        if !declared && indented.starts_with(ADDRESS_SIZE) {
            text.push_str(RECORD);
            declared = true;
        }
        offset += line.len();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
.version 8.0
.target sm_90
.address_size 64
.visible .entry a()
{
\t// begin inline asm
\t// simt.site src/a.rs:3:5 no
\tst.global.u32 [record+4], simt_site;
\t// end inline asm
\tret;
}
.visible .entry b()
{
\t// simt.site src/a.rs:9:5 {0} of {1}
\tst.global.u32 [record+4], simt_site;
\t// simt.site src/a.rs:3:5 no
\tst.global.u32 [record+4], simt_site;
}
";

    #[test]
    fn sites_are_numbered_and_name_their_entry() {
        let text = number(SOURCE.to_owned());
        let sites: Vec<&str> =
            text.lines().filter(|line| line.contains("simt.site")).map(str::trim).collect();
        assert_eq!(
            sites,
            [
                "// simt.site 1 a src/a.rs:3:5 no",
                "// simt.site 2 b src/a.rs:9:5 {0} of {1}",
                "// simt.site 3 b src/a.rs:3:5 no",
            ]
        );
        let stores: Vec<&str> =
            text.lines().filter(|line| line.contains("st.global")).map(str::trim).collect();
        assert_eq!(stores, [1, 2, 3].map(|n| format!("st.global.u32 [record+4], {n};")));
        assert!(text.contains(".address_size 64\n.visible .global .align 8 .u64 simt_stop_record = 0;\n"));
    }

    #[test]
    fn text_without_sites_is_left_alone() {
        let text = ".address_size 64\n.visible .entry a()\n{\n\tret;\n}\n";
        assert_eq!(number(text.to_owned()), text);
    }
}
