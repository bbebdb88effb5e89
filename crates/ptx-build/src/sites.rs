//! Places where a kernel may stop with a message, `// simt.site FILE:LINE:COLUMN MESSAGE`, and those where it
//! prints a line, `// simt.print FILE:LINE:COLUMN TEXT`.
//!
//! `assert!`, `panic!` and `println!` leave such a comment in their inline assembly, and the name `simt_site`
//! or `simt_print_site` where the site's number is wanted. Here each gets one, from 1 on, those that print
//! and those that stop for themselves, and the comment becomes `// simt.site NUMBER ENTRY FILE:LINE:COLUMN
//! MESSAGE`, which the device layer reads.

use crate::ptx;

/// What sites of one sort are known by.
struct Sort {
    /// What the comment starts with.
    comment: &'static str,
    /// What the number takes the place of.
    number: &'static str,
    /// The variable that holds the address of what the host reads, ahead of the first function.
    variable: &'static str,
}

const SORTS: [Sort; 2] = [
    Sort {
        comment: "// simt.site ",
        number: "simt_site",
        variable: ".visible .global .align 8 .u64 simt_stop_record = 0;\n",
    },
    Sort {
        comment: "// simt.print ",
        number: "simt_print_site",
        variable: ".visible .global .align 8 .u64 simt_print_ring[3];\n",
    },
];

/// Ahead of this directive's end nothing may be declared.
const ADDRESS_SIZE: &str = ".address_size";

/// The text with every site numbered.
pub fn number(source: String) -> String {
    SORTS.iter().fold(source, number_sort)
}

fn number_sort(source: String, sort: &Sort) -> String {
    if !source.contains(sort.comment) {
        return source;
    }
    let module = ptx::parse(&source);
    let mut text = String::with_capacity(source.len() + 64 * 1024);
    let (mut number, mut declared, mut offset) = (0, false, 0);
    for line in source.split_inclusive('\n') {
        let indented = line.trim_start();
        if let Some(site) = indented.strip_prefix(sort.comment) {
            number += 1;
            let function = module.functions.iter().rfind(|f| f.is_defined && f.header.start <= offset);
            let entry = function.map_or("?", |function| function.name.as_str());
            let indent = &line[..line.len() - indented.len()];
            text.push_str(&format!("{indent}{}{number} {entry} {site}", sort.comment));
        } else if line.contains(sort.number) && !indented.starts_with("//") {
            text.push_str(&line.replace(sort.number, &number.to_string()));
        } else {
            text.push_str(line);
        }
        if !declared && indented.starts_with(ADDRESS_SIZE) {
            text.push_str(sort.variable);
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
    fn those_that_print_have_numbers_of_their_own() {
        let print =
            "\t// simt.print src/a.rs:4:5 simt_print_site, simt_site\n\tst.u32 [r+8], simt_print_site;\n";
        let source = SOURCE.replacen("\tret;\n", &format!("{print}{print}\tret;\n"), 1);
        let (text, without) = (number(source), number(SOURCE.to_owned()));
        let printed = |n| {
            format!("\t// simt.print {n} a src/a.rs:4:5 simt_print_site, simt_site\n\tst.u32 [r+8], {n};\n")
        };
        let variable = ".visible .global .align 8 .u64 simt_print_ring[3];\n";
        assert_eq!(text.matches(variable).count(), 1);
        let rest = text.replacen(variable, "", 1).replacen(&(printed(1) + &printed(2)), "", 1);
        assert_eq!(rest, without);
    }

    #[test]
    fn text_without_sites_is_left_alone() {
        let text = ".address_size 64\n.visible .entry a()\n{\n\tret;\n}\n";
        assert_eq!(number(text.to_owned()), text);
    }
}
