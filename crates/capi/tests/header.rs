//! `include/ferrokv.h` says what the library has: the same functions with the same types, the same structs
//! field by field, the same numbers; the shared library exports these functions and nothing else; and a
//! program in C that includes it runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What an interface has, each by its name: types of a function's result and arguments, types and names of a
/// struct's fields, numbers of an enum's variants.
type Items = BTreeMap<String, Vec<String>>;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn header() -> String {
    let text = fs::read_to_string(here("include/ferrokv.h")).expect("the header");
    let mut rest = text.as_str();
    let mut bare = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        bare.push_str(before);
        rest = comment.split_once("*/").expect("a comment ends").1;
    }
    bare.push_str(rest);
    // But for the preprocessor's, and the frame for C++.
    let ours = |line: &&str| !line.starts_with(['#', '}']) || line.contains(';');
    bare.lines().filter(ours).filter(|line| !line.starts_with("extern")).collect::<Vec<_>>().join("\n")
}

fn sources() -> String {
    let mut files: Vec<_> =
        fs::read_dir(here("src")).expect("src").map(|file| file.expect("a file").path()).collect();
    files.sort();
    let text = files.iter().map(|path| fs::read_to_string(path).expect("a source")).collect::<String>();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Words with single spaces between; marks are words.
fn words(text: &str) -> Vec<String> {
    let spaced: String = text
        .chars()
        .flat_map(|c| match c.is_alphanumeric() || c == '_' {
            true => vec![c],
            false => vec![' ', c, ' '],
        })
        .collect();
    spaced.split_whitespace().map(str::to_owned).collect()
}

/// `const ferrokv_tensor * keys` as its type and its name.
fn declared(text: &str) -> (String, String) {
    let mut words = words(text);
    let name = words.pop().expect("a name");
    (words.concat().replace("const", "const "), name)
}

/// A type of Rust as C writes it.
fn in_c(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(to) = rust.strip_prefix("*const ") {
        return format!("const {}*", in_c(to));
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return format!("{}*", in_c(to));
    }
    match rust {
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "c_char" => "char",
        "c_void" | "" => "void",
        "Status" => "ferrokv_status",
        name if name.starts_with("ferrokv_") => name,
        other => panic!("no C type for {other}"),
    }
    .to_owned()
}

fn of_header(text: &str) -> Items {
    let mut items = Items::new();
    let mut rest = text;
    while let Some(end) = rest.find(';') {
        let mut statement = rest[..end].trim().to_owned();
        let mut after = end + 1;
        if let Some(open) =
            rest[..end].find('{').filter(|_| statement.contains("struct") || statement.contains("enum"))
        {
            let close = rest.find('}').expect("a body ends");
            let body = rest[open + 1..close].to_owned();
            after = close + rest[close..].find(';').expect("a declaration ends") + 1;
            let name = rest[close + 1..after - 1].trim().to_owned();
            let parts: Vec<String> = if statement.contains("enum") {
                let variants = body.split(',').map(|variant| variant.split_whitespace().collect::<String>());
                variants.filter(|variant| !variant.is_empty()).collect()
            } else {
                let fields = body.split(';').filter(|field| !field.trim().is_empty());
                fields.map(declared).map(|(of, name)| format!("{of} {name}")).collect()
            };
            items.insert(name, parts);
            statement.clear();
        }
        if let Some((head, arguments)) = statement.split_once('(') {
            let (result, name) = declared(head);
            let arguments = arguments.trim_end_matches(')').trim();
            let mut types = vec![result];
            if arguments != "void" {
                types.extend(arguments.split(',').map(|argument| declared(argument).0));
            }
            items.insert(name, types);
        }
        rest = &rest[after..];
    }
    items
}

fn of_library(text: &str) -> Items {
    let mut items = Items::new();
    for part in text.split("extern \"C\" fn ").skip(1) {
        let (name, rest) = part.split_once('(').expect("arguments");
        let (arguments, rest) = rest.split_once(')').expect("arguments end");
        let result = rest.split_once('{').expect("a body").0.trim().trim_start_matches("->");
        let mut types = vec![in_c(result)];
        let arguments = arguments.split(',').map(str::trim).filter(|argument| !argument.is_empty());
        types.extend(arguments.map(|argument| in_c(argument.split_once(':').expect("a type").1)));
        items.insert(name.to_owned(), types);
    }
    for part in text.split("#[repr(C)]\n").skip(1) {
        let (head, rest) = part.split_once('{').expect("a body");
        let body = rest.split_once('}').expect("a body ends").0;
        let name = head.split_whitespace().last().expect("a name");
        if !head.contains("struct") {
            continue;
        }
        let fields = body.split(',').map(str::trim).filter(|field| !field.is_empty());
        let fields = fields.map(|field| {
            field.strip_prefix("pub ").expect("a public field").split_once(": ").expect("a type")
        });
        items.insert(name.to_owned(), fields.map(|(name, of)| format!("{} {name}", in_c(of))).collect());
    }
    for (name, of) in [("ferrokv_status", "Status"), ("ferrokv_dtype", "Dtype")] {
        let body = text
            .split_once(&format!("pub enum {of} {{"))
            .expect("the enum")
            .1
            .split_once('}')
            .expect("it ends")
            .0;
        let variants = body.split(',').map(|variant| variant.split_whitespace().collect::<String>());
        let variants = variants.filter(|variant| !variant.is_empty());
        items.insert(
            name.to_owned(),
            variants.map(|variant| format!("FERROKV_{}", variant.to_uppercase())).collect(),
        );
    }
    items
}

#[test]
fn the_header_has_what_the_library_has() {
    let (header, library) = (of_header(&header()), of_library(&sources()));
    assert!(library.len() > 30, "{} items are not all", library.len());
    for (name, item) in &library {
        assert_eq!(header.get(name), Some(item), "{name}: the header's on the left");
    }
    let more: Vec<&String> = header.keys().filter(|name| !library.contains_key(*name)).collect();
    assert!(more.is_empty(), "the header has more: {more:?}");
    let text = fs::read_to_string(here("include/ferrokv.h")).expect("the header");
    assert!(
        text.contains(&format!("#define FERROKV_ABI {}\n", ferrokv_c::ABI)),
        "the number of the interface"
    );
}

/// The shared library that cargo builds beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let folder = test.parent().expect("a folder");
    folder.join(format!("{}ferrokv_c{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX))
}

/// The driver's symbols among others, which are stand-ins here, must not take the place of another library's.
#[test]
#[cfg(target_os = "linux")]
fn the_library_exports_what_the_header_has_and_nothing_else() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().expect("nm runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names");
    let mut exported: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    exported.sort_unstable();
    let header = header();
    let items = of_header(&header);
    let functions = items.keys().filter(|name| header.contains(&format!("{name}(")));
    assert_eq!(exported, functions.collect::<Vec<_>>());
}

#[test]
#[cfg(target_os = "linux")]
fn a_program_in_c_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    let library = library();
    let output = Command::new("cc")
        .args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(here("tests/program.c"))
        .arg("-I")
        .arg(here("include"))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().expect("a folder").display()))
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program).output().expect("the program runs");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
