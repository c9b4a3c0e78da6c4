"""The command line of scripts/one-gpu, and the order and the limits of its steps."""

import argparse
import collections
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

from . import binaries, costs, drills, machine, over_nccl, packed, page, phases
from .main import positive
from .running import Failed, Runner, Skipped, TookTooLong

Step = collections.namedtuple("Step", "name title limit head jobs")
# In the order of their worth. Limits are in seconds.
STEPS = [
    Step("nccl", "PyTorch's recorded runs over NCCL on a shared GPU", 170, over_nccl.HEAD, over_nccl.jobs),
    Step("drills", "a killed and a stopped rank", 40, drills.HEAD, drills.jobs),
    Step("faults", "a skipped collective, and others that differ", 70, binaries.HEAD, binaries.faults),
    Step("speed", "a training step beside PyTorch's", 140, costs.HEAD, costs.steps),
    Step("rates", "kernels, with their bandwidth and arithmetic", 30, costs.RATES_HEAD, costs.rates),
    Step("attention", "PyTorch's attention", 20, costs.ATTENTION_HEAD, costs.attention),
    Step("kernels", "layers and kernels beside f64, and random graphs", 50, binaries.HEAD, binaries.kernels),
    Step("collectives", "every collective over NCCL, on 1 to 4 ranks", 20, binaries.HEAD, binaries.collectives),
]
# Seconds that one command may take: longer than FSDP_TIMEOUT_S, whose error says what is wrong.
COMMAND_S = 75
# How many times longer steps may take with --small, on the double or on CPUs that do other work as well.
SLOWER = 4
# Seconds that a command has to end after SIGTERM.
GRACE_S = 2

DESCRIPTION = """\
Shows on a machine with one GPU, in at most nine minutes, that real NCCL works and what everything costs:

"""
EPILOG = """\
Examples:

  With what scripts/one-gpu-pack made on another machine:
      scripts/one-gpu --pack DIR
  With programs built here with the features cuda and nccl:
      scripts/one-gpu --programs target/release
  Without a GPU, on the device double:
      GPU_DOUBLE_DEVICES=1 scripts/gpu-double scripts/one-gpu --small
  To test the script itself, on CPUs:
      scripts/one-gpu --small --device cpu

Needs Python 3.9 or newer and the programs; it builds nothing. --out gets what is unpacked from --pack.
FSDP_DEVICE_BACKEND is nccl-shared unless it is set. A step that reaches its limit is ended and reported as cut off. The
report in --out is complete after each row: page.md, report.json, and log.txt with all output. The exit code is 0 if no
step failed, was cut off or was not reached. A step that can't run is skipped, with a reason.
"""


