"""Compiles CUDA sources to machine code by NVRTC, as fsdp-candle does at the first use of a device. Needs no GPU.

Usage: nvrtc.py CUDA_HOME "80 90 100" FILE.cu...
"""

import ctypes
import glob
import os
import re
import sys
import time


def main(home, archs, files):
    # NVRTC loads its second library by name; load it first by path.
    for name in ["libnvrtc-builtins.so.*", "libnvrtc.so.*"]:
        (path,) = glob.glob(f"{home}/lib/{name}")
        nvrtc = ctypes.CDLL(path)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    failed = False
    for file in files:
        text = with_headers(file)
        fmad = str(os.path.basename(file).startswith("flash_")).lower()
        for arch in archs.split():
            start = time.monotonic()
            program = ctypes.c_void_p()
            ask(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None))
            # No include directory: where programs run, there may be none.
            options = [f"--gpu-architecture=sm_{arch}", f"--fmad={fmad}"]
            given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            code = nvrtc.nvrtcCompileProgram(program, len(options), given)
            size = ctypes.c_size_t()
            ask(nvrtc, nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            ask(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            cubin = ctypes.c_size_t()
            names = set()
            if code == 0:
                ask(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(cubin)))
                image = ctypes.create_string_buffer(cubin.value)
                ask(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
                # As `kernels/cuda/preloading.rs` finds them.
                names = set(re.findall(rb"\.nv\.constant0\.([A-Za-z0-9_$]+)\0", image.raw))
            ask(nvrtc, nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
            said = log.value.decode(errors="replace").strip()
            # Warnings are errors, as for nvcc.
            if code or said or not names:
                failed = True
                print(f"{file}, sm_{arch}: {nvrtc.nvrtcGetErrorString(code).decode()}\n{said}", file=sys.stderr)
            else:
                seconds = time.monotonic() - start
                size = f"{len(names)} kernels, {cubin.value} bytes of machine code"
                print(f"NVRTC: {file} for sm_{arch}, {size} in {seconds:.2f} s")
    return 1 if failed else 0


def with_headers(file):
    """Returns a source in which headers replace the lines that include them, as in `kernels/cuda/compiler.rs`."""

    def header(line):
        with open(os.path.join(os.path.dirname(file), line[1].decode()), "rb") as text:
            return text.read()

    with open(file, "rb") as source:
        return re.sub(rb'(?m)^#include "(.*)"$', header, source.read())


def ask(nvrtc, code):
    if code:
        sys.exit(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
