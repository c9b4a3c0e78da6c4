"""Formats the report as a page."""

from collections import Counter


def of(report):
    parts = ["# GPU acceptance", ""]
    failed = [phase["name"] for phase in report["phases"] if phase["status"] == "failed"]
    parts += [f"**{'Failed: ' + ', '.join(failed) if failed else 'No phase failed.'}**", ""]
    ranks = f"{report.get('ranks')} on `--device {report['device']}`"
    parts += about(report, [["ranks", ranks]])
    parts += ["", "## Phases", ""]
    rows = [[it["name"], it["status"], f"{it['seconds']} s", short(it["why"])] for it in report["phases"]]
    parts += table(["phase", "", "took", "why"], rows)
    results = {phase["name"]: phase.get("result") for phase in report["phases"]}
    for show in (hosts, parity, memory, speed, overlap):
        name = show.__name__
        if results.get(name):
            parts += ["", *show(results[name], results)]
    for phase in report["phases"]:
        if phase["status"] == "failed":
            parts += ["", f"## Why {phase['name']} failed", "", "```", phase["why"], "```"]
    if report["machine"]["links"]:
        parts += ["", "## Links", "", "```", report["machine"]["links"], "```"]
    return "\n".join(parts) + "\n"


def of_one_gpu(report):
    """Formats the report of scripts/one-gpu."""
    parts, steps = ["# One GPU", ""], report["steps"]
    bad = [f"{step['name']} ({step['status']})" for step in steps if step["status"] not in ("passed", "skipped")]
    parts += [f"**{'Not passed: ' + ', '.join(bad) if bad else 'No step failed.'}**", ""]
    took = f"{report['seconds']} of {report['budget_s']} s"
    parts += about(report, [["NCCL", report["nccl"] or "no version in a log"], ["took", took]])
    parts += ["", "## Steps", ""]
    rows = [[it["name"], it["status"], f"{it['seconds']} of {it['limit_s']} s", short(it["why"])] for it in steps]
    parts += table(["step", "", "took", "why"], rows)
    for step in steps:
        if not step["rows"]:
            continue
        width, rows = len(step["head"]), []
        for it in step["rows"]:
            state = it["status"] if it["status"] in ("passed", "not reached") else f"**{it['status']}**"
            state += f": {short(it['why'])}" if it["status"] == "skipped" else ""
            rows += [[*cells, *[""] * (width - len(cells)), state, it["seconds"]] for cells in it["cells"]]
        parts += ["", f"## {step['name']}", "", f"{step['title'][0].upper()}{step['title'][1:]}.", ""]
        parts += table([*step["head"], "", "s"], rows)
        for it in step["rows"]:
            if it["status"] in ("failed", "cut off"):
                parts += ["", f"Why {it['name']} {'failed' if it['status'] == 'failed' else 'was cut off'}:"]
                parts += ["", "```", it["why"], "```"]
    return "\n".join(parts) + "\n"


