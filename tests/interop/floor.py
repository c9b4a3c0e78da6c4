"""Seconds of a training step's matrix products alone, in PyTorch's BLAS on one thread: no step that computes these
products can be faster with this BLAS.

    python tests/interop/floor.py --model DIR
    python tests/interop/floor.py --attention 4096

Run one process for each rank, all at once, because they share memory bandwidth. Every layer has one product in forward
and two in backward: of its input's gradient and of its weight's. A frozen layer has only the first of the two. A
convolution is the product of its unfolded input. Depthwise convolutions are left out. Products of causal attention
count half. With --param-dtype bf16, each layer counts in the faster of bf16 and f32. Prints one JSON object.
"""

import argparse
import json
import os
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="directory with the config.json of a model")
parser.add_argument("--attention", type=int, metavar="TOKENS", help="causal attention of 12 heads of 64 instead")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--param-dtype", choices=["f32", "bf16"], default="f32")
parser.add_argument("--lora-rank", type=int, default=0)
parser.add_argument("--runs", type=int, default=2)
args = parser.parse_args()
torch.set_num_threads(1)
dtypes = [torch.float32] if args.param_dtype == "f32" else [torch.bfloat16, torch.float32]
FORWARD, INPUT, WEIGHT = 1, 2, 4
ALL = FORWARD | INPUT | WEIGHT


def decoder(config):
    """Returns the layers of a decoder or of BERT as (count, rows, inputs, outputs, passes), and its heads."""
    first = lambda *names: next(config[name] for name in names if config.get(name) is not None)
    kind = config["model_type"]
    width, layers = first("hidden_size", "n_embd"), first("num_hidden_layers", "n_layer")
    heads = first("num_attention_heads", "n_head")
    head = config.get("head_dim") or width // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * width
    rows = args.batch * args.seq
    own = FORWARD | INPUT if args.lora_rank else ALL
    block = [(1, rows, queries, width, own)]
    if kind == "gpt2":
        projections = [(width, 3 * width, True)]
    else:
        projections = [(width, queries, True), (width, keys, False), (width, keys, True)]
    for inputs, outputs, is_adapted in projections:
        block.append((1, rows, inputs, outputs, own))
        if args.lora_rank and is_adapted:
            block += [(1, rows, inputs, args.lora_rank, ALL), (1, rows, args.lora_rank, outputs, ALL)]
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    each = rows
    if experts > 1:
        each = rows * config["num_experts_per_tok"] // experts
        block.append((1, rows, width, experts, own))
        inner = config.get("moe_intermediate_size") or inner
    up = 1 if kind in ("gpt2", "bert") else 2
    block += [(up * experts, each, width, inner, own), (experts, each, inner, width, own)]
    rest = [(1, rows, width, config["vocab_size"], own)]
    if kind == "bert":
        rest.append((1, rows, width, width, own))
    products = [(layers * count, *rest) for count, *rest in block] + rest
    return products, [(layers * args.batch * heads, args.seq, head, 1.0 if kind == "bert" else 0.5)]


def convolutions(config):
    """Returns the layers of a ResNet with basic blocks or of a ConvNeXt as (count, rows, inputs, outputs, passes)."""
    sizes, depths, channels = config["hidden_sizes"], config["depths"], config["num_channels"]
    products = []
    if config["model_type"] == "resnet":
        side, width = args.image_size // 2, config["embedding_size"]
        # Images need no gradient.
        products.append((1, args.batch * side**2, 49 * channels, width, FORWARD | WEIGHT))
        side //= 2
    else:
        side, width = args.image_size // config["patch_size"], sizes[0]
        products.append((1, args.batch * side**2, config["patch_size"] ** 2 * channels, width, FORWARD | WEIGHT))
    for stage, (size, depth) in enumerate(zip(sizes, depths)):
        side = side // 2 if stage > 0 else side
        rows = args.batch * side**2
        if config["model_type"] == "resnet":
            if stage > 0 or width != size:
                products.append((1, rows, width, size, ALL))
            products += [(1, rows, 9 * width, size, ALL), (2 * depth - 1, rows, 9 * size, size, ALL)]
        else:
            if stage > 0:
                products.append((1, rows, 4 * width, size, ALL))
            products += [(depth, rows, size, 4 * size, ALL), (depth, rows, 4 * size, size, ALL)]
        width = size
    return [*products, (1, args.batch, width, config["num_labels"], ALL)], []


def timed(product):
    """Returns the seconds of the product."""
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def linear(rows, inputs, outputs, passes):
    """Returns a function of dtype and number of layers that returns the seconds of the layers' products."""

    def products(dtype, count):
        seconds = 0.0
        for _ in range(count):
            x, dy = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
            weight = torch.randn(outputs, inputs).to(dtype)
            seconds += timed(lambda: x @ weight.t())
            if passes & INPUT:
                seconds += timed(lambda: dy @ weight)
            if passes & WEIGHT:
                seconds += timed(lambda: dy.t() @ x)
        return seconds

    return products


def attention(tokens, width, share):
    """The same for attention heads: the products of scores and of outputs, and two of each in backward. Scores are
    computed in blocks that fit a cache."""
    size = min(tokens, 512)
    blocks = (tokens / size) ** 2

    def products(dtype, heads):
        q, scores = torch.randn(size, width).to(dtype), torch.randn(size, size).to(dtype)
        seconds, count = 0.0, int(heads * blocks)
        for _ in range(count):
            for product in (lambda: q @ q.t(), lambda: scores @ q, lambda: scores.t() @ q):
                seconds += 2 * timed(product)
        return seconds / count * heads * blocks * share

    return products


def least(count, products):
    """Returns the fewest seconds of all runs, in the dtype in which one layer is fastest."""
    dtype = min(dtypes, key=lambda dtype: products(dtype, 1))
    return min(products(dtype, count) for _ in range(args.runs))


if args.attention:
    layers, heads = [], [(12, args.attention, 64, 0.5)]
else:
    with open(os.path.join(args.model, "config.json")) as file:
        config = json.load(file)
    of_images = config["model_type"] in ("resnet", "convnext")
    layers, heads = convolutions(config) if of_images else decoder(config)
seconds = sum(least(count, linear(*layer)) for count, *layer in layers)
seconds += sum(least(count, attention(*head)) for count, *head in heads)
print(json.dumps({"seconds": seconds}))
