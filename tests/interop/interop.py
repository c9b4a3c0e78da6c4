"""Checks with PyTorch that it reads our checkpoints and we read its checkpoints.

    pip install -r requirements.txt
    python interop.py [CONVERT ...]

CONVERT is the conversion command, by default `fsdp-ckpt convert`: CONVERT SRC DST --to fsdp|torch-dcp --world-size N.
tests/outside/pytorch.rs runs this script where PyTorch is installed. PyTorch FSDP2 trains on two ranks and saves in its
formats; the checkpoints are converted to ours and back, and compared bit for bit.
"""

import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ROOT = pathlib.Path(__file__).resolve().parents[2]
MANIFEST = str(ROOT / "Cargo.toml")
DEFAULT = ["cargo", "run", "--quiet", "--release", "--manifest-path", MANIFEST, "-p", "fsdp-ckpt", "--", "convert"]
CONVERT = sys.argv[1:] or DEFAULT
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True)
STEPS = 3


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(13, 7),
        torch.nn.Linear(7, 5),
        torch.nn.GELU(),
        torch.nn.LayerNorm(5),
        torch.nn.Linear(5, 13, bias=False),
    )


def sharded():
    net = model()
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(net)
    return net


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def step(net, optim, seed):
    tokens = torch.randint(0, 13, (8,), generator=torch.Generator().manual_seed(seed))
    loss = torch.nn.functional.cross_entropy(net(tokens), tokens.roll(1))
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def trained(net):
    optim = optimizer(net)
    for seed in range(STEPS):
        step(net, optim, seed)
    return optim


def rank_main(rank, root):
    """One of two FSDP2 ranks: trains and saves."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    net = sharded()
    optim = trained(net)
    state = dict(zip(("model", "optim"), get_state_dict(net, optim, options=FLAT)))
    dcp.save({**state, "step": STEPS, "data": {"epoch": 1, "name": "tokens"}}, checkpoint_id=root / "classic")
    dcp.save(state["model"], storage_writer=HuggingFaceStorageWriter(str(root / "hf"), save_distributed=True))
    state = dict(zip(("model", "optim"), get_state_dict(net, optim, options=FULL)))
    if rank == 0:
        torch.save({**state, "step": STEPS}, root / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


def rank_back(rank, root, path):
    """One of two FSDP2 ranks: resumes from the converted checkpoint."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-back", rank=rank, world_size=2)
    net = sharded()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    optim = optimizer(net)
    state = dict(zip(("model", "optim"), get_state_dict(net, optim, options=FLAT)))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(net, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT)
    full = dict(zip(("model", "optim"), get_state_dict(net, optim, options=FULL)))
    if rank == 0:
        same(flat(full), flat(torch.load(root / "full.pt")), "classic, by PyTorch FSDP2 on 2 ranks")
    dist.barrier()
    dist.destroy_process_group()


def convert(source, target, to, world_size):
    subprocess.run([*CONVERT, str(source), str(target), "--to", to, "--world-size", str(world_size)], check=True)


def flat(tree):
    return {f"{part}.{name}": value for part in ("model", "optim") for name, value in tree[part].items()}


def same(found, expected, what):
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert tensors, what
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype, f"{what}: {name} is {found[name].dtype}"
        assert torch.equal(found[name], value), f"{what}: {name} differs"
    others = {name: value for name, value in expected.items() if name not in tensors}
    for name, value in others.items():
        assert name in found and found[name] == value, f"{what}: {name} is {found.get(name)!r}, not {value!r}"
    print(f"ok  {what}: {len(tensors)} tensors, {len(others)} values")


def load_classic(path, step_value=True):
    """Loads a checkpoint into a new PyTorch model and optimizer, and continues the run."""
    torch.manual_seed(1)
    net = model()
    for parameter in net.parameters():
        torch.nn.init.uniform_(parameter)
    optim = optimizer(net)
    # Creates the optimizer's state, which loading requires.
    state = dict(zip(("model", "optim"), get_state_dict(net, optim, options=FLAT)))
    if step_value:
        state |= {"step": 0, "data": {"epoch": 0, "name": ""}}
    dcp.load(state, storage_reader=FileSystemReader(str(path)), no_dist=True)
    set_state_dict(net, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT)
    if step_value:
        assert state["step"] == STEPS and state["data"] == {"epoch": 1, "name": "tokens"}, state
    return flat(state), net, optim


def main():
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        mp.start_processes(rank_main, args=(root,), nprocs=2, start_method="spawn")
        full = torch.load(root / "full.pt")
        expected = flat(full)
        weights = {name: value for name, value in expected.items() if name.startswith("model.")}
        reference = load_classic(root / "classic")
        same(reference[0], expected, "PyTorch by itself")

        # Our checkpoint, read by PyTorch's Hugging Face reader.
        convert(root / "classic", root / "ours", "fsdp", 3)
        found = {name: torch.zeros_like(value) for name, value in expected.items() if isinstance(value, torch.Tensor)}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(root / "ours")), no_dist=True)
        wanted = {name: value for name, value in expected.items() if name in found}
        same(found, wanted, "ours, by HuggingFaceStorageReader")

        # Converted, and read by its classic reader. The run continues without a difference.
        for world_size in (1, 2, 3, 8):
            target = root / f"back-{world_size}"
            convert(root / "ours", target, "torch-dcp", world_size)
            found, net, optim = load_classic(target)
            same(found, expected, f"classic to ours on 3 ranks to classic on {world_size}, by FileSystemReader")
            _, other, other_optim = load_classic(root / "classic")
            for seed in range(STEPS, STEPS + 3):
                assert step(net, optim, seed) == step(other, other_optim, seed)
        print("ok  losses after the way there and back are equal")
        mp.start_processes(rank_back, args=(root, root / "back-3"), nprocs=2, start_method="spawn")

        # The other formats that PyTorch writes.
        convert(root / "full.pt", root / "from-pt", "torch-dcp", 2)
        found, _, _ = load_classic(root / "from-pt", step_value=False)
        same(found, expected, "torch.save to classic")
        convert(root / "hf", root / "from-hf", "torch-dcp", 2)
        found = {name: torch.zeros_like(value) for name, value in weights.items()}
        dcp.load(found, storage_reader=FileSystemReader(str(root / "from-hf")), no_dist=True)
        same(found, weights, "HuggingFaceStorageWriter to classic")

        # All dtypes.
        odd = {
            "bf16": torch.arange(9).to(torch.bfloat16).reshape(3, 3),
            "f16": torch.ones(2, 2, 2, dtype=torch.float16),
            "f64": torch.tensor(0.1, dtype=torch.float64),
            "i64": torch.tensor([-1, 2**62]),
            "u8": torch.arange(5, dtype=torch.uint8),
            "u32": torch.tensor([2**32 - 1, 0, 1], dtype=torch.uint32),
            "empty": torch.zeros(0, 3),
            "one": torch.ones(1, 4),
        }
        torch.save({**odd, "values": [1, 2.5, None, True, "x", {"a": [2**62]}]}, root / "odd.pt")
        convert(root / "odd.pt", root / "odd", "torch-dcp", 2)
        odd = {f"model.{name}": value for name, value in odd.items()}
        found = {name: torch.zeros_like(value) for name, value in odd.items()} | {"values": None}
        dcp.load(found, storage_reader=FileSystemReader(str(root / "odd")), no_dist=True)
        same(found, {**odd, "values": [1, 2.5, None, True, "x", {"a": [2**62]}]}, "every dtype")


if __name__ == "__main__":
    main()
