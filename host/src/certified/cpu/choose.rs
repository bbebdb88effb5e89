//! What each query row wants from the originals: `weigh` and `mark` of the kernels, for a group of eight
//! rows.

use super::pass::{Note, RowGroup};
use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::{Lanes, Portable};
use crate::attention::cpu::softmax::{MAX_ROWS, combine, warp_sum};
use kernels_gpu::attention::{PartialRow, part_floats};
use kernels_gpu::certified::choice::{BINS, Bins, COUNT_SHIFT, Choice, Limits, widened};
use kernels_gpu::certified::parts::{PART_BLOCKS, Part};
use kernels_gpu::certified::sums::{Own, weights};
use kernels_gpu::certified::weighing::ranks_error;
use kernels_gpu::certified::{Entry, Record, RowSums, StepShape, Taken, Thresholds};
use simt::Zeroable;
use simt::math::{fma, max};

const N: usize = BINS as usize;
/// Words of [`Own`].
const WORDS: usize = Own::WORDS;

/// What is known of a group of eight rows after the choice.
#[derive(Default)]
pub(super) struct Chosen {
    /// Reference and sum of the pass, by row.
    pub(super) pass: Vec<PartialRow>,
    /// What the certificates are made of, over all blocks.
    pub(super) sums: Vec<RowSums>,
    /// What is promoted of it, over all parts.
    pub(super) taken: Vec<Taken>,
    /// The blocks that some row wants: parts' lists one after another.
    pub(super) entries: Vec<Entry>,
    /// Where each part's list ends among them.
    pub(super) ends: Vec<usize>,
    /// Thread blocks that replace.
    pub(super) replacers: usize,
    /// Masses and errors of the rows' blocks, [rows, blocks].
    pub(super) weights: Vec<[f32; 2]>,
    /// What the threads of a block that weighs add up.
    threads: Vec<Own>,
    /// A part's list: of each entry and row whether its keys and its values are chosen, bits as in
    /// [`Entry::rows`].
    own: Vec<u32>,
}

/// The choice of one group.
pub(super) struct Choose<'a> {
    pub(super) shape: StepShape,
    pub(super) thresholds: Thresholds,
    /// Thread blocks of a row that weigh.
    pub(super) weighing: u32,
    pub(super) head_dim: u32,
    /// Whether the choice is for steps to come: nothing is taken out of this one's sums.
    pub(super) carried: bool,
    pub(super) group: RowGroup,
    /// Of the sequence's full blocks.
    pub(super) notes: &'a [Note],
    /// Partial results of the pass.
    pub(super) partials: &'a [f32],
    pub(super) chosen: &'a mut Chosen,
}

/// A row's choices.
struct Wanted {
    keys: Choice,
    values: Choice,
    of_errors: Bins,
}

impl Work for Choose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let rows = self.group.rows;
        let blocks = self.notes.len();
        let chosen = &mut *self.chosen;
        chosen.pass.clear();
        chosen.sums.clear();
        chosen.weights.clear();
        let mut wanted = Vec::with_capacity(rows);
        for r in 0..rows {
            wanted.push(self.weigh(r));
        }
        self.mark(&wanted, blocks);
    }
}

