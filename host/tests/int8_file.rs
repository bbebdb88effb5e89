//! The quantized file: what is written is read back, what is broken is refused by name, and no bytes at all
//! make the reader panic.

use host::int8::file::{Dtype, Error, Granularity, Original, QuantizedFile, QuantizedWriter, check_source};
use host::int8::{Int8Element, Matrix, cpu};
use host::tensor_file::{self, Target, TensorFile, TensorWriter};
use proptest::prelude::*;
use safetensors::Dtype as FileDtype;
use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::sync::OnceLock;

fn metadata(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
    texts.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

/// Tensor `a` of 33 × 6 quantized, tensor `b` of three bytes as it is.
fn sample(granularity: Granularity) -> Vec<u8> {
    sample_of(Dtype::Bf16, granularity)
}

fn sample_of(dtype: Dtype, granularity: Granularity) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let target = Target::new(&folder.path().join("q"), false, None).unwrap();
    let original = Original { dtype, shape: vec![33, 2, 3] };
    let source = sample_source();
    let mut writer = QuantizedWriter::create(
        target.clone(),
        granularity,
        &metadata(&[("title", "sample")]),
        &BTreeMap::from([("a".to_string(), original)]),
        source.entries(),
    )
    .unwrap();
    writer.write_bytes("b", &[1, 2, 3]).unwrap();
    writer.write("a", &sample_codes(), &sample_scales(granularity)).unwrap();
    writer.finish().unwrap();
    fs::read(target.path()).unwrap()
}

/// [`sample`], which goes to the disk, once a granularity.
fn written_once(granularity: Granularity) -> &'static Vec<u8> {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    &FILES.get_or_init(|| Granularity::ALL.map(sample))[granularity as usize]
}

fn sample_source() -> TensorFile<Cursor<Vec<u8>>> {
    let header = r#"{"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    open(&plain(header, 3)).unwrap()
}

fn sample_codes() -> Vec<i8> {
    (0..33 * 6).map(|i| (i * 37 % 255 - 127) as i8).collect()
}

fn sample_scales(granularity: Granularity) -> Vec<f32> {
    let count = if granularity == Granularity::Channel { 6 } else { 3 * 6 };
    (0..count).map(|i| 0.01 + i as f32).collect()
}

/// A file of `header` and `data` zero bytes.
fn plain(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
}

fn open(bytes: &[u8]) -> tensor_file::Result<TensorFile<Cursor<Vec<u8>>>> {
    TensorFile::new(Cursor::new(bytes.to_vec()), Path::new("a.safetensors"))
}

fn open_quantized(bytes: &[u8]) -> Result<QuantizedFile<Cursor<Vec<u8>>>, Error> {
    QuantizedFile::new(open(bytes)?)
}

/// Reads all there is to read.
fn read_everything(bytes: &[u8]) -> Result<(), Error> {
    let mut file = open_quantized(bytes)?;
    let names: Vec<String> = file.originals().keys().cloned().collect();
    let others: Vec<String> = file.others().map(|(name, _)| name.clone()).collect();
    for name in names {
        let (codes, scales) = file.read(&name)?;
        let matrix = file.originals()[&name].matrix().unwrap();
        assert_eq!(codes.len(), matrix.elements());
        assert_eq!(scales.len(), file.granularity().scales_shape(matrix).iter().product::<usize>());
    }
    for name in others {
        file.read_bytes(&name)?;
    }
    Ok(())
}

/// The sample with its header's text changed and its length corrected.
fn with_header(bytes: &[u8], change: impl Fn(String) -> String) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let old = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let new = change(old.clone());
    assert_ne!(old, new, "the change found nothing to change");
    [&(new.len() as u64).to_le_bytes(), new.as_bytes(), &bytes[8 + length..]].concat()
}

