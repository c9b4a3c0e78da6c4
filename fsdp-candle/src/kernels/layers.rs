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
