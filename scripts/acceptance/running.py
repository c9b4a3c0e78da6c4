"""Runs commands, each with a log file and a time limit, and without orphans."""

import json
import os
import re
import signal
import subprocess
import time


class Failed(Exception):
    """The phase failed. It may still have a result."""

    def __init__(self, why, result=None):
        super().__init__(why)
        self.result = result


class Skipped(Exception):
    """The phase can't run on this machine; the text is the reason."""


class Runner:
    """Runs the commands of one report."""

    def __init__(self, logs, limit):
        self.logs = logs
        self.limit = limit
        self.commands = []

    def run(self, name, command, env=None):
        """Runs a command, and returns its standard output.

        Raises Failed for an exit code other than 0, or after the time limit, with the last lines of the output.
        """
        log = self.logs / f"{len(self.commands):02d}-{name}.log"
        line = " ".join(f"{key}={value}" for key, value in (env or {}).items())
        line = f"{line} {' '.join(map(str, command))}".strip()
        entry = {"command": line, "log": log.name}
        self.commands.append(entry)
        # The report contains the whole command.
        print(f"    {name}: {line if len(line) < 100 else line[:97] + '...'}", flush=True)
        start = time.monotonic()
        with open(log, "w", encoding="utf-8") as errors, open(f"{log}.out", "w+", encoding="utf-8") as output:
            try:
                # In a new process group, so that a launcher's ranks end with it.
                child = subprocess.Popen(
                    [str(part) for part in command],
                    stdout=output,
                    stderr=errors,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise Failed(f"{command[0]}: {error.strerror}") from error
            try:
                code = child.wait(self.limit)
            except subprocess.TimeoutExpired:
                end(child)
                code = None
            except BaseException:
                end(child)
                raise
            entry["seconds"] = round(time.monotonic() - start, 1)
            entry["exit_code"] = code
            output.seek(0)
            text = output.read()
        os.unlink(f"{log}.out")
        with open(log, "a", encoding="utf-8") as whole:
            whole.write(text)
        if code != 0:
            what = f"took longer than {self.limit} s" if code is None else f"ended with {code}"
            with open(log, encoding="utf-8", errors="replace") as whole:
                tail = whole.read().splitlines()[-25:]
            raise Failed(f"`{line}` {what}. The end of {log}:\n" + "\n".join(tail))
        return text


def end(child):
    """Ends a command and its child processes, first by SIGTERM, so that a launcher ends its ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def json_lines(text):
    """Returns the JSON objects among a program's output lines, which may have a launcher's prefix."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"^\[rank \d+\] ", "", line)
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found