fn assert_one_line(error: &dyn std::error::Error, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    for granularity in Granularity::ALL {
        let bytes = sample(granularity);
        let mut file = open_quantized(&bytes).unwrap();
        assert_eq!(file.granularity(), granularity);
        assert_eq!(file.originals()["a"], Original { dtype: Dtype::Bf16, shape: vec![33, 2, 3] });
        assert_eq!(file.read("a").unwrap(), (sample_codes(), sample_scales(granularity)));
        assert_eq!(file.others().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["b"]);
        assert_eq!(file.read_bytes("b").unwrap(), [1, 2, 3]);
        let restored = file.restored_metadata();
        assert_eq!(restored["title"], "sample");
        assert_eq!(restored["ferrokv.restored"], format!("ferrokv-int8 1 {granularity}"));
        assert_eq!(restored.len(), 2);
        // The same input makes the same file, and another reader of the format accepts it.
        assert_eq!(bytes, sample(granularity));
        let other = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(other.tensor("a.codes").unwrap().shape(), [33, 2, 3]);
        assert!(matches!(check_source(&open(&bytes).unwrap()), Err(Error::AlreadyQuantized { .. })));
    }
}

#[test]
fn each_broken_promise_of_the_header_is_named() {
    let good = sample(Granularity::Block16);
    let replaced = |from: &str, to: &str| with_header(&good, |header| header.replace(from, to));
    let cases: [(Vec<u8>, &[&str]); 9] = [
        (replaced("\"ferrokv-int8\"", "\"other\""), &["is not a ferrokv-int8 file", "quantize -o"]),
        (replaced("\"ferrokv.version\":\"1\"", "\"ferrokv.version\":\"7\""), &["version '7'", "reads 1"]),
        (replaced("\"block16\"", "\"block99\""), &["unknown granularity 'block99'", "channel and block16"]),
        (replaced("a.scales\":", "z.scales\":"), &["no tensor 'a.scales'"]),
        (replaced("a.codes\":", "z.codes\":"), &["no tensor 'a.codes'"]),
        (replaced("\"block16\"", "\"channel\""), &["'a.scales' is F32 [3, 6]", "[6]"]),
        (replaced("[33,2,3]}}\"", "[33,3,2]}}\""), &["'a.codes' is I8 [33, 2, 3]", "[33, 3, 2]"]),
        (replaced("\\\"BF16\\\"", "\\\"I64\\\""), &["ferrokv.tensors cannot be read", "I64"]),
        (replaced("\"b\":", "\"a\":"), &["'a' is there both"]),
    ];
    for (bytes, words) in cases {
        assert_one_line(&open_quantized(&bytes).unwrap_err(), words);
    }
}

#[test]
fn values_that_no_quantizer_writes_are_refused() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let good = sample_of(dtype, Granularity::Channel);
        let data = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        // Scales (6 × 4 bytes) come first, then b and the codes in the order of their widths and names.
        let with_scale = |scale: f32| {
            let mut bytes = good.clone();
            bytes[data + 8..data + 12].copy_from_slice(&scale.to_le_bytes());
            open_quantized(&bytes).unwrap().read("a")
        };
        let most = dtype.largest_scale();
        let subnormal = f32::MIN_POSITIVE.next_down();
        let wrong =
            [f32::NAN, f32::INFINITY, f32::MAX, most.next_up(), subnormal, 1e-40, 0.0, -0.0, -1.0, -most];
        for scale in wrong {
            let written = format!("'a.scales' has the scale {scale:e} at element 2");
            let range = format!("{dtype} has {:e} to {most:e}", f32::MIN_POSITIVE);
            assert_one_line(&with_scale(scale).unwrap_err(), &[&written, &range]);
        }
        for scale in [f32::MIN_POSITIVE, most] {
            assert_eq!(with_scale(scale).unwrap().1[2], scale, "{dtype}");
        }
        let mut bytes = good.clone();
        bytes[data + 24 + 5] = 0x80;
        let error = open_quantized(&bytes).unwrap().read("a").unwrap_err();
        assert_one_line(&error, &["'a.codes' has the code -128 at element 5"]);
    }
}

