"""Compares logits with those of transformers: python logits.py DIRECTORY TOKENS LOGITS [DIRECTORY TOKENS LOGITS ..]

LOGITS has the f32 logits of the first four sequences of 32 ids in TOKENS. A logit may differ by 1e-5 of the largest one.
"""

import sys

import numpy
import torch
from transformers import AutoModelForCausalLM


def main():
    for at in range(1, len(sys.argv), 3):
        directory, tokens, logits = sys.argv[at : at + 3]
        tokens = torch.from_numpy(numpy.fromfile(tokens, dtype="<u2").astype("int64"))[:128].reshape(4, 32)
        # The grouped products of PyTorch need widths that are multiples of four.
        options = {"dtype": torch.float32, "experts_implementation": "eager", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(directory, **options)
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        assert not any(info[kind] for kind in kinds), f"{directory}: {info}"
        with torch.no_grad():
            expected = model.eval()(tokens).logits
        found = torch.from_numpy(numpy.fromfile(logits, dtype="<f4")).reshape(expected.shape)
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        assert difference < 1e-5, f"{directory}: logits differ by {difference} of the largest"
        print(f"ok  {directory}: logits differ by {difference:.1e} of the largest")


if __name__ == "__main__":
    main()
