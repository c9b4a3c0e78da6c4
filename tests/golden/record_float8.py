"""Trains `llama_float8_tiny` with torchao's float8 recipes, emulated, and in bf16: record_float8.py --out DIR

    pip install -r ../interop/requirements.txt torchao==0.18.0

The sizes are multiples of 16, as 8-bit products need. `--make` also makes the model and its tokens. One rank trains it
for 200 steps, as record.py trains the other models: scales follow from each rank's own data, so other numbers of ranks
have other losses.
"""

import argparse
import json
import pathlib

import numpy
import record
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

NAME = "llama_float8_tiny"
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
# In bf16, and in f32.
STEPS, STEPS_OF_F32 = 200, 20
CONFIG = LlamaConfig(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.2,
    use_cache=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


def tokens():
    """A text of a random automaton: each token has four successors, so that there is something to learn."""
    random = numpy.random.default_rng(7)
    successors = random.integers(0, CONFIG.vocab_size, (CONFIG.vocab_size, 4))
    text, choices = [0], random.integers(0, 4, STEPS * record.sequences(NAME) * record.LENGTH)
    for choice in choices:
        text.append(successors[text[-1], choice])
    return numpy.array(text, dtype="<u2")


def make(out):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG).to(torch.float32)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    tokens().tofile(out / "tokens.bin")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--make", action="store_true")
    options = parser.parse_args()
    out = options.out / NAME
    out.mkdir(parents=True, exist_ok=True)
    if options.make:
        make(out)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29541", rank=0, world_size=1)
    record.HERE = options.out
    for dtype, steps, suffix in [(torch.bfloat16, STEPS, "_bf16"), (None, STEPS_OF_F32, "")]:
        for recipe in [None, *RECIPES]:
            record.STEPS = steps
            trajectory = record.train(NAME, record.Run(dtype, torch.float32, "eager", float8=recipe))
            settings = {"torch": torch.__version__, "recipe": recipe, "world_size": 1}
            settings |= {"batch_per_rank": record.sequences(NAME), "seq_len": record.LENGTH, "steps": steps}
            settings |= {"param_dtype": str(dtype), "clip_grad_norm": record.CLIP} | record.ADAMW
            settings["trajectory"] = trajectory
            file = f"run_float8_{recipe}" if recipe else "run"
            file = f"run_float8_{recipe}{suffix}" if recipe else f"run{suffix}"
            (out / f"{file}.json").write_text(json.dumps(settings, indent=1))
            print(file, [round(step["loss"], 4) for step in trajectory[:: steps // 10]])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
