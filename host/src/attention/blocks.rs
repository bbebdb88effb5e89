//! Which blocks of a pool are taken, and by how many: the host's side of block tables, without a device.

/// Blocks that nobody has, and how many sequences have each of the others.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    free: Vec<u32>,
    references: Vec<u32>,
}

impl Blocks {
    /// So many, all free.
    pub fn new(blocks: u32) -> Self {
        // The lowest are taken first.
        Blocks { free: (0..blocks).rev().collect(), references: vec![0; blocks as usize] }
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.references.len() as u32
    }

    /// How many nobody has.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// So many that nobody has, or as many as there are.
    pub fn take(&mut self, blocks: usize) -> Vec<u32> {
        let at = self.free.len().saturating_sub(blocks);
        let mut taken = self.free.split_off(at);
        taken.reverse();
        taken.iter().for_each(|block| self.references[*block as usize] = 1);
        taken
    }

    /// Another sequence has these too.
    pub fn share(&mut self, blocks: &[u32]) {
        blocks.iter().for_each(|block| self.references[*block as usize] += 1);
    }

    /// A sequence gives its blocks back; those that no other has are free again.
    pub fn give_back(&mut self, blocks: Vec<u32>) {
        for block in blocks.into_iter().rev() {
            let references = &mut self.references[block as usize];
            *references -= 1;
            if *references == 0 {
                self.free.push(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Blocks;

    #[test]
    fn a_shared_block_is_free_when_the_last_gives_it_back() {
        let mut blocks = Blocks::new(4);
        let first = blocks.take(3);
        assert_eq!((&first[..], blocks.free(), blocks.count()), (&[0, 1, 2][..], 1, 4));
        blocks.share(&first[..2]);
        blocks.give_back(first);
        assert_eq!((blocks.free(), blocks.take(1)), (2, vec![2]));
        blocks.give_back(vec![0, 1]);
        assert_eq!(blocks.take(9), vec![0, 1, 3]);
        assert_eq!(blocks.free(), 0);
    }
}