def about(report, more):
    """Returns a note and a table about the machine and the commit, with more rows before them."""
    machine, parts = report["machine"], []
    if report["is_double"]:
        parts += ["On the device double: no GPU was used, and the times are meaningless.", ""]
    elif report["device"] == "cpu":
        parts += ["On CPUs: no GPU was used.", ""]
    gpus = Counter(f"{gpu['name']} ({gpu['memory_mib']} MiB, driver {gpu['driver']})" for gpu in machine["gpus"])
    gpus = [f"{count} x {name}" for name, count in gpus.items()]
    dirty = ", with uncommitted changes" if machine["changed_since"] else ""
    rows = [
        *more,
        ["GPUs", "<br>".join(gpus) or "none found by nvidia-smi"],
        ["host", f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"],
        ["tools", f"{machine['rustc']}; nvcc {machine['nvcc'] or 'missing'}"],
        ["commit", f"{machine['commit']}{dirty}"],
        ["began", report["began"]],
        ["arguments", " ".join(report["arguments"]) or "none"],
    ]
    return [*parts, *table(["", ""], rows)]


def short(why):
    return why.splitlines()[0] if why else ""


def hosts(result, _):
    if "why" in result:
        return ["## Hosts", "", f"{result['why'].capitalize()}."]
    row, rate = result["parity"], result["tokens_per_s_per_rank"]
    off = f"{row['way']} differ from PyTorch's recorded run by {row['loss']:.1e} (loss)"
    off += f" and {row['grad_norm']:.1e} (norm)."
    return ["## Hosts", "", off, "", f"A step on {result['ranks']} ranks: {rate:,.0f} tokens a second and rank."]


def parity(result, _):
    rows = []
    for it in result["rows"]:
        holds = "" if it["holds"] else "**too much**"
        rows.append([it["model"], it["way"], f"{it['loss']:.1e}", f"{it['grad_norm']:.1e}", holds])
    head = ["model", "way", "off in a loss", "off in a norm", ""]
    note = f"The largest relative difference to what PyTorch FSDP2 recorded on CPUs, over {result['steps']} steps."
    same = "the same to the last bit" if result["checkpoint_is_the_same_on_the_cpu"] else "**not the same**"
    return ["## Parity", "", note, "", *table(head, rows), "", f"A checkpoint, loaded on the CPU, is {same}."]


def memory(result, _):
    mib = lambda count: f"{count / 2**20:.2f}"  # noqa: E731
    rows = []
    for it in result["rows"]:
        holds = "" if it["holds"] else "**too much**"
        rows.append([it["mode"], it["after"], mib(it["bytes"]), mib(it["formula"]), f"{it['off']:+.2%}", holds])
    head = ["mode", "after", "MiB", "formula", "off", ""]
    note = "What a rank has in use after each phase of a step. The last row of a mode is the most that a step adds."
    return ["## Memory", "", note, "", *table(head, rows)]


def speed(result, results):
    theirs, rows = results.get("pytorch") or {"runs": []}, []
    for row in sorted(result["rows"], key=lambda row: row["ranks"]):
        if "why" in row:
            rows.append([row["ranks"], "candle-fsdp", row["why"], *[""] * 5])
            continue
        # The same operations a token.
        per_token = row.get("share_of_peak", 0) / row["tokens_per_s_per_rank"]
        rows.append([row["ranks"], "candle-fsdp", *cells(row, per_token)])
        if row["ranks"] < max(it["ranks"] for it in result["rows"]):
            continue
        for run in theirs["runs"]:
            name = f"PyTorch {theirs['torch']} FSDP2, {run['name']}"
            rows.append([row["ranks"], name, *([run["why"], *[""] * 5] if "why" in run else cells(run, per_token))])
    for name, (rate, gib) in result["published"].items():
        name = f"{name} (published: H100 with 96 GB, selective checkpointing)"
        rows.append([8, name, f"{rate:,}", "", f"{gib:.2f}", "", "", ""])
    head = ["ranks", "", "tokens a second and rank", "s a step", "GiB in use", "GiB planned", "MiB on the device"]
    head += ["share of peak"]
    what = f"{result['model']}: {result['parameters']:,} parameters, {result['dtype']}, "
    what += f"{result['batch']} sequences of {result['seq']} tokens a rank{result['checkpointing']}."
    peak = f" The peak is {result['peak_tflops']} TFLOP/s." if result["peak_tflops"] else f" {result['why_no_share']}."
    return ["## Speed", "", what + peak, "", *table(head, rows)]


def cells(row, per_token):
    """Returns a row without its ranks and name. `per_token` is the share of the peak of one token a second, or 0."""
    rate, used = row["tokens_per_s_per_rank"], row["device_mib"]
    peak, planned = row.get("peak_gib"), row.get("planned_gib")
    off = f" ({planned / peak - 1:+.1%})" if planned and peak else ""
    memory = ["" if peak is None else f"{peak:.2f}", f"{planned:.2f}{off}" if planned else ""]
    share = f"{rate * per_token:.1%}" if per_token else ""
    return [f"{rate:,.0f}", f"{row['step_s']:.4f}", *memory, "" if used is None else used, share]


def overlap(result, _):
    each = result.get("communication_s_per_step")
    each = f"{each:.4f} s of communication a step" if each else f"{result['communication_s']:.3f} s of NCCL's kernels"
    return ["## Overlap", "", f"{each} and rank, {result['hidden_share']:.0%} of it hidden behind compute."]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
