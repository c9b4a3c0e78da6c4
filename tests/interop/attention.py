"""PyTorch's side of `bench attention`: milliseconds of the forward and the backward of causal self-attention by
scaled_dot_product_attention, in f32, on one thread.

    python tests/interop/attention.py --tokens 1024,4096

Prints one JSON object a line. `bench peers` runs it beside `bench attention`.
"""

import argparse
import json
import resource
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", default="1024,4096,8192")
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--head-dim", type=int, default=64)
parser.add_argument("--runs", type=int, default=3)
args = parser.parse_args()
torch.set_num_threads(1)
for tokens in map(int, args.tokens.split(",")):
    # The layout that a model's projections have.
    q, k, v = (torch.randn(1, tokens, args.heads, args.head_dim, requires_grad=True) for _ in range(3))
    best = [float("inf")] * 2
    for _ in range(args.runs):
        start = time.perf_counter()
        y = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        forward = time.perf_counter() - start
        loss = y.sum()
        start = time.perf_counter()
        loss.backward()
        best = [min(old, new * 1e3) for old, new in zip(best, (forward, time.perf_counter() - start))]
        q.grad = k.grad = v.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens": tokens, "forward_ms": best[0], "backward_ms": best[1], "peak_rss_bytes": peak}))
