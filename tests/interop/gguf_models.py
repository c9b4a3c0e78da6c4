"""Makes small models of every architecture that `fsdp-ckpt convert --to gguf` writes.

    pip install -r requirements.txt
    python gguf_models.py OUT [NAME ..]

Each model has random weights, so that every norm, bias and router matters, and a tokenizer with a chat template:
byte-level, sentencepiece-like or WordPiece, trained on TEXTS. Beside it are the tokens of PROMPTS by transformers.

`expected.npz` has its logits (of BERT the last hidden states) for TOKENS:

    f32, f16                   with its weights, and with matrices rounded to f16 as in a file of 16 bits
    rounded_f32, rounded_f16   the same, and activations rounded where llama.cpp rounds them (`Rounding`)

llama.cpp takes GELU from a table of f16. The models have such large inputs of GELU that the table hardly matters, except
the model `gpt2_table`.
"""

import json
import pathlib
import re
import sys

import numpy
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and 1234 other foxes don't.",
    "Zażółć gęślą jaźń. Привет, мир! 你好，世界。 🦊🦊",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))",
    "  two spaces, a tab\t, and a newline\n",
    "I've said you'll see what she'd DON'T WE'RE.",
]
PROMPTS = TEXTS + ["the fox", " the fox ", "don't  jump", "a\n\nb", "3.14159 and 27182", "ß ÄÖÜ é", "unseen: Ж 猫 𝔘"]
MESSAGES = [
    {"role": "user", "content": "Hello there."},
    {"role": "assistant", "content": "Hi! What is it?"},
    {"role": "user", "content": "Two  spaces and\nlines."},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY = 512
LENGTH = 24


def byte_level(pattern=None, bos=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        tokenizer.pre_tokenizer = last
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=CHATML
    )


def sentencepiece(prefix):
    """Pieces as sentencepiece makes them: every pair that makes a piece is a merge, in the order of the pieces."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    symbols = [f"<0x{byte:02X}>" for byte in range(256)]
    text = "".join(TEXTS).replace(" ", "▁")
    letters = sorted(set(text) - {"\n", "\t"})
    pieces = ["▁the", "▁fox", "▁t", "th", "he", "▁a", "fo", "ox", "▁th", "es", "▁▁", "over", "ov", "er", "ve", "es,"]
    known = set(letters)
    merges = []
    for piece in sorted(pieces, key=len):
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        if pairs:
            known.add(piece)
            merges += pairs
    order = special + symbols + letters + [piece for piece in sorted(pieces, key=len) if piece in known]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys(order))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHATML
    )


def word_piece():
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS * 3, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
}
SCALED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
# transformers chooses the factors by the number of tokens, and llama.cpp by the size of the context.
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + 0.1 * at for at in range(8)],
    "long_factor": [1.5 + 0.5 * at for at in range(8)],
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.15}

def phi3(original=None):
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if original is None:
        return transformers.Phi3Config(**SIZES, **ids)
    sizes = {**SIZES, "max_position_embeddings": 1024, "original_max_position_embeddings": original}
    rope = {**LONG, "original_max_position_embeddings": original}
    return transformers.Phi3Config(**sizes, **ids, rope_parameters=rope)


# Name: configuration, tokenizer.
MODELS = {
    "llama": (transformers.LlamaConfig(**SIZES), lambda: sentencepiece(True)),
    "llama3": (
        transformers.LlamaConfig(
            **SIZES, rope_parameters=SCALED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        lambda: byte_level(LLAMA3, bos=True),
    ),
    "llama_linear": (
        transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
        lambda: None,
    ),
    "mistral": (transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=24), lambda: sentencepiece(True)),
    "mixtral": (
        transformers.MixtralConfig(**SIZES, sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
        lambda: byte_level(),
    ),
    "qwen2": (transformers.Qwen2Config(**SIZES, rope_parameters=YARN), lambda: byte_level()),
    # Without the scaling that Candle's quantized models do not have.
    "qwen2_plain": (transformers.Qwen2Config(**SIZES), lambda: None),
    "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True), lambda: byte_level()),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(
            **SIZES, head_dim=24, moe_intermediate_size=32, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
        ),
        lambda: byte_level(),
    ),
    "gemma2": (transformers.Gemma2Config(**{**SIZES, **GEMMA}, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
               lambda: sentencepiece(False)),
    "gemma3": (
        transformers.Gemma3TextConfig(
            **{**SIZES, **GEMMA}, rope_parameters=GEMMA_ROPE,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        lambda: sentencepiece(False),
    ),
    "phi3": (phi3(original=512), lambda: sentencepiece(True)),
    "phi3_long": (phi3(original=16), lambda: None),
    "phi3_plain": (phi3(), lambda: None),
    "gpt2": (transformers.GPT2Config(**GPT2), lambda: byte_level()),
    "gpt2_table": (transformers.GPT2Config(**GPT2), lambda: None),
    "bert": (
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=64, hidden_act="gelu_new", initializer_range=0.15,
        ),
        word_piece,
    ),
}
TOKENS = [(7 * at * at + 3 * at + 5) % VOCABULARY for at in range(LENGTH)]


# Factor of GELU's inputs: 1 in 100 of them is then within the table's range of -10 to 10.
LARGE = 300


def randomize(model, is_large):
    """Gives norms and biases, which are ones and zeros, random values. With `is_large`, multiplies the inputs of GELU
    and divides the next layer's weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif is_large and any(part in name for part in ["gate_proj", "c_fc", "intermediate.dense"]):
                parameter.mul_(LARGE)
            elif is_large and re.search(r"down_proj|mlp.c_proj|\d.output.dense", name):
                parameter.div_(LARGE)


def expected(model, tokens):
    model.eval()
    with torch.no_grad():
        out = model(torch.tensor([tokens]))
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0].float().numpy()


