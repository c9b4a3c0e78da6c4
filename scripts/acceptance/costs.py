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
# Flags of `bench kernels`: heads of 128, then of 64.
KERNELS = [[], ["--heads", 64, "--kv-heads", 8, "--only", "attention"], ["--tokens", 2048, "--only", "attention"]]
SMALL_KERNELS = [
    ["--tokens", 64, "--width", 128, "--inner", 256, "--heads", 2, "--kv-heads", 1, "--vocabulary", 500, "--runs", 1]
]
# Name, model, sequences, tokens.
SHAPES = [
    ("Llama 3.2 1B", models.LLAMA_1B, 2, 2048),
    ("Llama 3.2 1B", models.LLAMA_1B, 1, 8192),
    ("eight layers of Llama 3.1 8B", {**models.LLAMA_8B, "num_hidden_layers": 8}, 1, 8192),
]
SMALL = [("a tiny Llama", models.LLAMA_TINY, 1, 64)]
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
        yield f"{shape.title}, here", functools.partial(ours, shape)
    python, version = with_torch(run)
    # cuDNN needs a GPU, and the compiler takes minutes on CPUs.
    ways = PYTORCH if run.args.device == "cuda" else PYTORCH[:1]
    for shape in shapes:
        for way in ways:
            yield f"{shape.title}, PyTorch {way[0]}", functools.partial(theirs, shape, python, version, *way)


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


def ours(run):
    return cells(run, "candle-fsdp", phases.measured(run, 1, run.peak))


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
    for flags in SMALL_KERNELS if run.args.small else KERNELS:
        name = " ".join(map(str, ["kernels", *flags]))
        yield name, functools.partial(rates_with, run, flags)


def rates_with(run, flags):
    """Measures kernels, and returns the rows of cells."""
    command = [run.programs / "bench", "kernels", "--device", run.args.device, "--json", *flags]
    rows, shape = [], "" if run.args.small else f" {' '.join(map(str, flags))}"
    for found in json_lines(run.runner.run("kernels", command)):
        rate = lambda key: f"{found[key]:.0f}" if key in found else ""  # noqa: B023, E731
        rows.append([found["name"] + shape, found["pass"], f"{found['ms']:.3f}", rate("gb_s"), rate("tflop_s")])
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
