//! Makes NVVM IR of the text of a module that rustc wrote.
//!
//! | in the module | what becomes of it |
//! |---|---|
//! | `target datalayout` | libNVVM's: sizes and alignments of what kernels use are the same |
//! | `module asm` | taken out: libNVVM has no such thing; it goes into the PTX as it is |
//! | `"target-cpu"`, `"target-features"` | taken out: libNVVM is told its target |
//! | `llvm.rint`, `llvm.nearbyint` | `llvm.roundeven`, the same without other rounding modes |
//! | `llvm.fabs` | the sign bit cleared |
//! | other intrinsics | kept, or refused by name ([`super::intrinsics`]) |
//! | inline PTX with `.sync` or `.aligned` | its call is `convergent`: it stays where its threads are |
//! | flags, metadata and attributes that let arithmetic change bits | refused |
//! | all else | kept |
//!
//! and `!nvvmir.version` is added.

use super::intrinsics::{self, Treatment};
use std::collections::HashSet;
use std::fmt::{self, Write};

/// The layout that rustc's target has.
const LAYOUT: &str = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64";

/// The layout that libNVVM accepts.
const NVVM_LAYOUT: &str = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-\
                           f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64";

const TRIPLE: &str = "nvptx64-nvidia-cuda";

/// The version of the NVVM IR, and of its debug information.
const VERSION: &str = "!{i32 2, i32 0, i32 3, i32 2}";

/// Attributes, in quotes, that say what libNVVM is told otherwise.
const DROPPED: [&str; 2] = ["\"target-cpu\"", "\"target-features\""];

/// Flags of float operations by which a compiler may change the result's bits.
const FAST: [&str; 6] = ["fast", "reassoc", "arcp", "contract", "afn", "nsz"];

/// Attributes, in quotes, that say so of a whole function.
const LOOSE: [&str; 9] = [
    "unsafe-fp-math",
    "denormal-fp-math",
    "denormal-fp-math-f32",
    "nvptx-f32ftz",
    "no-nans-fp-math",
    "no-infs-fp-math",
    "no-signed-zeros-fp-math",
    "approx-func-fp-math",
    "less-precise-fpmad",
];

/// How many refusals are said in full.
const SAID: usize = 8;

/// A module for libNVVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Legal {
    /// NVVM IR.
    pub ir: String,
    /// What stood in `module asm`, a line each.
    pub assembly: String,
}

/// What cannot be translated: at least one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub Vec<Refusal>);

/// One thing that cannot be translated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The line of the IR, from 1.
    pub line: usize,
    /// The function that it is in; empty outside of any.
    pub function: String,
    /// What it is.
    pub what: What,
}

/// What is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// A layout that was not compared with libNVVM's.
    #[error("the data layout `{0}` is not the device compiler's `{LAYOUT}`: build with the pinned compiler")]
    Layout(String),
    /// Another target.
    #[error("the target `{0}` is not `{TRIPLE}`")]
    Triple(String),
    /// A function without a translation.
    #[error("`{name}` has no translation: {instead}")]
    Function {
        /// Its name.
        name: String,
        /// What to do instead.
        instead: &'static str,
    },
    /// A call that is not written as the rewriting expects.
    #[error("`{0}` is not of the form `%x = call TYPE @llvm.NAME(TYPE VALUE)` of f32 or f64")]
    Call(String),
    /// A flag that lets bits change.
    #[error("the flag `{flag}` of `{operation}` lets the result's bits change")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// The operation.
        operation: String,
    },
    /// An attribute that lets bits change.
    #[error("the attribute `{0}` of functions lets their results' bits change")]
    Attribute(&'static str),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        if !self.function.is_empty() {
            write!(f, ", kernel {}", self.function)?;
        }
        write!(f, ": {}", self.what)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this is not translated to NVVM IR (FERROKV_CODEGEN=llvm builds it):")?;
        for refusal in self.0.iter().take(SAID) {
            write!(f, "\n{refusal}")?;
        }
        if self.0.len() > SAID {
            write!(f, "\nand {} more", self.0.len() - SAID)?;
        }
        Ok(())
    }
}

impl std::error::Error for Refused {}

/// Translates the text of a module.
///
/// # Errors
/// Everything in it that has no translation.
pub fn translate(ir: &str) -> Result<Legal, Refused> {
    let mut pass = Pass { ir: String::with_capacity(ir.len() + 1024), ..Pass::default() };
    for line in ir.lines() {
        pass.line += 1;
        pass.translate(line);
    }
    let number = pass.metadata;
    let _ = writeln!(pass.ir, "!nvvmir.version = !{{!{number}}}\n!{number} = {VERSION}");
    match pass.refused.is_empty() {
        true => Ok(Legal { ir: pass.ir, assembly: pass.assembly }),
        false => Err(Refused(pass.refused)),
    }
}

