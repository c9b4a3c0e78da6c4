"""PyTorch's side of `bench layers --only convolution,`: milliseconds of the forward and the backward.

    python tests/interop/convolutions.py --runs 5
"""

import argparse
import time

import torch
from torch.nn.functional import conv2d

# Channels in and out, size of the image, kernel, stride, padding and groups.
CASES = [
    (3, 64, 64, 7, 2, 3, 1),
    (64, 64, 16, 3, 1, 1, 1),
    (128, 128, 8, 3, 1, 1, 1),
    (256, 256, 4, 3, 1, 1, 1),
    (512, 512, 2, 3, 1, 1, 1),
    (64, 128, 16, 1, 2, 0, 1),
    (3, 96, 64, 4, 4, 0, 1),
    (96, 96, 16, 7, 1, 3, 96),
    (96, 192, 16, 2, 2, 0, 1),
]

parser = argparse.ArgumentParser()
parser.add_argument("--runs", type=int, default=5)
parser.add_argument("--batch", type=int, default=16)
args = parser.parse_args()
torch.set_num_threads(1)
for inputs, outputs, size, kernel, stride, padding, groups in CASES:
    x = torch.randn(args.batch, inputs, size, size, requires_grad=True)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, requires_grad=True)
    best = [float("inf")] * 2
    for _ in range(args.runs):
        start = time.perf_counter()
        y = conv2d(x, weight, stride=stride, padding=padding, groups=groups)
        forward = time.perf_counter() - start
        loss = y.sum()
        start = time.perf_counter()
        loss.backward()
        best = [min(old, new * 1e3) for old, new in zip(best, (forward, time.perf_counter() - start))]
    print(f"{kernel} x {kernel}, {inputs} to {outputs}, {size} x {size}: {best[0]:.2f} {best[1]:.2f}")
