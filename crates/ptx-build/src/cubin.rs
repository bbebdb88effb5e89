//! What is read from machine code: how long each kernel is.

use std::collections::BTreeMap;

/// Bytes of an instruction, from sm_70 on.
const INSTRUCTION: u64 = 16;

/// Bytes of a section's header, at least.
const HEADER: u64 = 64;

/// A kernel's code lies in a section of this name and its own.
const SECTION: &str = ".text.";

/// The instructions of each kernel in a cubin, by its name: those that pad it to whole lines too. Empty for a
/// file of another form.
pub fn instructions(cubin: &[u8]) -> BTreeMap<String, u32> {
    sections(cubin).unwrap_or_default()
}

fn sections(file: &[u8]) -> Option<BTreeMap<String, u32>> {
    // ELF, 64 bits, little-endian.
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: u64, bytes: usize| -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(file.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(word))
    };
    let (table, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    if size < HEADER {
        return None;
    }
    let header = |index: u64| table.checked_add(index.checked_mul(size)?);
    // More sections than two bytes count: the first one's size tells.
    let count = if count == 0 { number(header(0)?.checked_add(0x20)?, 8)? } else { count };
    let names_index = match number(0x3e, 2)? {
        0xffff => number(header(0)?.checked_add(0x28)?, 4)?,
        index => index,
    };
    let names = number(header(names_index)?.checked_add(0x18)?, 8)?;
    let mut found = BTreeMap::new();
    for index in 0..count {
        let header = header(index)?;
        let at = usize::try_from(names.checked_add(number(header, 4)?)?).ok()?;
        let name = file.get(at..)?;
        let name = std::str::from_utf8(&name[..name.iter().position(|byte| *byte == 0)?]).ok()?;
        if let Some(entry) = name.strip_prefix(SECTION) {
            let bytes = number(header.checked_add(0x20)?, 8)?;
            found.insert(entry.to_owned(), u32::try_from(bytes / INSTRUCTION).ok()?);
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with the sections `""`, `.shstrtab` and `.text.k` of 48 bytes.
    fn file() -> Vec<u8> {
        let names = b"\0.shstrtab\0.text.k\0";
        let mut file = vec![0u8; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let table = 64 + names.len();
        file[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        file[0x3a..0x40].copy_from_slice(&[64, 0, 3, 0, 1, 0]);
        file.extend_from_slice(names);
        for (name, offset, size) in [(0u32, 0u64, 0u64), (1, 64, names.len() as u64), (11, 500, 48)] {
            let mut header = [0u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file
    }

    #[test]
    fn a_kernels_instructions_are_its_sections_words() {
        assert_eq!(instructions(&file()), BTreeMap::from([("k".to_owned(), 3)]));
    }

    #[test]
    fn another_file_or_a_cut_one_has_none_and_no_panic() {
        let whole = file();
        assert_eq!(instructions(b"not a cubin"), BTreeMap::new());
        // The last header's size is what is read last.
        for end in 0..whole.len() - 64 + 0x28 {
            assert_eq!(instructions(&whole[..end]), BTreeMap::new(), "{end}");
        }
        // Headers that point anywhere.
        for at in 0x28..0x40 {
            let mut wrong = whole.clone();
            wrong[at] = 0xff;
            let _ = instructions(&wrong);
        }
    }
}
