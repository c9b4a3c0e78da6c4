//! Floats as 8-bit codes with a scale for each block of them.

/// What a code is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EightBits {
    /// A whole number from -127 to 127; a block's scale is its largest magnitude / 127.
    Int8,
    /// A float of 4 bits of exponent and 3 of mantissa; a block's scale is its largest magnitude / 448.
    E4M3,
}
