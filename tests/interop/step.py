"""PyTorch FSDP2's side of `bench step`: the same step of the same model, over gloo on CPUs.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/interop/step.py --model DIR

DIR has a config.json of a Llama or a GPT-2. Prints one JSON object: the fastest step's seconds, and each rank's most
resident memory.
"""

import argparse
import json
import resource
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = AutoConfig.from_pretrained(args.model)
config.use_cache = False
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
mesh = init_device_mesh("cpu", (world,))
blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
for block in blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

ids = (torch.arange(args.batch * args.seq + 1) * 7919 + rank) % config.vocab_size
inputs, targets = ids[:-1].view(args.batch, args.seq), ids[1:]
steps = []
# One to warm up.
for _ in range(args.steps + 1):
    dist.barrier()
    start = time.perf_counter()
    loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    steps.append(time.perf_counter() - start)
peaks = [None] * world
dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
if rank == 0:
    print(json.dumps({"world": world, "best_step_s": min(steps[1:]), "peak_rss_bytes": peaks}))
dist.destroy_process_group()
