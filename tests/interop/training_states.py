"""Checks that fsdp-ckpt finds the model and the optimizer in training states of other trainers.

    pip install -r requirements.txt
    python training_states.py FSDP_CKPT

Saves a small model in the shapes of torchtitan, torchtune, Lightning, accelerate, DeepSpeed, Megatron and of programs
with `torch.save`, as files and as DCP checkpoints. Each is converted to a Hugging Face model, whose tensors must be
those of the model, and to this project's format, which must equal the conversion of `{"model": .., "optim": ..}`. What
can't be told must be refused by name. tests/outside/pytorch.rs runs this script where PyTorch is installed.
"""

import argparse
import collections
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

CKPT = sys.argv[1]
GENERATOR = torch.Generator().manual_seed(1)
PARTS = "several parts may be the model"
NUMBERED = "numbers the parameters"


def tensor(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def llama(is_tied):
    """Names and small shapes of a Llama."""
    state = collections.OrderedDict({"model.embed_tokens.weight": tensor(12, 4)})
    for layer in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"model.layers.{layer}.self_attn.{name}.weight"] = tensor(4, 4)
        for name, shape in (("gate_proj", (6, 4)), ("up_proj", (6, 4)), ("down_proj", (4, 6))):
            state[f"model.layers.{layer}.mlp.{name}.weight"] = tensor(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{layer}.{name}.weight"] = tensor(4)
    state["model.norm.weight"] = tensor(4)
    if not is_tied:
        state["lm_head.weight"] = tensor(12, 4)
    return state


def gpt2():
    state = collections.OrderedDict({"transformer.wte.weight": tensor(12, 4), "transformer.wpe.weight": tensor(8, 4)})
    state["transformer.h.0.attn.c_attn.weight"] = tensor(4, 12)
    state["transformer.h.0.attn.c_attn.bias"] = tensor(12)
    state["lm_head.weight"] = tensor(12, 4)
    return state


def moments(value):
    return {"step": torch.tensor(3.0), "exp_avg": value * 0.5, "exp_avg_sq": value * value}


def named(model):
    """An optimizer's state as get_state_dict returns it."""
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(model)}]
    return {"state": {name: moments(value) for name, value in model.items()}, "param_groups": groups}


def flat(model):
    """An optimizer's state as get_state_dict returns it with flatten_optimizer_state_dict, as in torchtitan."""
    state = {f"state.{name}.{key}": value for name, state in named(model)["state"].items() for key, value in state.items()}
    return state | {f"param_groups.{name}.lr": 0.1 for name in model}


def numbered(model, has_names=False):
    """An optimizer's state as Optimizer.state_dict() returns it."""
    groups = [{"lr": 0.1, "params": list(range(len(model)))}]
    if has_names:
        groups[0]["param_names"] = list(model)
    return {"state": {number: moments(value) for number, value in enumerate(model.values())}, "param_groups": groups}


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def nested(state):
    """Dicts in dicts instead of dotted names."""
    root = {}
    for name, value in state.items():
        *dicts, last = name.split(".")
        at = root
        for key in dicts:
            at = at.setdefault(key, {})
        at[last] = value
    return root


Case = collections.namedtuple("Case", "name state model optimized part hf fsdp")


