"""Measures the memory in use on GPUs by nvidia-smi while a program runs, independently of the program."""

import threading

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