#[derive(Default)]
struct Pass {
    ir: String,
    assembly: String,
    line: usize,
    function: String,
    /// The first number that no metadata has.
    metadata: u64,
    declared: HashSet<String>,
    refused: Vec<Refusal>,
}

impl Pass {
    fn refuse(&mut self, what: What) {
        let (line, function) = (self.line, self.function.clone());
        self.refused.push(Refusal { line, function, what });
    }

    fn push(&mut self, line: &str) {
        self.ir.push_str(line);
        self.ir.push('\n');
    }

    fn translate(&mut self, line: &str) {
        if line.starts_with("  ") {
            return self.instruction(line);
        }
        if let Some(layout) = quoted(line, "target datalayout = ") {
            if layout != LAYOUT {
                self.refuse(What::Layout(layout.to_owned()));
            }
            return self.push(&format!("target datalayout = \"{NVVM_LAYOUT}\""));
        }
        if let Some(triple) = quoted(line, "target triple = ")
            && triple != TRIPLE
        {
            self.refuse(What::Triple(triple.to_owned()));
        }
        if let Some(text) = quoted(line, "module asm ") {
            self.assembly.push_str(&unescaped(text));
            self.assembly.push('\n');
            return;
        }
        if line.starts_with("attributes #") {
            for name in LOOSE {
                if line.contains(&format!("\"{name}\"")) {
                    self.refuse(What::Attribute(name));
                }
            }
            return self.push(&without_dropped(line));
        }
        if line.starts_with("declare ") {
            return self.declaration(line);
        }
        if line.starts_with("define ") {
            self.function = called(line).unwrap_or_default().to_owned();
        } else if line == "}" {
            self.function.clear();
        } else if let Some(number) = line.strip_prefix('!') {
            let digits = number.split(' ').next().and_then(|digits| digits.parse::<u64>().ok());
            self.metadata = self.metadata.max(digits.map_or(0, |number| number + 1));
        }
        self.push(line);
    }

    /// Each function is declared once: what is renamed may be there under its new name, too.
    fn declaration(&mut self, line: &str) {
        let name = called(line).unwrap_or_default().to_owned();
        let to = match intrinsics::treatment(&name) {
            Treatment::Kept => name.clone(),
            Treatment::Renamed(to) => renamed(&name, to),
            Treatment::Absolute => return,
            Treatment::Refused(instead) => return self.refuse(What::Function { name, instead }),
        };
        if self.declared.insert(to.clone()) {
            self.push(&line.replacen(&name, &to, 1));
        }
    }

    fn instruction(&mut self, line: &str) {
        if let Some((flag, operation)) = fast_flag(line) {
            self.refuse(What::Flag { flag, operation: operation.to_owned() });
        }
        if let Some(text) = convergent(line) {
            return self.push(&text);
        }
        // Only calls of intrinsics have the name behind their type; asm strings hold no `@llvm.`.
        let Some(name) = called(line).filter(|name| name.starts_with("llvm.")) else {
            return self.push(line);
        };
        match intrinsics::treatment(name) {
            // What is refused was so where it is declared.
            Treatment::Kept | Treatment::Refused(_) => self.push(line),
            Treatment::Renamed(to) => {
                let renamed = renamed(name, to);
                self.push(&line.replacen(name, &renamed, 1));
            }
            Treatment::Absolute => match absolute(line, name) {
                Some(text) => self.push(&text),
                None => self.refuse(What::Call(line.trim().to_owned())),
            },
        }
    }
}

/// `llvm.roundeven.f32` of `llvm.rint.f32` and `roundeven`.
fn renamed(name: &str, to: &str) -> String {
    let rest = name.strip_prefix("llvm.").unwrap_or(name);
    let types = &rest[intrinsics::base(rest).len()..];
    format!("llvm.{to}{types}")
}

