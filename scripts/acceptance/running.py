"""Runs commands, each with a log file and a time limit, and without orphans."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

from .watch import Follow

# Variable that marks the processes of a command.
MARK = "FSDP_ACCEPTANCE_COMMAND"


class Failed(Exception):
    """The phase failed. It may still have a result."""

    def __init__(self, why, result=None):
        super().__init__(why)
        self.result = result


class Skipped(Exception):
    """The phase can't run on this machine; the text is the reason."""


class TookTooLong(Failed):
    """A command reached its time limit."""


class Runner:
    """Runs the commands of one report."""

    def __init__(self, logs, limit):
        self.logs = logs
        self.limit = limit
        # No command runs past this time (time.monotonic).
        self.deadline = float("inf")
        # Seconds that a command has to end after SIGTERM.
        self.grace = 10
        # A file that gets the output of all commands, with times.
        self.together = None
        # Programs of this directory search these directories for libraries. PyTorch must not.
        self.own, self.libraries = None, []
        self.commands = []

    def run(self, name, command, env=None):
        """Runs a command, and returns its standard output.

        Raises Failed for an exit code other than 0, or TookTooLong after the time limit, with the last lines of the
        output.
        """
        with self.start(name, command, env) as started:
            limit = max(0, min(self.limit, self.deadline - time.monotonic()))
            code = started.wait(limit)
        if code != 0:
            what = f"took longer than {limit:.0f} s" if code is None else f"ended with {code}"
            with open(started.log, encoding="utf-8", errors="replace") as whole:
                tail = whole.read().splitlines()[-25:]
            failure = TookTooLong if code is None else Failed
            raise failure(f"`{started.line}` {what}. The end of {started.log}:\n" + "\n".join(tail))
        return started.text

    @contextlib.contextmanager
    def start(self, name, command, env=None):
        """Starts a command. If it still runs at the end of the `with` block, ends it with all of its processes."""
        log = self.logs / f"{len(self.commands):02d}-{name}.log"
        line = " ".join(f"{key}={value}" for key, value in (env or {}).items())
        line = f"{line} {' '.join(map(str, command))}".strip()
        entry = {"command": line, "log": log.name}
        self.commands.append(entry)
        # The report contains the whole command.
        print(f"    {name}: {line if len(line) < 100 else line[:97] + '...'}", flush=True)
        start = time.monotonic()
        mark = f"{os.getpid()}-{len(self.commands)}"
        env = {**os.environ, **(env or {}), MARK: mark}
        if self.own and any(str(part).startswith(str(self.own)) for part in command):
            paths = [*self.libraries, *filter(None, [env.get("LD_LIBRARY_PATH")])]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        with open(log, "w", encoding="utf-8") as errors, open(f"{log}.out", "w+", encoding="utf-8") as output:
            try:
                # In a new process group, so that a launcher's ranks end with it.
                child = subprocess.Popen(
                    [str(part) for part in command],
                    stdout=output,
                    stderr=errors,
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failed(f"{command[0]}: {error.strerror}") from error
            started = Started(child, mark, line, log)
            try:
                with Follow(self.together, name, [log, f"{log}.out"]):
                    try:
                        yield started
                    finally:
                        if child.poll() is None:
                            end(child, self.grace)
                            started.kill_rest()
            finally:
                entry["seconds"] = round(time.monotonic() - start, 1)
                entry["exit_code"] = started.code
                output.seek(0)
                started.text = output.read()
                os.unlink(f"{log}.out")
                with open(log, "a", encoding="utf-8") as whole:
                    whole.write(started.text)


class Started:
    """A command that runs."""

    def __init__(self, child, mark, line, log):
        self.child, self.mark, self.line, self.log = child, mark, line, log
        # The exit code, unless the command was killed. The standard output, once it has ended.
        self.code, self.text = None, ""

    def wait(self, limit):
        """Returns the exit code, or None if the command still runs after `limit` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self.child.wait(limit)
        return self.code

    def processes(self):
        """Returns the command's processes that still run, as a dict from process id to environment.

        Unlike a session or a process group, no process leaves its environment.
        """
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                # Ended, or of another user.
                with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                    words = file.read().decode(errors="replace").split("\0")
                    environment = dict(word.split("=", 1) for word in words if "=" in word)
                    if environment.get(MARK) == self.mark:
                        found[int(entry)] = environment
        return found

    def kill_rest(self):
        """Kills the command's processes that still run, and returns their number."""
        found = self.processes()
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(found)


def end(child, grace):
    """Ends a command and its child processes, first by SIGTERM, so that a launcher ends its ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(grace)
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
