//! New tokens on their way into the pool: each row is where the table says, and nothing else is written.

use super::devices;
use ferrokv::host::dense::{AppendElement, AppendHandles, Problem, append};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use half::{bf16, f16};

/// Three sequences of blocks that are shuffled; the last one's last token is past its table.
fn check<E: AppendElement + std::fmt::Debug + PartialEq>(
    device: &Device,
    (tokens, kv_heads, head_dim): (u32, u32, u32),
    number: impl Fn(usize) -> E,
) {
    let problem =
        Problem { sequences: 3, q_heads: kv_heads, kv_heads, head_dim, query_tokens: tokens, max_tokens: 48 };
    let table = [7u32, 2, 5, 0, 8, 3, 1, 6, 4];
    let positions: Vec<u32> = [0, 15, 48 - tokens + 1].iter().flat_map(|&at| at..at + tokens).collect();
    let elements = (kv_heads * head_dim) as usize;
    let rows = 3 * tokens as usize * elements;
    let keys: Vec<E> = (0..rows).map(&number).collect();
    let values: Vec<E> = (0..rows).map(|i| number(i + rows)).collect();

    let mut expected = [vec![number(3); 9 * 16 * elements], vec![number(4); 9 * 16 * elements]];
    let mut lengths = [9u32; 3];
    for (item, &position) in positions.iter().enumerate().filter(|(_, position)| **position < 48) {
        let sequence = item / tokens as usize;
        let block = table[3 * sequence + position as usize / 16] as usize;
        for i in 0..elements {
            let (head, channel) = (i / head_dim as usize, i % head_dim as usize);
            let token = (block * kv_heads as usize + head) * 16 + position as usize % 16;
            let to = token * head_dim as usize + channel;
            expected[0][to] = keys[item * elements + i];
            expected[1][to] = values[item * elements + i];
        }
        if item % tokens as usize == tokens as usize - 1 {
            lengths[sequence] = position + 1;
        }
    }

    let stream = Stream::new(device).unwrap();
    let put = |x: &[E]| Buffer::from_slice(device, x).unwrap();
    let (new_keys, new_values) = (put(&keys), put(&values));
    let (mut pool_keys, mut pool_values) =
        (put(&vec![number(3); 9 * 16 * elements]), put(&vec![number(4); 9 * 16 * elements]));
    let words = |x: &[u32]| Buffer::from_slice(device, x).unwrap();
    let (positions, table, mut lengths_found) = (words(&positions), words(&table), words(&[9; 3]));
    let handles = AppendHandles {
        new_keys: new_keys.global(),
        new_values: new_values.global(),
        positions: positions.global(),
        table: table.global(),
        lengths: lengths_found.global_mut(),
        keys: pool_keys.global_mut(),
        values: pool_values.global_mut(),
    };
    // SAFETY: buffers of the device, read back before they go; the table's entries are the pool's nine blocks,
    // and no two sequences share one.
    unsafe { append(&stream, problem, handles).unwrap() };
    stream.synchronize().unwrap();
    assert!(pool_keys.to_vec().unwrap() == expected[0], "keys of {problem:?}");
    assert!(pool_values.to_vec().unwrap() == expected[1], "values of {problem:?}");
    assert_eq!(lengths_found.to_vec().unwrap(), lengths, "{problem:?}");
}

#[test]
fn new_tokens_are_where_the_table_says() {
    let checked = [Device::cpu(EmuOptions::race_checked())];
    for device in devices().iter().chain(&checked) {
        for shape in [(1, 3, 64), (1, 8, 128), (5, 1, 96), (19, 2, 256)] {
            check(device, shape, |i| f16::from_bits((i % 30_011) as u16));
            check(device, shape, |i| bf16::from_bits((i % 30_011) as u16));
        }
    }
}
