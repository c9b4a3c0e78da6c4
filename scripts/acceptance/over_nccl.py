"""Repeats PyTorch's recorded runs over real NCCL, between ranks that share one GPU.

Each rank is a host of its own to NCCL, so that NCCL accepts the GPU twice and moves the data through sockets.
"""

import functools
import json
import os
import re

from . import parity
from .running import Failed

HEAD = ["model", "way", "off in a loss", "off in a norm", "bounds", "transport"]
# With few channels, the kernels of all ranks fit on the GPU at the same time.
ENVIRONMENT = {
    "FSDP_TIMEOUT_S": "60",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "INFO",
}
# Model and way of each row. The recorded runs of llama3_tiny have six sequences a step, for three ranks.
WAYS = [
    ("llama_tiny", ("2 ranks", "run", 2, [], {}, parity.F32)),
    ("llama3_tiny", ("3 ranks, uneven shards", "run", 3, [], {}, parity.F32)),
    ("llama_tiny", ("4 ranks", "run", 4, [], {}, parity.F32)),
    ("llama_tiny", ("4 ranks, two copies (HSDP)", "run", 4, ["--replicate", "2"], {}, parity.F32)),
    ("llama_tiny", ("2 ranks, bf16", "run_bf16_reduce_f32", 2, ["--param-dtype", "bf16"], {}, parity.BF16)),
    ("llama_tiny", ("2 ranks, f16", "run_f16_reduce_f32", 2, parity.SCALED, {}, parity.F16)),
    ("llama_tiny", ("2 ranks, float8 gathers", "run_float8_gather", 2, ["--all-gather", "float8"], {}, parity.FLOAT8)),
    ("llama_tiny", ("2 ranks, ZeRO-2", "run", 2, ["--reshard-after-forward", "never"], {}, parity.F32)),
    ("llama_tiny", ("2 ranks, checkpointing", "run", 2, ["--activation-checkpoint", "full"], {}, parity.F32)),
    ("llama_tiny", ("2 ranks, two micro-batches", "run", 2, ["--grad-accum", "2"], {}, parity.F32)),
    ("llama_tiny", ("2 ranks, compared first", "run", 2, [], {"FSDP_NCCL_CHECK": "always"}, parity.F32)),
]
RESUMED = ("llama_tiny", (2, 4))


def environment(run):
    """Returns the variables of a run between ranks that share the GPU."""
    backend = os.environ.get("FSDP_DEVICE_BACKEND", "nccl-shared")
    return {**ENVIRONMENT, "FSDP_DEVICE_BACKEND": backend} if run.args.device == "cuda" else {}


def jobs(run):
    """Yields the name and the function of each row."""
    for model, way in WAYS:
        yield f"{model}, {way[0]}", functools.partial(repeat, run, model, way)
    yield f"{RESUMED[0]}, resumed", functools.partial(resume, run)


def repeat(run, model, way):
    def train(env):
        named = (*way[:4], {**env, **way[4]}, way[5])
        launch = functools.partial(run.launch, f"nccl-{model}", way[2])
        return parity.repeat(run, model, named, launch, run.scratch / "over-nccl")

    return checked(run, way[2], train)


def resume(run):
    def train(env):
        launch = functools.partial(run.launch, "nccl-resume", env=env)
        return parity.resume(run, *RESUMED, launch, run.scratch / "over-nccl")

    return checked(run, max(RESUMED[1]), train)


def checked(run, ranks, train):
    """Trains, and returns the cells of a row. Raises Failed if figures differ, or if a rank proves no transport.

    Each process has a log of NCCL. The device double writes no log, but counts calls.
    """
    logs = run.runner.logs / f"nccl-{len(run.runner.commands):02d}"
    logs.mkdir(exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    row = train({**environment(run), "NCCL_DEBUG_FILE": f"{logs}/%p.log", "GPU_DOUBLE_REPORT": str(logs)})
    proofs = [proof(log.read_text(encoding="utf-8", errors="replace")) for log in sorted(logs.glob("*.log"))]
    proofs += [of_double(json.loads(counts.read_text(encoding="utf-8"))) for counts in logs.glob("rank-*.json")]
    transports = sorted({name for names, _ in proofs for name in names})
    run.nccl = next((version for _, version in proofs if version), run.nccl)
    bounds = " and ".join(f"{bound:g}" for bound in row["bounds"])
    differences = [f"{row[key]:.1e}" for key in ("loss", "grad_norm")]
    cells = [row["model"], row["way"], *differences, bounds, ", ".join(transports) or "no log"]
    if not row["holds"]:
        raise Failed("the run differs from PyTorch's by more than the bounds", cells)
    proven = sum(bool(names) for names, _ in proofs)
    if run.args.device == "cuda" and proven < ranks:
        raise Failed(f"NCCL's logs name a transport for {proven} of {ranks} ranks", cells)
    return cells


def of_double(report):
    """Returns the transport that the device double's report of a rank proves, as `proof` does."""
    return ["the double's NCCL"] if report["counts"].get("nccl") else [], None


def proof(log):
    """Returns the transports and the version of NCCL that a log proves.

    >>> proof("NCCL version 2.28.9+cuda13.0\\nh:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0")
    (['NET/Socket'], '2.28.9+cuda13.0')
    >>> proof("Channel 00 : 0[0] -> 1[0] via SHM/direct\\nChannel 00/0 : 1[0] -> 0[0] via P2P/direct pointer")
    (['P2P', 'SHM'], None)
    >>> proof("")
    ([], None)
    """
    transports = sorted(set(re.findall(r" via ((?:NET/)?[A-Za-z0-9]+)", log)))
    version = re.search(r"NCCL version (\S+)", log)
    return transports, version and version.group(1)
