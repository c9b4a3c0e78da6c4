"""The command line, and the order of the phases."""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

from . import machine, page, phases
from .running import Failed, Runner, Skipped

DESCRIPTION = """\
Tests and measures everything on 1 to 8 real GPUs, and writes a report as JSON and as a page:

  build     the workspace with the features cuda and nccl
  hosts     with --nnodes: a recorded run, and a training step, over the GPUs of all hosts
  parity    repeats runs that PyTorch FSDP2 recorded; loads a device's checkpoint on the CPU
  memory    bytes after each phase of a step, against the formula of docs/memory.md
  speed     tokens a second, the share of the GPU's peak, and memory beside `bench plan`, on 1, 2, 4, ... GPUs
  overlap   the share of communication hidden behind compute, by nsys if it is installed
  pytorch   the same step by PyTorch FSDP2, eager and compiled, if torch with CUDA and transformers are installed

A step of Llama 3.1 8B (for 300 GiB of GPU memory or more) is compared with torchtitan's figures.
"""
EPILOG = """\
Examples:

  On a machine with GPUs:
      scripts/gpu-acceptance
  On two of them, with your own model:
      scripts/gpu-acceptance --gpus 2 --model ./Llama-3.2-1B
  On two hosts, started on both (the other phases run on host 0 alone):
      scripts/gpu-acceptance --nnodes 2 --node-rank 0 --endpoint HOST0:29400 --token-file FILE
      scripts/gpu-acceptance --nnodes 2 --node-rank 1 --endpoint HOST0:29400 --token-file FILE
  Without a GPU, on the device double:
      scripts/gpu-double scripts/gpu-acceptance --small
  To test the script itself, on CPUs:
      scripts/gpu-acceptance --small --device cpu

Needs Rust, a CUDA toolkit (12.0 to 13.4) with nvcc and NCCL, and Python 3.9 or newer. The last phase needs a Python
with torch and transformers (tests/interop/requirements.txt). The exit code is 0 if no phase failed. A phase that can't
run is skipped, with a reason in the report.
"""


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-acceptance",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs to use [default: all, at most 8]")
    parser.add_argument("--nnodes", type=positive, default=1, metavar="N", help="hosts, each with as many GPUs [1]")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="index of this host [0]")
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="where hosts meet: an address of host 0")
    parser.add_argument("--token-file", metavar="FILE", help="a secret of 16 bytes or more that all hosts share")
    parser.add_argument("--small", action="store_true", help="small models, few steps: minutes, no meaningful speed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="[default: cuda]")
    parser.add_argument("--model", metavar="DIR", help="directory of the model for the measurements")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size per GPU")
    parser.add_argument("--seq", type=positive, metavar="N", help="sequence length")
    parser.add_argument("--steps", type=positive, metavar="N", help="number of timed steps")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="bf16 peak of the GPU, if unknown")
    parser.add_argument("--python", metavar="PATH", help="Python with torch [default: target/interop, python3]")
    parser.add_argument("--only", metavar="PHASES", help="run only these phases: parity,memory")
    parser.add_argument("--limit", type=positive, default=3600, metavar="S", help="seconds a command may take [3600]")
    parser.add_argument("--out", metavar="DIR", help="directory of the report [default: target/gpu-acceptance]")
    args = parser.parse_args(arguments)
    names = [phase.__name__ for phase in phases.ALL]
    args.only = args.only.split(",") if args.only else names
    for name in args.only:
        if name not in names:
            parser.error(f"--only: there is no phase {name!r}; there are {', '.join(names)}")
    if (args.nnodes > 1) != bool(args.endpoint):
        parser.error("--nnodes above 1 and --endpoint go together")
    if args.endpoint and not args.token_file and not args.endpoint.startswith(("127.", "localhost:")):
        parser.error("--endpoint on other hosts needs --token-file: a secret of 16 bytes or more that all hosts share")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank {args.node_rank}: it must be below --nnodes, which is {args.nnodes}")
    if args.model and not os.path.isfile(os.path.join(args.model, "config.json")):
        parser.error(f"--model: {args.model} has no config.json")
    return args


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main(arguments=None):
    args = parse(arguments)
    # Resolve paths before changing the directory.
    for name in ("model", "out", "python", "token_file"):
        if getattr(args, name):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    os.chdir(pathlib.Path(__file__).resolve().parents[2])
    out = pathlib.Path(args.out or "target/gpu-acceptance").resolve()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    runner = Runner(logs, args.limit)
    report = {**machine.report(arguments, args.device), "phases": []}
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
            run = phases.Run(args, report["machine"], runner, pathlib.Path(scratch))
            report["ranks"] = run.ranks
            print(f"{run.ranks} ranks on {run.what()}", flush=True)
            for phase in phases.ALL:
                report["phases"].append(one(phase, run, runner, args.only))
                # Write after each phase, in case the machine is lost.
                write(report, out)
    except KeyboardInterrupt:
        print(f"interrupted: what is done is in {out / 'report.json'}", file=sys.stderr)
        return 130
    failed = [phase["name"] for phase in report["phases"] if phase["status"] == "failed"]
    print(f"\n{out / 'report.md'}\n{out / 'report.json'}")
    print(f"failed: {', '.join(failed)}" if failed else "no phase failed")
    return 1 if failed else 0


def one(phase, run, runner, chosen):
    """Runs a phase and returns its result."""
    name, start, first = phase.__name__, time.monotonic(), len(runner.commands)
    print(f"\n==> {name}: {phase.__doc__.splitlines()[0]}", flush=True)
    entry = {"name": name, "status": "passed", "why": None}
    try:
        if name not in chosen:
            raise Skipped("not among --only")
        if run.args.node_rank and phase not in (phases.build, phases.hosts):
            raise Skipped("host 0 runs it")
        if not run.is_built and phase is not phases.build and "build" in chosen:
            raise Skipped("the build failed")
        entry["result"] = phase(run)
    except Skipped as why:
        entry.update(status="skipped", why=str(why))
    except Failed as why:
        entry.update(status="failed", why=str(why), result=why.result)
    entry["seconds"] = round(time.monotonic() - start, 1)
    entry["commands"] = runner.commands[first:]
    print(f"    {entry['status']}{': ' + entry['why'] if entry['why'] else ''} ({entry['seconds']} s)", flush=True)
    return entry


def write(report, out):
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(page.of(report), encoding="utf-8")
