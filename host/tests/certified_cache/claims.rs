//! Who comes into the scratch, by hand.

use super::*;
use ferrokv::host::certified::{Scratch, Traffic};
use ferrokv::kernels_gpu::certified::admit::{LAST, STEP, TOTAL};
use ferrokv::kernels_gpu::certified::carried::{Promoted, mode};
use ferrokv::kernels_gpu::certified::choice::Choice;
use ferrokv::kernels_gpu::certified::layout::Annotation;
use ferrokv::kernels_gpu::certified::marking::THREADS;
use ferrokv::kernels_gpu::certified::{
    Entry, ListHead, Record, RowChoice, StepShape, Taken, Thresholds, Weighed, mark, mark_layout,
};
use ferrokv::simt::{LaunchShape, Zeroable};

/// A block of no mass, one whose keys are wanted, one whose values are too.
const NOTHING: (f32, f32) = (0.0, 0.0);
const KEYS: (f32, f32) = (1.0, 0.0);
const BOTH: (f32, f32) = (1.0, 1.0);
const EMPTY: u64 = Scratch::EMPTY as u64;

fn traffic(words: &[u64]) -> Traffic {
    Traffic { key_hits: words[0], key_misses: words[1], value_hits: words[2], value_misses: words[3] }
}

/// Sequences of one head of up to `max_blocks` blocks, of a pool of `pool_blocks`; nothing is split.
fn shape(max_blocks: u32, pool_blocks: u32) -> StepShape {
    StepShape {
        group: 1,
        kv_heads: 1,
        max_blocks,
        splits: 1,
        parts: 1,
        replacers: 1,
        softmax_scale: 1.0,
        notes: 1,
        pool_blocks,
        paced: 0,
        dense_splits: 1,
        rung_splits: 1,
    }
}