impl Choose<'_> {
    /// `weigh` of row `r`.
    #[inline(always)]
    fn weigh(&mut self, r: usize) -> Wanted {
        let Choose { shape, thresholds, weighing, head_dim, notes, partials, .. } = *self;
        let blocks = notes.len() as u32;
        let floats = part_floats(head_dim);
        // Sums alone, no values.
        let total = combine::<Portable>(partials, floats, r, head_dim as usize, &mut []);
        let first_eta = notes.first().map_or(Record::zeroed(), |note| note.records[r]).eta();
        let (of_masses, of_errors) = (Bins::of_masses(), Bins::of_errors(first_eta));
        for note in notes {
            let (mass, error) = weights(note.records[r], total.reference);
            self.chosen.weights.push([mass, error]);
        }
        let of_row = &self.chosen.weights[r * blocks as usize..];
        let mut histograms = [[0u64; N]; 2];
        let part = |index: u32| Part { index, parts: shape.parts, blocks };
        let used = part(0).used();
        let mut merged = [0f32; WORDS];
        for first in 0..used.min(weighing) {
            let parts = || (first..used).step_by(weighing as usize).map(part);
            let most = parts().map(Part::places).max().unwrap_or(0) as usize;
            let threads = &mut self.chosen.threads;
            threads.clear();
            threads.resize(most.min(N).next_multiple_of(32), Own::new());
            for part in parts() {
                for place in 0..part.places() {
                    let block = part.block(place);
                    if block >= blocks {
                        continue;
                    }
                    let ([mass, error], record) = (of_row[block as usize], notes[block as usize].records[r]);
                    threads[place as usize % N].add(mass, error, thresholds.per_group != 0, record);
                    if thresholds.max_keys != 0 {
                        histograms[0][of_masses.bin(mass) as usize] += widened(of_masses.addend(mass));
                    }
                    if ranks_error(record, thresholds) {
                        histograms[1][of_errors.bin(error) as usize] += widened(of_errors.addend(error));
                    }
                }
            }
            let words = reduce(threads, most);
            for (k, (merged, word)) in merged.iter_mut().zip(words).enumerate() {
                *merged = added(k, *merged, word);
            }
        }

        let wanted = thresholds.coverage * total.sum;
        let mut keys = Choice::NONE;
        let mut expanded = 0;
        if thresholds.max_keys > 0 && (wanted > 0.0 || thresholds.min_keys > 0) {
            let ranked = Ranked::of(of_masses, &histograms[0]);
            let limits = |most: u32| Limits {
                wanted,
                least: thresholds.min_keys.min(blocks),
                most: most.min(blocks),
                floor: thresholds.key_floor * total.sum,
            };
            let chosen = ranked.choose(limits(thresholds.max_keys));
            keys = chosen.0;
            let tail = total.sum - chosen.1;
            if tail > thresholds.expand_tail * total.sum && thresholds.expanded_keys > thresholds.max_keys {
                expanded = 1;
                keys = ranked.choose(limits(thresholds.expanded_keys)).0;
            }
        }
        let mut values = Choice::NONE;
        let (nu, error_sum) = (merged[Own::NU as usize], merged[Own::ERROR as usize]);
        let allowed = thresholds.value_tolerance * nu * total.sum;
        if error_sum > allowed && thresholds.max_values > 0 {
            let limits = Limits {
                wanted: error_sum - allowed,
                least: 0,
                most: thresholds.max_values.min(blocks),
                floor: thresholds.value_floor * nu * total.sum,
            };
            values = Ranked::of(of_errors, &histograms[1]).choose(limits).0;
        }
        self.chosen.pass.push(total);
        self.chosen.sums.push(Own::row(merged, total.sum, expanded));
        Wanted { keys, values, of_errors }
    }

    /// `mark` of all parts, and what `replace` adds up of each row's.
    #[inline(always)]
    fn mark(&mut self, wanted: &[Wanted], blocks: usize) {
        let Choose { shape, thresholds, notes, carried, .. } = *self;
        let rows = wanted.len();
        let all = 0xffu32 >> (MAX_ROWS - rows);
        let chosen = &mut *self.chosen;
        chosen.entries.clear();
        chosen.ends.clear();
        let mut room = [[0u32; 2]; MAX_ROWS];
        for (room, wanted) in room.iter_mut().zip(wanted) {
            *room = [wanted.keys.room, wanted.values.room];
        }
        // Four lanes of a row have every fourth part.
        let mut taken = [[Taken::zeroed(); 4]; MAX_ROWS];
        for index in 0..shape.parts {
            let part = Part { index, parts: shape.parts, blocks: blocks as u32 };
            let first = chosen.entries.len();
            chosen.own.clear();
            for place in 0..part.places() {
                let block = part.block(place);
                if block as usize >= blocks {
                    continue;
                }
                let mut own = 0;
                for (r, wanted) in wanted.iter().enumerate() {
                    let [mass, error] = chosen.weights[r * blocks + block as usize];
                    let of_mass = Bins::of_masses().bin(mass);
                    own |= u32::from(takes(wanted.keys, of_mass, &mut room[r][0])) << r;
                    if ranks_error(notes[block as usize].records[r], thresholds) {
                        let of_error = wanted.of_errors.bin(error);
                        own |= u32::from(takes(wanted.values, of_error, &mut room[r][1])) << (8 + r);
                    }
                }
                if own == 0 {
                    continue;
                }
                let mut rows = own;
                if thresholds.per_group != 0 {
                    rows = if own & 0xff != 0 { all } else { 0 } | if own >> 8 != 0 { all << 8 } else { 0 };
                }
                chosen.own.push(own);
                chosen.entries.push(Entry { index: block, rows });
            }
            chosen.ends.push(chosen.entries.len());
            if carried {
                continue;
            }
            for (r, taken) in taken.iter_mut().enumerate().take(rows) {
                let mut lanes = [Taken::zeroed(); 32];
                for (e, (entry, own)) in chosen.entries[first..].iter().zip(&chosen.own).enumerate() {
                    let of_row = [own >> r & 1 != 0, own >> (8 + r) & 1 != 0];
                    if of_row[0] || of_row[1] {
                        let block = entry.index as usize;
                        let [mass, error] = chosen.weights[r * blocks + block];
                        let record = notes[block].records[r];
                        lanes[e % 32].add(mass, error, of_row, thresholds.per_group != 0, record);
                    }
                }
                let of_lane = &mut taken[index as usize % 4];
                // The lanes beyond have nothing.
                let used = chosen.own.len().clamp(1, 32).next_power_of_two();
                *of_lane = of_lane.plus(over_lanes(&mut lanes[..used]));
            }
        }
        chosen.taken.clear();
        for taken in &mut taken[..rows] {
            chosen.taken.push(over_lanes(taken));
        }
    }
}

/// Whether a choice takes what lies in `bin`, for whose own bin there is `room` left.
#[inline(always)]
fn takes(choice: Choice, bin: u32, room: &mut u32) -> bool {
    if bin == choice.bin && *room > 0 {
        *room -= 1;
        return true;
    }
    bin < choice.bin
}

