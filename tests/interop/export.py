"""Loads pairs of directories of a model with transformers, and compares the losses:
python export.py OURS THEIRS TOKENS [OURS THEIRS TOKENS ..]
"""

import sys

import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM


def loss(directory, tokens):
    masked = AutoConfig.from_pretrained(directory).model_type == "bert"
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model, info = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info[kind] for kind in kinds), f"{directory}: {info}"
    with torch.no_grad():
        return model.eval()(tokens, labels=tokens).loss.item()


def main():
    for at in range(1, len(sys.argv), 3):
        ours, theirs, tokens = sys.argv[at : at + 3]
        tokens = torch.from_numpy(numpy.fromfile(tokens, dtype="<u2").astype("int64"))[:512].reshape(8, 64)
        found, expected = loss(ours, tokens), loss(theirs, tokens)
        assert abs(found - expected) < 2e-6 * expected, f"{ours} has a loss of {found}, {theirs} of {expected}"
        print(f"ok  transformers reads {ours}: a loss of {found}, and of {expected} for {theirs}")


if __name__ == "__main__":
    main()
