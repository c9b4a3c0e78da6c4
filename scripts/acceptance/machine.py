"""Describes the machine: GPUs, processor, tools."""

import os
import platform
import re
import shutil
import subprocess

# Peak bf16 operations a second of a GPU's tensor cores, in 10^12, without sparsity, by its data sheet. The first name
# that occurs in the GPU's name applies.
PEAKS = [
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
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


def peak_tflops(name):
    """Returns the peak of a GPU by its name, or None."""
    return next((peak for part, peak in PEAKS if re.search(rf"\b{re.escape(part)}(?![0-9A-Z])", name)), None)


def plan_device(name):
    """Returns the name of a GPU in `bench plan`, or None."""
    known = {"H100": "h100-sxm", "H200": "h200", "B200": "b200", "A100": "a100-80"}
    return next((device for part, device in known.items() if re.search(rf"\b{part}(?![0-9A-Z])", name)), None)


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
