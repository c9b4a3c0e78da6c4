"""Computes the share of NCCL's work that is hidden behind compute, from Nsight Systems' traces of devices.

A trace of the host is not enough, because the host only issues the work.
"""

import sqlite3

from .trace import length, meet, union


def overlap(paths):
    """Returns seconds of NCCL's kernels, and the share that overlaps other kernels, from one `nsys` SQLite file a rank.

    Only the second half of NCCL's time counts, without the warm-up. NCCL's kernels also run while they wait for other
    ranks. Returns None without NCCL kernels.
    """
    total = hidden = 0
    for path in paths:
        moved, busy = of_kernels(read(path))
        total += length(moved)
        hidden += length(meet(moved, busy))
    # Times are in nanoseconds.
    return {"communication_s": total / len(paths) / 1e9, "hidden_share": hidden / total} if total else None


def read(path):
    """Returns name, start and end of each kernel."""
    query = """
        SELECT StringIds.value, kernel.start, kernel.end
        FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel JOIN StringIds ON StringIds.id = kernel.shortName
    """
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def of_kernels(kernels):
    """Returns the times of NCCL's kernels and of other kernels, each as a union of spans.

    >>> kernels = [("ncclDevKernel_AllGather", 0, 10), ("ncclDevKernel_AllGather", 90, 100), ("gemm", 85, 98)]
    >>> of_kernels(kernels)
    ([(90, 100)], [(85, 98)])
    """
    spans = {True: [], False: []}
    for name, start, end in kernels:
        spans[name.startswith("nccl")].append((start, end))
    moved, busy = union(spans[True]), union(spans[False])
    if not moved:
        return [], busy
    middle = (moved[0][0] + moved[-1][1]) / 2
    return meet(moved, [(middle, moved[-1][1])]), busy
