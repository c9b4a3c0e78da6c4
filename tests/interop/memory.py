"""PyTorch FSDP2's side of `bench memory --mode zero3`: what the same model's step needs, over gloo.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/interop/memory.py --layers 8 --passes 3

Prints one JSON object: the bytes that PyTorch's allocator handed out during forward and backward beyond those at the
start, at most, on the rank that needed most. Gradients stay allocated from step to step, so that the start includes
them.
"""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--passes", type=int, default=1, help="forwards before each backward, with summed losses")
parser.add_argument("--in-one-call", action="store_true", help="run these forwards in one call of the root")
args = parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(args.width, 4 * args.width, bias=False)
        self.down = torch.nn.Linear(4 * args.width, args.width, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = torch.nn.RMSNorm(args.width, 1e-5)

    def loss(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()

    def forward(self, x, passes):
        return sum(self.loss(x) for _ in range(passes))


def backward():
    if args.in_one_call:
        loss = model(inputs, args.passes)
    else:
        loss = sum(model(inputs, 1) for _ in range(args.passes))
    loss.backward()


torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = Residual()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.01)
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.ones(1, args.width)
for _ in range(2):
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    backward()
events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
now = most = 0
for event in sorted(events, key=lambda event: event.start_ns()):
    now += event.nbytes()
    most = max(most, now)
counted = torch.tensor(most)
dist.all_reduce(counted, dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    sizes = {"world": dist.get_world_size(), "unit_bytes": 32 * args.width**2}
    print(json.dumps(sizes | {"passes": args.passes, "transient_bytes": counted.item()}), flush=True)
dist.destroy_process_group()
sys.stdout.flush()
# PyTorch's threads may abort the process while Python ends.
os._exit(0)
