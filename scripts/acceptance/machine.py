"""Describes the machine: GPUs, processor, tools."""

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys

# GPUs: their peak of bf16 operations a second of the tensor cores, in 10^12, without sparsity, by the data sheet; and
# their name in `bench plan`. The first entry that occurs in the GPU's name applies.
GPUS = [
    ("GB200", 2500.0, None),
    ("B200", 2250.0, "b200"),
    ("H100 NVL", 835.0, None),
    ("H100 PCIe", 756.0, None),
    ("GH200", 989.0, None),
    ("H200", 989.0, "h200"),
    ("H100", 989.0, "h100-sxm"),
    ("A100", 312.0, "a100-80"),
    ("L40S", 362.0, None),
    ("L4", 121.0, None),
    ("A40", 149.7, None),
    ("A10G", 70.0, None),
    ("A10", 125.0, None),
    ("RTX 4090", 165.2, None),
    ("RTX 3090", 71.0, None),
]


def gpus():
    """Returns the GPUs that this process may use, as dicts; empty without nvidia-smi."""
    fields = "index,uuid,name,memory.total,compute_cap,driver_version"
    text = said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    found = []
    for line in (text or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6:
            index, uuid, name, memory, capability, driver = cells
            found.append(
                {
                    "index": index,
                    "uuid": uuid,
                    "name": name,
                    "memory_mib": int(memory) if memory.isdigit() else None,
                    "compute_capability": capability,
                    "driver": driver,
                }
            )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [name.strip() for name in visible.split(",") if name.strip()]
        found = [gpu for gpu in found if gpu["index"] in chosen or any(gpu["uuid"].startswith(it) for it in chosen)]
    for gpu in found:
        # The serial number is private.
        del gpu["uuid"]
    return found


def is_double():
    """Returns whether this runs under scripts/gpu-double."""
    return "GPU_DOUBLE_NVCC" in os.environ


def known(name):
    """Returns the peak of a GPU by its name, and its name in `bench plan`, or None for each.

    >>> [known(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA GB200", "NVIDIA T4", None)]
    [(989.0, 'h100-sxm'), (362.0, None), (2500.0, None), (None, None), (None, None)]
    """
    is_one = lambda part: re.search(rf"\b{re.escape(part)}(?![0-9A-Z])", name or "")  # noqa: E731
    return next(((peak, device) for part, peak, device in GPUS if is_one(part)), (None, None))


def describe():
    """Describes the machine for the report, without its host name: reports are shared."""
    return {
        "gpus": gpus(),
        # NVLink or PCIe explains differences between machines.
        "links": said(["nvidia-smi", "topo", "-m"]),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "rustc": said(["rustc", "--version"]),
        "nvcc": nvcc(),
        "commit": said(["git", "rev-parse", "HEAD"]),
        "changed_since": bool(said(["git", "status", "--porcelain", "--untracked-files=no"])),
    }


def report(arguments, device):
    """Returns what the reports of all scripts have."""
    return {
        "format": 1,
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": sys.argv[1:] if arguments is None else arguments,
        "device": device,
        "is_double": is_double(),
        "machine": describe(),
    }


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), None)
    except OSError:
        return None


def nvcc():
    own = os.environ.get("NVCC") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    text = said([shutil.which("nvcc") or own, "--version"]) or ""
    release = re.search(r"release [\d.]+, V([\d.]+)", text)
    return release.group(1) if release else None


def said(command):
    """Returns the output of a command, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
