"""Watches a program while it runs: the memory in use on GPUs by nvidia-smi, and the program's output."""

import threading
import time

from .machine import said


class Watcher:
    """Looks at something again and again during the `with` block."""

    def __init__(self, enabled, period):
        self.enabled, self.period = enabled, period
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        if self.enabled:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.enabled:
            self.thread.join()
            self.last()

    def watch(self):
        while not self.ended.wait(self.period):
            self.look()

    def last(self):
        """Looks once more, if the end matters."""


class DeviceMemory(Watcher):
    """Measures twice a second."""

    def __init__(self, enabled):
        super().__init__(enabled, 0.5)
        self.highest = []

    def look(self):
        text = said(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
        used = [int(line) for line in (text or "").split() if line.isdigit()]
        if len(used) == len(self.highest):
            self.highest = [max(pair) for pair in zip(used, self.highest)]
        elif used:
            self.highest = used

    def most(self):
        """Returns the MiB in use on the fullest GPU, or None."""
        return max(self.highest, default=None)


class Follow(Watcher):
    """Copies what is appended to text files to another file, if there is one, with times."""

    def __init__(self, to, name, paths):
        super().__init__(bool(to), 0.3)
        self.to, self.name, self.paths = to, name, paths
        self.read = {path: 0 for path in paths}

    def look(self):
        self.copy()

    def last(self):
        self.copy(whole=True)

    def copy(self, whole=False):
        """Copies new lines: complete ones, or also the last one."""
        for path in self.paths:
            with open(path, "rb") as file:
                file.seek(self.read[path])
                new = file.read()
            if not whole:
                new = new[: new.rfind(b"\n") + 1]
            self.read[path] += len(new)
            for line in new.decode(errors="replace").splitlines():
                self.to.write(f"{time.strftime('%H:%M:%S')} {self.name}: {line}\n")
        self.to.flush()
