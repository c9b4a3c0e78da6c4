"""Runs test binaries on the GPU: kernels, layers, random graphs, collectives and their faults."""

import functools
import os
import re
import shutil

from . import over_nccl
from .running import Failed, Skipped

HEAD = ["tests", "passed"]
SEEDS = (1, 1001, 2001)
# Random layers, and how often each is computed again.
LAYERS, REPEATS = 150, 20
# Faults, and the tests of fsdp-core for them that run with all ranks on one device and without the device double.
FAULTS = {
    "a rank skips a collective": "a_rank_that_is_elsewhere",
    "a rank issues another collective": "ranks_that_issue_different",
    "a rank dies": "a_rank_that_dies",
    "a rank leaves": "a_rank_that_leaves",
    "a rank passes a bad argument": "all_hear_of_a_mistake",
    "a collective is captured": "a_captured_collective",
    "a device is busy forever": "a_device_that_does_not_come",
    "a rank skips collectives of two groups": "work_of_another_group",
}


def kernels(run):
    """Yields the name and the function of each row."""
    tests = functools.partial(one, run)
    random = {"FSDP_RANDOM_LAYERS": LAYERS, "FSDP_RANDOM_REPEATS": REPEATS}
    if run.args.small:
        random = {"FSDP_RANDOM_LAYERS": 10, "FSDP_RANDOM_REPEATS": 2}
    name = f"{random['FSDP_RANDOM_LAYERS']} random layers beside f64, each with the same bits "
    name += f"{random['FSDP_RANDOM_REPEATS']} times"
    yield "layers", functools.partial(tests, name, ["units", "random_layers"], random)
    yield "units", functools.partial(tests, "nn:: and kernels:: beside f64", ["units", "nn::", "kernels::"])
    for seed in SEEDS[:1] if run.args.small else SEEDS:
        graphs = {"FSDP_RANDOM_SEED": seed, "FSDP_RANDOM_GRAPHS": 5 if run.args.small else 20}
        name = f"random graphs from seed {seed}"
        yield f"graphs-{seed}", functools.partial(tests, name, ["candle", "random_graphs"], graphs)
    yield "memcheck", functools.partial(memcheck, run)


def memcheck(run):
    # CUDA's default directory often is not on PATH.
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=places)
    if not sanitizer:
        raise Skipped("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    before = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1"]
    # Attention and the most kernels that read at an offset, on small shapes.
    few = {"FSDP_RANDOM_LAYERS": 12}
    return one(run, "12 random layers under compute-sanitizer", ["units", "random_layers"], few, before)


def faults(run):
    """Yields the name and the function of each row."""
    for name, test in FAULTS.items():
        yield name, functools.partial(over, run, name, f"nccl::{test}")


def collectives(run):
    """Yields the name and the function of the row."""
    yield "conformance", functools.partial(over, run, "the suite of every backend", "conformance::nccl")


def over(run, name, test):
    """Runs tests of collectives over NCCL with all ranks on one device."""
    if run.args.device != "cuda":
        raise Skipped("ranks on CPUs have no NCCL")
    env = {**over_nccl.environment(run), "FSDP_TEST_ONE_DEVICE": 1}
    # The tests have limits of their own.
    del env["FSDP_TIMEOUT_S"]
    return one(run, name, ["cuda", test], env)


def one(run, name, words, env=None, before=()):
    """Runs a test binary, and returns the cells of a row."""
    if not run.args.tests:
        raise Skipped("--pack or --tests gives the test binaries")
    binary = run.args.tests / words[0]
    if not binary.exists():
        raise Skipped(f"{binary} does not exist")
    env = {"FSDP_TEST_DEVICE": run.args.device, **(env or {})}
    if words[0] == "candle":
        # Ranks on devices compare their collectives, so that tests of ranks that differ end.
        env["FSDP_NCCL_CHECK"] = "always"
    env = {key: str(value) for key, value in env.items()}
    text = run.runner.run(words[0], [*before, binary, *words[1:]], env)
    passed = sum(int(count) for count in re.findall(r"test result: ok\. (\d+) passed", text))
    if not passed:
        raise Failed(f"`{' '.join(words)}` ran no test", [name, 0])
    return [name, passed]
