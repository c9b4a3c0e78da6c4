"""Merges random adapters of PEFT by fsdp-ckpt, and trains from them.

    pip install -r requirements.txt
    python merges.py FSDP_CKPT TRAIN COUNT [SEED]

Each adapter has random settings of `LoraConfig` over one of several small models. The logits of the merged model, and
the loss with which `train --lora-from` begins, must be those of PEFT. What is not supported must be refused by a message
with the name of a setting or a layer. Prints how many came out how. tests/outside/pytorch.rs runs this script where
PyTorch is installed.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

CKPT, TRAIN = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
COUNT = int(sys.argv[3])
SEED = int(sys.argv[4]) if len(sys.argv) > 4 else 1
SEQUENCES, LENGTH, VOCABULARY = 2, 12, 64
# Settings of a configuration, linear layers, and whether `train` knows the family.
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llama": ("llama", DECODER | {"tie_word_embeddings": False}, ATTENTION + MLP, True),
    "tied llama": ("llama", DECODER | {"tie_word_embeddings": True}, ATTENTION + MLP, True),
    "llama with biases": ("llama", DECODER | {"attention_bias": True, "mlp_bias": True}, ATTENTION + MLP, True),
    "qwen2": ("qwen2", DECODER | {"tie_word_embeddings": False}, ATTENTION + MLP, True),
    "phi3": ("phi3", DECODER | {"pad_token_id": 0}, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], True),
    "gpt2": ("gpt2", GPT, ["c_attn", "c_proj", "c_fc"], True),
    "square gpt2": ("gpt2", GPT | {"n_inner": 16}, ["c_attn", "c_proj", "c_fc"], True),
    "gpt_bigcode": ("gpt_bigcode", GPT, ["c_attn", "c_proj", "c_fc"], False),
    "gpt_neo": (
        "gpt_neo",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_heads": 4, "num_layers": 2, "intermediate_size": 16}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32},
        ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
        False,
    ),
    "mixtral": ("mixtral", DECODER | {"num_local_experts": 3}, ATTENTION, True),
    "qwen3_moe": (
        "qwen3_moe",
        DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        ATTENTION,
        True,
    ),
}
# Names of which a refusal must have one, by the settings below. Adapters with other settings must not be refused.
EMBEDDING = ["embed", "wte", "head"]
NAMES = {
    # For mixtures of experts, PEFT adds the tensors of experts.
    "all-linear": ["target_parameters", "alpha_pattern", "rank_pattern"],
    "use_rslora": ["use_rslora"],
    "rank_pattern": ["rank_pattern"],
    "alpha_pattern": ["alpha_pattern"],
    "two patterns": ["alpha_pattern"],
    "patterns of other order": ["alpha_pattern"],
    "bias": ["bias"],
    "head": ["lm_head", "tie"],
    "embedding": EMBEDDING,
    "head and embedding": EMBEDDING,
    "saved head": ["modules_to_save", "lm_head"],
    "saved embedding": ["modules_to_save", *EMBEDDING],
    "saved both": ["modules_to_save", *EMBEDDING],
    "tying": ["ensure_weight_tying", *EMBEDDING],
    "dora": ["use_dora"],
    "lora_bias": ["lora_bias"],
    "tokens": ["trainable_token_indices"],
}


def is_named(output, kinds):
    """Returns whether a refusal names the reason."""
    return "panicked" not in output and any(part in output for kind in kinds for part in NAMES.get(kind, []))


def setting(random, layers, model):
    """Returns keyword arguments of a `LoraConfig`: the layers, and up to three other settings."""
    rank = random.choice([1, 2, 3, 5])
    chosen = random.sample(layers, random.randint(1, len(layers)))
    config = {"r": rank, "lora_alpha": random.choice([1, 4, 7.5]), "target_modules": chosen}
    is_conv = model in ("gpt2", "square gpt2")
    config["fan_in_fan_out"] = is_conv
    head, embedding = ("lm_head", "wte" if model.startswith(("gpt2", "square", "gpt_")) else "embed_tokens")
    others = {
        "use_rslora": lambda: {"use_rslora": True},
        "rank_pattern": lambda: {"rank_pattern": {random.choice(chosen): 4}},
        "alpha_pattern": lambda: {"alpha_pattern": {random.choice(chosen): 3}},
        "two patterns": lambda: {"alpha_pattern": {chosen[0]: 3, rf"1\..*{chosen[0]}": 9}},
        "patterns of other order": lambda: {"alpha_pattern": {rf"1\..*{chosen[0]}": 9, chosen[0]: 3}},
        "layers": lambda: {"layers_to_transform": [random.randint(0, 1)]},
        "regex": lambda: {"target_modules": rf".*\.1\..*({'|'.join(chosen)})"},
        "all-linear": lambda: {"target_modules": "all-linear"},
        "excluded": lambda: {"exclude_modules": [chosen[0]], "target_modules": layers},
        "bias": lambda: {"bias": random.choice(["all", "lora_only"])},
        "head": lambda: {"target_modules": [*chosen, head]},
        "embedding": lambda: {"target_modules": [*chosen, embedding]},
        "head and embedding": lambda: {"target_modules": [*chosen, head, embedding]},
        "saved head": lambda: {"modules_to_save": [head]},
        "saved embedding": lambda: {"modules_to_save": [embedding]},
        "saved both": lambda: {"modules_to_save": [head, embedding]},
        "tying": lambda: {"target_modules": [*chosen, embedding], "ensure_weight_tying": True},
        "dora": lambda: {"use_dora": True},
        "lora_bias": lambda: {"lora_bias": True},
        "tokens": lambda: {"trainable_token_indices": [1, 3]},
        "dropout": lambda: {"lora_dropout": 0.1},
    }
    names = random.sample(sorted(others), random.choice([0, 1, 1, 1, 2, 2, 3]))
    for name in names:
        config |= others[name]()
    return config, names


def train_loss(base, adapter, root):
    """Returns the loss of the first step, or None, and the output."""
    metrics = root / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    flags = ["--model", base, "--data", root / "tokens.bin", "--seq-len", LENGTH, "--batch-size", SEQUENCES, "--steps", 1]
    flags += ["--lora-from", adapter, "--metrics", metrics, "--device", "cpu"]
    done = subprocess.run([TRAIN, *map(str, flags)], capture_output=True, text=True, cwd=root)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        return None, output
    return json.loads(metrics.read_text().splitlines()[0])["loss"], output


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    torch.set_num_threads(1)
    source = random.Random(SEED)
    counts = dict.fromkeys(["merged", "merge refused", "trained", "train refused", "not made by PEFT"], 0)
    wrong = []
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        ids = torch.randint(0, VOCABULARY, (SEQUENCES * LENGTH + 1,), generator=torch.Generator().manual_seed(5))
        ids.numpy().astype("<u2").tofile(root / "tokens.bin")
        inputs, targets = (ids[shift : shift + SEQUENCES * LENGTH].view(SEQUENCES, LENGTH) for shift in (0, 1))
        bases = {}
        for name, (family, settings, _, _) in MODELS.items():
            torch.manual_seed(0)
            no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            config = AutoConfig.for_model(family, **no_tokens | settings)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor += 0.1 * torch.randn_like(tensor)
            bases[name] = root / name.replace(" ", "-")
            model.save_pretrained(bases[name])
        made = 0
        while made < COUNT:
            name = source.choice(sorted(MODELS))
            _, _, layers, is_known = MODELS[name]
            settings, kinds = setting(source, layers, name)
            base, adapter, merged = bases[name], root / f"adapter{made}", root / "merged"
            load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            try:
                torch.manual_seed(made)
                model = get_peft_model(load(base), LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings))
                with torch.no_grad():
                    for tensor in model.parameters():
                        if tensor.requires_grad:
                            tensor += 0.1 * torch.randn_like(tensor)
                model.save_pretrained(adapter)
                with torch.no_grad():
                    logits = PeftModel.from_pretrained(load(base), adapter).eval()(inputs).logits
            except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, NotImplementedError, IndexError):
                counts["not made by PEFT"] += 1
                continue
            made += 1
            label = f"{name}, {settings}"
            if merged.exists():
                for file in merged.iterdir():
                    file.unlink()
                merged.rmdir()
            done = subprocess.run([CKPT, "merge", base, adapter, merged], capture_output=True, text=True)
            if done.returncode == 0:
                with torch.no_grad():
                    far = (load(merged)(inputs).logits - logits).abs().max().item()
                if not far < 1e-4:
                    wrong.append(f"{label}: merged logits differ by {far}: {done.stdout}")
                counts["merged"] += 1
            else:
                if not is_named(done.stderr, kinds):
                    wrong.append(f"{label}: {done.stderr}")
                counts["merge refused"] += 1
            if is_known:
                loss, output = train_loss(base, adapter, root)
                expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
                if loss is None:
                    if not is_named(output, kinds):
                        wrong.append(f"{label}: train: {output}")
                    counts["train refused"] += 1
                else:
                    if abs(loss / expected - 1) > 1e-5:
                        wrong.append(f"{label}: loss {loss}, PEFT's {expected}")
                    counts["trained"] += 1
    print(f"seed {SEED}, {COUNT} adapters:", ", ".join(f"{count} {what}" for what, count in counts.items()))
    if wrong:
        sys.exit(f"{len(wrong)} wrong\n" + "\n".join(wrong))


main()
