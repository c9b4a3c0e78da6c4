"""Faults of a rank during training: the launcher names the rank and ends everything in seconds."""

import functools
import os
import re
import signal
import time

from . import over_nccl, parity
from .running import Failed, TookTooLong

HEAD = ["drill", "ended with", "after", "rank 1 is named", "processes left"]
# FSDP_TIMEOUT_S, and seconds in which everything ends; after the timeout if the fault shows by it.
TIMES = (3, 10)
# With --small, on the double or on CPUs that do other work as well.
SMALL_TIMES = (10, 120)
# Name, signal to rank 1, and whether the fault shows by the timeout only. A program that skips a collective on one rank
# would be a further drill.
DRILLS = [("SIGKILL of rank 1", signal.SIGKILL, False), ("SIGSTOP of rank 1", signal.SIGSTOP, True)]


def jobs(run):
    """Yields the name and the function of each row."""
    for drill in DRILLS:
        yield drill[0], functools.partial(one, run, *drill)


def one(run, name, sign, shows_late):
    """Trains on two ranks, sends a signal to rank 1, and returns the cells of a row."""
    timeout, end = SMALL_TIMES if run.args.small else TIMES
    record = parity.read("llama_tiny", "run")
    metrics, saved = run.scratch / "drill.jsonl", run.scratch / "drill"
    metrics.unlink(missing_ok=True)
    flags = [*parity.as_recorded("llama_tiny", record, 1_000_000), "--batch-size", 2, "--metrics", metrics]
    command = [run.programs / "fsdp-launch", "--nproc-per-node", 2, run.programs / "train", *flags]
    command += ["--checkpoint-dir", saved, "--device", run.args.device]
    env = {**over_nccl.environment(run), "FSDP_TIMEOUT_S": str(timeout)}
    with run.runner.start("drill", command, env) as started:
        wait_for_steps(run, started, metrics, 3)
        ranks = [process for process, variables in started.processes().items() if variables.get("RANK") == "1"]
        if len(ranks) != 1:
            raise Failed(f"{len(ranks)} processes have RANK=1, and one was expected")
        begin = time.monotonic()
        os.kill(ranks[0], sign)
        code = started.wait(timeout * shows_late + end)
        took = time.monotonic() - begin
        # The kernel may still be removing killed processes.
        time.sleep(0.5)
        left = started.kill_rest()
    is_named = names_rank(started.log.read_text(encoding="utf-8", errors="replace"), 1)
    cells = [name, "did not end" if code is None else code, f"{took:.1f} s", "yes" if is_named else "no", left]
    wrong = ["the launcher did not end in time"] if code is None else ["the exit code is 0"] if code == 0 else []
    wrong += [] if is_named else ["no message names rank 1"]
    wrong += [f"{left} processes were left"] if left and code is not None else []
    if wrong:
        raise Failed("; ".join(wrong), cells)
    return cells


def wait_for_steps(run, started, metrics, steps):
    """Waits until the file of metrics has a number of steps."""
    limit = min(run.runner.deadline, time.monotonic() + run.runner.limit)
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < steps:
        if started.wait(0.1) is not None:
            raise Failed(f"training ended with {started.code} before the fault; see {started.log}")
        if time.monotonic() > limit:
            raise TookTooLong(f"training did not reach step {steps} in time; see {started.log}")


def names_rank(text, rank):
    """Returns whether a message names a rank. The launcher's prefix of each line of a rank is not a message.

    >>> names_rank("[rank 1] step 3", 1), names_rank("[rank 0] rank 1 has ended", 1), names_rank("rank 12 ended", 1)
    (False, True, False)
    """
    return any(re.search(rf"\branks? {rank}\b", re.sub(r"^\[rank \d+\] ", "", line)) for line in text.splitlines())
