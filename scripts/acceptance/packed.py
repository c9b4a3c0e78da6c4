"""Unpacks what scripts/one-gpu-pack packed, and finds the libraries that the programs need beside it."""

import contextlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile

# The archives of a pack.
LIBRARIES = ("nccl", "curand")
PARTS = ("programs", "tests", *LIBRARIES)
# Prints the directories in which PyTorch's wheels put CUDA's libraries.
PROBE = """
import glob, json, os, sys
print(json.dumps([lib for path in sys.path for lib in glob.glob(os.path.join(path, "nvidia", "*", "lib"))]))
"""


def unpack(archives, to):
    """Unpacks the archives of a directory, and returns the parts that it had."""
    found = []
    for part in PARTS:
        archive, target = archives / f"{part}.tar.xz", to / part
        if archive.exists():
            shutil.rmtree(target, ignore_errors=True)
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(target)
            except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as why:
                raise SystemExit(f"one-gpu: {archive}: {why}. Copy it again, or run scripts/one-gpu-pack") from why
            found.append(part)
    return found


def libraries(to, python):
    """Returns the directories that the programs search for libraries: the packed ones, then PyTorch's."""
    own = [str(to / name) for name in LIBRARIES if (to / name).exists()]
    found = []
    if python:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            text = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True).stdout
            found = json.loads(text)
    if not found:
        print(f"one-gpu: {python or 'no Python'} has no wheels of CUDA's libraries; the system's are used", file=sys.stderr)
    return own + found
