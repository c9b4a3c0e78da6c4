"""Records the placements of PyTorch's FSDP2 for tensor parallel parameters: python placements.py.

Writes fsdp-candle/tests/it/parallel_params/pytorch.json for the tests in that directory: for meshes and their roles
(`dp_mesh_dims`), the mesh and the placements of a sharded parameter, and the region that each rank holds.
"""

import functools
import json
import math
import os
import pathlib
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

OUTPUT = pathlib.Path(__file__).resolve().parents[2] / "fsdp-candle/tests/it/parallel_params/pytorch.json"
SHAPE = (14, 24)
# The mesh, the dimensions that shard and those that replicate.
MESHES = [
    ([("dp", 2)], ["dp"], []),
    ([("dp", 4), ("tp", 1)], ["dp"], []),
    ([("dp", 2), ("tp", 2)], ["dp"], []),
    ([("dp", 3), ("tp", 2)], ["dp"], []),
    ([("tp", 2), ("dp", 2)], ["dp"], []),
    ([("tp", 2), ("dp", 3)], ["dp"], []),
    ([("replicate", 2), ("shard", 2), ("tp", 2)], ["shard"], ["replicate"]),
    ([("replicate", 2), ("shard", 1), ("tp", 2)], ["shard"], ["replicate"]),
    ([("outer", 2), ("inner", 2), ("tp", 2)], ["outer", "inner"], []),
    ([("outer", 2), ("inner", 2), ("tp", 2)], [], ["outer", "inner"]),
    ([("replicate", 2), ("tp", 2)], [], ["replicate"]),
]
# The dimension that tensor parallelism shards, and the one that FSDP shards.
CUTS = [(None, 0), (0, 0), (1, 0), (0, 1), (1, 1)]


def shown(placement):
    if isinstance(placement, Replicate):
        return "R"
    factor = getattr(placement, "split_factor", 1)
    return f"S({placement.dim})" if factor == 1 else f"_S({placement.dim}, {factor})"


@functools.cache
def mesh_of(dims):
    """Returns the same object for the same mesh: DTensors cache the first of equal meshes."""
    names, sizes = zip(*dims)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def record(dims, shard, replicate, cut, dim):
    """Returns the part that one rank holds."""
    mesh = mesh_of(tuple(dims))
    placements = [Shard(cut) if name == "tp" and cut is not None else Replicate() for name, _ in dims]
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    roles = DataParallelMeshDims(shard=tuple(shard) or None, replicate=tuple(replicate) or None)
    chosen = {"shard_placement_fn": lambda _: Shard(dim)} if shard else {}
    fully_shard(layer, mesh=mesh, dp_mesh_dims=roles, **chosen)
    weight, local = layer.weight, layer.weight.to_local()
    first = int(local.flatten()[0]) if local.numel() else None
    return {
        "dims": dims, "shard": shard, "replicate": replicate, "cut": cut, "dim": dim,
        "mesh": list(zip(weight.device_mesh.mesh_dim_names, weight.device_mesh.shape)),
        "placements": [shown(placement) for placement in weight.placements],
        "offsets": None if first is None else list(divmod(first, SHAPE[1])), "sizes": list(local.shape),
    }  # fmt: skip


def record_all(cases, size, rank):
    """Returns the parts of one rank for each case, from a separate process, because meshes are cached."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            with os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps([record(*case) for case in cases]))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = json.loads(pipe.read())
    os.wait()
    return told


def main():
    by_size = {}
    for dims, shard, replicate in MESHES:
        for cut, dim in CUTS:
            # Parameters that nothing shards are the same for each case.
            has_tp = any(name == "tp" for name, _ in dims)
            if (cut is None or has_tp) and (dim == 0 or shard):
                size = math.prod(of_dim for _, of_dim in dims)
                by_size.setdefault(size, []).append((dims, shard, replicate, cut, dim))
    recorded = []
    for size, cases in sorted(by_size.items()):
        ranks = [record_all(cases, size, rank) for rank in range(size)]
        for at, case in enumerate(ranks[0]):
            case["boxes"] = [[rank[at].pop("offsets"), rank[at].pop("sizes")] for rank in ranks]
            recorded.append(case)
    lines = ",\n".join(json.dumps(case) for case in recorded)
    OUTPUT.write_text(f'{{"torch": "{torch.__version__}", "shape": {list(SHAPE)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
