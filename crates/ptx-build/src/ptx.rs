//! A reader of PTX: statements, functions and instructions with their line numbers.
//!
//! It knows what the lint and the directives need: comments, strings, scopes, labels, predicates, vector
//! operands in braces, several statements on a line and statements over several lines. It does not check
//! that the PTX is right; ptxas does.

use crate::needs::ONLY_BEGIN;
use std::collections::BTreeSet;
use std::ops::Range;

/// A PTX module, read.
#[derive(Debug, Default)]
pub struct Module {
    /// Entries and functions, in order; a function may stand here twice, declared and defined.
    pub functions: Vec<Function>,
    /// Every statement of the module, in order.
    pub statements: Vec<Statement>,
    /// The lines between LLVM's marks of inline assembly, each block a range, from 1.
    pub inline_assembly: Vec<Range<usize>>,
    /// The entries that may start before the launch ahead of them is done: those that comments of the kernel
    /// macro name, `// simt.overlaps ENTRY`.
    pub overlapping: BTreeSet<String>,
    /// The entries that are for GPUs of one compute capability: those between the lines that
    /// [`needs::only`](crate::needs::only) leaves, `// simt.only_begin ENTRY SM` and `// simt.only_end
    /// ENTRY`.
    pub of_one_target: BTreeSet<String>,
}

impl Module {
    /// The target's number, 90 for sm_90; 0 if the text names none.
    pub fn target(&self) -> u32 {
        let named = self.statements.iter().find_map(|statement| statement.text.strip_prefix(".target sm_"));
        let digits: String = named.unwrap_or_default().chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or(0)
    }

    /// Does inline assembly of the source hold the statement?
    pub fn is_inline_assembly(&self, statement: &Statement) -> bool {
        let after = self.inline_assembly.partition_point(|block| block.start <= statement.line);
        after > 0 && self.inline_assembly[after - 1].contains(&statement.line)
    }
}

/// What a comment starts with, behind `//`, that names an entry which overlaps.
const OVERLAPS: &str = "simt.overlaps ";

fn overlapping(source: &str) -> BTreeSet<String> {
    let named =
        |line: &str| Some(line.trim().strip_prefix("//")?.trim().strip_prefix(OVERLAPS)?.trim().to_owned());
    source.lines().filter_map(named).collect()
}

fn of_one_target(source: &str) -> BTreeSet<String> {
    let named = |line: &str| {
        let rest = line.trim().strip_prefix("//")?.trim_start().strip_prefix(ONLY_BEGIN)?;
        rest.split_whitespace().next().map(str::to_owned)
    };
    source.lines().filter_map(named).collect()
}

/// The lines that LLVM marks as inline assembly.
fn inline_assembly(source: &str) -> Vec<Range<usize>> {
    let mut blocks: Vec<Range<usize>> = Vec::new();
    let mut open = None;
    for (index, line) in source.lines().enumerate() {
        match line.trim() {
            "// begin inline asm" => open = Some(index + 2),
            "// end inline asm" => blocks.extend(open.take().map(|start| start..index + 1)),
            _ => {}
        }
    }
    blocks
}

/// An `.entry` or a `.func`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Is it an `.entry`?
    pub is_entry: bool,
    /// Has it a body?
    pub is_defined: bool,
    /// The line of its header.
    pub line: usize,
    /// Where in the text its header stands.
    pub header: Range<usize>,
    /// The offset just behind its parameter list (or its name, if it has none).
    pub after_params: usize,
    /// The offset just behind its body; that of its header's end, if it has none.
    pub end: usize,
}

/// One statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The line it starts on, from 1.
    pub line: usize,
    /// Its text, on one line, without comments and the semicolon.
    pub text: String,
    /// Index into [`Module::functions`] of the function whose body holds it.
    pub function: Option<usize>,
    /// The instruction, if it is one, and not a directive.
    pub instruction: Option<Instruction>,
    /// The labels that stand ahead of it.
    pub labels: Vec<String>,
}

/// An instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// The predicate without `@`, for example `%p1` or `!%p1`.
    pub predicate: Option<String>,
    /// The opcode's parts: `ld`, `global`, `b32`.
    pub opcode: Vec<String>,
    /// What follows the opcode.
    pub operands: String,
}

