//! GGUF files: valid ones come back as they were, and no bytes make the reader panic or take memory on trust.

use host::model::gguf::write::Writer;
use host::model::gguf::{Array, Error, Fault, Gguf, Header, TensorType, Value};
use proptest::prelude::*;
use std::error::Error as _;

/// A file with a value of every type and a tensor of every type.
fn sample() -> Writer {
    let mut writer = Writer::new();
    let nested = Array::Array(vec![Array::U8(vec![1, 2]), Array::String(vec!["x".into()])]);
    let values = [
        Value::U8(1),
        Value::I8(-1),
        Value::U16(2),
        Value::I16(-2),
        Value::U32(3),
        Value::I32(-3),
        Value::F32(0.5),
        Value::Bool(true),
        Value::String("text, ünïcode".into()),
        Value::U64(1 << 40),
        Value::I64(-1 << 40),
        Value::F64(0.1),
        Value::Array(Array::U8(vec![1, 2, 3])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![7])),
        Value::Array(Array::I16(vec![-7])),
        Value::Array(Array::U32(vec![8])),
        Value::Array(Array::I32(vec![-8])),
        Value::Array(Array::F32(vec![1.5, -2.5])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::String(vec!["a".into(), String::new()])),
        Value::Array(Array::U64(vec![9])),
        Value::Array(Array::I64(vec![-9])),
        Value::Array(Array::F64(vec![0.25])),
        Value::Array(Array::F32(vec![])),
        Value::Array(nested),
    ];
    for (i, value) in values.into_iter().enumerate() {
        writer.set(&format!("key.{i}"), value);
    }
    for (i, tensor_type) in TensorType::ALL.into_iter().enumerate() {
        let columns = tensor_type.block_values() * 2;
        let bytes = tensor_type.row_bytes(columns).expect("whole blocks") * 3;
        let bytes = (0..bytes).map(|j| (i + j * 7) as u8).collect();
        writer.tensor(&format!("tensor.{tensor_type}"), &[columns as u64, 3], tensor_type, bytes);
    }
    writer
}

fn fault(bytes: &[u8]) -> Fault {
    Header::parse(bytes).expect_err("a wrong file")
}

#[test]
fn what_is_written_is_read() {
    let mut writer = sample();
    for alignment in [None, Some(8u32), Some(128)] {
        if let Some(alignment) = alignment {
            writer.set("general.alignment", Value::U32(alignment));
        }
        let bytes = writer.to_bytes();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sample.gguf");
        std::fs::write(&path, &bytes).expect("written");
        let file = Gguf::open(&path).expect("a valid file");
        assert_eq!((file.header().version, file.size()), (3, bytes.len()));
        assert_eq!(file.get("key.8").and_then(Value::as_str), Some("text, ünïcode"));
        assert_eq!(file.get("key.9").and_then(Value::as_u64), Some(1 << 40));
        assert_eq!(file.get("key.3").and_then(Value::as_u64), None);
        assert_eq!(file.get("key.20").and_then(Value::as_array).map(Array::len), Some(2));
        assert!(file.get("key.26").is_none());
        assert_eq!(file.header().tensors.len(), TensorType::ALL.len());
        for (i, tensor) in file.header().tensors.iter().enumerate() {
            assert_eq!((tensor.columns(), tensor.rows()), (tensor.tensor_type.block_values() * 2, 3));
            assert_eq!(tensor.range.start % alignment.unwrap_or(32) as usize, 0);
            let data = file.data(tensor);
            assert!(data.iter().enumerate().all(|(j, &byte)| byte == (i + j * 7) as u8), "{}", tensor.name);
            assert_eq!(file.tensor(&tensor.name), Some(tensor));
        }
        // The same from memory, and as version 2, which has the same layout.
        let mut second = bytes;
        second[4] = 2;
        let second = Gguf::from_bytes("memory", second).expect("a valid file");
        assert_eq!((second.header().version, &second.header().metadata), (2, &file.header().metadata));
    }
}

#[test]
fn an_empty_file_of_the_format_is_valid() {
    let header = Header::parse(&Writer::new().to_bytes()).expect("valid");
    assert!(header.metadata.is_empty() && header.tensors.is_empty());
}