def cases():
    """Yields training states and the expected results. `hf` and `fsdp` are parts of the refusal's text, or None."""

    def case(name, state, model, optimized=None, part=None, hf=None, fsdp=None):
        return Case(name, state, model, optimized, part, hf, fsdp)

    models = {"llama": llama(False), "tied llama": llama(True), "gpt2": gpt2()}
    for kind, model in models.items():
        others = {"step": 7, "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]}}
        yield case(f"{kind}, bare", dict(model), model)
        for key in ("model", "net", "state_dict", "model_state_dict", "module", "weights"):
            yield case(f"{kind}, {key}", {key: model} | others, model)
        for key in ("optim", "optimizer", "opt", "optimizer_state_dict"):
            yield case(f"{kind}, model and {key}", {"model": model, key: named(model)} | others, model, model)
            yield case(f"{kind}, model and flat {key}", {"model": model, key: flat(model)} | others, model, model)
            state = {"model": model, key: numbered(model)} | others
            yield case(f"{kind}, model and numbered {key}", state, model, fsdp=NUMBERED)
        state = {"model": model, "optimizer": numbered(model, True)}
        yield case(f"{kind}, numbered with names", state, model, model)
        shared = {"app": {"model": model, "optim": named(model)}}
        yield case(f"{kind}, EMA beside the app", shared | {"ema": model}, model, hf=PARTS, fsdp=PARTS)
        state = shared | {"norm": {"mean": tensor(3)}}
        yield case(f"{kind}, statistics beside the app", state, model, hf=PARTS, fsdp=PARTS)
        yield case(f"{kind}, statistics, --part app.model", state, model, model, part="app.model")
        several = {"state_dict": model, "optimizer_states": [named(model), named(model)]}
        yield case(f"{kind}, two optimizers", several, model, fsdp="several optimizers")
        yield case(f"{kind}, optimizer alone", named(model), model, part=".", hf="has no model", fsdp="has no model")
        yield case(f"{kind}, torchtune", {"app": {"model": model, "optim": named(model)} | others}, model, model)
        yield case(f"{kind}, torchtitan", dict(model) | {"optimizer": flat(model), "train_state": {"step": 3}}, model, model)
        lightning = {
            "epoch": 1,
            "pytorch-lightning_version": "2.5",
            "state_dict": prefixed("model.", model),
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": 0.5}},
        }
        yield case(f"{kind}, Lightning", lightning | {"optimizer_states": [numbered(model)]}, model, fsdp=NUMBERED)
        yield case(f"{kind}, Lightning without optimizer", lightning, model)
        yield case(f"{kind}, DeepSpeed", {"module": model, "dp_world_size": 2, "buffer_names": []}, model)
        for wrapper in ("module.", "_orig_mod.", "module._orig_mod."):
            yield case(f"{kind}, {wrapper}", prefixed(wrapper, model), model)
        inner = {name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."): value for name, value in model.items()}
        yield case(f"{kind}, checkpointed layers", {"model": inner}, model)
        rng = {"rng": torch.arange(8, dtype=torch.uint8), "loss": torch.tensor(0.5)}
        yield case(f"{kind}, random state", {"model": model, "optim": named(model)} | rng, model, model)
        ema = {"model": model, "ema": {name: value + 1 for name, value in model.items()}, "optimizer": named(model)}
        yield case(f"{kind}, EMA", ema, model, model, hf=PARTS, fsdp=PARTS)
        yield case(f"{kind}, EMA, --part model", ema, model, model, part="model")
        yield case(f"{kind}, EMA, --part ema", ema, ema["ema"], model, part="ema")
        yield case(f"{kind}, an unknown --part", ema, model, part="teacher", hf="has no model", fsdp="has no model")
        gan = {"generator": model, "discriminator": gpt2()}
        yield case(f"{kind}, two models", gan, model, hf=PARTS, fsdp=PARTS)
        megatron = {
            "model": nested(model),
            "optimizer": {"optimizer": numbered(model), "fp32_from_fp16_params": [[value.clone() for value in model.values()]]},
            "iteration": 3,
        }
        yield case(f"{kind}, Megatron", megatron, model, fsdp=NUMBERED)
        other = {"model": model, "optimizer": named({"another.weight": tensor(3, 3)})}
        yield case(f"{kind}, optimizer of another model", other, model, fsdp="which the model lacks")
        yield case(f"{kind}, arguments", {"model": model, "args": argparse.Namespace(lr=0.1)}, model)
    bert = {
        "bert.embeddings.word_embeddings.weight": tensor(12, 4),
        "bert.encoder.layer.0.output.dense.weight": tensor(4, 6),
        "cls.predictions.bias": tensor(12),
    }
    yield case("bert, Lightning", {"state_dict": prefixed("model.", bert), "epoch": 1}, bert)


def convert(source, target, *flags):
    shutil.rmtree(target, ignore_errors=True)
    done = subprocess.run([CKPT, "convert", source, target, *flags], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def as_saved(case, kind):
    """Returns the case as a file or a DCP checkpoint has it."""
    if kind == "file" and "args" in case.state:
        # As in PyTorch's weights_only, no such object is made.
        return case._replace(hf="argparse.Namespace", fsdp="argparse.Namespace")
    if kind == "dcp" and "numbered with names" in case.name:
        # DCP pickles lists of plain values, among them the names.
        return case._replace(fsdp=NUMBERED)
    return case


def check(case, source, root):
    """Returns what is wrong, or None."""
    part = ["--part", case.part] if case.part else []
    code, output = convert(source, root / "hf", "--to", "hf", *part)
    if case.hf is not None:
        if code == 0 or case.hf not in output:
            return f"--to hf: expected {case.hf!r}, got {code}: {output}"
    else:
        if code != 0:
            return f"--to hf: {output}"
        found = load_file(root / "hf" / "model.safetensors")
        if sorted(found) != sorted(case.model):
            return f"--to hf: {sorted(found)[:3]}, expected {sorted(case.model)[:3]}: {output}"
        if not all(torch.equal(found[name], case.model[name]) for name in found):
            return "--to hf: other values"
    code, output = convert(source, root / "fsdp", "--to", "fsdp", *part)
    if case.fsdp is not None:
        if code == 0 or case.fsdp not in output:
            return f"--to fsdp: expected {case.fsdp!r}, got {code}: {output}"
        return None
    if code != 0:
        return f"--to fsdp: {output}"
    usual = {"model": case.model} | ({"optim": named(case.optimized)} if case.optimized else {})
    reference = root / "reference"
    shutil.rmtree(reference, ignore_errors=True)
    dcp.save(usual, checkpoint_id=str(reference), no_dist=True)
    code, output = convert(reference, root / "reference-fsdp", "--to", "fsdp")
    if code != 0:
        return f"the reference: {output}"
    done = subprocess.run([CKPT, "diff", root / "fsdp", root / "reference-fsdp"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"differs from the reference: {done.stdout}"


def main():
    warnings.simplefilter("ignore")
    wrong, converted, refused = [], 0, 0
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        for usual in cases():
            for kind in ("file", "dcp"):
                case = as_saved(usual, kind)
                source = root / "source"
                if source.is_dir():
                    shutil.rmtree(source)
                else:
                    source.unlink(missing_ok=True)
                if kind == "file":
                    torch.save(case.state, source)
                else:
                    dcp.save(case.state, checkpoint_id=str(source), no_dist=True)
                problem = check(case, source, root)
                if problem:
                    wrong.append(f"{case.name}, {kind}: {problem}")
                refused += case.fsdp is not None
                converted += case.fsdp is None
    print(f"{converted} training states converted, {refused} refused, {len(wrong)} wrong")
    if wrong:
        sys.exit("\n".join(wrong))


main()
