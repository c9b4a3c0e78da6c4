"""Makes the small models in this directory from transformers' configurations, and data: make.py --out DIR [--models ..]

    pip install -r ../interop/requirements.txt

Sizes are odd, windows shorter than a sequence, caps low, and norms and biases have unusual initial values, so that
differences in the computation change the losses. The random numbers depend only on PyTorch.
"""

import argparse
import json
import pathlib
import tempfile
import warnings

import numpy
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, DeepseekV2Config, DeepseekV3Config
from transformers import Gemma2Config, Gemma3TextConfig, GptOssConfig, LlamaConfig, MistralConfig, MixtralConfig, Phi3Config
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 131
TOKENS = 20 * 6 * 32 + 1
EXAMPLES = 20 * 6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
CONFIGS = {
    "llama3_tiny": LlamaConfig(
        **SIZES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral_tiny": MistralConfig(**SIZES, sliding_window=8),
    "qwen2_tiny": Qwen2Config(
        **SIZES | {"head_dim": 4}, rope_parameters=YARN, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3_tiny": Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "gemma2_tiny": Gemma2Config(
        **SIZES,
        sliding_window=8,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text_tiny": Gemma3TextConfig(
        **SIZES,
        sliding_window=8,
        query_pre_attn_scalar=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": LINEAR},
    ),
    "phi3_tiny": Phi3Config(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        rope_parameters=LONGROPE,
        original_max_position_embeddings=16,
        sliding_window=20,
    ),
    "mixtral_tiny": MixtralConfig(
        **SIZES | {"intermediate_size": 19}, **EXPERTS, num_local_experts=3, sliding_window=8
    ),
    "qwen3_moe_tiny": Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        num_experts=5,
        moe_intermediate_size=11,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
}
# Masked language models. The mask token does not occur in the data.
MASKED = {
    "bert_tiny": BertConfig(
        vocab_size=VOCABULARY + 6,
        hidden_size=20,
        intermediate_size=43,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=71,
        type_vocab_size=3,
        layer_norm_eps=1e-3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        pad_token_id=None,
    ),
}
# Models for tensor parallelism: heads, inner widths and vocabulary are divisible by four, or heads of keys and values
# by two. The second has replicated biases and a tied head.
EVEN = SIZES | {"vocab_size": VOCABULARY + 1, "hidden_size": 32, "intermediate_size": 88, "head_dim": 8}
PARALLEL = {
    "llama_tp_tiny": LlamaConfig(**EVEN | {"num_key_value_heads": 4}),
    "llama_tp_tied_tiny": LlamaConfig(
        **EVEN | {"hidden_size": 16, "intermediate_size": 44},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
}
# Latent attention, a dense layer, then shared experts and groups of experts.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 11,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-3,
}
DEEPSEEK = {
    # Its rotation needs even sizes.
    "deepseek_v2_tiny": DeepseekV2Config(
        **SIZES | LATENT | {"kv_lora_rank": 8, "qk_nope_head_dim": 4},
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_routed_experts=6,
        n_shared_experts=2,
        attention_bias=True,
        mlp_bias=True,
    ),
    "deepseek_v3_tiny": DeepseekV3Config(
        **SIZES | LATENT,
        q_lora_rank=9,
        n_routed_experts=9,
        n_shared_experts=1,
        norm_topk_prob=True,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
}
# Sinks, biases of routers and experts, and limits that the projections reach.
GPT_OSS = {
    "gpt_oss_tiny": GptOssConfig(
        **SIZES | EXPERTS | {"intermediate_size": 11},
        num_local_experts=5,
        sliding_window=8,
        swiglu_alpha=1.3,
        swiglu_limit=1.5,
        rope_parameters=YARN | {"truncate": False},
    ),
}
# Later additions have later seeds.
SEEDS = {name: seed for seed, name in enumerate([*sorted(CONFIGS), *sorted(MASKED), *PARALLEL])}
# With these, no two scores between which a router chooses are nearer than 5e-5, so that rounding changes no choice.
SEEDS |= {"deepseek_v2_tiny": 28, "deepseek_v3_tiny": 37, "gpt_oss_tiny": 40}


def tokens():
    """A random walk with a pattern to learn."""
    random = numpy.random.RandomState(7)
    ids = [1]
    for jump in random.randint(0, VOCABULARY, TOKENS - 1):
        ids.append((3 * ids[-1] + 5) % VOCABULARY if jump % 3 else int(jump))
    return numpy.array(ids, dtype="<u2")


def examples():
    """Texts of bytes with continuations, of many lengths, in the format of `train --sft`."""
    random = numpy.random.RandomState(11)
    for _ in range(EXAMPLES):
        prompt, completion = ("".join(random.choice(list("abcd "), random.randint(1, 15))) for _ in range(2))
        yield json.dumps({"prompt": prompt, "completion": completion[::-1] + prompt[-1]})


def make(name, out):
    torch.manual_seed(SEEDS[name])
    kind = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    model = kind.from_config((CONFIGS | MASKED | PARALLEL | DEEPSEEK | GPT_OSS)[name], dtype=torch.float32)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" in tensor_name.lower() or tensor_name.endswith(("bias", "sinks")):
                tensor += 0.2 * torch.randn_like(tensor)
        # Biases of a choice are buffers.
        for tensor_name, tensor in model.named_buffers():
            if tensor_name.endswith("bias"):
                tensor += 0.2 * torch.randn_like(tensor)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        out.mkdir(parents=True, exist_ok=True)
        for file in ["config.json", "model.safetensors"]:
            (out / file).write_bytes((pathlib.Path(folder) / file).read_bytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", default=SEEDS, choices=SEEDS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tokens.bin").write_bytes(tokens().tobytes())
    (options.out / "examples.jsonl").write_text("".join(f"{line}\n" for line in examples()))
    for name in options.models:
        make(name, options.out / name)


if __name__ == "__main__":
    main()
