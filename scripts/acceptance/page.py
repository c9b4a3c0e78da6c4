"""Formats the report as a page."""

from collections import Counter


def of(report):
    machine, parts = report["machine"], ["# GPU acceptance", ""]
    failed = [phase["name"] for phase in report["phases"] if phase["status"] == "failed"]
    parts += [f"**{'Failed: ' + ', '.join(failed) if failed else 'No phase failed.'}**", ""]
    if report["is_double"]:
        parts += ["On the device double: no GPU was used, and the times are meaningless.", ""]
    elif report["device"] == "cpu":
        parts += ["On CPUs: no GPU was used.", ""]
    gpus = Counter(f"{gpu['name']} ({gpu['memory_mib']} MiB, driver {gpu['driver']})" for gpu in machine["gpus"])
    gpus = [f"{count} x {name}" for name, count in gpus.items()]
    dirty = ", with uncommitted changes" if machine["changed_since"] else ""
    parts += table(
        ["", ""],
        [
            ["ranks", f"{report.get('ranks')} on `--device {report['device']}`"],
            ["GPUs", "<br>".join(gpus) or "none found by nvidia-smi"],
            ["host", f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"],
            ["tools", f"{machine['rustc']}; nvcc {machine['nvcc'] or 'missing'}"],
            ["commit", f"{machine['commit']}{dirty}"],
            ["began", report["began"]],
            ["arguments", " ".join(report["arguments"]) or "none"],
        ],
    )
    parts += ["", "## Phases", ""]
    short = lambda why: (why or "").splitlines()[0] if why else ""  # noqa: E731
    rows = [[it["name"], it["status"], f"{it['seconds']} s", short(it["why"])] for it in report["phases"]]
    parts += table(["phase", "", "took", "why"], rows)
    results = {phase["name"]: phase.get("result") for phase in report["phases"]}
    for name, show in (("parity", parity), ("memory", memory), ("speed", speed), ("overlap", overlap)):
        if results.get(name):
            parts += ["", *show(results[name], results)]
    for phase in report["phases"]:
        if phase["status"] == "failed":
            parts += ["", f"## Why {phase['name']} failed", "", "```", phase["why"], "```"]
    if machine["links"]:
        parts += ["", "## Links", "", "```", machine["links"], "```"]
    return "\n".join(parts) + "\n"


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
    theirs, rows = results.get("pytorch"), []
    for row in sorted(result["rows"], key=lambda row: row["ranks"]):
        if "why" in row:
            rows.append([row["ranks"], "candle-fsdp", row["why"], "", "", ""])
            continue
        share = f"{row['share_of_peak']:.1%}" if "share_of_peak" in row else ""
        rows.append([row["ranks"], "candle-fsdp", *cells(row), share])
        if theirs and row["ranks"] == max(it["ranks"] for it in result["rows"]):
            share = ""
            if "share_of_peak" in row:
                ratio = theirs["tokens_per_s_per_rank"] / row["tokens_per_s_per_rank"]
                share = f"{row['share_of_peak'] * ratio:.1%}"
            theirs_row = {**theirs, "step_s": theirs["program"]["step_s"]}
            rows.append([row["ranks"], f"PyTorch {theirs['torch']} FSDP2", *cells(theirs_row), share])
    head = ["ranks", "", "tokens a second and rank", "s a step", "MiB on the device", "share of peak"]
    what = f"{result['model']}: {result['parameters']:,} parameters, {result['dtype']}, "
    what += f"{result['batch']} sequences of {result['seq']} tokens a rank."
    peak = f" The peak is {result['peak_tflops']} TFLOP/s." if result["peak_tflops"] else f" {result['why_no_share']}."
    return ["## Speed", "", what + peak, "", *table(head, rows)]


def cells(row):
    used = row["device_mib"]
    return [f"{row['tokens_per_s_per_rank']:,.0f}", f"{row['step_s']:.4f}", "" if used is None else used]


def overlap(result, _):
    each = result.get("communication_s_per_step")
    each = f"{each:.4f} s of communication a step" if each else f"{result['communication_s']:.3f} s of NCCL's kernels"
    return ["## Overlap", "", f"{each} and rank, {result['hidden_share']:.0%} of it hidden behind compute."]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
