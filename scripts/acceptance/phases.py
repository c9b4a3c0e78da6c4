"""The phases. Each returns its result, or raises Skipped or Failed."""

import functools
import json
import math
import os
import pathlib
import shutil

from . import kernels, models, trace
from .machine import is_double, known
from .parity import F32, SEQUENCES, parity, repeat
from .running import Failed, Skipped, json_lines
from .watch import DeviceMemory

# Maximum difference of a phase's memory from the formula.
TOLERANCE = 0.02
# f32 parameters, gradients and AdamW's two moments, for any compute dtype.
STATE_BYTES = 16
GIB = 2**30


class Run:
    """State that the phases share: arguments, machine, paths."""

    def __init__(self, args, machine, runner, scratch):
        self.args, self.machine, self.runner, self.scratch = args, machine, runner, scratch
        self.is_built = False
        self.gpus = machine["gpus"] if args.device == "cuda" else []
        # The double has any number of devices; two are enough to communicate.
        found = len(self.gpus) or 2
        self.ranks = args.gpus or min(found, 8)
        if self.gpus and self.ranks > len(self.gpus):
            raise SystemExit(f"gpu-acceptance: --gpus {self.ranks}, and nvidia-smi shows {len(self.gpus)}")
        # The CPU is only for testing the script; use f32 as usual on CPUs.
        self.dtype = "f32" if args.device == "cpu" else "bf16"
        self.batch = args.batch or 2
        # Steps of a recorded run, which has 20.
        self.recorded = 5 if args.small else 20
        self.steps = args.steps or (3 if args.small else 10)
        self.programs = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release"
        self.model = pathlib.Path(args.model) if args.model else models.write(self.config(), scratch / "model")
        # As in what torchtitan published.
        usual = 8192 if models.read(self.model) == models.LLAMA_8B else 2048
        self.seq = args.seq or (64 if args.small else usual)

    def what(self):
        names = sorted({gpu["name"] for gpu in self.gpus})
        if names:
            return ", ".join(names)
        if self.args.device == "cpu":
            return "CPUs"
        return "the device double" if is_double() else "devices that nvidia-smi does not show"

    def config(self):
        """Returns the largest model whose state and activations fit all ranks together."""
        if self.args.small:
            return models.LLAMA_TINY
        room = sum(gpu["memory_mib"] or 0 for gpu in self.gpus[: self.ranks]) / 1024
        return models.LLAMA_8B if room >= 300 else models.LLAMA_1B

    def launch(self, name, ranks, *words, device=None, env=None, across_hosts=False):
        """Runs a program on a number of ranks, of this host or of each host, and returns its output."""
        launcher = [self.programs / "fsdp-launch", "--nproc-per-node", ranks]
        if across_hosts:
            args = self.args
            launcher += ["--nnodes", args.nnodes, "--node-rank", args.node_rank, "--rdzv-endpoint", args.endpoint]
            # The hosts' builds take different times.
            launcher += ["--rdzv-conf", f"join_timeout={args.limit}", "--rdzv-id", f"gpu-acceptance-{name}"]
            launcher += ["--rdzv-token-file", args.token_file] if args.token_file else []
        command = [*launcher, self.programs / words[0], *words[1:]]
        return self.runner.run(name, [*command, "--device", device or self.args.device], env)


def build(run):
    """the workspace"""
    if run.args.device == "cuda" and not run.machine["nvcc"] and not is_double():
        raise Failed("no nvcc is found: Candle's kernels need it. Set CUDA_HOME to a CUDA toolkit (12.0 to 13.4)")
    if is_double():
        run.is_built = True
        raise Skipped("scripts/gpu-double has built the programs")
    features = ["--features", "cuda,nccl,cudnn"] if run.args.device == "cuda" else []
    # Build the whole workspace: another selection would compile Candle again.
    run.runner.run("build", ["cargo", "build", "--release", "--workspace", *features])
    run.is_built = True
    return {}


