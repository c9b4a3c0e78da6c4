"""Computes the share of communication hidden behind compute, from a trace of `train --trace`."""

import json


def overlap(path):
    """Returns seconds of communication per step and rank, and the share during which the rank computed.

    A rank computes in forward, backward and the optimizer while it does not wait for communication. The first step is
    the warm-up and does not count. Returns None without communication.

    A step of 10 microseconds that computes for 6 and waits for 1 of these; 4 are communicated, 3 of them meanwhile:

    >>> def span(line, name, start, end):
    ...     place = {"pid": 0, "tid": line, "name": name}
    ...     return [{**place, "ph": "B", "ts": start}, {**place, "ph": "E", "ts": end}]
    >>> names = {1: "compute", 2: "communication (world)"}
    >>> line = {"ph": "M", "pid": 0, "name": "thread_name"}
    >>> events = [{**line, "tid": tid, "args": {"name": name}} for tid, name in names.items()]
    >>> events += span(1, "step 1", 0, 10) + span(2, "all_gather", 0, 10)
    >>> events += span(2, "all_gather", 12, 16)
    >>> step = span(1, "step 2", 10, 20)
    >>> forward, wait = span(1, "forward a", 11, 17), span(1, "wait for all-gather a", 13, 14)
    >>> events += [step[0], forward[0], *wait, forward[1], step[1]]
    >>> found = of_events(events)
    >>> round(found["communication_s_per_step"] * 1e6, 9), found["hidden_share"]
    (4.0, 0.75)
    >>> of_events(events[:4]) is None
    True
    """
    with open(path, encoding="utf-8") as file:
        return of_events(json.load(file))


def of_events(events):
    lines, spans, begun = {}, {}, {}
    for event in events:
        where = (event.get("pid"), event.get("tid"))
        if event["ph"] == "M" and event["name"] == "thread_name":
            lines[where] = event["args"]["name"]
        elif event["ph"] == "B":
            begun.setdefault(where, []).append((event["name"], event["ts"]))
        elif event["ph"] == "E" and begun.get(where):
            name, start = begun[where].pop()
            spans.setdefault(where, []).append((name, start, event["ts"]))
        elif event["ph"] == "X":
            spans.setdefault(where, []).append((event["name"], event["ts"], event["ts"] + event["dur"]))
    total = hidden = steps = 0
    for rank in sorted({pid for pid, _ in spans}):
        compute = of_lines(lines, spans, rank, "compute")
        communication = of_lines(lines, spans, rank, "communication")
        timed = [(start, end) for name, start, end in compute if name.startswith("step ") and name != "step 1"]
        waits = [(start, end) for name, start, end in compute if name.startswith("wait for ")]
        works = [(start, end) for name, start, end in compute if name.startswith(("forward", "backward", "optimizer"))]
        moved = meet(union([(start, end) for _, start, end in communication]), union(timed))
        busy = without(union(works), union(waits))
        total += length(moved)
        hidden += length(meet(moved, busy))
        steps += len(timed)
    if not total:
        return None
    # Times are in microseconds.
    return {"communication_s_per_step": total / steps / 1e6, "hidden_share": hidden / total}


def of_lines(lines, spans, rank, kind):
    chosen = [where for where in spans if where[0] == rank and lines.get(where, "").startswith(kind)]
    return [span for where in chosen for span in spans[where]]


def union(spans):
    """Returns the union as sorted, disjoint spans."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def meet(these, those):
    """Returns the intersection of two unions."""
    found, i, j = [], 0, 0
    while i < len(these) and j < len(those):
        start, end = max(these[i][0], those[j][0]), min(these[i][1], those[j][1])
        if start < end:
            found.append((start, end))
        if these[i][1] < those[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(these, those):
    """Returns the difference of two unions."""
    gaps, at = [], float("-inf")
    for start, end in those:
        gaps.append((at, start))
        at = end
    gaps.append((at, float("inf")))
    return meet(these, gaps)


def length(spans):
    return sum(end - start for start, end in spans)
