//! What a scheme can calibrate on where a workload is given no file: its own input.

use super::Input;
use crate::attention::BLOCK_TOKENS;
use crate::kv::Result;
use crate::kv::calibration::{Material, Passed};
use half::f16;

const BLOCK: usize = BLOCK_TOKENS as usize;

impl Input<f16> {
    /// Some tokens of the first pool, evenly spread, with all queries: tokens of `least` to `most`, taken
    /// again and again where there are fewer. What is no number is 0.
    ///
    /// # Errors
    /// What copying reports.
    pub(crate) fn material(&self, [least, most]: [usize; 2]) -> Result<Material> {
        let geometry = self.geometry();
        let (heads, dim) = (geometry.kv_heads, geometry.head_dim);
        let pool = &self.pools[0];
        let all: usize = self.lengths.iter().map(|length| *length as usize).sum();
        let every = all.div_ceil(most).max(1);
        let mut passed = Passed::default();
        let mut blocks = [vec![f16::ZERO; heads * BLOCK * dim], vec![f16::ZERO; heads * BLOCK * dim]];
        let mut index = 0;
        for (length, numbers) in self.lengths.iter().zip(&self.blocks) {
            for (number, first) in numbers.iter().zip((0..*length as usize).step_by(BLOCK)) {
                index += 1;
                if index % every != 0 && every > 1 {
                    continue;
                }
                let at = *number as usize * blocks[0].len();
                pool.keys().read(at, &mut blocks[0])?;
                pool.values().read(at, &mut blocks[1])?;
                for place in 0..BLOCK.min(*length as usize - first) {
                    for head in 0..heads {
                        let row = (head * BLOCK + place) * dim..(head * BLOCK + place + 1) * dim;
                        passed.keys.extend_from_slice(&blocks[0][row.clone()]);
                        passed.values.extend_from_slice(&blocks[1][row]);
                    }
                }
            }
        }
        if passed.keys.is_empty() {
            passed.keys.resize(heads * dim, f16::ZERO);
            passed.values.resize(heads * dim, f16::ZERO);
        }
        for rows in [&mut passed.keys, &mut passed.values] {
            let once = rows.len();
            while rows.len() < least * heads * dim {
                rows.extend_from_within(..once);
            }
        }
        for queries in &self.queries {
            passed.queries.extend(queries.to_vec()?);
        }
        for rows in [&mut passed.keys, &mut passed.values, &mut passed.queries] {
            rows.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = f16::ZERO);
        }
        Ok(Material { geometry, rope: None, layers: vec![passed], fronts: Vec::new() })
    }
}