def hosts(run):
    """a recorded run, and a training step, over the GPUs of all hosts"""
    count = run.args.nnodes
    if count == 1:
        raise Skipped("--nnodes gives further hosts")
    if SEQUENCES % count:
        raise Skipped(f"the recorded run has {SEQUENCES} sequences, which {count} hosts can't share")
    each = max(ranks for ranks in (1, 2, 4) if ranks <= run.ranks and SEQUENCES % (count * ranks) == 0)
    # Hosts share no directory.
    way = (f"{count * each} ranks on {count} hosts", "run", count * each, ["--checkpoint-local"], {}, F32)
    launch = functools.partial(run.launch, "hosts-parity", each, across_hosts=True)
    # Ranks have to agree on paths.
    row = repeat(run, "llama_tiny", way, launch, pathlib.Path("target/gpu-acceptance-hosts"))
    text = run.launch("hosts-speed", run.ranks, "bench", "step", *step_flags(run), "--json", across_hosts=True)
    if run.args.node_rank:
        return {"why": "host 0 has the figures"}
    found = only(json_lines(text), "bench step")
    rate = found["tokens_per_s"] / found["world"]
    result = {"parity": row, "ranks": found["world"], "tokens_per_s_per_rank": rate, "program": found}
    if not row["holds"]:
        raise Failed(f"other than recorded: {way[0]}", result)
    return result


def memory(run):
    """bytes after each phase of a step, against the formula"""
    shape = ["--width", "512", "--layers", "6"] if run.args.small else ["--width", "2048", "--layers", "12"]
    text = run.launch("memory", run.ranks, "bench", "memory", "--mode", "zero3,zero2", *shape, "--json")
    rows = []
    for found in json_lines(text):
        model, unit, share = found["model_bytes"], found["unit_bytes"], found["model_bytes"] / found["world"]
        kept = model if found["mode"] == "zero2" else 0
        formulas = {
            "build": share,
            "optimizer": 3 * share,
            "forward": 3 * share + kept,
            "backward": 4 * share,
        }
        for phase, formula in formulas.items():
            measured = found["phases"][phase]
            off = measured / formula - 1
            row = {"mode": found["mode"], "after": phase, "bytes": measured, "formula": formula, "off": off}
            rows.append({**row, "holds": abs(off) <= TOLERANCE})
        # At most two units' parameters and one unit's gradients, or all parameters and one unit's gradients. A device
        # keeps the inputs of a reduction until compute waits for it: one more unit's gradients.
        bound = kept + unit if kept else (4 if run.args.device == "cuda" else 3) * unit
        off = found["transient_bytes"] / bound - 1
        row = {"mode": found["mode"], "after": "on top, at most", "bytes": found["transient_bytes"], "formula": bound}
        rows.append({**row, "off": off, "holds": off <= TOLERANCE})
    if len(rows) != 10:
        raise Failed(f"bench memory printed {len(rows) // 5} of 2 modes")
    wrong = [f"{row['mode']} {row['after']}: {row['off']:+.1%}" for row in rows if not row["holds"]]
    result = {"rows": rows, "tolerance": TOLERANCE}
    if wrong:
        raise Failed("more off than 2 %: " + ", ".join(wrong), result)
    return result


def speed(run):
    """tokens a second, the share of the peak, and memory beside `bench plan`"""
    config, rows = models.read(run.model), []
    name = run.gpus[0]["name"] if run.gpus else None
    peak = run.args.peak_tflops or known(name)[0]
    parameters = None
    # Most ranks first: they fit the model, and report its number of parameters.
    for ranks in sorted({2**i for i in range(4) if 2**i <= run.ranks} | {run.ranks}, reverse=True):
        room = min((gpu["memory_mib"] for gpu in run.gpus if gpu["memory_mib"]), default=None)
        if parameters and room and parameters * STATE_BYTES / ranks > 0.8 * room * 2**20:
            needs = parameters * STATE_BYTES / ranks / GIB
            rows.append({"ranks": ranks, "why": f"its state alone takes {needs:.0f} GiB a GPU"})
            continue
        rows.append(measured(run, ranks, peak))
        parameters = rows[-1]["program"]["parameters"]
    result = {"model": named(config), "parameters": parameters, "batch": run.batch, "seq": run.seq, "dtype": run.dtype}
    result["checkpointing"] = "" if run.args.small else ", every block computed again in backward"
    published = models.PUBLISHED.get((run.batch, run.seq), {}) if config == models.LLAMA_8B else {}
    result.update(rows=rows, peak_tflops=peak, published=published)
    if not peak:
        result["why_no_share"] = f"no peak is known for {name or run.what()}: --peak-tflops gives one"
    return result


