"""The measured models, as Hugging Face's config.json, and the cost of a training step."""

import json

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
}


def llama(width, inner, layers, heads, kv_heads, vocabulary, tied):
    return {
        **LLAMA,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


# Llama 3.1 8B, Llama 3.2 1B, and a tiny model for CPUs.
LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256, False)
LLAMA_1B = llama(2048, 8192, 16, 32, 8, 128256, True)
LLAMA_TINY = llama(128, 352, 4, 4, 2, 256, False)


# torchtitan's figures of LLAMA_8B on eight H100 (96 GB, 500 W), with selective checkpointing: tokens a second and GPU,
# and GiB, by sequences and tokens (benchmarks/llama3_h100_202412_torchtitan.md).
PUBLISHED = {
    (2, 8192): {"torchtitan": (5762, 82.4), "torchtitan, compiled": (6667, 77.0)},
}


def write(config, directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def read(directory):
    with open(f"{directory}/config.json", encoding="utf-8") as file:
        return json.load(file)


def sizes(config):
    """Returns layers, width and vocabulary size, by either of a config's names."""
    named = lambda *names: next(config[name] for name in names if name in config)  # noqa: E731
    return named("num_hidden_layers", "n_layer"), named("hidden_size", "n_embd"), named("vocab_size")


def operations_per_token(config, parameters, seq):
    """Returns the floating point operations of a training step for one token.

    Six for each parameter that is multiplied with (the table of embeddings is looked up, unless it is the head as
    well), and twelve times layers, width and sequence for attention, as if it were not causal: torchtitan and PaLM
    count so. What activation checkpointing computes twice counts once.
    """
    layers, width, vocabulary = sizes(config)
    looked_up = 0 if config.get("tie_word_embeddings") or "n_embd" in config else vocabulary * width
    return 6 * (parameters - looked_up) + 12 * layers * width * seq
