"""Makes the files of this directory, which other programs' libraries write.

Run with pyarrow 26, zstandard 0.25 and numpy: python make.py
"""

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

HERE = Path(__file__).parent
TEXTS = ["first document", None, "", "zweites Dokument: Grüße\n", "the third\ndocument", "語"]


def parquet():
    table = pa.table({"id": list(range(6)), "text": TEXTS, "tags": [["a"]] * 6})
    for codec in ["none", "snappy", "gzip", "zstd", "lz4"]:
        pq.write_table(table, HERE / f"{codec}.parquet", compression=codec, row_group_size=4)
    # Another encoding, pages of version 2, a large string and a required column.
    schema = pa.schema([pa.field("text", pa.large_string(), nullable=False)])
    table = pa.table({"text": [f"row {i}" for i in range(100)]}, schema=schema)
    pq.write_table(
        table, HERE / "delta.parquet", compression="zstd", use_dictionary=False, data_page_version="2.0",
        column_encoding={"text": "DELTA_BYTE_ARRAY"}, data_page_size=64,
    )
    binary = pa.table({"text": pa.array([b"ab", b"\xff\xfe"], pa.binary())})
    pq.write_table(binary, HERE / "binary.parquet", compression="none")
    with open(HERE / "brotli.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["a"]}), file, compression="brotli")


def zst():
    # Two frames, the first without its size.
    first = zstandard.ZstdCompressor().compressobj()
    frames = first.compress(b'{"text": "one"}\n{"te') + first.flush()
    frames += zstandard.ZstdCompressor().compress(b'xt": "two"}\n')
    (HERE / "frames.jsonl.zst").write_bytes(frames)


def megatron():
    """As IndexedDatasetBuilder of Megatron-LM writes them: documents of one, two and one sequences."""
    sequences = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    documents = [0, 1, 3, 4]
    for name, dtype, code in [("u16", np.uint16, 8), ("i32", np.int32, 4), ("f32", np.float32, 7)]:
        arrays = [np.array(sequence, dtype) for sequence in sequences]
        (HERE / f"megatron_{name}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
        lengths = [len(sequence) for sequence in sequences]
        pointers = np.cumsum([0] + lengths[:-1]) * np.dtype(dtype).itemsize
        (HERE / f"megatron_{name}.idx").write_bytes(
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
            + np.array(lengths, np.int32).tobytes() + pointers.astype(np.int64).tobytes()
            + np.array(documents, np.int64).tobytes()
        )


def llmc():
    """As write_datafile of llm.c's dev/data/data_common.py writes them."""
    for name, magic, version, dtype in [("gpt2", 20240520, 1, np.uint16), ("llama3", 20240801, 7, np.uint32)]:
        ids = np.array([250, 1, 2, 3, 250, 4, 5], dtype)
        header = np.zeros(256, np.int32)
        header[:3] = [magic, version, len(ids)]
        (HERE / f"llmc_{name}.bin").write_bytes(header.tobytes() + ids.tobytes())


parquet()
zst()
megatron()
llmc()
