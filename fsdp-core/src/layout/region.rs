//! Boxes of a tensor.

/// A box of a global tensor: where it starts and how far it reaches in every dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The first index in every dimension.
    pub offsets: Vec<usize>,
    /// The extent in every dimension.
    pub sizes: Vec<usize>,
}

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Region { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// The number of elements; the largest `usize` where there are more.
    pub fn elements(&self) -> usize {
        self.sizes.iter().fold(1, |elements, &size| elements.saturating_mul(size))
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// What this box and another of the same tensor have in common, if anything.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        let mut both =
            Region { offsets: Vec::with_capacity(self.offsets.len()), sizes: Vec::with_capacity(self.sizes.len()) };
        for dim in 0..self.offsets.len() {
            let start = self.offsets[dim].max(other.offsets[dim]);
            let end = (self.offsets[dim] + self.sizes[dim]).min(other.offsets[dim] + other.sizes[dim]);
            if start >= end {
                return None;
            }
            both.offsets.push(start);
            both.sizes.push(end - start);
        }
        Some(both)
    }
}
