// The nearest floats of 8 bits, ties to even. Values beyond the largest become the largest.

#if !defined(GPU_DOUBLE) && __CUDA_ARCH__ >= 890
#define CODE(name, format, exponent, mantissa, above, most) \
  inline __device__ u8 name(float x) { \
    u16 codes; \
    asm("cvt.rn.satfinite." format ".f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x)); \
    return (u8)codes; \
  }
#else
#define CODE(name, format, exponent, mantissa, above, most) \
  inline __device__ u8 name(float x) { \
    const u32 sign = bits_of(x) >> 31 << 7; \
    if (x != x) return (u8)(sign | 0x7f); \
    if (x >= (most) || x <= -(most)) return (u8)(sign | ((above) - 1)); \
    return (u8)narrowed<exponent, mantissa, 8, 23>(bits_of(x), above); \
  }
#endif
// `above` is the code after that of the largest number, `most`.
CODE(code_e4m3, "e4m3x2", 4, 3, 0x7f, 448)
CODE(code_e5m2, "e5m2x2", 5, 2, 0x7c, 57344)
