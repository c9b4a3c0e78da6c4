// The kernels of `flash_attention.cuh` for f16 and heads of 128 elements.
#include "prelude.cuh"
#include "visible_keys.cuh"
#include "tensor_cores.cuh"
#include "flash_attention.cuh"

FLASH_ATTENTION(f16, 128)
