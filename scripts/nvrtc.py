"""Compiles CUDA sources by NVRTC, as programs do at run time: no GPU is needed for that.

Usage: nvrtc.py CUDA_HOME "80 90 100" FILE.cu...
"""

import ctypes
import glob
import sys
import time


def main(home, archs, files):
    # NVRTC opens its second library by name, and finds it where it is loaded already.
    for name in ["libnvrtc-builtins.so.*", "libnvrtc.so.*"]:
        (path,) = glob.glob(f"{home}/lib/{name}")
        nvrtc = ctypes.CDLL(path)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    failed = False
    for file in files:
        with open(file, "rb") as source:
            text = source.read()
        for arch in archs.split():
            start = time.monotonic()
            program = ctypes.c_void_p()
            ask(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None))
            options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", f"--include-path={home}/include"]
            given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            code = nvrtc.nvrtcCompileProgram(program, len(options), given)
            size = ctypes.c_size_t()
            ask(nvrtc, nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            ask(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            cubin = ctypes.c_size_t()
            if code == 0:
                ask(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(cubin)))
            ask(nvrtc, nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
            said = log.value.decode(errors="replace").strip()
            # A warning is as much as an error, as it is for nvcc.
            if code or said:
                failed = True
                print(f"{file}, sm_{arch}: {nvrtc.nvrtcGetErrorString(code).decode()}\n{said}", file=sys.stderr)
            else:
                print(f"NVRTC {file} sm_{arch}: {cubin.value} bytes in {time.monotonic() - start:.2f} s")
    return 1 if failed else 0


def ask(nvrtc, code):
    if code:
        sys.exit(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