def parse(arguments):
    lines = [f"  {step.name:<13}{step.title} (at most {step.limit} s)\n" for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="scripts/one-gpu",
        description=DESCRIPTION + "".join(lines),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pack", metavar="DIR", help="directory of the archives by scripts/one-gpu-pack")
    parser.add_argument("--programs", metavar="DIR", help="directory of the programs [default: target/release]")
    parser.add_argument("--tests", metavar="DIR", help="directory of the test binaries `units`, `candle` and `cuda`")
    parser.add_argument("--budget", type=positive, default=540, metavar="S", help="seconds for all steps [540]")
    parser.add_argument("--small", action="store_true", help="small models, few steps: no meaningful speed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="[default: cuda]")
    parser.add_argument("--python", metavar="PATH", help="Python with torch [default: target/interop, python3]")
    parser.add_argument("--only", metavar="STEPS", help="run only these steps: nccl,drills")
    parser.add_argument("--out", metavar="DIR", help="directory of the report [default: target/one-gpu]")
    # The functions of gpu-acceptance read these.
    parser.set_defaults(gpus=1, nnodes=1, node_rank=0, model=None, batch=None, seq=None, peak_tflops=None)
    args = parser.parse_args(arguments)
    args.steps = 3 if args.small else 6
    names = [step.name for step in STEPS]
    args.only = args.only.split(",") if args.only else names
    if args.pack and (args.programs or args.tests):
        parser.error("--pack has programs and tests: leave out --programs and --tests")
    for name in args.only:
        if name not in names:
            parser.error(f"--only: unknown step {name!r}; the steps are {', '.join(names)}")
    return args


def main(arguments=None):
    begin = time.monotonic()
    args = parse(arguments)
    # Resolve paths before changing the directory.
    args.programs = args.programs or os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release")
    for name in ("pack", "programs", "tests", "out"):
        if getattr(args, name):
            setattr(args, name, pathlib.Path(getattr(args, name)).resolve())
    # A virtual environment's Python is a link.
    args.python = args.python and os.path.abspath(args.python)
    os.chdir(pathlib.Path(__file__).resolve().parents[2])
    out = args.out or pathlib.Path("target/one-gpu").resolve()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    runner = Runner(logs, COMMAND_S * (SLOWER if args.small else 1))
    runner.grace = GRACE_S
    if args.pack:
        runner.own = out / "pack"
        parts = packed.unpack(args.pack, runner.own)
        if "programs" not in parts:
            print(f"one-gpu: {args.pack} has no programs.tar.xz. scripts/one-gpu-pack makes it", file=sys.stderr)
            return 2
        args.programs = runner.own / "programs"
        args.tests = runner.own / "tests" if "tests" in parts else None
        runner.libraries = packed.libraries(runner.own, phases.chosen_python(args))
    report = {
        **machine.report(arguments, args.device),
        "nccl": None,
        "budget_s": args.budget,
        "steps": [entry(step, args.only) for step in STEPS],
    }
    # `timeout` and job systems send it. The report says so, and no process is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as scratch, open(out / "log.txt", "w", encoding="utf-8") as log:
        runner.together = log
        run = phases.Run(args, report["machine"], runner, pathlib.Path(scratch))
        run.programs, run.peak = args.programs, costs.peak(run)
        # The steps set these: the version of NCCL, and a Python with PyTorch.
        run.nccl, run.torch = None, None

        def write():
            report["nccl"], report["seconds"] = run.nccl, round(time.monotonic() - begin, 1)
            replace(out / "report.json", json.dumps(report, indent=2) + "\n")
            replace(out / "page.md", page.of_one_gpu(report))

        print(f"one GPU: {run.what()}; {args.budget} s", flush=True)
        write()
        try:
            for step, found in zip(STEPS, report["steps"]):
                if found["status"] == "not reached":
                    do(step, found, run, begin + args.budget, write)
        except KeyboardInterrupt:
            write()
            print(f"interrupted: what is done is in {out / 'page.md'}", file=sys.stderr)
            return 130
    bad = [f"{it['name']} ({it['status']})" for it in report["steps"] if it["status"] not in ("passed", "skipped")]
    print(f"\n{out / 'page.md'}\n{out / 'report.json'}\n{out / 'log.txt'}")
    print(f"not passed: {', '.join(bad)}" if bad else "no step failed")
    return 1 if bad else 0


def entry(step, chosen):
    """Returns the report of a step that has not begun."""
    found = {"name": step.name, "title": step.title, "head": step.head, "status": "not reached", "why": None}
    found.update(limit_s=step.limit, seconds=0, rows=[])
    return found if step.name in chosen else {**found, "status": "skipped", "why": "not among --only"}


def do(step, found, run, end, write):
    """Runs a step until its limit, or until the end of the budget, and reports each row."""
    begin = time.monotonic()
    deadline = min(begin + step.limit * (SLOWER if run.args.small else 1), end)
    if begin >= end:
        return
    print(f"\n==> {step.name}: {step.title} (at most {deadline - begin:.0f} s)", flush=True)
    run.runner.deadline, found["limit_s"] = deadline, round(deadline - begin)
    # The page says this if the machine is lost during the step.
    found["status"] = "interrupted"
    try:
        for name, job in step.jobs(run):
            if time.monotonic() >= deadline:
                found["rows"].append(of(name, "not reached"))
                continue
            found["rows"].append(row(name, job))
            found["seconds"] = round(time.monotonic() - begin, 1)
            write()
    except Skipped as why:
        found["rows"].append(of("the rest", "skipped", str(why)))
    except Failed as why:
        found["rows"].append(of("the rest", "failed", str(why)))
    late = time.monotonic() >= deadline
    named = lambda *states: [it["name"] for it in found["rows"] if it["status"] in states]  # noqa: E731
    found["seconds"] = round(time.monotonic() - begin, 1)
    if late and named("cut off", "not reached", "skipped"):
        found.update(status="cut off", why=f"it reached its limit of {deadline - begin:.0f} s")
    elif named("failed", "cut off"):
        found.update(status="failed", why="; ".join(named("failed", "cut off")))
    else:
        skipped = [it["why"] for it in found["rows"] if it["status"] == "skipped"]
        found.update(status="passed" if named("passed") else "skipped", why="; ".join(dict.fromkeys(skipped)) or None)
    print(f"    {found['status']}{': ' + found['why'] if found['why'] else ''} ({found['seconds']} s)", flush=True)
    write()


def of(name, status, why=None):
    """Returns a row without figures. The cells may be of several lines of the table."""
    return {"name": name, "cells": [[name]], "status": status, "why": why, "seconds": 0}


def row(name, job):
    """Runs a job, and returns its row."""
    begin, found = time.monotonic(), of(name, "passed")
    try:
        found["cells"] = lines(job())
    except Skipped as why:
        found.update(status="skipped", why=str(why))
    except TookTooLong as why:
        found.update(status="cut off", why=str(why))
    except Failed as why:
        found.update(status="failed", why=str(why), cells=lines(why.result or [name]))
    found["seconds"] = round(time.monotonic() - begin, 1)
    short = f": {found['why'].splitlines()[0]}" if found["why"] else ""
    print(f"    {name}: {found['status']}{short} ({found['seconds']} s)", flush=True)
    return found


def lines(cells):
    return cells if cells and isinstance(cells[0], list) else [cells]


def replace(path, text):
    """Writes a file so that a reader, or a lost machine, has the old or the new one."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
