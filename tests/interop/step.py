"""PyTorch FSDP2's side of `bench step`: the same step of the same model, over gloo on CPUs or over NCCL on GPUs.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/interop/step.py --model DIR
    torchrun --nproc-per-node 8 tests/interop/step.py --model DIR --device cuda --param-dtype bf16

DIR has a config.json of a decoder such as Llama, of GPT-2, BERT, ResNet or ConvNeXt. Prints one JSON object: the
seconds of the median and of the fastest step, and each rank's most resident memory, on the host and on the device.
`bench peers` runs it beside `bench step`.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--limit", type=float, metavar="SECONDS", help="take no further step after this time")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--param-dtype", choices=["f32", "bf16"], default="f32")
parser.add_argument("--lora-rank", type=int, help="train PEFT's adapters on query and value projections only")
parser.add_argument("--activation-checkpoint", action="store_true")
parser.add_argument("--compile", action="store_true", help="compile each block, as torchtitan does")
parser.add_argument("--attention", choices=["cudnn", "flash"], help="the only backend that attention may use")
args = parser.parse_args()

torch.set_num_threads(1)
on_gpu = args.device == "cuda"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = transformers.AutoConfig.from_pretrained(args.model)
of_images = config.model_type in ("resnet", "convnext")
if of_images:
    build = transformers.AutoModelForImageClassification.from_config
else:
    config.use_cache = False
    masked = config.model_type == "bert"
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    build = lambda config: auto.from_config(config, attn_implementation="sdpa")
# Built on the meta device, so that no rank holds the whole model.
with torch.device("meta"):
    model = build(config).float().train()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
whole = model
if args.lora_rank:
    from peft import LoraConfig, get_peft_model

    # The layers that `bench step --lora-rank` adapts.
    targets = ["q_proj", "v_proj", "c_attn", "qkv_proj", "query", "value"]
    # Embeddings need no gradient, which is why checkpoints would have no inputs with one.
    if args.activation_checkpoint:
        model.enable_input_require_grads()
    lora = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=targets)
    with torch.device("meta"):
        whole = get_peft_model(model, lora)
mesh = init_device_mesh(args.device, (world,))
policy = MixedPrecisionPolicy()
if args.param_dtype == "bf16":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if of_images:
    stages = getattr(model, config.model_type).encoder.stages
    lists = [stage.layers for stage in stages]
elif config.model_type == "bert":
    lists = [model.bert.encoder.layer]
else:
    lists = [model.model.layers if hasattr(model, "model") else model.transformer.h]
for blocks in lists:
    for index, block in enumerate(blocks):
        if args.activation_checkpoint:
            blocks[index] = block = checkpoint_wrapper(block)
        if args.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(whole, mesh=mesh, mp_policy=policy)
whole.to_empty(device=device)
model.init_weights()
parameters = sum(parameter.numel() for parameter in whole.parameters())
trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

# Pseudo-random data that differ between ranks.
if of_images:
    shape = (args.batch, config.num_channels, args.image_size, args.image_size)
    pixels = (torch.arange(torch.Size(shape).numel()) * 7919 + rank) % 1009
    inputs = (pixels.float() / 504.5 - 1).view(shape).to(device)
    targets = ((torch.arange(args.batch) * 7919 + rank) % config.num_labels).to(device)
else:
    ids = ((torch.arange(args.batch * args.seq + 1) * 7919 + rank) % config.vocab_size).to(device)
    inputs, targets = ids[:-1].view(args.batch, args.seq), ids[1:]
backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
begin, steps = time.perf_counter(), []
# One warm-up step.
for _ in range(args.steps + 1):
    if args.limit and len(steps) > 1:
        # Rank 0 decides for all.
        late = torch.tensor(time.perf_counter() - begin > args.limit, dtype=torch.int32, device=device)
        dist.broadcast(late, 0)
        if late.item():
            break
    dist.barrier()
    start = time.perf_counter()
    # Backward computes blocks again with checkpointing.
    with sdpa_kernel(backends[args.attention]) if args.attention else contextlib.nullcontext():
        logits = whole(inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, -2).float(), targets)
        del logits
        loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
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
    report = {"world": world, "parameters": parameters, "step_s": statistics.median(steps[1:])}
    report |= {"best_step_s": min(steps[1:]), "loss": loss}
    print(json.dumps({**report, "peak_rss_bytes": peaks, "peak_device_bytes": on_device}))
# If a rank exited while others still read gathered data, they would fail.
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
# PyTorch's threads may abort the process while Python ends.
os._exit(0)