#[test]
fn hits_keep_their_slots_and_the_first_miss_gets_the_others() {
    for device in devices().iter().chain([&Device::cpu(EmuOptions::race_checked())]) {
        let stream = Stream::new(device).unwrap();
        // Two sequences of one head, of up to four blocks.
        let table = Buffer::from_slice(device, &[0u32, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let scratch = Scratch { key_slots: 2, value_slots: 1, fresh: 2, admits: 1 };
        let mut words = vec![0; scratch.words() as usize];
        let [first, second, value] = [0, 1, 2].map(Scratch::word);
        // The first slot for keys has block 4.
        words[first..].copy_from_slice(&[u64::MAX, 4, u64::MAX, EMPTY, u64::MAX, EMPTY]);
        let mut directory = Buffer::from_slice(device, &words).unwrap();
        // Both rows choose everything that has mass, or mass and error.
        let everything = Choice { bin: 240, room: 1 };
        let choice =
            RowChoice { keys: everything, values: everything, first_eta: 1.0, ..RowChoice::zeroed() };
        let weighed = Buffer::from_slice(device, &[Weighed { choice, ..Weighed::zeroed() }; 2]).unwrap();
        let shape = shape(4, 8);
        let thresholds = Thresholds { max_keys: 9, max_values: 9, certify: 1, ..Thresholds::zeroed() };
        let part_counts = Buffer::<u32>::zeroed(device, 2 * 256).unwrap();
        let mut lists = Buffer::<ListHead>::zeroed(device, 2).unwrap();
        let mut entries = Buffer::<Entry>::zeroed(device, 2 * shape.places() as usize).unwrap();
        let mut taken = Buffer::<Taken>::zeroed(device, 2).unwrap();
        let mut promoted = Buffer::<Promoted>::zeroed(device, 2).unwrap();
        let dense_rows = Buffer::<u32>::zeroed(device, 2).unwrap();
        let mut launch = |lengths: [u32; 2], blocks: [(f32, f32); 8]| {
            let records = blocks.map(|(mass, eta)| {
                Record::new(mass, 0.0, 0.0, Annotation { eta, nu: 1.0, ..Annotation::NONE })
            });
            let records = Buffer::from_slice(device, &records).unwrap();
            let lengths = Buffer::from_slice(device, &lengths).unwrap();
            let arguments = mark::Args {
                records: records.global(),
                weighed: weighed.global(),
                part_counts: part_counts.global(),
                lengths: lengths.global(),
                table: table.global(),
                lists: lists.global_mut(),
                entries: entries.global_mut(),
                taken: taken.global_mut(),
                directory: directory.global_mut(),
                promoted: promoted.global_mut(),
                dense_rows: dense_rows.global(),
                shape,
                thresholds,
                scratch, // No list is carried.
                mode: 0,
            };
            let grid = LaunchShape::new((1, 1, 2), THREADS).shared(mark_layout().bytes);
            // SAFETY: records, choices and a table of two rows of four blocks, a directory of three slots.
            unsafe { stream.launch(&mark::kernel(), grid, arguments) }.unwrap();
            directory.to_vec().unwrap()
        };
        // Blocks 0 and 2 want the slot of block 4, which is used: they stay out. Blocks 1 and 5 want the
        // empty one, and all values the only one for values. The second sequence's trailing block is fresh.
        let words = launch([64, 37], [KEYS, BOTH, KEYS, NOTHING, KEYS, BOTH, NOTHING, NOTHING]);
        let stamp = 0xffff_ffff_u64 << 32;
        assert_eq!([words[first], words[second], words[value]], [stamp, stamp | 2, stamp | 2]);
        assert_eq!([words[first + 1], words[second + 1], words[value + 1]], [4, EMPTY, EMPTY]);
        let expected = Traffic { key_hits: 1, key_misses: 4, value_hits: 0, value_misses: 2 };
        assert_eq!((words[STEP], traffic(&words[LAST..])), (1, expected));

        // Nobody uses block 4 now, and claims of the step before count for nothing.
        let words = launch([64, 64], [NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, KEYS, BOTH]);
        let stamp = 0xffff_fffe_u64 << 32;
        assert_eq!([words[first], words[second], words[value]], [stamp | 8, stamp | 9, stamp | 9]);
        let last = Traffic { key_hits: 0, key_misses: 2, value_hits: 0, value_misses: 1 };
        assert_eq!((words[STEP], traffic(&words[LAST..])), (2, last));
        let total = Traffic { key_hits: 1, key_misses: 6, value_hits: 0, value_misses: 3 };
        assert_eq!(traffic(&words[TOTAL..]), total);
    }
}

#[test]
fn a_list_that_is_used_again_is_counted_by_what_its_entries_want() {
    for device in devices().iter().chain([&Device::cpu(EmuOptions::race_checked())]) {
        let stream = Stream::new(device).unwrap();
        // One sequence of one head; more entries than a warp has threads, so that all warps count.
        const BLOCKS: u32 = 70;
        let table = Buffer::from_slice(device, &(0..BLOCKS).rev().collect::<Vec<_>>()).unwrap();
        let scratch = Scratch { key_slots: 1, value_slots: BLOCKS, fresh: 0, admits: 1 };
        let mut words = vec![0; scratch.words() as usize];
        for slot in 0..=BLOCKS {
            // The values of every third block are in their slot; slot 0 is for keys.
            let block = slot.wrapping_sub(1);
            let held = if slot > 0 && block.is_multiple_of(3) { u64::from(block) } else { EMPTY };
            words[Scratch::word(slot)..][..2].copy_from_slice(&[u64::MAX, held]);
        }
        let mut directory = Buffer::from_slice(device, &words).unwrap();
        let weighed = Buffer::<Weighed>::zeroed(device, 1).unwrap();
        let shape = shape(BLOCKS, BLOCKS);
        let records = Buffer::<Record>::zeroed(device, BLOCKS as usize).unwrap();
        let lengths = Buffer::from_slice(device, &[16 * BLOCKS]).unwrap();
        let part_counts = Buffer::<u32>::zeroed(device, 256).unwrap();
        let head = ListHead { entries: BLOCKS, key_tiles: 0, value_tiles: BLOCKS, expanded: 0 };
        let mut lists = Buffer::from_slice(device, &[head]).unwrap();
        // Row 0's bit for values; see `Entry::rows`.
        let mut listed: Vec<Entry> = (0..BLOCKS).map(|index| Entry { index, rows: 1 << 8 }).collect();
        listed.resize(shape.places() as usize, Entry { index: u32::MAX, rows: 0 });
        let mut entries = Buffer::from_slice(device, &listed).unwrap();
        let mut taken = Buffer::<Taken>::zeroed(device, 1).unwrap();
        let made = Promoted { value_tiles: BLOCKS, blocks: BLOCKS, ..Promoted::zeroed() };
        let mut promoted = Buffer::from_slice(device, &[made]).unwrap();
        let dense_rows = Buffer::<u32>::zeroed(device, 1).unwrap();
        let arguments = mark::Args {
            records: records.global(),
            weighed: weighed.global(),
            part_counts: part_counts.global(),
            lengths: lengths.global(),
            table: table.global(),
            lists: lists.global_mut(),
            entries: entries.global_mut(),
            taken: taken.global_mut(),
            directory: directory.global_mut(),
            promoted: promoted.global_mut(),
            dense_rows: dense_rows.global(),
            shape,
            thresholds: Thresholds { certify: 1, ..Thresholds::zeroed() },
            scratch,
            mode: mode::LISTED,
        };
        let grid = LaunchShape::new((1, 1, 1), THREADS).shared(mark_layout().bytes);
        // SAFETY: a list of as many entries as the sequence has blocks, a table of them, a directory of 71
        // slots.
        unsafe { stream.launch(&mark::kernel(), grid, arguments) }.unwrap();
        let words = directory.to_vec().unwrap();
        let expected = Traffic { key_hits: 0, key_misses: 0, value_hits: 24, value_misses: 46 };
        assert_eq!((words[STEP], traffic(&words[LAST..])), (1, expected));
        assert_eq!(entries.to_vec().unwrap(), listed);
    }
}
