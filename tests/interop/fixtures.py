"""Writes the small PyTorch files for the tests of fsdp-ckpt: python fixtures.py."""

import collections
import fractions
import pathlib
import shutil

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parent.parent / "fsdp-ckpt" / "tests" / "it" / "torch" / "fixtures"
SEED = HERE.parent.parent / "fuzz" / "corpus" / "dcp_metadata" / "torch"


def tensors():
    base = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    cube = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    return {
        "plain": torch.linspace(-1, 1, 7),
        "transposed": base.t(),
        "window": base[1:4, 2:9:3],
        "tied": base,
        "permuted": cube.permute(2, 0, 1),
        "expanded": torch.tensor([1.5, 2.5], dtype=torch.float64).expand(3, 2),
        "parameter": torch.nn.Parameter(torch.full((2, 2), 0.25, dtype=torch.float16)),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "long": torch.tensor([-(2**40), 2**40]),
        "byte": torch.tensor([0, 255], dtype=torch.uint8),
        "unsigned": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
    }


def main():
    target = TARGET
    target.mkdir(parents=True, exist_ok=True)
    state = collections.OrderedDict(tensors())
    state["flags"] = torch.tensor([True, False])
    torch.save(
        {
            "model": state,
            "optimizer": {
                "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.ones(2)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "foreach": None, "params": [0]}],
            },
            "mixed": [1, torch.zeros(2), {"deep": True}],
            "epoch": 3,
            "big": 2**62,
            "best": float("inf"),
            "device": torch.device("cuda", 1),
            "dtype": torch.float32,
            "name": "tiny \u00e9",
        },
        target / "views.pt",
    )
    expected = {f"model.{name}": tensor.detach().contiguous().clone() for name, tensor in tensors().items()}
    save_file(expected, target / "views.safetensors")
    views = {"neg": torch._neg_view(torch.ones(2)), "conj": torch.ones(2, dtype=torch.complex64).conj()}
    sparse = torch.ones(2).to_sparse()
    others = {"sparse": sparse, "meta": torch.ones(2, device="meta"), "nested": torch.nested.nested_tensor([torch.ones(2)])}
    for name, tensor in {**views, **others}.items():
        torch.save({"model.weight": tensor}, target / f"{name}.pt")
    torch.save(torch.nn.Linear(3, 2).state_dict(), target / "linear.pth")
    torch.save(torch.arange(3.0), target / "tensor.pt")
    torch.save({"w": torch.ones(2)}, target / "legacy.bin", _use_new_zipfile_serialization=False)
    state = {
        "model": {"w": torch.arange(12.0).reshape(4, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
        "flags": torch.tensor([True]),
        "step": 7,
        "betas": (0.9, 0.95),
        "scheduler": {"last": 2, "kind": "cosine"},
        "half": fractions.Fraction(1, 2),
        "seed": 2**64 - 1,
        "state": 2**127,
    }
    dcp.save(state, checkpoint_id=target / "dcp", no_dist=True)
    # The seed of a fuzz target that reads the same files.
    shutil.copy(target / "dcp" / ".metadata", SEED)


if __name__ == "__main__":
    main()
