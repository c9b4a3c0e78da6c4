"""Records QLoRA runs with PEFT, in one process on the CPU: record_qlora.py --out DIR

    pip install -r ../interop/requirements.txt bitsandbytes==0.50.2

Writes DIR/qlora/MODEL (config.json, model.safetensors, adapters/, run_*.json, codes.safetensors), which README.md
describes. The frozen weights are encoded and decoded as in fsdp-core's `block_format.rs`.
"""

import argparse
import json
import pathlib
import tempfile
import warnings

import bitsandbytes
import bitsandbytes.functional
import numpy
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

HERE = pathlib.Path(__file__).resolve().parent
VOCABULARY, LENGTH, STEPS, SEQUENCES, BLOCK = 132, 32, 20, 6, 64
ADAMW = {"lr": 5e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}
# A matrix of which bitsandbytes encodes the codes.
ENCODED = {"llama": "model.layers.1.mlp.down_proj.weight", "gpt2": "h.1.attn.c_attn.weight"}

# The levels of "QLoRA" (arXiv:2305.14314), appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def decoded(weight, form):
    """A matrix, encoded and decoded."""
    if form == "bf16":
        return weight.bfloat16().float()
    rows = weight.reshape(-1, BLOCK)
    largest = rows.abs().amax(dim=1, keepdim=True)
    if form == "int8":
        scale = (largest / 127).bfloat16().float()
        return ((rows * (1 / scale)).round().clamp(-127, 127) * scale).reshape(weight.shape)
    levels = torch.tensor(NF4)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(rows * (1 / largest), middles)
    return (levels[codes] * largest.bfloat16().float()).reshape(weight.shape)


def load(folder, form):
    """The model with the values that `train --base FORM` computes with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and form != "f32":
                in_block = ".layers." in name or ".h." in name
                weight.copy_(decoded(weight, form if in_block else "bf16"))
    return model


def make(name, folder):
    torch.manual_seed(23)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as written:
        # Small files. The weights are exact in BF16.
        model.bfloat16().save_pretrained(written)
        folder.mkdir(parents=True, exist_ok=True)
        for file in ["config.json", "model.safetensors"]:
            (folder / file).write_bytes((pathlib.Path(written) / file).read_bytes())
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[name], task_type="CAUSAL_LM")
    config.fan_in_fan_out = name == "gpt2"
    adapted = get_peft_model(load(folder, "f32"), config)
    with torch.no_grad():
        for parameter, tensor in adapted.named_parameters():
            if "lora_B" in parameter:
                tensor += 0.02 * torch.randn_like(tensor)
    adapted.save_pretrained(folder / "adapters")
    file = folder / "adapters" / "adapter_config.json"
    fields = json.loads(file.read_text()) | {"base_model_name_or_path": None}
    fields["target_modules"].sort()
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (folder / "adapters" / "README.md").unlink(missing_ok=True)
    state = dict(load(folder, "f32").named_parameters())
    encoded = state[ENCODED[name] if name == "llama" else f"transformer.{ENCODED[name]}"].detach()
    codes, _ = bitsandbytes.functional.quantize_4bit(encoded, blocksize=BLOCK, quant_type="nf4")
    save_file({ENCODED[name]: codes.flatten()}, folder / "codes.safetensors")


def train(folder, form):
    model = PeftModel.from_pretrained(load(folder, form), folder / "adapters", is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    tokens = torch.from_numpy(numpy.fromfile(HERE / "tokens.bin", dtype="<u2").astype("int64"))
    for step in range(STEPS):
        starts = [sequence * LENGTH for sequence in range(step * SEQUENCES, (step + 1) * SEQUENCES)]
        inputs, targets = [torch.stack([tokens[start + shift :][:LENGTH] for start in starts]) for shift in (0, 1)]
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        yield {"step": step + 1, "loss": loss.item(), "grad_norm": norm.item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    versions |= {"bitsandbytes": bitsandbytes.__version__}
    for name in CONFIGS:
        folder = options.out / "qlora" / name
        make(name, folder)
        for form in ["bf16", "int8", "nf4"]:
            settings = versions | {"base": form, "sequences": SEQUENCES, "seq_len": LENGTH, "clip_grad_norm": CLIP}
            recorded = settings | ADAMW | {"trajectory": list(train(folder, form))}
            (folder / f"run_{form}.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