/// Each prefix is an error: nothing that was announced is missing unnoticed.
#[test]
fn every_truncation_is_an_error() {
    let bytes = sample().to_bytes();
    for length in 0..bytes.len() {
        let fault = fault(&bytes[..length]);
        let expected = match length {
            0..4 => matches!(fault, Fault::Magic { .. }),
            _ => matches!(fault, Fault::Truncated { .. } | Fault::OutsideFile { .. }),
        };
        assert!(expected, "{length}: {fault}");
        assert_eq!(fault.to_string().lines().count(), 1);
    }
}

#[test]
fn files_of_another_kind_are_named() {
    assert!(matches!(fault(b"PK\x03\x04 and so on"), Fault::Magic { .. }));
    let mut bytes = sample().to_bytes();
    bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
    assert_eq!(fault(&bytes), Fault::Version { version: 1 });
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert_eq!(fault(&bytes), Fault::BigEndian);

    let folder = tempfile::tempdir().expect("a folder");
    let missing = Gguf::open(folder.path().join("none.gguf")).expect_err("no file");
    assert!(
        matches!(missing, Error::Io { .. }) && missing.to_string().contains("./setup --model"),
        "{missing}"
    );
    assert!(missing.source().is_some());
    assert!(matches!(Gguf::open(folder.path()), Err(Error::Io { .. })));
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, b"").expect("written");
    assert!(matches!(Gguf::open(&empty), Err(Error::Invalid { fault: Fault::Magic { .. }, .. })));
}

/// The place of the first occurrence of `pattern`.
fn place(bytes: &[u8], pattern: &[u8]) -> usize {
    bytes.windows(pattern.len()).position(|window| window == pattern).expect("it is there")
}

/// A file with one tensor of 2 × 32 values, changed at `offset` from the end of the tensor's name.
fn with_tensor_field(offset: usize, field: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.tensor("the.tensor", &[32, 2], TensorType::Q8_0, vec![0; 68]);
    let mut bytes = writer.to_bytes();
    let at = place(&bytes, b"the.tensor") + "the.tensor".len() + offset;
    bytes[at..at + field.len()].copy_from_slice(field);
    bytes
}

#[test]
fn wrong_tensors_are_named() {
    assert!(Header::parse(&with_tensor_field(0, &2u32.to_le_bytes())).is_ok());
    for axes in [0u32, 5, u32::MAX] {
        assert_eq!(
            fault(&with_tensor_field(0, &axes.to_le_bytes())),
            Fault::Axes { name: "the.tensor".into(), axes }
        );
    }
    for extent in [0, u64::MAX, 1 << 62] {
        let fault = fault(&with_tensor_field(4 + 8, &extent.to_le_bytes()));
        assert!(matches!(fault, Fault::Extents { .. }), "{extent}: {fault}");
    }
    let ragged = fault(&with_tensor_field(4, &33u64.to_le_bytes()));
    assert!(
        ragged.to_string().contains("rows of 33 values, no multiple of the 32 of a Q8_0 block"),
        "{ragged}"
    );
    let unread = fault(&with_tensor_field(20, &10u32.to_le_bytes()));
    assert!(unread.to_string().contains("has the type Q2_K, and F32, F16"), "{unread}");
    let unknown = fault(&with_tensor_field(20, &4242u32.to_le_bytes()));
    assert!(unknown.to_string().contains("has the type number 4242"), "{unknown}");
    assert!(matches!(fault(&with_tensor_field(24, &8u64.to_le_bytes())), Fault::Misaligned { .. }));
    for offset in [32, 1 << 32, u64::MAX - 31] {
        let fault = fault(&with_tensor_field(24, &offset.to_le_bytes()));
        assert!(matches!(fault, Fault::OutsideFile { .. }), "{offset}: {fault}");
    }
}

