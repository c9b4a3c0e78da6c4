"""Measures training steps and attention on one GPU, beside PyTorch."""

import copy
import functools

from . import models, page, phases
from .machine import known
from .running import Failed, Skipped, TookTooLong, json_lines

HEAD = ["model", "batch", "by", "tokens a second", "s a step", "GiB in use", "GiB planned", "MiB on the device"]
HEAD += ["share of peak"]
ATTENTION_HEAD = ["tokens", "by", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"]
RATES_HEAD = ["kernel", "pass", "ms", "GB/s", "TFLOP/s"]
# The environment variable that chooses the library of attention.
BACKEND = "FSDP_ATTENTION_BACKEND"
# Attention, and flags of `bench kernels`: heads of 128, then of 64.
HEADS_OF_64 = ["--heads", 64, "--kv-heads", 8, "--only", "attention"]
KERNELS = [
    ("own", []),
    ("own", HEADS_OF_64),
    ("own", ["--tokens", 2048, "--only", "attention"]),
    ("cudnn", ["--only", "attention"]),
    ("cudnn", HEADS_OF_64),
    ("cudnn", ["--tokens", 2048, "--only", "attention"]),
]
SMALL_SIZES = ["--tokens", 64, "--width", 128, "--inner", 256, "--heads", 2, "--kv-heads", 1, "--vocabulary", 500]
SMALL_KERNELS = [("own", [*SMALL_SIZES, "--runs", 1])]
# Name, model, sequences, tokens.
SHAPES = [
    ("Llama 3.2 1B", models.LLAMA_1B, 2, 2048),
    ("Llama 3.2 1B", models.LLAMA_1B, 1, 8192),
    ("eight layers of Llama 3.1 8B", {**models.LLAMA_8B, "num_hidden_layers": 8}, 1, 8192),
]
SMALL = [("a tiny Llama", models.LLAMA_TINY, 1, 64)]
# Name, attention and flags of this library's ways.
OURS = [
    ("own attention", "own", []),
    ("cuDNN attention", "cudnn", []),
    ("cuDNN attention, float8 products", "cudnn", ["--compute", "float8"]),
]
# Name and flags of PyTorch's ways.
PYTORCH = [
    ("eager", []),
    ("eager, cuDNN attention", ["--attention", "cudnn"]),
    ("compiled", ["--compile"]),
]


def steps(run):
    """Yields the name and the function of each row."""
    shapes = [shaped(run, *shape) for shape in (SMALL if run.args.small else SHAPES)]
    for shape in shapes:
        for way in ways_for(run, is_last=shape is shapes[-1]):
            yield f"{shape.title}, here, {way[0]}", functools.partial(ours, shape, *way)
    python, version = with_torch(run)
    # cuDNN needs a GPU, and the compiler takes minutes on CPUs.
    ways = PYTORCH if run.args.device == "cuda" else PYTORCH[:1]
    for shape in shapes:
        for way in ways:
            yield f"{shape.title}, PyTorch {way[0]}", functools.partial(theirs, shape, python, version, *way)


def ways_for(run, is_last):
    """Returns this library's ways. cuDNN and 8-bit products need a GPU; one shape shows what the latter are worth."""
    if run.args.device != "cuda":
        return OURS[:1]
    return OURS if is_last else OURS[:2]


def with_torch(run):
    """Searches for PyTorch as `phases.with_torch` does, but once: its import takes seconds."""
    if run.torch is None:
        try:
            run.torch = phases.with_torch(run)
        except Skipped as why:
            run.torch = why
    if isinstance(run.torch, Skipped):
        raise run.torch
    return run.torch


def shaped(run, name, config, batch, seq):
    """Returns a run of another model and batch."""
    shape = copy.copy(run)
    shape.title, shape.batch, shape.seq = f"{name}, {batch} x {seq}", batch, seq
    shape.model = models.write(config, run.scratch / shape.title.replace(" ", "-").replace(",", ""))
    return shape


def cells(run, by, row):
    """Returns a row's cells."""
    parameters, per_token = row["program"]["parameters"], 0
    if run.peak:
        per_token = models.operations_per_token(models.read(run.model), parameters, run.seq) / (run.peak * 1e12)
    model, batch = run.title.rsplit(", ", 1)
    return [model, batch, by, *page.cells(row, per_token)]


def ours(run, name, backend, flags):
    env = {BACKEND: backend}
    return cells(run, f"candle-fsdp, {name}", with_backend(lambda: phases.measured(run, 1, run.peak, flags, env)))


def with_backend(measure):
    """Measures this library. A row is skipped where cuDNN can't be used."""
    try:
        return measure()
    except TookTooLong:
        raise
    except Failed as why:
        refused = [line for line in str(why).splitlines() if f"{BACKEND}=cudnn:" in line]
        if refused:
            raise Skipped(refused[0].strip()) from why
        raise


def theirs(run, python, version, name, flags):
    return cells(run, f"PyTorch {version}, {name}", of_pytorch(lambda: phases.one_pytorch(run, python, name, flags)))


def of_pytorch(measure):
    """Measures PyTorch. A failure of PyTorch skips the row."""
    try:
        return measure()
    except TookTooLong:
        raise
    except Failed as why:
        raise Skipped(f"PyTorch failed: {why}") from why


def rates(run):
    """Yields the name and the function of the rows of this library's kernels."""
    for backend, flags in SMALL_KERNELS if run.args.small else KERNELS:
        name = " ".join(map(str, [f"kernels, {backend} attention", *flags]))
        yield name, functools.partial(rates_with, run, backend, flags)


def rates_with(run, backend, flags):
    """Measures kernels, and returns the rows of cells."""
    command = [run.programs / "bench", "kernels", "--device", run.args.device, "--json", *flags]
    rows, shape = [], "" if run.args.small else f" {' '.join(map(str, flags))}"
    text = with_backend(lambda: run.runner.run("kernels", command, {BACKEND: backend}))
    for found in json_lines(text):
        rate = lambda key: f"{found[key]:.0f}" if key in found else ""  # noqa: B023, E731
        name = found["name"] + (f" by {found['library']}" if "library" in found else "")
        rows.append([name + shape, found["pass"], f"{found['ms']:.3f}", rate("gb_s"), rate("tflop_s")])
    if not rows:
        raise Failed("`bench kernels` printed no row")
    return rows


def attention(run):
    """Yields the name and the function of the rows of PyTorch's attention."""
    python, version = with_torch(run)
    if run.args.device != "cuda":
        yield "attention", functools.partial(attention_of, run, python, version, "default", "f32", [])
        return
    for backend in ("flash", "cudnn"):
        flags = ["--device", "cuda", "--backend", backend, "--heads", 32]
        yield backend, functools.partial(attention_of, run, python, version, backend, "bf16", flags)


def attention_of(run, python, version, backend, dtype, flags):
    """Measures attention over a number of tokens, and returns the rows of cells."""
    tokens = "128" if run.args.small else "2048,8192"
    command = [python, "tests/interop/attention.py", "--tokens", tokens, "--dtype", dtype, *flags]
    text = of_pytorch(lambda: run.runner.run(f"attention-{backend}", command))
    rows = []
    for found in json_lines(text):
        row = [found["tokens"], f"PyTorch {version}, {backend}, {dtype}"]
        for way in ("forward", "backward"):
            rate = found.get(f"{way}_tflops")
            row += [f"{found[f'{way}_ms']:.3f}", "" if rate is None else f"{rate:.0f}"]
        rows.append(row)
    return rows


def peak(run):
    """Returns the GPU's peak in TFLOP/s, or None."""
    return known(run.gpus[0]["name"])[0] if run.gpus else None
