"""Records runs of PyTorch FSDP2, on two CPU ranks:
torchrun --nproc-per-node 2 record.py --out DIR [--models NAME ..] [--runs RUN ..] [--from DIR] [--final] [--save STEP]

    pip install -r ../interop/requirements.txt

Trains each model in this directory (by default the first two) as README.md describes, and writes DIR/NAME/RUN.json.
With --from, the runs resume from DIR/NAME/RUN/step-N or DIR/NAME/step-N, a checkpoint of candle-fsdp or of `fsdp-ckpt
convert`, and the files have the steps after it. --final writes the model after the last step to
DIR/NAME/final.safetensors, and --save writes a DCP checkpoint to DIR/NAME/RUN-step-STEP. At other world sizes the file
is RUN_of_RANKS.json.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import warnings

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

HERE = pathlib.Path(__file__).resolve().parent
MODELS = ["llama_tiny", "gpt2_tiny"]
# The models of make.py. A step has six sequences, for one, two or three ranks.
FAMILIES = ["llama3_tiny", "mistral_tiny", "qwen2_tiny", "qwen3_tiny", "gemma2_tiny", "gemma3_text_tiny", "phi3_tiny"]
FAMILIES += ["mixtral_tiny", "qwen3_moe_tiny", "bert_tiny", "llama_tp_tiny", "llama_tp_tied_tiny"]
FAMILIES += ["deepseek_v2_tiny", "deepseek_v3_tiny", "gpt_oss_tiny"]
# Masked language models: the seed, the share of chosen tokens, and the mask token.
MASKED = ["bert_tiny"]
SEED, SHARE, MASK = 42, 0.15, 131
IGNORED = -100
# Models that are also trained with a `pad_token_id` that occurs in the data. A negative id counts from the end of the
# vocabulary.
PADDING = {"gemma2_tiny": 0, "gemma3_text_tiny": 63, "phi3_tiny": -68, "bert_tiny": 0}


@dataclasses.dataclass(frozen=True)
class Run:
    """Dtypes of computation and reduction, transformers' attention, and the format of gathered matrices."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    attention: str = "sdpa"
    all_gather: str = "full"
    # The recipe of torchao by which the blocks' linear layers compute, emulated.
    float8: str | None = None
    # One of OPTIMIZERS, and whether norms are a parameter group without weight decay.
    optimizer: str = "adamw"
    groups: bool = False
    # The first loss scale of f16 runs.
    loss_scale: float | None = None
    # A `pad_token_id` that replaces the one in config.json.
    padding: int | None = None
    # Whether the run reads examples.jsonl.
    padded: bool = False


