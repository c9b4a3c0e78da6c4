"""Copies a CUDA library, and overwrites its machine code for other GPUs and its PTX with zeros, which compress well.

    python3 scripts/slim_library.py libnccl.so.2 COPY 90

The copy has the same size and addresses, and runs only on GPUs of that compute capability.
"""

import struct
import sys

# The start of a container in the sections of device code, as cuda's fatbinary.h has it.
MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MACHINE_CODE = 2


def sections(elf):
    """Yields the name, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    found = [struct.unpack_from("<II16xQQ", elf, table + index * size) for index in range(count)]
    names = found[of_names][2]
    for name, _, offset, length in found:
        begin = names + name
        yield elf[begin : elf.index(0, begin)].decode(), offset, length


def codes(elf):
    """Yields the kind, compute capability, offset and size of each piece of device code."""
    for name, offset, length in sections(elf):
        if name not in SECTIONS:
            continue
        position, end = offset, offset + length
        while position + 16 <= end:
            magic, _, header, size = struct.unpack_from("<IHHQ", elf, position)
            if magic != MAGIC:
                # Padding between containers.
                position += 8
                continue
            piece, position = position + header, position + header + size
            while piece < position:
                kind, _, header, size = struct.unpack_from("<HHIQ", elf, piece)
                (capability,) = struct.unpack_from("<I", elf, piece + 28)
                yield kind, capability, piece + header, size
                piece += header + size


def main(source, target, keep):
    with open(source, "rb") as file:
        elf = bytearray(file.read())
    kept = 0
    for kind, capability, offset, size in list(codes(elf)):
        if (kind, capability) == (MACHINE_CODE, keep):
            kept += size
        else:
            elf[offset : offset + size] = bytes(size)
    if not kept:
        sys.exit(f"slim_library: {source} has no machine code for sm_{keep}")
    with open(target, "wb") as file:
        file.write(elf)
    print(f"{target}: kept {kept} bytes of device code, for sm_{keep}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
