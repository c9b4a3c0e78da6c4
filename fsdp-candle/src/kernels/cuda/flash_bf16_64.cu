// The kernels of `flash_attention.cuh` for bf16 and heads of 64 elements.
#include "prelude.cuh"
#include "visible_keys.cuh"
#include "tensor_cores.cuh"
#include "flash_attention.cuh"

FLASH_ATTENTION(bf16, 64)