/// The largest scale that is read is what the largest values get, and gives them back finite.
#[test]
fn no_scale_that_is_read_restores_to_an_infinity() {
    fn restore<T: Int8Element>(dtype: Dtype) {
        let matrix = Matrix::new(2, 2).unwrap();
        let keys = [f32::INFINITY, T::LARGEST, -T::LARGEST, f32::NEG_INFINITY].map(T::from_f32);
        let mut scales = [0f32; 2];
        cpu::column_scales(&keys, matrix, &mut scales);
        assert_eq!(scales, [dtype.largest_scale(); 2], "{dtype}");
        let mut restored = keys;
        cpu::dequantize(&[127, -127, -127, 127], matrix, &scales, &mut restored);
        assert!(
            restored.iter().all(|x| x.to_f32().is_finite()),
            "{dtype}: {:?}",
            restored.map(|x| x.to_f32())
        );
    }
    restore::<f32>(Dtype::F32);
    restore::<half::f16>(Dtype::F16);
    restore::<half::bf16>(Dtype::Bf16);
}

#[test]
fn each_break_of_the_tensor_file_is_named() {
    let good = plain(r#"{"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, 3);
    let mut oversized = good.clone();
    oversized[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut beyond = good.clone();
    beyond[..8].copy_from_slice(&90_000_000u64.to_le_bytes());
    // Nine tensors whose sizes add up to 2^64 − 1: adding the header to that would overflow.
    let huge: Vec<String> = (0..9u128)
        .map(|i| {
            let start = i * ((1 << 61) - 1);
            let size = if i == 8 { 7 } else { (1u128 << 61) - 1 };
            format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{}]}}"#, start + size)
        })
        .collect();
    let cases: [(Vec<u8>, &[&str]); 10] = [
        (vec![], &["0 bytes", "header's length"]),
        (good[..5].to_vec(), &["5 bytes"]),
        (good[..20].to_vec(), &["cut off", "12 are there"]),
        (good[..good.len() - 1].to_vec(), &["cut off", "take 3 bytes, 2 are there"]),
        ([good.as_slice(), &[0]].concat(), &["no tensor owns", "4 are there"]),
        (oversized, &["exceeds the 100000000 allowed"]),
        (beyond, &["cut off: the header has 90000000 bytes"]),
        (plain("not json", 0), &["its header is wrong"]),
        (plain(r#"{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}}"#, 3), &["its header is wrong"]),
        (plain(&format!("{{{}}}", huge.join(",")), 3), &["cut off", "3 are there"]),
    ];
    for (bytes, words) in cases {
        let error = open(&bytes).unwrap_err();
        assert!(matches!(error, tensor_file::Error::Corrupt { .. }), "{error}");
        assert_one_line(&error, words);
    }
    let mut file = open(&good).unwrap();
    assert_one_line(&file.read_bytes("c").unwrap_err(), &["no tensor 'c'", "it has b"]);
    let error = file.read::<i8>("b", FileDtype::I8).unwrap_err();
    assert_one_line(&error, &["'b'", "holds U8", "I8 is read"]);
}

#[test]
fn nothing_is_left_where_writing_stops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let left = || fs::read_dir(folder.path()).unwrap().count();
    let tensors = || [("x".to_string(), FileDtype::I8, vec![2]), ("y".to_string(), FileDtype::F32, vec![1])];
    let target = Target::new(&path, false, None).unwrap();

    // A tensor missing, of the wrong size, given twice, unknown.
    let mut writer = TensorWriter::create(target.clone(), &metadata(&[]), tensors()).unwrap();
    writer.write("x", &[1i8, 2]).unwrap();
    assert_one_line(&writer.write("x", &[1i8, 2]).unwrap_err(), &["'x'", "given 2"]);
    assert_one_line(
        &writer.write("y", &[1f32, 2.0]).unwrap_err(),
        &["'y'", "announced with 4 bytes and given 8"],
    );
    assert_one_line(&writer.finish().unwrap_err(), &["'y'"]);
    let twice = [tensors(), tensors()].concat();
    let error = TensorWriter::create(target.clone(), &metadata(&[]), twice).unwrap_err();
    assert_one_line(&error, &["named 'y'"]);
    let overflow = [("x".to_string(), FileDtype::F32, vec![usize::MAX, 2])];
    let error = TensorWriter::create(target.clone(), &metadata(&[]), overflow).unwrap_err();
    assert_one_line(&error, &["'x'", "memory"]);
    assert_eq!(left(), 0);

    // A file that appears between the check and the rename stays.
    fs::write(&path, "precious").unwrap();
    assert!(matches!(target.write(b"new").unwrap_err(), tensor_file::Error::Exists { .. }));
    assert!(matches!(Target::new(&path, false, None).unwrap_err(), tensor_file::Error::Exists { .. }));
    let same = Target::new(&path, true, Some(&path)).unwrap_err();
    assert!(matches!(same, tensor_file::Error::SameAsInput { .. }));
    assert_eq!((fs::read(&path).unwrap(), left()), (b"precious".to_vec(), 1));
    Target::new(&path, true, None).unwrap().write(b"new").unwrap();
    assert_eq!((fs::read(&path).unwrap(), left()), (b"new".to_vec(), 1));

    let folder_error = Target::new(folder.path(), true, None).unwrap_err();
    assert!(matches!(folder_error, tensor_file::Error::NotRegular { .. }), "{folder_error}");
    let missing = Target::new(&folder.path().join("no/out"), true, None).unwrap_err();
    assert_one_line(&missing, &["cannot write to", "folder that exists"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bytes, flipped bits, a cut and an insertion: an error or a good read, never a panic.
    #[test]
    fn mutated_files_never_panic(
        granularity in prop_oneof![Just(Granularity::Channel), Just(Granularity::Block16)],
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        inserted in prop::option::of((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..9))),
    ) {
        let mut bytes = written_once(granularity).clone();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Some((at, new)) = inserted {
            let at = at.index(bytes.len());
            bytes.splice(at..at, new);
        }
        if let Some(at) = cut {
            bytes.truncate(at.index(bytes.len()));
        }
        if let Err(error) = read_everything(&bytes) {
            prop_assert_eq!(error.to_string().lines().count(), 1, "{}", error);
        }
    }

    /// Numbers of the header replaced by others, edges included.
    #[test]
    fn other_numbers_in_the_header_never_panic(
        granularity in prop_oneof![Just(Granularity::Channel), Just(Granularity::Block16)],
        which in any::<prop::sample::Index>(),
        number in prop_oneof![Just(0u64), Just(1), Just(15), Just(16), Just(1 << 32), Just(1 << 61), Just(u64::MAX), any::<u64>()],
    ) {
        let good = written_once(granularity);
        let length = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(good[8..8 + length].to_vec()).unwrap();
        let starts: Vec<usize> = header
            .char_indices()
            .filter(|(at, c)| c.is_ascii_digit() && !header[..*at].ends_with(|c: char| c.is_ascii_digit()))
            .map(|(at, _)| at)
            .collect();
        let start = starts[which.index(starts.len())];
        let end = header[start..].find(|c: char| !c.is_ascii_digit()).map_or(header.len(), |n| start + n);
        let header = format!("{}{number}{}", &header[..start], &header[end..]);
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &good[8 + length..]].concat();
        if let Err(error) = read_everything(&bytes) {
            prop_assert_eq!(error.to_string().lines().count(), 1, "{}", error);
        }
    }

    /// A random header before random data.
    #[test]
    fn random_headers_never_panic(header in "[{}\\[\\]\",:a-z0-9_\\\\-]{0,80}", data in 0usize..64) {
        prop_assert!(read_everything(&plain(&header, data)).is_err());
    }
}