# `GradScaler`'s default, and a scale at which llama_tiny skips only the first step and gpt2_tiny the first two. With 8
# % less or more it is the same.
LOSS_SCALE, TOO_LARGE = 65536.0, 9e5
# Models that are also trained on examples.jsonl, with one example and padding in each sequence.
PADDED = ["mixtral_tiny", "qwen3_moe_tiny"]
# By file name.
RUNS = {
    "run": Run(),
    "run_bf16_reduce_f32": Run(torch.bfloat16, torch.float32),
    "run_bf16_reduce_bf16": Run(torch.bfloat16, torch.bfloat16),
    "run_bf16_reduce_f32_eager": Run(torch.bfloat16, torch.float32, "eager"),
    "run_f16_reduce_f32": Run(torch.float16, torch.float32, loss_scale=LOSS_SCALE),
    "run_f16_reduce_f16": Run(torch.float16, torch.float16, loss_scale=LOSS_SCALE),
    "run_f16_reduce_f32_eager": Run(torch.float16, torch.float32, "eager", loss_scale=LOSS_SCALE),
    "run_f16_overflow": Run(torch.float16, torch.float32, loss_scale=TOO_LARGE),
    "run_float8_gather": Run(all_gather="float8"),
    "run_float8_gather_eager": Run(attention="eager", all_gather="float8"),
}
# For llama3_tiny only. Muon rounds to bf16, so it is also run on one rank, to measure the effect of rounding.
OF_OPTIMIZERS = {
    "run_sgd": Run(optimizer="sgd", groups=True),
    "run_adam": Run(optimizer="adam", groups=True),
    "run_adamw_groups": Run(groups=True),
    "run_muon": Run(optimizer="muon", groups=True),
    "run_muon_original": Run(optimizer="muon_original", groups=True),
}
# For FAMILIES, if --runs names them. The second has the same mathematics as the first, and other rounding. It has no caps
# of scores.
OF_ROUNDED = {
    "run_bf16": Run(torch.bfloat16, torch.float32, "eager"),
    "run_bf16_sdpa": Run(torch.bfloat16, torch.float32, "sdpa"),
}
# For the models in PADDING and in PADDED.
OF_PADDING = {"run_padding": Run(), "run_padded": Run(padded=True)}
OF_FAMILIES = OF_OPTIMIZERS | OF_ROUNDED | OF_PADDING
LENGTH = 32
STEPS = 20
CLIP = 1.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 5e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
MUON = {"lr": 1e-3, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
MUON_ORIGINAL = MUON | {"lr": 1e-2, "adjust_lr_fn": "original"}
# Classes by name, with their hyper-parameters. The first of two has the matrices of the blocks, the
# other has the rest.
OPTIMIZERS = {
    "adamw": [(torch.optim.AdamW, ADAMW)],
    "adam": [(torch.optim.Adam, ADAMW)],
    "sgd": [(torch.optim.SGD, SGD)],
    "muon": [(torch.optim.Muon, MUON), (torch.optim.AdamW, ADAMW)],
    "muon_original": [(torch.optim.Muon, MUON_ORIGINAL), (torch.optim.AdamW, ADAMW)],
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def usual(name):
    """The recorded runs of a model."""
    if name not in FAMILIES:
        return [*RUNS]
    optimizers = OF_OPTIMIZERS if name == "llama3_tiny" else []
    return ["run", *optimizers, *["run_padding"] * (name in PADDING), *["run_padded"] * (name in PADDED)]


def sequences(name):
    return 6 if name in FAMILIES else 4


def auto(name):
    return AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM


def blocks(name, model):
    if name in MASKED:
        return model.bert.encoder.layer
    return model.transformer.h if name == "gpt2_tiny" else model.model.layers


class Float8(torch.Tensor):
    """A parameter gathered like candle-fsdp's `Float8`: E4M3 codes, and one scale for each rank's shard, which maps the
    largest magnitude to 448. Other operations use the tensor that it holds.
    """

    LARGEST = 448.0

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        largest = self.held.abs().max() if self.held.numel() else torch.tensor(0.0)
        scale = largest / self.LARGEST if largest > 0 else torch.tensor(1.0)
        # PyTorch requires gathered tensors of an uneven shard to have the padded size, so each code has its scale.
        padded = (math.ceil(outer_size[0] / mesh.size()), *outer_size[1:])
        codes = torch.zeros(padded, dtype=torch.uint8)
        codes[: self.held.shape[0]] = (self.held / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        return (codes, scale.expand(padded).contiguous()), outer_size

    def fsdp_post_all_gather(self, outputs, outer_size, param_dtype, *, out=None):
        codes, scales = (output[: outer_size[0]] for output in outputs)
        decoded = codes.view(torch.float8_e4m3fn).to(torch.float32) * scales
        if out is not None:
            # Autograd must not see the change.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(decoded)
            return None
        decoded = decoded.to(param_dtype)
        return decoded, (decoded,)


def compute_in_float8(block, recipe):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(block, config=config)


def sharded(name, run):
    kinds = {"attn_implementation": run.attention, "experts_implementation": "eager"}
    kinds |= {"pad_token_id": run.padding} if run.padding is not None else {}
    model = auto(name).from_pretrained(HERE / name, dtype=torch.float32, **kinds).train()
    policy = MixedPrecisionPolicy(param_dtype=run.param_dtype, reduce_dtype=run.reduce_dtype)
    for block in blocks(name, model):
        for module in block.modules() if run.all_gather == "float8" else []:
            if (weight := getattr(module, "weight", None)) is not None and weight.dim() == 2:
                module.weight = torch.nn.Parameter(Float8(weight.data))
        if run.float8:
            compute_in_float8(block, run.float8)
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def optimizers(name, model, run):
    """The optimizers of a run. The first group has weight decay."""
    parts = [list(model.named_parameters())]
    if len(OPTIMIZERS[run.optimizer]) == 2:
        inside = {parameter for block in blocks(name, model) for parameter in block.parameters()}
        is_matrix = [parameter.dim() == 2 and parameter in inside for _, parameter in parts[0]]
        parts = [[named for named, so in zip(parts[0], is_matrix) if so == first] for first in (True, False)]
    made = []
    for (optimizer, hyper), part in zip(OPTIMIZERS[run.optimizer], parts):
        decaying = [parameter for fqn, parameter in part if not (run.groups and "norm" in fqn)]
        kept = [parameter for fqn, parameter in part if run.groups and "norm" in fqn]
        groups = [{"params": decaying}] + ([{"params": kept, "weight_decay": 0.0}] if kept else [])
        made.append(optimizer(groups, **hyper))
    return made


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., 2011) of counters and a key, each in words of 32 bits."""
    low = numpy.uint64(0xFFFFFFFF)
    half = numpy.uint64(32)
    (a, b, c, d), (first, second) = counter, key
    for _ in range(10):
        left, right = a * numpy.uint64(0xD2511F53), c * numpy.uint64(0xCD9E8D57)
        a, b, c, d = (right >> half) ^ b ^ first, right & low, (left >> half) ^ d ^ second, left & low
        first, second = (first + numpy.uint64(0x9E3779B9)) & low, (second + numpy.uint64(0xBB67AE85)) & low
    return a, b, c, d


def masked(ids, first, vocabulary):
    """Inputs and targets of the sequences from number `first` on, masked as candle-fsdp's `train` does it."""
    numbers, places = numpy.indices(ids.shape).astype("uint64")
    numbers += numpy.uint64(first)
    key = [numpy.uint64(SEED & 0xFFFFFFFF), numpy.uint64(SEED >> 32)]
    zero = numpy.zeros_like(places)
    words = philox([numbers, zero, places, zero + numpy.uint64(int.from_bytes(b"mask", "big"))], key)
    assert first + len(ids) < 2**32
    chosen, kind = [words[0] < SHARE * 2**32, words[1] / 2**32]
    random = (words[2] * numpy.uint64(vocabulary)) >> numpy.uint64(32)
    ids = ids.numpy()
    inputs = numpy.where(kind < 0.8, MASK, numpy.where(kind < 0.9, random.astype("int64"), ids))
    return torch.from_numpy(numpy.where(chosen, inputs, ids)), torch.from_numpy(numpy.where(chosen, ids, IGNORED))


def padded(first, size):
    """Sequences of one example each, the target after each token, and the mask of tokens that are data."""
    inputs, targets = torch.zeros(size, LENGTH, dtype=torch.int64), torch.full((size, LENGTH), IGNORED)
    mask = torch.zeros(size, LENGTH, dtype=torch.int64)
    lines = (HERE / "examples.jsonl").read_text().splitlines()
    for row, line in enumerate(lines[first : first + size]):
        example = json.loads(line)
        # Without a tokenizer, a text is its bytes with a final 0.
        ids = torch.tensor([*f"{example['prompt']}{example['completion']}\0".encode()])
        inputs[row, : len(ids) - 1], mask[row, : len(ids) - 1] = ids[:-1], 1
        learnt = slice(len(example["prompt"]) - 1, len(ids) - 1)
        targets[row, learnt] = ids[1:][learnt]
    return inputs, targets, mask


def batch(name, run, tokens, step, sequences, vocabulary):
    """This rank's sequences, the next or masked tokens, and the mask of tokens that are data."""
    size = sequences // dist.get_world_size()
    first = ((step - 1) * dist.get_world_size() + dist.get_rank()) * size
    if run.padded:
        return padded(first, size)
    starts = [sequence * LENGTH for sequence in range(first, first + size)]
    inputs, targets = [torch.stack([tokens[start + shift :][:LENGTH] for start in starts]) for shift in (0, 1)]
    return (*(masked(inputs, first, vocabulary) if name in MASKED else (inputs, targets)), None)


def resumed(model, optims, checkpoint):
    """Loads each rank's part of a checkpoint, and returns the number of steps."""
    classic = (checkpoint / ".metadata").exists()
    reader = (FileSystemReader if classic else HuggingFaceStorageReader)(str(checkpoint))
    state = dict(zip(("model", "optim"), get_state_dict(model, optims, options=FLAT)))
    flat = {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
    saved = reader.read_metadata().state_dict_metadata
    found = {name: value for name, value in flat.items() if name in saved}
    # A tied head is saved once. Safetensors files hold only tensors.
    left = {name for name, value in flat.items() if classic or isinstance(value, torch.Tensor)} - found.keys()
    assert all("lm_head.weight" in name for name in left), f"{checkpoint} lacks {left}"
    dcp.load(found, storage_reader=reader)
    for name, value in found.items():
        part, name = name.split(".", 1)
        state[part][name] = value
    set_state_dict(model, optims, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT)
    return int(re.fullmatch(r"step-(\d+)", checkpoint.name).group(1))


def loss_of(model, inputs, targets, mask):
    """The loss of transformers, with separate targets."""
    outputs = model(inputs, attention_mask=mask)
    logits, targets = outputs.logits.float().flatten(0, 1), targets.flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    # The mean over the counted tokens of all ranks. FSDP takes the mean over ranks.
    own = (targets != IGNORED).sum()
    counted = own.clone()
    dist.all_reduce(counted)
    share = (own * dist.get_world_size() / counted).item()
    return loss if share == 1 else loss * share


def save(name, model, file):
    """Writes the full model as transformers does. Experts are one tensor in memory and several in a file."""
    state = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        whole = auto(name).from_pretrained(HERE / name, dtype=torch.float32)
        whole.load_state_dict(state)
        with tempfile.TemporaryDirectory() as folder:
            whole.save_pretrained(folder)
            file.write_bytes((pathlib.Path(folder) / "model.safetensors").read_bytes())


def train(name, run, checkpoint=None, final=None, saved=None):
    own = HERE / name / "tokens.bin"
    file = own if own.exists() else HERE / "tokens.bin"
    tokens = torch.from_numpy(numpy.fromfile(file, dtype="<u2").astype("int64"))
    model = sharded(name, run)
    optims = optimizers(name, model, run)
    # A classic checkpoint contains the learning rate.
    if checkpoint is not None and (checkpoint / ".metadata").exists():
        for group in (group for optim in optims for group in optim.param_groups):
            group["lr"] = 0.0
    done = resumed(model, optims, checkpoint) if checkpoint else 0
    # Disabled without a scale. On DTensors its result covers all ranks.
    scaler = torch.amp.GradScaler("cpu", init_scale=run.loss_scale or 1.0, enabled=run.loss_scale is not None)
    trajectory = []
    for step in range(done + 1, STEPS + 1):
        read = batch(name, run, tokens, step, sequences(name), model.config.vocab_size)
        loss = loss_of(model, *read)
        scaler.scale(loss).backward()
        for optim in optims:
            scaler.unscale_(optim)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor().item()
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        # JSON has no infinity.
        trajectory.append({"step": step, "loss": mean.item(), "grad_norm": norm if math.isfinite(norm) else None})
        if run.loss_scale is not None:
            trajectory[-1]["next_loss_scale"] = scaler.get_scale()
        if saved and step == saved[0]:
            state = dict(zip(("model", "optim"), get_state_dict(model, optims, options=FLAT)))
            dcp.save(state, checkpoint_id=saved[1])
    if final:
        save(name, model, final)
    return trajectory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS + FAMILIES)
    parser.add_argument("--runs", nargs="+", choices=RUNS | OF_FAMILIES)
    parser.add_argument("--from", dest="checkpoints", type=pathlib.Path)
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--save", type=int, metavar="STEP")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in options.models:
        for file in options.runs or usual(name):
            run = (RUNS | OF_FAMILIES)[file]
            run = dataclasses.replace(run, padding=PADDING.get(name)) if file == "run_padding" else run
            # Transformers' default attention ignores caps.
            if name in FAMILIES and file != "run_bf16_sdpa":
                run = dataclasses.replace(run, attention="eager")
            of_model = options.checkpoints and options.checkpoints / name
            checkpoint = of_model and next(iter([*(of_model / file).glob("step-*"), *of_model.glob("step-*")]))
            (options.out / name).mkdir(parents=True, exist_ok=True)
            final = options.out / name / "final.safetensors" if options.final else None
            saved = options.save and (options.save, options.out / name / f"{file}-step-{options.save}")
            trajectory = train(name, run, checkpoint, final, saved)
            size = dist.get_world_size()
            settings = {"torch": torch.__version__, "world_size": size, "batch_per_rank": sequences(name) // size}
            settings |= {"seq_len": LENGTH, "steps": STEPS, "clip_grad_norm": CLIP}
            for optimizer, hyper in OPTIMIZERS[run.optimizer]:
                settings |= hyper if optimizer is torch.optim.AdamW else {optimizer.__name__: hyper}
            settings |= {"param_dtype": str(run.param_dtype), "reduce_dtype": str(run.reduce_dtype)}
            settings |= {"attention": run.attention, "all_gather": run.all_gather, "loss_scale": run.loss_scale}
            settings |= {"groups": run.groups} if run.groups else {}
            settings |= {"pad_token_id": run.padding} if run.padding is not None else {}
            settings |= {"data": "examples.jsonl"} if run.padded else {}
            settings["trajectory"] = trajectory
            if dist.get_rank() == 0:
                file = file if size == 2 else f"{file}_of_{size}"
                (options.out / name / f"{file}.json").write_text(json.dumps(settings, indent=1))
    dist.destroy_process_group()
    # During the interpreter's shutdown, a thread of PyTorch sometimes aborts the process ("terminate called without an
    # active exception"), although everything is written.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
