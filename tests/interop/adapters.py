"""Adapters of PEFT's own library beside ours.

    pip install -r requirements.txt
    python adapters.py make MODEL OUT       makes adapters of every linear layer, none of them zero
    python adapters.py loss MODEL OUT TOKENS        prints the loss of the first four sequences with them

The names of all adapters that PEFT found in OUT follow the loss, one a line.
"""

import sys
import warnings

import numpy
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

LENGTH = 32
SEQUENCES = 4


def base(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def make(path, out):
    torch.manual_seed(0)
    # Initialised otherwise, B is zero.
    config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base(path), config).save_pretrained(out)


def loss(path, out, tokens):
    model = PeftModel.from_pretrained(base(path), out)
    ids = torch.from_numpy(numpy.fromfile(tokens, dtype="<u2").astype("int64"))
    inputs, targets = (ids[shift : shift + SEQUENCES * LENGTH].view(SEQUENCES, LENGTH) for shift in (0, 1))
    with torch.no_grad():
        logits = model(inputs).logits
    print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    for name, _ in model.named_parameters():
        if "lora_" in name:
            print(name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"make": make, "loss": loss}[sys.argv[1]](*sys.argv[2:])