impl Instruction {
    /// The first part of the opcode.
    pub fn name(&self) -> &str {
        self.opcode.first().map_or("", String::as_str)
    }

    /// The parts behind the first.
    pub fn modifiers(&self) -> &[String] {
        self.opcode.get(1..).unwrap_or_default()
    }

    /// Is `part` one of the modifiers?
    pub fn has(&self, part: &str) -> bool {
        self.modifiers().iter().any(|modifier| modifier == part)
    }

    fn parse(text: &str) -> Option<Instruction> {
        let (predicate, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let rest = rest.trim_start();
                let end = rest.find(char::is_whitespace)?;
                (Some(rest[..end].to_owned()), rest[end..].trim_start())
            }
            None => (None, text),
        };
        let end = rest.find(|c: char| !is_word(c) && c != '.' && c != ':').unwrap_or(rest.len());
        let opcode: Vec<String> = rest[..end].split('.').map(str::to_owned).collect();
        if opcode[0].is_empty() {
            return None;
        }
        Some(Instruction { predicate, opcode, operands: rest[end..].trim().to_owned() })
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

/// Directives that end with their line and not with a semicolon.
const LINE_DIRECTIVES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

/// `source` with comments turned into spaces and the contents of strings into underscores, so that every
/// offset and every line stays where it was.
fn mask(source: &str) -> Vec<u8> {
    let mut text = source.as_bytes().to_vec();
    let mut at = 0;
    while at < text.len() {
        let (end, filler, keep) = match text[at] {
            b'/' if text.get(at + 1) == Some(&b'/') => {
                (find(&text, at, b"\n").unwrap_or(text.len()), b' ', 0)
            }
            b'/' if text.get(at + 1) == Some(&b'*') => {
                (find(&text, at + 2, b"*/").map_or(text.len(), |end| end + 2), b' ', 0)
            }
            b'"' => (find(&text, at + 1, b"\"").map_or(text.len(), |end| end + 1), b'_', 1),
            _ => {
                at += 1;
                continue;
            }
        };
        let last = text.len().min(end);
        for byte in &mut text[(at + keep).min(last)..last.saturating_sub(keep).max((at + keep).min(last))] {
            if *byte != b'\n' {
                *byte = filler;
            }
        }
        at = end;
    }
    text
}

fn find(text: &[u8], from: usize, needle: &[u8]) -> Option<usize> {
    let from = from.min(text.len());
    text[from..].windows(needle.len()).position(|window| window == needle).map(|at| from + at)
}

/// Reads a module.
pub fn parse(source: &str) -> Module {
    let module = Reader {
        text: &mask(source),
        at: 0,
        counted: 0,
        line: 1,
        labels: Vec::new(),
        module: Module::default(),
    };
    let mut module = module.read();
    module.inline_assembly = inline_assembly(source);
    module.overlapping = overlapping(source);
    module.of_one_target = of_one_target(source);
    module
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    /// Lines are counted as far as this offset.
    counted: usize,
    line: usize,
    /// Labels behind the last statement.
    labels: Vec<String>,
    module: Module,
}

impl Reader<'_> {
    fn read(mut self) -> Module {
        let mut depth = 0_usize;
        // The function whose header was the last statement, and the one whose body is open.
        let mut headed = None;
        let mut open: Option<usize> = None;
        while let Some(&byte) = self.text.get(self.at) {
            match byte {
                b'{' => {
                    if depth == 0 {
                        open = headed.take();
                        if let Some(index) = open {
                            let function: &mut Function = &mut self.module.functions[index];
                            function.is_defined = true;
                        }
                    }
                    depth += 1;
                    self.at += 1;
                }
                b'}' => {
                    depth = depth.saturating_sub(1);
                    self.at += 1;
                    if depth == 0 {
                        self.labels.clear();
                        if let Some(index) = open.take() {
                            self.module.functions[index].end = self.at;
                        }
                    }
                }
                b';' => {
                    headed = None;
                    self.at += 1;
                }
                byte if byte.is_ascii_whitespace() => self.at += 1,
                _ => {
                    if let Some(index) = self.statement(open) {
                        headed = Some(index);
                    }
                }
            }
        }
        self.module
    }

