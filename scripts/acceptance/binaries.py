"""Runs the test binaries of kernels, layers and random graphs on the GPU."""

import functools
import re
import shutil

from .running import Failed, Skipped

HEAD = ["tests", "passed"]
SEEDS = (1, 1001, 2001)


def jobs(run):
    """Yields the name and the function of each row."""
    if not run.args.tests:
        raise Skipped("--tests gives a directory with the test binaries")
    yield "units", functools.partial(one, run, "nn:: and kernels:: beside f64", ["units", "nn::", "kernels::"], {})
    for seed in SEEDS:
        graphs = {"FSDP_RANDOM_SEED": str(seed), "FSDP_RANDOM_GRAPHS": "20"}
        name, words = f"random graphs from seed {seed}", ["candle", "random_graphs"]
        yield f"graphs-{seed}", functools.partial(one, run, name, words, graphs)
    yield "memcheck", functools.partial(memcheck, run)


def memcheck(run):
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        raise Skipped("compute-sanitizer is not on PATH")
    before = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1"]
    return one(run, "kernels:: under compute-sanitizer", ["units", "kernels::"], {}, before)


def one(run, name, words, env, before=()):
    """Runs a test binary, and returns the cells of a row."""
    binary = run.args.tests / words[0]
    if not binary.exists():
        raise Skipped(f"{binary} does not exist")
    # Ranks on devices compare their collectives, so that tests of ranks that differ end.
    env = {"FSDP_TEST_DEVICE": run.args.device, "FSDP_NCCL_CHECK": "always", **env}
    text = run.runner.run(words[0], [*before, binary, *words[1:]], env)
    passed = sum(int(count) for count in re.findall(r"test result: ok\. (\d+) passed", text))
    if not passed:
        raise Failed(f"`{' '.join(words)}` ran no test", [name, 0])
    return [name, passed]
