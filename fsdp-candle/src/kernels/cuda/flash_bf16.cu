// The kernels of `flash_attention.cuh` for bf16.
#include "prelude.cuh"
#include "visible_keys.cuh"
#include "tensor_cores.cuh"
#include "flash_attention.cuh"

FLASH_ATTENTION(bf16, 64)
FLASH_ATTENTION(bf16, 128)