    /// Reads the statement that starts here; answers the function's index if it is a function's header.
    fn statement(&mut self, function: Option<usize>) -> Option<usize> {
        let start = self.at;
        let line = self.line_of(start);
        if self.text[start] == b'.' {
            let word = self.word_at(start);
            if LINE_DIRECTIVES.contains(&word.as_str()) {
                self.at = find(self.text, start, b"\n").unwrap_or(self.text.len());
                self.push(start, line, function, false);
                return None;
            }
            // A function's header ends before its body; any other directive at its semicolon.
            let end = self.end(start, true);
            if let Some(header) = self.header(start..end, line) {
                self.at = end;
                self.push(start, line, None, false);
                self.module.functions.push(header);
                return Some(self.module.functions.len() - 1);
            }
            self.at = self.end(start, false);
            self.push(start, line, function, false);
            return None;
        }
        if let Some(behind) = self.label(start) {
            self.labels.push(self.word_at(start));
            self.at = behind;
            return None;
        }
        self.at = self.end(start, false);
        self.push(start, line, function, true);
        None
    }

    /// The end of the statement at `start`: a semicolon outside every bracket, or, for a header, its brace.
    fn end(&self, start: usize, at_brace: bool) -> usize {
        let mut depth = 0_usize;
        for (offset, &byte) in self.text[start..].iter().enumerate() {
            match byte {
                b'{' if at_brace && depth == 0 => return start + offset,
                b'{' | b'(' | b'[' => depth += 1,
                // An unmatched brace closes the scope around a statement that lacks its semicolon.
                b'}' if depth == 0 => return start + offset,
                b'}' | b')' | b']' => depth = depth.saturating_sub(1),
                b';' if depth == 0 => return start + offset,
                _ => {}
            }
        }
        self.text.len()
    }

    /// If a label starts at `start`, the offset behind its colon.
    fn label(&self, start: usize) -> Option<usize> {
        let word = start + self.text[start..].iter().position(|&byte| !is_word(byte as char))?;
        let colon = word + self.text[word..].iter().position(|byte| !byte.is_ascii_whitespace())?;
        (word > start && self.text[colon] == b':' && self.text.get(colon + 1) != Some(&b':'))
            .then_some(colon + 1)
    }

    fn header(&self, range: Range<usize>, line: usize) -> Option<Function> {
        let text = &self.text[range.clone()];
        let kind_at = |kind: &[u8]| {
            let at = find(text, 0, kind)?;
            let next = text.get(at + kind.len()).copied().unwrap_or(b' ');
            (!is_word(next as char)).then_some(at)
        };
        let (is_entry, mut at) = match (kind_at(b".entry"), kind_at(b".func")) {
            (Some(at), _) => (true, at + 6),
            (None, Some(at)) => (false, at + 5),
            (None, None) => return None,
        };
        let skip = |mut at: usize| {
            while text.get(at).is_some_and(u8::is_ascii_whitespace) {
                at += 1;
            }
            at
        };
        let parens = |at: usize| match text.get(at) {
            Some(b'(') => find(text, at, b")").map_or(text.len(), |close| close + 1),
            _ => at,
        };
        at = skip(at);
        if !is_entry {
            // The value that a function returns stands before its name.
            at = skip(parens(at));
        }
        let end = at + text[at..].iter().position(|&byte| !is_word(byte as char)).unwrap_or(text.len() - at);
        let name = String::from_utf8_lossy(&text[at..end]).into_owned();
        let open = skip(end);
        let after = if text.get(open) == Some(&b'(') { parens(open) } else { end };
        let after_params = range.start + after;
        let end = range.end;
        Some(Function { name, is_entry, is_defined: false, line, header: range, after_params, end })
    }

    fn word_at(&self, start: usize) -> String {
        let rest = &self.text[start..];
        let end =
            rest.iter().skip(1).position(|&byte| !is_word(byte as char)).map_or(rest.len(), |at| at + 1);
        String::from_utf8_lossy(&rest[..end]).into_owned()
    }

