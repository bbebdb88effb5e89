//! Who comes into the scratch, by hand.

use super::*;
use ferrokv::host::certified::{Scratch, Traffic};
use ferrokv::kernels_gpu::certified::admit::{LAST, STEP, THREADS, TOTAL};
use ferrokv::kernels_gpu::certified::{Entry, claim};
use ferrokv::simt::LaunchShape;

const KEYS: u32 = 0xff;
const BOTH: u32 = 0xffff;
const EMPTY: u64 = Scratch::EMPTY as u64;

fn traffic(words: &[u64]) -> Traffic {
    Traffic { key_hits: words[0], key_misses: words[1], value_hits: words[2], value_misses: words[3] }
}

#[test]
fn hits_keep_their_slots_and_the_first_miss_gets_the_others() {
    for device in devices().iter().chain([&Device::cpu(EmuOptions::race_checked())]) {
        let stream = Stream::new(device).unwrap();
        // Two sequences of one KV head, four blocks each; lists of up to five.
        let table = Buffer::from_slice(device, &[0u32, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let scratch = Scratch { key_slots: 2, value_slots: 1, fresh: 2, admits: 1 };
        let mut words = vec![0; scratch.words() as usize];
        let [first, second, value] = [0, 1, 2].map(Scratch::word);
        // The first slot for keys has block 4.
        words[first..].copy_from_slice(&[u64::MAX, 4, u64::MAX, EMPTY, u64::MAX, EMPTY]);
        let mut directory = Buffer::from_slice(device, &words).unwrap();
        let mut launch = |lists: [&[(u32, u32)]; 2]| {
            let mut entries = [Entry { index: 0, rows: 0 }; 10];
            for (list, of) in lists.iter().enumerate() {
                for (place, (index, rows)) in of.iter().enumerate() {
                    entries[5 * list + place] = Entry { index: *index, rows: *rows };
                }
            }
            let entries = Buffer::from_slice(device, &entries).unwrap();
            let counts = Buffer::from_slice(device, &lists.map(|list| list.len() as u32)).unwrap();
            let arguments =
                (entries.global(), counts.global(), table.global(), directory.global_mut(), 1, 1, 4, scratch);
            // SAFETY: two lists of five, a table of two rows, a directory of three slots.
            unsafe { stream.launch(&claim::kernel(), LaunchShape::new((1, 2), THREADS), arguments) }.unwrap();
            directory.to_vec().unwrap()
        };
        // Blocks 0 and 2 want the slot of block 4, which is used: they stay out. Blocks 1 and 5 want the empty one, and all
        // values the only one for values.
        let words = launch([
            &[(0, KEYS), (1, BOTH), (2, KEYS)],
            &[(0, KEYS), (1, BOTH), (2, Entry::TRAILING | BOTH)],
        ]);
        let stamp = 0xffff_ffff_u64 << 32;
        assert_eq!([words[first], words[second], words[value]], [stamp, stamp | 2, stamp | 2]);
        assert_eq!([words[first + 1], words[second + 1], words[value + 1]], [4, EMPTY, EMPTY]);
        let expected = Traffic { key_hits: 1, key_misses: 4, value_hits: 0, value_misses: 2 };
        assert_eq!((words[STEP], traffic(&words[LAST..])), (1, expected));

        // Nobody uses block 4 now, and claims of the step before count for nothing.
        let words = launch([&[], &[(2, KEYS), (3, BOTH)]]);
        let stamp = 0xffff_fffe_u64 << 32;
        assert_eq!([words[first], words[second], words[value]], [stamp | 6, stamp | 7, stamp | 7]);
        let last = Traffic { key_hits: 0, key_misses: 2, value_hits: 0, value_misses: 1 };
        assert_eq!((words[STEP], traffic(&words[LAST..])), (2, last));
        let total = Traffic { key_hits: 1, key_misses: 6, value_hits: 0, value_misses: 3 };
        assert_eq!(traffic(&words[TOTAL..]), total);
    }
}
