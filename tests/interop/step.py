"""PyTorch FSDP2's side of `bench step`: the same step of the same model, over gloo on CPUs or over NCCL on GPUs.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/interop/step.py --model DIR
    torchrun --nproc-per-node 8 tests/interop/step.py --model DIR --device cuda --param-dtype bf16

DIR has a config.json of a Llama or a GPT-2. Prints one JSON object: the seconds of the median and of the fastest step,
and each rank's most resident memory, on the host and on the device.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--param-dtype", choices=["f32", "bf16"], default="f32")
parser.add_argument("--activation-checkpoint", action="store_true")
parser.add_argument("--compile", action="store_true", help="compile each block, as torchtitan does")
args = parser.parse_args()

torch.set_num_threads(1)
on_gpu = args.device == "cuda"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = AutoConfig.from_pretrained(args.model)
config.use_cache = False
# Built on the meta device, so that no rank holds the whole model.
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
mesh = init_device_mesh(args.device, (world,))
policy = MixedPrecisionPolicy()
if args.param_dtype == "bf16":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
for index, block in enumerate(blocks):
    if args.activation_checkpoint:
        blocks[index] = block = checkpoint_wrapper(block)
    if args.compile:
        block.compile()
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device=device)
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

ids = ((torch.arange(args.batch * args.seq + 1) * 7919 + rank) % config.vocab_size).to(device)
inputs, targets = ids[:-1].view(args.batch, args.seq), ids[1:]
steps = []
# One warm-up step.
for _ in range(args.steps + 1):
    dist.barrier()
    start = time.perf_counter()
    loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    # Waits for the device.
    loss = loss.item()
    steps.append(time.perf_counter() - start)
peaks = [None] * world
dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
on_device = [None] * world
dist.all_gather_object(on_device, torch.cuda.max_memory_allocated() if on_gpu else 0)
if rank == 0:
    report = {"world": world, "step_s": statistics.median(steps[1:]), "best_step_s": min(steps[1:]), "loss": loss}
    print(json.dumps({**report, "peak_rss_bytes": peaks, "peak_device_bytes": on_device}))
# If a rank exited while others still read gathered data, they would fail.
dist.barrier()
dist.destroy_process_group()
