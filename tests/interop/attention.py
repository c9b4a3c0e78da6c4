"""PyTorch's side of `bench attention`: milliseconds of the forward and the backward of causal self-attention by
scaled_dot_product_attention, in f32, on one thread; or on a GPU, in another dtype, by each of some backends.

    python tests/interop/attention.py --tokens 1024,4096
    python tests/interop/attention.py --tokens 8192 --heads 32 --device cuda --dtype bf16 --backend flash,cudnn

Prints one JSON object a line. `bench peers` runs it beside `bench attention`.
"""

import argparse
import contextlib
import json
import resource
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", default="1024,4096,8192")
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--head-dim", type=int, default=64)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--dtype", choices=DTYPES, default="f32")
parser.add_argument("--backend", default="default", metavar="NAME,..", help=f"of {', '.join(BACKENDS)}")
args = parser.parse_args()
torch.set_num_threads(1)
on_gpu = args.device == "cuda"


def milliseconds(work):
    """Returns the result of a function, and its time, on the device if there is one."""
    if not on_gpu:
        start = time.perf_counter()
        result = work()
        return result, (time.perf_counter() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = work()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def measure(tokens):
    """Returns the best times of forward and backward."""
    # The layout that a model's projections have.
    shape, kind = (1, tokens, args.heads, args.head_dim), {"device": args.device, "dtype": DTYPES[args.dtype]}
    q, k, v = (torch.randn(shape, requires_grad=True, **kind) for _ in range(3))
    best = [float("inf")] * 2
    for _ in range(args.runs):
        attend = lambda: scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        y, forward = milliseconds(attend)
        loss = y.sum()
        _, backward = milliseconds(loss.backward)
        best = [min(old, new) for old, new in zip(best, (forward, backward))]
        q.grad = k.grad = v.grad = None
    return best


for name in args.backend.split(","):
    for tokens in map(int, args.tokens.split(",")):
        with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else contextlib.nullcontext():
            forward, backward = measure(tokens)
        found = {"tokens": tokens, "forward_ms": forward, "backward_ms": backward}
        found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if on_gpu:
            # Two products forward and five backward, of the half of the scores that causal queries see.
            product = args.heads * tokens**2 * args.head_dim
            rates = {"forward_tflops": 2 * product / forward / 1e9, "backward_tflops": 5 * product / backward / 1e9}
            found = {**found, "backend": name, "dtype": args.dtype, **rates}
        print(json.dumps(found))
