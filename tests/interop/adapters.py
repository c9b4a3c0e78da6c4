"""Compares PEFT's adapters with ours.

    pip install -r requirements.txt
    python adapters.py COMMAND [+ COMMAND ..]

    make MODEL OUT              makes nonzero adapters of every linear layer
    loss MODEL OUT TOKENS       prints the loss of the first four sequences with them, and their names
    kinds MODEL OUT TOKENS [KIND ..]        makes adapters of many kinds, directories in OUT, and prints the losses

`loss` and `kinds` print a line of JSON.
"""

import itertools
import json
import pathlib
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
    # With the default initialization, B is zero.
    config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base(path), config).save_pretrained(out)


SOME = ["v_proj", "c_proj"]
# By name. Some have other layers than `all-linear`.
KINDS = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
    "eva": {"init_lora_weights": "eva"},
    "transposed": {"fan_in_fan_out": True},
    "dropout": {"lora_dropout": 0.3},
    "excluded": {"exclude_modules": ["q_proj", "c_attn"]},
    "some_layers": {"target_modules": SOME, "layers_to_transform": [1]},
    "of_a_pattern": {"target_modules": SOME, "layers_to_transform": 0, "layers_pattern": ["layers", "h"]},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "mica": {"init_lora_weights": "mica"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rank_pattern": {"rank_pattern": {"v_proj": 2, "c_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 2, "c_proj": 2}},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "saved_modules": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3]},
}


def kinds(path, out, tokens, *names):
    losses = {}
    for name in names or KINDS:
        settings = KINDS[name]
        torch.manual_seed(0)
        usual = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(base(path), LoraConfig(**usual | settings))
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.requires_grad:
                    # Not the initial values, which may be zero.
                    tensor += 0.3 * torch.randn_like(tensor)
        model.save_pretrained(pathlib.Path(out) / name)
        losses[name] = measured(path, pathlib.Path(out) / name, tokens)[0]
    print(json.dumps(losses))


def measured(path, out, tokens):
    model = PeftModel.from_pretrained(base(path), out)
    ids = torch.from_numpy(numpy.fromfile(tokens, dtype="<u2").astype("int64"))
    inputs, targets = (ids[shift : shift + SEQUENCES * LENGTH].view(SEQUENCES, LENGTH) for shift in (0, 1))
    with torch.no_grad():
        logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), model


def loss(path, out, tokens):
    value, model = measured(path, out, tokens)
    print(json.dumps([value, [name for name, _ in model.named_parameters() if "lora_" in name]]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # Starting Python with PyTorch takes longer than a command.
    for _, command in itertools.groupby(sys.argv[1:], "+".__ne__):
        name, *arguments = command
        if name != "+":
            {"make": make, "loss": loss, "kinds": kinds}[name](*arguments)
