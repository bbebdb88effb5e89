//! The PTX version of a target's text: that which was [asked for](crate::compile::PTX_VERSION), or a newer
//! one where an instruction in it needs that. A driver that does not read it takes the text of an older
//! target.

use crate::ptx::{self, Instruction};

/// The text with a version that has all of its instructions.
pub fn raise(text: String) -> String {
    let module = ptx::parse(&text);
    let instructions = module.statements.iter().filter_map(|statement| statement.instruction.as_ref());
    let Some(needed) = instructions.filter_map(needs).max() else { return text };
    let Some((before, rest)) = text.split_once(".version ") else { return text };
    let (version, behind) = rest.split_once(['\n', ' ']).unwrap_or((rest, ""));
    let numbers = version.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match numbers {
        Some(version) if version < needed => format!("{before}.version {}.{}\n{behind}", needed.0, needed.1),
        _ => text,
    }
}

/// The PTX version that an instruction needs, if that is newer than what is asked for.
fn needs(instruction: &Instruction) -> Option<(u32, u32)> {
    // Fences of one proxy's accesses behind those of another, as against both ways.
    let is_one_way = |part: &String| part.starts_with("tensormap::");
    (instruction.name() == "fence" && instruction.modifiers().iter().any(is_one_way)).then_some((8, 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raised(version: &str, body: &str) -> String {
        let text = format!(".version {version}\n.target sm_90\n.visible .entry k()\n{{\n{body}\n}}\n");
        let raised = raise(text.clone());
        assert!(raised.ends_with(text.split_once('\n').expect("lines").1), "{raised}");
        raised.lines().next().expect("a line").to_owned()
    }

    #[test]
    fn the_version_is_raised_where_an_instruction_needs_it() {
        let fence = "fence.proxy.tensormap::generic.acquire.sys [%rd1], 128;";
        assert_eq!(raised("8.0", fence), ".version 8.3");
        assert_eq!(raised("8.3", fence), ".version 8.3");
        assert_eq!(raised("8.7", fence), ".version 8.7");
        assert_eq!(
            raised("8.0", "fence.proxy.async; ret; // fence.proxy.tensormap::generic"),
            ".version 8.0"
        );
    }
}