def measured(run, ranks, peak, flags=(), env=None):
    """Returns a row of `bench step` on a number of ranks, with more flags and variables of the environment."""
    with DeviceMemory(enabled=bool(run.gpus)) as used:
        text = run.launch(f"speed-{ranks}", ranks, "bench", "step", *step_flags(run), *flags, "--json", env=env)
    found = only(json_lines(text), "bench step")
    if not math.isfinite(found["loss"]):
        raise Failed(f"the loss on {ranks} ranks is {found['loss']}")
    row = {"ranks": ranks, "tokens_per_s_per_rank": found["tokens_per_s"] / ranks, "step_s": found["step_s"]}
    row["device_mib"] = used.most()
    row["peak_gib"], row["planned_gib"] = found["allocated"]["peak"] / GIB, planned(run, ranks)
    if peak:
        operations = models.operations_per_token(models.read(run.model), found["parameters"], run.seq)
        row["share_of_peak"] = row["tokens_per_s_per_rank"] * operations / (peak * 1e12)
    return {**row, "program": found}


def planned(run, ranks):
    """Returns the GiB that `bench plan` predicts for a rank, or None for a device that it does not know."""
    if run.gpus:
        device = known(run.gpus[0]["name"])[1]
    else:
        device = "h100-sxm" if run.args.device == "cuda" else "cpu"
    if not device:
        return None
    flags = ["--model", run.model, "--batch", run.batch, "--seq", run.seq, "--param-dtype", run.dtype]
    flags += ["--device", device, "--ranks-per-host", ranks, "--reserve", 0, "--json"]
    flags += ["--flops", 1] if device == "cpu" else []
    flags += [] if run.args.small else ["--activation-checkpoint", "full"]
    text = run.runner.run(f"plan-{ranks}", [run.programs / "bench", "plan", *flags])
    return only(json_lines(text), "bench plan")["memory"]["total"] / GIB