    fn push(&mut self, start: usize, line: usize, function: Option<usize>, code: bool) {
        let raw = String::from_utf8_lossy(&self.text[start..self.at]);
        let text = raw.split_whitespace().collect::<Vec<_>>().join(" ");
        let instruction = if code { Instruction::parse(&text) } else { None };
        let labels = std::mem::take(&mut self.labels);
        self.module.statements.push(Statement { line, text, function, instruction, labels });
    }

    fn line_of(&mut self, offset: usize) -> usize {
        self.line += self.text[self.counted..offset].iter().filter(|&&byte| byte == b'\n').count();
        self.counted = offset;
        self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "\
.version 8.0 // a ; in a comment {
.target sm_90
/* .entry no( ) {
*/
.extern .func (.param .b32 out) helper(.param .b64 in) ;
.shared .align 4 .b8 pad[4] = {1, 2, 3, 4};
.visible .entry first(
\t.param .u64 first_0
)
.maxntid 128, 1, 1
{
\t.reg .b32 %r<3>;
\tld.global.v2.b32 {%r1, %r2}, [%rd1]; trap; exit;
$L__BB0_1: @!%p1 st.shared::cta.b32
\t\t[%r1],
\t\t%r2;
\t{ // callseq 0
\tcall.uni helper, (param0);
\t}
}
.entry second { ret; }
";

    fn texts(module: &Module, function: usize) -> Vec<(usize, &str)> {
        let of = module.statements.iter().filter(|statement| statement.function == Some(function));
        of.map(|statement| (statement.line, statement.text.as_str())).collect()
    }

    #[test]
    fn functions_and_their_statements() {
        let module = parse(SAMPLE);
        let names: Vec<_> =
            module.functions.iter().map(|f| (f.name.as_str(), f.is_entry, f.is_defined, f.line)).collect();
        assert_eq!(
            names,
            [("helper", false, false, 5), ("first", true, true, 7), ("second", true, true, 21)]
        );
        assert_eq!(
            texts(&module, 1),
            [
                (12, ".reg .b32 %r<3>"),
                (13, "ld.global.v2.b32 {%r1, %r2}, [%rd1]"),
                (13, "trap"),
                (13, "exit"),
                (14, "@!%p1 st.shared::cta.b32 [%r1], %r2"),
                (18, "call.uni helper, (param0)"),
            ]
        );
        assert_eq!(texts(&module, 2), [(21, "ret")]);
    }

    #[test]
    fn an_instruction_has_predicate_opcode_and_operands() {
        let module = parse(SAMPLE);
        let store = module
            .statements
            .iter()
            .find_map(|s| s.instruction.as_ref().filter(|i| i.name() == "st"))
            .unwrap();
        assert_eq!(store.predicate.as_deref(), Some("!%p1"));
        assert_eq!(store.opcode, ["st", "shared::cta", "b32"]);
        assert_eq!(store.operands, "[%r1], %r2");
        assert!(store.has("b32") && !store.has("st"));
    }

    #[test]
    fn the_offset_behind_the_parameters() {
        let module = parse(SAMPLE);
        let first = &module.functions[1];
        assert!(SAMPLE[..first.after_params].ends_with("first_0\n)"));
        assert!(SAMPLE[..module.functions[2].after_params].ends_with(".entry second"));
    }

    #[test]
    fn broken_text_is_read_without_a_panic() {
        for end in 0..SAMPLE.len() {
            parse(&SAMPLE[..end]);
            parse(&SAMPLE[end..]);
        }
        for text in
            ["\"", "/*", "/", "@", "@%p", "}", ".", ".func", ".entry (", "::", "{{{", "a:b::c", "é: ü;"]
        {
            parse(text);
        }
    }

    #[test]
    fn strings_hide_what_they_hold() {
        let module = parse(".file 1 \"a//b{;\"\n.pragma \"no;unroll {\";\n.entry k() { ret; }");
        assert_eq!(module.statements.len(), 4);
        assert_eq!(module.functions[0].line, 3);
    }
}