/// `%x = call float @llvm.fabs.f32(float %y)`, with the sign bit of `%y` cleared.
fn absolute(line: &str, name: &str) -> Option<String> {
    let (result, call) = line.trim_start().split_once(" = ")?;
    let (float, integer, mask) = match name {
        "llvm.fabs.f32" => ("float", "i32", i64::from(i32::MAX)),
        "llvm.fabs.f64" => ("double", "i64", i64::MAX),
        _ => return None,
    };
    let (head, rest) = call.split_once(&format!("@{name}("))?;
    let head: Vec<&str> = head.split_whitespace().collect();
    let known = ["tail", "call", "noundef", "nnan", "ninf", float];
    let (arguments, _) = rest.split_once(')')?;
    let value = arguments.strip_prefix(float)?.trim_start();
    let value = value.strip_prefix("noundef ").unwrap_or(value);
    if !head.iter().all(|word| known.contains(word)) || value.contains([' ', ',']) {
        return None;
    }
    // Names of values may hold dots; numbers alone may not be skipped, so these are names.
    let stem = format!("%nvvm.abs.{}", result.trim_start_matches('%').trim_matches('"'));
    let stem = if result.contains('"') { return None } else { stem };
    Some(format!(
        "  {stem}.bits = bitcast {float} {value} to {integer}\n  {stem}.clear = and {integer} {stem}.bits, {mask}\n  \
         {result} = bitcast {integer} {stem}.clear to {float}"
    ))
}

/// A flag of [`FAST`] among those that follow an operation, or metadata that is one; and that operation.
fn fast_flag(line: &str) -> Option<(&'static str, &str)> {
    let (_, operation) = line.split_once(" = ")?;
    let mut words = operation.split(' ').skip_while(|word| matches!(*word, "tail" | "musttail" | "notail"));
    let opcode = words.next()?;
    if line.contains(", !fpmath ") {
        return Some(("!fpmath", opcode));
    }
    let flags = ["nnan", "ninf", "fast", "reassoc", "arcp", "contract", "afn", "nsz"];
    let mut flags = words.take_while(|word| flags.contains(word));
    flags.find_map(|word| FAST.into_iter().find(|fast| *fast == word)).map(|flag| (flag, opcode))
}

/// A call of inline PTX that threads execute together, with the attribute that says so: rustc leaves it out,
/// and without it the call may be moved to where fewer threads are.
fn convergent(line: &str) -> Option<String> {
    let (head, asm) = line.split_once(" asm ").filter(|(head, _)| !head.contains('"'))?;
    // No quote is inside of a string: there it is `\22`.
    let mut parts = asm.split('"');
    parts.nth(1).filter(|text| text.contains(".sync") || text.contains(".aligned"))?;
    let arguments = line.len() - parts.nth(2)?.len() - parts.map(|part| part.len() + 1).sum::<usize>();
    if !head.contains("call ") {
        return None;
    }
    let mut depth = 0usize;
    let end = line[arguments..].find(|c| {
        depth = match c {
            '(' => depth + 1,
            ')' => depth.saturating_sub(1),
            _ => depth,
        };
        c == ')' && depth == 0
    })?;
    let (call, rest) = line.split_at(arguments + end + 1);
    Some(format!("{call} convergent{rest}"))
}

/// The name behind the first `@`, of a declaration, a definition or a direct call.
fn called(line: &str) -> Option<&str> {
    let call = line.starts_with("declare ") || line.starts_with("define ") || line.contains("call ");
    let (_, rest) = line.split_once('@').filter(|_| call)?;
    let end = rest.find(|c: char| !(c.is_alphanumeric() || "._$".contains(c)))?;
    rest[end..].starts_with('(').then_some(&rest[..end])
}

/// What stands in quotes behind `head`.
fn quoted<'a>(line: &'a str, head: &str) -> Option<&'a str> {
    line.strip_prefix(head)?.strip_prefix('"')?.strip_suffix('"')
}

/// A string of the IR: `\22` is a quote.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hexadecimal = |at: usize| tail.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        rest = match (first, hexadecimal(0), hexadecimal(1)) {
            (b'\\', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                &tail[2..]
            }
            (b'\\', ..) if tail.first() == Some(&b'\\') => {
                bytes.push(b'\\');
                &tail[1..]
            }
            _ => {
                bytes.push(first);
                tail
            }
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A group of attributes without those of [`DROPPED`].
fn without_dropped(line: &str) -> String {
    let mut line = line.to_owned();
    for name in DROPPED {
        let start = format!("{name}=\"");
        while let Some(at) = line.find(&start) {
            let value = at + start.len();
            let end = line[value..].find('"').map_or(line.len(), |end| value + end + 1);
            line.replace_range(at..line.len().min(end + usize::from(line[end..].starts_with(' '))), "");
        }
    }
    line
}

#[cfg(test)]
mod tests;
