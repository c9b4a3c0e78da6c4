//! Arguments of the layers' kernels. Devices have such kernels; on the CPU, the layers of `nn` compute themselves.

/// The random numbers of a tensor, which `Mask` in `random` explains. Kernels that draw them include `philox.cuh`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Draw {
    /// Follows from the seed and the number of earlier draws.
    pub(crate) key: u64,
    /// Coordinates of the tensor's first element.
    pub(crate) first: [u64; 4],
    /// Number of planes, lines and columns of a row.
    pub(crate) extents: [u64; 3],
    /// The first line after a gap, and the lines that the gap skips.
    pub(crate) gap_at: u64,
    pub(crate) gap: u64,
    /// Words below this drop their element.
    pub(crate) threshold: u32,
    /// Factor of the other elements.
    pub(crate) scale: f32,
}

/// A float of 8 bits, without infinities in E4M3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Float8Format {
    /// 4 bits of exponent and 3 of mantissa.
    E4M3,
    /// 5 bits of exponent and 2 of mantissa.
    E5M2,
}

impl Float8Format {
    /// Returns the largest finite number.
    pub(crate) const fn most(self) -> f32 {
        match self {
            Float8Format::E4M3 => 448.,
            Float8Format::E5M2 => 57_344.,
        }
    }
}

/// How an operand of a matrix product becomes 8-bit floats: each value is multiplied by a scale, the largest float over
/// the largest magnitude, and rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Float8Cast {
    pub(crate) format: Float8Format,
    /// Whether each row of a left operand, and each column of a right one, has a scale. Else the tensor has one.
    pub(crate) per_vector: bool,
    /// Whether scales are rounded down to a power of two.
    pub(crate) power_of_two: bool,
}

impl Float8Cast {
    /// Magnitudes below this have its scale.
    pub(crate) const LEAST: f64 = 1e-12;
    /// Sums of a product have a multiple of this many terms, since tensor cores multiply in tiles of so many.
    pub(crate) const TERMS: usize = 16;
}

/// A normalization over rows.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code))]
pub(crate) struct Normalization {
    /// Elements of a row, at least 1.
    pub(crate) width: usize,
    pub(crate) eps: f64,
    /// Whether the mean is subtracted.
    pub(crate) centered: bool,
}

/// A rotation of heads. Heads at one position follow one another, as a group.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code))]
pub(crate) struct Rotation {
    /// Heads of a group.
    pub(crate) heads: usize,
    /// Elements of a head.
    pub(crate) dim: usize,
    /// Rotated pairs of a head: the first `2 * half` elements.
    pub(crate) half: usize,
    /// Position of the first group, unless each group's position is given.
    pub(crate) offset: usize,
    /// Groups until the positions repeat.
    pub(crate) steps: usize,
    /// Groups that share a table, and rows of a table. `None` if all groups share one.
    pub(crate) tables: Option<(usize, usize)>,
    /// Whether the elements of a pair are adjacent, else they are `half` apart.
    pub(crate) interleaved: bool,
}
