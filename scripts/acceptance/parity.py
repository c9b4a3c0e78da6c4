"""Repeats runs that PyTorch FSDP2 recorded (tests/golden) on the device."""

import functools
import json
import pathlib
import shutil

from .running import Failed

GOLDEN = pathlib.Path("tests/golden")
MODELS = ["llama_tiny", "gpt2_tiny"]
# Sequences of a step of the recorded runs of MODELS.
SEQUENCES = 4
# Maximum relative differences of losses and gradient norms.
F32 = (2e-5, 2e-5)
# As in tests/support/src/tolerance.rs. PyTorch differs from itself by half as much with another attention.
BF16 = (2e-4, 2.5e-3)
F16 = (3e-5, 7e-4)
FLOAT8 = (5e-6, 2e-4)
SCALED = ["--param-dtype", "f16", "--loss-scale", "65536"]


def ways(run):
    """Returns name, recorded run, ranks, flags, environment and bounds of each way to repeat a run."""
    counts = [ranks for ranks in (1, 2, 4) if ranks <= run.ranks]
    found = [(f"{ranks} rank{'s' * (ranks > 1)}", "run", ranks, [], {}, F32) for ranks in counts]
    if run.args.device == "cuda":
        # NCCL refuses two ranks on one GPU; a machine with one GPU uses this way.
        found.append(("2 ranks through the host", "run", 2, [], {"FSDP_DEVICE_BACKEND": "host"}, F32))
    most = max(ranks for ranks in (1, 2, 4) if ranks <= run.ranks)
    options = [
        ("parameters kept (ZeRO-2)", ["--reshard-after-forward", "never"]),
        ("activation checkpointing", ["--activation-checkpoint", "full"]),
    ]
    if most < 4:
        options.append(("two micro-batches", ["--grad-accum", "2"]))
    if most > 1:
        options.append(("two copies (HSDP)", ["--replicate", "2"]))
    ranks = f"{most} rank{'s' * (most > 1)}"
    found += [(f"{ranks}, {name}", "run", most, flags, {}, F32) for name, flags in options]
    found.append((f"{ranks}, bf16", "run_bf16_reduce_f32", most, ["--param-dtype", "bf16"], {}, BF16))
    found.append((f"{ranks}, f16", "run_f16_reduce_f32", most, SCALED, {}, F16))
    # Scales of 8-bit shards depend on the number of ranks, which were two.
    if run.ranks > 1:
        found.append(("2 ranks, float8", "run_float8_gather", 2, ["--all-gather", "float8"], {}, FLOAT8))
    return found


def parity(run):
    """runs that PyTorch FSDP2 recorded, repeated on the device"""
    rows = []
    for model in MODELS:
        for way in ways(run):
            launch = functools.partial(run.launch, f"parity-{model}", way[2])
            rows.append(repeat(run, model, way, launch, run.scratch / "parity"))
    same = checkpoint(run)
    result = {"steps": run.recorded, "rows": rows, "checkpoint_is_the_same_on_the_cpu": same}
    wrong = [f"{row['model']}, {row['way']}" for row in rows if not row["holds"]]
    wrong += [] if same else ["a checkpoint of the device, loaded on the CPU"]
    if wrong:
        raise Failed("other than recorded: " + "; ".join(wrong), result)
    return result


def repeat(run, model, way, launch, place):
    """Trains as recorded with files at `place`, and returns a row. Only rank 0's host has the figures."""
    name, recorded, ranks, flags, env, bounds = way
    record = read(model, recorded)
    # A stopped run may have left one.
    shutil.rmtree(place, ignore_errors=True)
    metrics = train(model, record, (ranks, run.recorded, flags), functools.partial(launch, env=env), place)
    shutil.rmtree(place, ignore_errors=True)
    if run.args.node_rank:
        return {"model": model, "way": name}
    return beside(model, name, lines(metrics), record["trajectory"][: run.recorded], bounds)


def resume(run, model, counts, launch, place):
    """Trains half of a recorded run on one number of ranks and the rest on another, and returns a row.

    `launch` takes the number of ranks before the program.
    """
    record, half = read(model, "run"), run.recorded // 2
    ours = []
    for ranks, steps, flags in zip(counts, (half, run.recorded), ([], ["--resume", "auto"])):
        metrics = train(model, record, (ranks, steps, flags), functools.partial(launch, ranks), place)
        ours += lines(metrics)
    shutil.rmtree(place)
    name = f"{counts[0]} ranks, resumed on {counts[1]}"
    return beside(model, name, ours, record["trajectory"][: run.recorded], F32)


def read(model, recorded):
    return json.loads((GOLDEN / model / f"{recorded}.json").read_text(encoding="utf-8"))


def train(model, record, way, launch, place):
    """Trains as recorded on a number of ranks, to a step, with more flags. Returns the file of the metrics."""
    ranks, steps, flags = way
    micro_batches = int(flags[1]) if flags[:1] == ["--grad-accum"] else 1
    sequences = record["world_size"] * record["batch_per_rank"]
    metrics = place.with_suffix(".jsonl")
    batch = ["--batch-size", sequences // ranks // micro_batches, "--metrics", metrics]
    launch("train", *as_recorded(model, record, steps), *batch, "--checkpoint-dir", place, *flags)
    return metrics


def lines(metrics):
    """Returns the steps in a file of metrics, and removes the file."""
    found = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.unlink()
    return found


def beside(model, name, ours, theirs, bounds):
    """Returns a row of the largest differences."""
    off = [difference(ours, theirs, key) for key in ("loss", "grad_norm")]
    row = {"model": model, "way": name, "loss": off[0], "grad_norm": off[1], "bounds": bounds}
    return {**row, "holds": all(it <= bound for it, bound in zip(off, bounds))}


def checkpoint(run):
    """Returns whether weights saved by the device load on the CPU with the same bits."""
    record = read("llama_tiny", "run")
    place, ranks = run.scratch / "checkpoint", min(run.ranks, 2)
    flags = [*as_recorded("llama_tiny", record, run.recorded), "--batch-size", 4 // ranks, "--checkpoint-dir", place]
    run.launch("checkpoint", ranks, "train", *flags, "--export-hf", run.scratch / "of-device")
    run.launch(
        *("checkpoint-cpu", ranks, "train", *flags, "--resume", "auto", "--export-hf", run.scratch / "of-cpu"),
        device="cpu",
    )
    weights = [(run.scratch / of / "model.safetensors").read_bytes() for of in ("of-device", "of-cpu")]
    return weights[0] == weights[1]


def as_recorded(model, record, steps):
    own = GOLDEN / model / "tokens.bin"
    flags = ["--model", GOLDEN / model, "--data", own if own.exists() else GOLDEN / "tokens.bin"]
    flags += ["--seq-len", record["seq_len"], "--steps", steps, "--lr", record["lr"]]
    flags += ["--betas", ",".join(map(str, record["betas"])), "--eps", record["eps"]]
    flags += ["--weight-decay", record["weight_decay"], "--clip-grad-norm", record["clip_grad_norm"]]
    return [*flags, "--lr-schedule", "constant", "--warmup-steps", 0]


def difference(ours, theirs, key):
    """Returns the largest relative difference of all steps."""
    if [step["step"] for step in ours] != [step["step"] for step in theirs]:
        raise Failed(f"{len(ours)} steps were trained, and {len(theirs)} are recorded")
    # JSON has null for values that are not finite.
    values = [(float("inf") if mine[key] is None else mine[key], other[key]) for mine, other in zip(ours, theirs)]
    return max(abs((mine - other) / other) for mine, other in values)
