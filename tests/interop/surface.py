"""Records the names in PyTorch's API: python surface.py, which writes surface.json.

    python surface.py [--check]

Records each module's `__all__` or the names listed here, the parameters of functions and constructors, and the public
members that classes define themselves, with parameters for those in METHODS. tests/it/from_pytorch.rs checks that
`docs/from-pytorch.md` has a row for each name. `--check` fails if the file differs from the installed PyTorch.
"""

import enum
import importlib
import inspect
import json
import pathlib
import sys
import warnings

import torch
from torch.distributed.run import get_args_parser

OUTPUT = pathlib.Path(__file__).with_suffix(".json")
# None means all public names of the module.
MODULES = {
    "torch.distributed.fsdp": None,
    "torch.distributed.fsdp._fully_shard._fsdp_api": ["AllGather", "Comm", "ReduceScatter"],
    "torch.distributed.fsdp._fully_shard._fsdp_common": ["ShardPlacementResult"],
    "torch.distributed.fsdp.sharded_grad_scaler": ["ShardedGradScaler"],
    "torch.distributed.fsdp.wrap": None,
    "torch.distributed.device_mesh": None,
    "torch.distributed.tensor": None,
    "torch.distributed.tensor.placement_types": ["_StridedShard"],
    "torch.distributed.tensor.experimental": None,
    "torch.distributed.tensor.parallel": None,
    "torch.distributed.checkpoint": None,
    "torch.distributed.checkpoint._consolidate_hf_safetensors": [
        "consolidate_safetensors_files",
        "consolidate_safetensors_files_on_every_rank",
    ],
    "torch.distributed.checkpoint.format_utils": None,
    "torch.distributed.checkpoint.staging": None,
    "torch.distributed.checkpoint.state_dict": [
        "StateDictOptions",
        *(f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("", "model_", "optimizer_")),
    ],
    "torch.distributed.checkpoint.stateful": ["Stateful"],
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": None,
    "torch.nn.parallel": ["DistributedDataParallel"],
    "torch.nn.utils": ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"],
    "torch.amp": ["GradScaler", "autocast"],
    "torch.optim": ["Adam", "AdamW", "Muon", "SGD"],
    "torch.optim.swa_utils": ["AveragedModel", "get_ema_multi_avg_fn"],
    "torch.utils.checkpoint": ["checkpoint", "create_selective_checkpoint_contexts"],
}
METHODS = {"FSDPModule", "UnshardHandle", "GradientReductionHandle", "Comm", "DTensor", "DeviceMesh"}


def public(module):
    names = getattr(module, "__all__", None)
    if names is None:
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        defined = {name: value for name, value in public.items() if not inspect.ismodule(value)}
        own = module.__name__
        names = [name for name, value in defined.items() if getattr(value, "__module__", "").startswith(own)]
    return names


def parameters(function):
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [item.name for item in found if item.kind not in starred and item.name not in ("self", "cls")]
    return [name for name in named if not name.startswith("_")]


def members(owner, constructor):
    if issubclass(owner, enum.Enum):
        return {name: [] for name in owner.__members__}
    # Classes written in C++ are bases. Fields are already parameters of the constructor.
    own = [base for base in owner.__mro__ if base is owner or base.__module__ == "torch._C._distributed"]
    names = [name for base in own for name in vars(base) if not name.startswith("_") and name not in constructor]
    names += [name for name in ("_flatten",) if name in vars(owner)]
    return {name: parameters(getattr(owner, name)) if owner.__name__ in METHODS else [] for name in names}


def entry(value):
    if not isinstance(value, type):
        return {"parameters": parameters(value)} if callable(value) else {}
    constructor = [] if issubclass(value, enum.Enum) else parameters(value)
    return {"parameters": constructor, "members": members(value, constructor)}


def surface():
    modules = {}
    for name, chosen in MODULES.items():
        module = importlib.import_module(name)
        modules[name] = {item: entry(getattr(module, item)) for item in sorted(chosen or public(module))}
    options = [option for action in get_args_parser()._actions for option in action.option_strings if "_" not in option]
    return {"torch": torch.__version__.split("+")[0], "modules": modules, "torchrun": sorted(options)}


def text(record):
    """JSON with a line for each name, so that differences are easy to read."""
    modules = []
    for name, items in record["modules"].items():
        lines = ",\n".join(f"   {json.dumps(item)}: {json.dumps(value)}" for item, value in items.items())
        modules.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    head = f'{{\n "torch": {json.dumps(record["torch"])},\n "torchrun": {json.dumps(record["torchrun"])},\n'
    head += ' "modules": {\n'
    return head + ",\n".join(modules) + "\n }\n}\n"


def main():
    warnings.simplefilter("ignore")
    found = text(surface())
    if sys.argv[1:] == ["--check"]:
        hint = f"{OUTPUT.name} is not what PyTorch {torch.__version__} has: run surface.py, see docs/from-pytorch.md"
        assert OUTPUT.read_text() == found, hint
    else:
        OUTPUT.write_text(found)


if __name__ == "__main__":
    main()