/// `Taken::over_lanes`, of a power of two of lanes.
#[inline(always)]
fn over_lanes(lanes: &mut [Taken]) -> Taken {
    let mut distance = lanes.len() / 2;
    while distance > 0 {
        for lane in 0..distance {
            lanes[lane] = lanes[lane].plus(lanes[lane + distance]);
        }
        distance /= 2;
    }
    lanes[0]
}

/// Word `k` of [`Own`] taken together with another thread's.
#[inline(always)]
fn added(k: usize, a: f32, b: f32) -> f32 {
    if k < Own::FIRST_MAXIMUM as usize { a + b } else { max(a, b) }
}

/// `Reduce::words`: over the lanes of each warp, then over the warps, of the first `used` threads. What
/// threads without a block have changes nothing.
#[inline(always)]
fn reduce(threads: &[Own], used: usize) -> [f32; WORDS] {
    let mut total = [0f32; WORDS];
    for (w, warp) in threads.as_chunks::<32>().0.iter().enumerate() {
        let used = used.saturating_sub(32 * w).min(32);
        let mut lanes = [[0f32; 32]; WORDS];
        for (lane, own) in warp.iter().enumerate().take(used) {
            for (lanes, word) in lanes.iter_mut().zip(own.words()) {
                lanes[lane] = word;
            }
        }
        for (k, (total, lanes)) in total.iter_mut().zip(&mut lanes).enumerate() {
            let word = if k < Own::FIRST_MAXIMUM as usize {
                warp_sum(*lanes)
            } else {
                let mut most = lanes[0];
                // Of the lanes beyond, which have zeros, one is enough.
                for lane in &lanes[..(used + 1).min(32)] {
                    most = max(most, *lane);
                }
                most
            };
            *total = if w == 0 { word } else { added(k, *total, word) };
        }
    }
    total
}

/// Numbers in each bin and above.
struct Ranked<'a> {
    bins: Bins,
    /// The histogram.
    words: &'a [u64; N],
    count: [u32; N],
    sum: [f32; N],
}

impl<'a> Ranked<'a> {
    /// `Reduce::rank`: prefix sums within the warps, a bin a lane, then over the warps.
    #[inline(always)]
    fn of(bins: Bins, words: &'a [u64; N]) -> Self {
        let mut ranked = Ranked { bins, words, count: [0; N], sum: [0.0; N] };
        let (mut count_before, mut sum_before) = (0, 0f32);
        for (warp, words) in words.as_chunks::<32>().0.iter().enumerate() {
            let of_warp = 32 * warp..32 * warp + 32;
            // Most warps have no number: what they add is nothing.
            if words.iter().all(|word| *word == 0) {
                ranked.count[of_warp.clone()].fill(count_before);
                ranked.sum[of_warp].fill(sum_before);
                continue;
            }
            let (mut count, mut sum) = ([0u32; 32], [0f32; 32]);
            for (lane, word) in words.iter().enumerate().filter(|(_, word)| **word != 0) {
                count[lane] = (word >> COUNT_SHIFT) as u32;
                sum[lane] = bins.sum((32 * warp + lane) as u32, *word);
            }
            for distance in [1, 2, 4, 8, 16] {
                let (counts, sums) = (count, sum);
                for lane in distance..32 {
                    count[lane] += counts[lane - distance];
                    sum[lane] += sums[lane - distance];
                }
            }
            let all = (count[31], sum[31]);
            for lane in 0..32 {
                ranked.count[32 * warp + lane] = count[lane] + count_before;
                ranked.sum[32 * warp + lane] = sum[lane] + sum_before;
            }
            count_before += all.0;
            sum_before += all.1;
        }
        ranked
    }

    /// `Reduce::choose`.
    #[inline(always)]
    fn choose(&self, limits: Limits) -> (Choice, f32) {
        let mut bin = 0;
        for (t, (count, sum)) in self.count.iter().zip(&self.sum).enumerate() {
            let low = self.bins.edge(t as u32) < limits.floor;
            let heavy = (*sum >= limits.wanted) | low;
            let enough = (heavy & (*count >= limits.least)) | (*count > limits.most);
            bin += usize::from(!enough);
        }
        let bin = bin.min(N - 1);
        let (own_count, own_sum) = match self.words[bin] {
            0 => (0, 0.0),
            word => ((word >> COUNT_SHIFT) as u32, self.bins.sum(bin as u32, word)),
        };
        let (taken, taken_sum) = (self.count[bin] - own_count, self.sum[bin] - own_sum);
        let edge = self.bins.edge(bin as u32);
        let missing = limits.missing(taken_sum, edge);
        let room = missing.max(limits.least.saturating_sub(taken)).min(limits.most.saturating_sub(taken));
        let counted = room.min(own_count);
        (Choice { bin: bin as u32, room }, fma(counted as f32, edge, taken_sum))
    }
}

const _: () = assert!(PART_BLOCKS as usize <= 4 * N, "a thread has four blocks of a part at most");
