//! MXFP4, the format of gpt-oss's experts (OCP Microscaling Formats, version 1.0, section 5.3): blocks of 32 values of 4 bits
//! with a power of two as their scale.

/// Values of a block.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a block's codes. Each has two values, of which the lower four bits come first.
pub(crate) const CODES: usize = BLOCK / 2;
/// Magnitudes of the codes 0 to 7. The fourth bit is the sign.
const MAGNITUDES: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];

/// Returns the values of a block. The scale is `2^(scale - 127)`, and NaN for 255.
pub(crate) fn decode(codes: &[u8], scale: u8) -> [f32; BLOCK] {
    // f64 has all of these powers, which f32 rounds to 0 only below 2^-149.
    let scale = if scale == u8::MAX { f64::NAN } else { 2f64.powi(i32::from(scale) - 127) };
    std::array::from_fn(|at| {
        let code = (codes[at / 2] >> (4 * (at % 2))) & 0xf;
        let magnitude = f64::from(MAGNITUDES[usize::from(code & 7)]);
        ((if code & 8 == 0 { magnitude } else { -magnitude }) * scale) as f32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_signs_magnitudes_and_a_scale() {
        let mut codes = [0u8; CODES];
        (codes[0], codes[1], codes[15]) = (0x71, 0x9f, 0xa0);
        let values = decode(&codes, 128);
        assert_eq!((values[0], values[1], values[2], values[3]), (1., 12., -12., -1.));
        assert_eq!((values[30], values[31]), (0., -2.));
        assert!(values[4..30].iter().all(|&value| value == 0.));
        assert_eq!(decode(&codes, 127 - 3)[1], 0.75);
        assert!(decode(&codes, 255)[0].is_nan());
    }
}