class Rounding(torch.overrides.TorchFunctionMode):
    """Rounds activations as llama.cpp does on CPUs: inputs of products with f16 weights, and the input and output of
    GELU, which its table has in f16."""

    def __init__(self, model, halves):
        self.halves = halves
        self.f32_weights = {parameter.data_ptr() for name, parameter in model.named_parameters() if stays_f32(name)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and self.halves and args[1].data_ptr() not in self.f32_weights:
            args = (half(args[0]), *args[1:])
        if function is torch.addmm and self.halves:
            args = (args[0], half(args[1]), *args[2:])
        if function is torch.nn.functional.gelu:
            x = args[0]
            table = half(torch.nn.functional.gelu(half(x).float(), approximate="tanh").to(x.dtype))
            return torch.where(x <= -10, 0, torch.where(x >= 10, x, table))
        return function(*args, **(kwargs or {}))


def half(values):
    return values.half().to(values.dtype)


def stays_f32(name):
    """Returns whether `--quantize f16` keeps a matrix in f32."""
    return any(part in name for part in ["mlp.gate.weight", "wpe.", "position_embeddings", "token_type_embeddings"])


def round_matrices(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not stays_f32(name):
                parameter.copy_(half(parameter))


def references(model):
    """Returns the logits of `expected.npz`. Changes the model's weights."""
    for module in model.modules():
        if type(module).__name__ == "NewGELUActivation":
            # The same function by torch's own.
            module.forward = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    arrays = {}
    for name in ["f32", "f16"]:
        if name == "f16":
            round_matrices(model)
        arrays[name] = expected(model, TOKENS)
        with Rounding(model, name == "f16"):
            arrays[f"rounded_{name}"] = expected(model, TOKENS)
    return arrays


def make(name, out):
    config, tokenizer = MODELS[name]
    torch.manual_seed(0)
    config._attn_implementation = config._experts_implementation = "eager"
    if name == "bert":
        model = transformers.BertModel(config, add_pooling_layer=False)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, name in ["gemma2", "gemma3", "gpt2", "bert"])
    dir = pathlib.Path(out) / name
    model.save_pretrained(dir)
    numpy.savez(dir / "expected.npz", tokens=numpy.array(TOKENS), **references(model))
    tokenizer = tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(dir)
        record = {"ids": [tokenizer(prompt)["input_ids"] for prompt in PROMPTS], "prompts": PROMPTS}
        if tokenizer.chat_template:
            record["chat"] = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        (dir / "expected.json").write_text(json.dumps(record))


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        make(name, sys.argv[1])
