"""How much of NCCL's work is hidden behind compute, out of what Nsight Systems saw on the device.

The host only issues what a device does: a trace of the host can't tell.
"""

import sqlite3

from .trace import length, meet, union


def overlap(paths):
    """Of one SQLite export of `nsys` a rank: seconds of NCCL's kernels, and the share with other kernels beside them.

    The second half of NCCL's time counts: what comes before it may be warming up. A kernel of NCCL also runs while it
    waits for other ranks. Returns None where none ran.
    """
    total = hidden = 0
    for path in paths:
        moved, busy = of_kernels(read(path))
        total += length(moved)
        hidden += length(meet(moved, busy))
    # They are in nanoseconds.
    return {"communication_s": total / len(paths) / 1e9, "hidden_share": hidden / total} if total else None


def read(path):
    """Name, start and end of each kernel."""
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
    """The times of NCCL's kernels and of the others, each as a union of spans.

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
