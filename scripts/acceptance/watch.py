"""Watches a program while it runs: the memory in use on GPUs by nvidia-smi, and the program's output."""

import threading
import time

from .machine import said


class DeviceMemory:
    """Measures twice a second during the `with` block."""

    def __init__(self, enabled):
        self.enabled = enabled
        self.highest = []
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

    def watch(self):
        while not self.ended.wait(0.5):
            text = said(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
            used = [int(line) for line in (text or "").split() if line.isdigit()]
            if len(used) == len(self.highest):
                self.highest = [max(pair) for pair in zip(used, self.highest)]
            elif used:
                self.highest = used

    def most(self):
        """Returns the MiB in use on the fullest GPU, or None."""
        return max(self.highest, default=None)


class Follow:
    """Copies what is appended to text files to another file during the `with` block, with times."""

    def __init__(self, to, name, paths):
        self.to, self.name, self.paths = to, name, paths
        self.read = {path: 0 for path in paths}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        if self.to:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.to:
            self.thread.join()
            self.copy(whole=True)

    def watch(self):
        while not self.ended.wait(0.3):
            self.copy()

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
