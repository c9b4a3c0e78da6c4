"""Makes a small file of conversations from Python's documentation (PSF licence), which is part of Python:
python conversations.py DIRECTORY

Writes DIRECTORY/train.jsonl and DIRECTORY/eval.jsonl: questions about functions of the standard library. The same
version of Python makes the same files."""

import importlib
import inspect
import json
import pathlib
import sys
import warnings
import zlib

MODULES = """ast asyncio base64 bisect builtins calendar cmath collections colorsys concurrent.futures configparser
contextlib copy csv datetime decimal difflib dis email enum fileinput filecmp fnmatch fractions functools gettext glob
gzip hashlib heapq hmac html http.client inspect io ipaddress itertools json locale logging lzma math mimetypes
multiprocessing numbers operator os os.path pathlib pickle pkgutil platform pprint queue random re sched secrets select
selectors shelve shlex shutil signal socket socketserver sqlite3 ssl stat statistics string struct subprocess sys
sysconfig tarfile tempfile textwrap threading time timeit token tokenize traceback types typing unicodedata unittest
urllib.parse urllib.request uuid warnings wave weakref xml.etree.ElementTree zipfile zlib""".split()
LONGEST = 200


def answer(documentation):
    """The first paragraph, as one line."""
    paragraph = inspect.cleandoc(documentation).split("\n\n")[0]
    return " ".join(paragraph.split())


def signature(member):
    try:
        shown = str(inspect.signature(member))
    except (TypeError, ValueError):
        return None
    # Addresses differ between runs.
    return None if " at 0x" in shown else shown


def conversations():
    seen = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for member_name in sorted(dir(module)):
            member = getattr(module, member_name)
            if member_name.startswith("_") or not callable(member) or not isinstance(member.__doc__, str):
                continue
            said, called = answer(member.__doc__), signature(member)
            if said in seen or " at 0x" in said or not 20 <= len(said) <= LONGEST:
                continue
            seen.add(said)
            full = f"{name}.{member_name}"
            messages = [
                {"role": "user", "content": f"What does {full} do?"},
                {"role": "assistant", "content": said},
            ]
            if called is not None and len(called) <= LONGEST // 2:
                messages += [
                    {"role": "user", "content": "How is it called?"},
                    {"role": "assistant", "content": f"{full}{called}"},
                ]
            yield full, json.dumps({"messages": messages})


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", DeprecationWarning)
    files = {"train": [], "eval": []}
    for name, line in conversations():
        files["eval" if zlib.crc32(name.encode()) % 10 == 0 else "train"].append(line)
    for name, lines in files.items():
        (directory / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)} conversations")


if __name__ == "__main__":
    main()