#[test]
fn names_keys_and_bytes_belong_to_one() {
    let mut writer = Writer::new();
    writer.set("key.a", Value::U8(0)).set("key.b", Value::U8(0));
    for name in ["tensor.a", "tensor.b"] {
        writer.tensor(name, &[8], TensorType::F32, vec![0; 32]);
    }
    let bytes = writer.to_bytes();
    let renamed = |from: &[u8], to: &[u8]| {
        let mut bytes = bytes.clone();
        let at = place(&bytes, from);
        bytes[at..at + to.len()].copy_from_slice(to);
        fault(&bytes)
    };
    assert_eq!(renamed(b"key.b", b"key.a"), Fault::DuplicateKey { key: "key.a".into() });
    assert_eq!(renamed(b"tensor.b", b"tensor.a"), Fault::DuplicateTensor { name: "tensor.a".into() });
    assert!(matches!(renamed(b"key.b", b"\xff"), Fault::NotUtf8 { .. }));
    let mut overlapping = bytes.clone();
    let offset = place(&bytes, b"tensor.b") + "tensor.b".len() + 4 + 8 + 4;
    overlapping[offset..offset + 8].fill(0);
    assert_eq!(fault(&overlapping), Fault::Overlap { first: "tensor.a".into(), second: "tensor.b".into() });
}

#[test]
fn wrong_metadata_is_named() {
    // Changes `to` bytes behind the key's type.
    let with = |value: Value, offset: usize, to: &[u8]| {
        let mut writer = Writer::new();
        let mut bytes = writer.set("a.key", value).to_bytes();
        let at = place(&bytes, b"a.key") + "a.key".len() + offset;
        bytes[at..at + to.len()].copy_from_slice(to);
        fault(&bytes)
    };
    assert_eq!(with(Value::Bool(true), 4, &[2]), Fault::Bool { key: "a.key".into(), byte: 2 });
    assert_eq!(with(Value::U8(1), 0, &[13]), Fault::ValueType { key: "a.key".into(), id: 13 });
    let bytes = || Value::Array(Array::U8(vec![9; 16]));
    assert_eq!(with(bytes(), 4, &[77]), Fault::ValueType { key: "a.key".into(), id: 77 });
    // A length that no memory could hold is refused before any is taken, whatever its elements are.
    for id in 0..13u8 {
        for length in [u64::MAX, 1 << 61, 1 << 40] {
            let array: Vec<u8> = [&u32::from(id).to_le_bytes()[..], &length.to_le_bytes()].concat();
            let fault = with(bytes(), 4, &array);
            assert!(matches!(fault, Fault::Truncated { .. }), "{id} {length}: {fault}");
        }
    }
    let deep = (0..5).fold(Array::U8(vec![0; 64]), |inner, _| Array::Array(vec![inner]));
    let fault = fault(&Writer::new().set("a.key", Value::Array(deep)).to_bytes());
    assert_eq!(fault, Fault::ArrayDepth { key: "a.key".into() });
    for alignment in [Value::U32(0), Value::U32(48), Value::U64(32), Value::String("32".into())] {
        let bytes = Writer::new().set("general.alignment", alignment).to_bytes();
        assert!(matches!(Header::parse(&bytes), Err(Fault::Alignment { .. })));
    }
}

/// What holds of any header that was accepted.
fn check_consistent(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    for tensor in &header.tensors {
        assert!(tensor.range.end <= bytes.len());
        let row = tensor.tensor_type.row_bytes(tensor.columns()).expect("whole blocks");
        assert_eq!(tensor.range.len(), row * tensor.rows());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(Header::parse(&bytes).is_err());
        let headed = [b"GGUF\x03\0\0\0".as_slice(), &bytes].concat();
        check_consistent(&headed);
        // With small counts the reader gets further.
        let counted = [b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".as_slice(), &bytes].concat();
        check_consistent(&counted);
    }

    /// Flipped bits, replaced runs, and lengths set to the extremes, anywhere in the header.
    #[test]
    fn mutations_of_a_valid_file_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..4),
        words in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![
            0u64, 1, 31, 32, 255, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61, 1 << 63, u64::MAX - 7, u64::MAX,
        ]), 1usize..=8), 0..3),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample().to_bytes();
        // The header is the part that matters; the data is any bytes.
        let header = Header::parse(&bytes).expect("valid").tensors[0].range.start;
        for (at, bit) in flips {
            bytes[at.index(header)] ^= 1 << bit;
        }
        for (at, word, length) in words {
            let at = at.index(header - 8);
            bytes[at..at + length].copy_from_slice(&word.to_le_bytes()[..length]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check_consistent(&bytes);
    }
}
