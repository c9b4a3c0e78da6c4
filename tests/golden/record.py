"""Records runs of PyTorch FSDP2, on two CPU ranks:
torchrun --nproc-per-node 2 record.py --out DIR [--models NAME ..] [--runs RUN ..] [--from DIR]

    pip install -r ../interop/requirements.txt

Each model beside this file is trained as README.md says, into DIR/NAME/RUN.json. With --from, the runs go on from what
candle-fsdp has saved (or `fsdp-ckpt convert` has made of it) as DIR/NAME/step-N, and the files have the steps after it.
"""

import argparse
import json
import pathlib
import re
import warnings

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
MODELS = ["llama_tiny", "gpt2_tiny"]
# The file: the dtypes that units compute and reduce in, and transformers' attention.
RUNS = {
    "run": (None, None, "sdpa"),
    "run_bf16_reduce_f32": (torch.bfloat16, torch.float32, "sdpa"),
    "run_bf16_reduce_bf16": (torch.bfloat16, torch.bfloat16, "sdpa"),
    "run_bf16_reduce_f32_eager": (torch.bfloat16, torch.float32, "eager"),
}
SEQUENCES = 4
LENGTH = 32
STEPS = 20
CLIP = 1.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def sharded(name, param_dtype, reduce_dtype, attention):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation=attention, dtype=torch.float32)
    model = model.train()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.model.layers if name.startswith("llama") else model.transformer.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def batch(tokens, step):
    """This rank's sequences, and what comes after each token."""
    size = SEQUENCES // dist.get_world_size()
    first = ((step - 1) * dist.get_world_size() + dist.get_rank()) * size
    starts = [sequence * LENGTH for sequence in range(first, first + size)]
    return [torch.stack([tokens[start + shift :][:LENGTH] for start in starts]) for shift in (0, 1)]


def resumed(model, optim, checkpoint):
    """Loads a checkpoint, of which each rank reads its own part, and returns the steps done."""
    classic = (checkpoint / ".metadata").exists()
    reader = (FileSystemReader if classic else HuggingFaceStorageReader)(str(checkpoint))
    state = dict(zip(("model", "optim"), get_state_dict(model, optim, options=FLAT)))
    flat = {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
    saved = reader.read_metadata().state_dict_metadata
    found = {name: value for name, value in flat.items() if name in saved}
    # A tied head is saved once. Safetensors hold tensors alone.
    left = {name for name, value in flat.items() if classic or isinstance(value, torch.Tensor)} - found.keys()
    assert all("lm_head.weight" in name for name in left), f"{checkpoint} lacks {left}"
    dcp.load(found, storage_reader=reader)
    for name, value in found.items():
        part, name = name.split(".", 1)
        state[part][name] = value
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT)
    return int(re.fullmatch(r"step-(\d+)", checkpoint.name).group(1))


def train(name, run, checkpoint=None):
    tokens = torch.from_numpy(numpy.fromfile(HERE / name / "tokens.bin", dtype="<u2").astype("int64"))
    model = sharded(name, *run)
    # A classic checkpoint has its own learning rate.
    classic = checkpoint is not None and (checkpoint / ".metadata").exists()
    optim = torch.optim.AdamW(model.parameters(), **ADAMW | ({"lr": 0.0} if classic else {}))
    done = resumed(model, optim, checkpoint) if checkpoint else 0
    trajectory = []
    for step in range(done + 1, STEPS + 1):
        inputs, targets = batch(tokens, step)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()
        optim.step()
        optim.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        trajectory.append({"step": step, "loss": mean.item(), "grad_norm": norm.item()})
    return trajectory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
    parser.add_argument("--from", dest="checkpoints", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in options.models:
        for file in options.runs:
            run = RUNS[file]
            checkpoint = options.checkpoints and next((options.checkpoints / name).glob("step-*"))
            trajectory = train(name, run, checkpoint)
            size = dist.get_world_size()
            settings = {"torch": torch.__version__, "world_size": size, "batch_per_rank": SEQUENCES // size}
            settings |= {"seq_len": LENGTH, "steps": STEPS, "clip_grad_norm": CLIP, **ADAMW}
            settings |= {"param_dtype": str(run[0]), "reduce_dtype": str(run[1])}
            settings |= {"attention": run[2], "trajectory": trajectory}
            if dist.get_rank() == 0:
                (options.out / name).mkdir(parents=True, exist_ok=True)
                (options.out / name / f"{file}.json").write_text(json.dumps(settings, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