def overlap(run):
    """share of communication hidden behind compute"""
    if run.ranks == 1:
        raise Skipped("one rank has nobody to communicate with")
    if is_double():
        raise Skipped("what the double does takes no time of its own")
    nsys = shutil.which("nsys")
    if run.args.device == "cuda" and not nsys:
        raise Skipped("only Nsight Systems sees when a GPU communicates, and nsys is not on PATH")
    # `train` saves a checkpoint at the end: use only four of the equal layers.
    layers, _, vocabulary = models.sizes(models.read(run.model))
    config = {**models.read(run.model), "vocab_size": min(vocabulary, 8192)}
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            config[key] = min(layers, 4)
    steps, metrics = 6, run.scratch / "overlap.jsonl"
    flags = ["--model", models.write(config, run.scratch / "overlap"), "--init", "random", "--steps", steps]
    flags += ["--batch-size", run.batch, "--seq-len", run.seq, "--param-dtype", run.dtype, "--metrics", metrics]
    flags += ["--checkpoint-dir", run.scratch / "overlapped"]
    if run.args.device == "cuda":
        found = seen_by_nsys(run, nsys, flags)
    else:
        file = run.runner.logs / "trace.json"
        run.launch("overlap", run.ranks, "train", *flags, "--trace", file)
        found = trace.overlap(file)
    shutil.rmtree(run.scratch / "overlapped", ignore_errors=True)
    losses = [json.loads(line)["loss"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    if len(losses) != steps or None in losses:
        raise Failed(f"the losses of {steps} steps are {losses}")
    if not found:
        raise Failed(f"{run.ranks} ranks trained, and the trace shows no communication")
    return {**found, "losses": losses}


def seen_by_nsys(run, nsys, flags):
    """Runs each rank under Nsight Systems."""
    # nsys replaces this by the rank.
    to = run.scratch / "rank%q{RANK}"
    profiler = [nsys, "profile", "--trace=cuda", "--sample=none", "--cpuctxsw=none", "--export=sqlite"]
    profiler += ["--force-overwrite=true", f"--output={to}", (run.programs / "train").resolve()]
    launcher = [run.programs / "fsdp-launch", "--nproc-per-node", run.ranks, "--no-python"]
    run.runner.run("overlap", [*launcher, *profiler, *flags, "--device", "cuda"])
    return kernels.overlap([run.scratch / f"rank{rank}.sqlite" for rank in range(run.ranks)])


def pytorch(run):
    """the same step by PyTorch FSDP2"""
    python, version = with_torch(run)
    runs = [one_pytorch(run, python, "eager", [])]
    # On CPUs, the compiler takes minutes.
    if run.args.device == "cuda":
        try:
            runs.append(one_pytorch(run, python, "compiled", ["--compile"]))
        except Failed as why:
            runs.append({"name": "compiled", "why": str(why).splitlines()[0]})
    return {"torch": version, "runs": runs}


def chosen_python(args):
    """Returns the Python of --python, of .ci/install, or of PATH."""
    own = pathlib.Path("target/interop/bin/python")
    return args.python or (str(own) if own.exists() else shutil.which("python3"))


def with_torch(run):
    """Returns a Python that has torch and transformers, and torch's version, or raises Skipped."""
    python = chosen_python(run.args)
    probe = "import json, torch, transformers; from torch.distributed.fsdp import fully_shard; "
    probe += "print(json.dumps([torch.__version__, torch.cuda.is_available() and torch.cuda.device_count()]))"
    try:
        version, cards = json.loads(run.runner.run("pytorch-probe", [python, "-c", probe]))
    except Failed as why:
        raise Skipped(f"{python} can't import torch and transformers: {str(why).splitlines()[-1]}") from why
    if run.args.device == "cuda" and cards < run.ranks:
        raise Skipped(f"torch {version} in {python} sees {cards or 'no'} GPUs, and {run.ranks} are needed")
    return python, version


def one_pytorch(run, python, name, flags):
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", run.ranks]
    command += ["tests/interop/step.py", *step_flags(run), "--device", run.args.device, *flags]
    with DeviceMemory(enabled=bool(run.gpus)) as used:
        # Avoids a warning of torchrun.
        text = run.runner.run(f"pytorch-{name}", command, {"OMP_NUM_THREADS": "1"})
    found = only(json_lines(text), "tests/interop/step.py")
    row = {"name": name, "tokens_per_s_per_rank": run.batch * run.seq / found["step_s"], "step_s": found["step_s"]}
    peaks = found["peak_device_bytes"]
    return {**row, "device_mib": used.most(), "peak_gib": max(peaks) / GIB if max(peaks) else None, "program": found}


def step_flags(run):
    """Returns the flags that `bench step` and tests/interop/step.py share."""
    flags = ["--model", run.model, "--batch", run.batch, "--seq", run.seq, "--steps", run.steps]
    flags += ["--param-dtype", run.dtype]
    return flags if run.args.small else [*flags, "--activation-checkpoint"]


def named(config):
    layers, width, vocabulary = models.sizes(config)
    return f"{config.get('model_type')}, {layers} layers, width {width}, vocabulary {vocabulary}"


def only(objects, program):
    if len(objects) != 1:
        raise Failed(f"{program} printed {len(objects)} JSON objects, and one was expected")
    return objects[0]


ALL = [build, hosts, parity, memory, speed, overlap, pytorch]
