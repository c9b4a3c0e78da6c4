"""Records what transformers reads from unusual model directories: record_directories.py --out DIR

    pip install -r ../interop/requirements.txt

Makes the small model of `directories` (see README.md) with its other files, and writes DIR/directories/recorded.json:
losses of transformers for each kind of directory, and the token ids for each way to configure tokens.
"""

import argparse
import json
import pathlib
import shutil
import tempfile

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig, LlamaForCausalLM

GOLDEN = pathlib.Path(__file__).resolve().parent
LENGTH, SEQUENCES = 32, 4
TEXT = "the user asks and the assistant answers, as the system says: hello there, how are you today?\n"
SIZES = {
    "vocab_size": 288,
    "hidden_size": 8,
    "intermediate_size": 11,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tokenizer(special):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=276, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT] * 9, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def loss(model, ids):
    """The mean loss over sequences, each of which predicts the tokens that follow."""
    ids = torch.tensor(ids[: SEQUENCES * LENGTH + 1])
    with torch.no_grad():
        logits = model.eval()(ids[:-1].reshape(SEQUENCES, LENGTH)).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item()


def stream(length, vocabulary):
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(2)).tolist()


def make(directory):
    """Makes the model, its other files of weights, and its tokenizer."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    made = tokenizer(["<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "text.txt").write_text(TEXT * 4)
    numpy.asarray(stream(SEQUENCES * LENGTH + 1, 256), dtype="<u2").tofile(directory / "tokens.bin")
    return model


def losses(directory):
    """The losses of the model on its text and on tokens, and of its tied variants on tokens."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = stream(SEQUENCES * LENGTH + 1, 256)
    text = AutoTokenizer.from_pretrained(directory)(TEXT * 4, add_special_tokens=False).input_ids
    found = {"text": loss(model, text), "tokens": loss(model, ids)}
    with tempfile.TemporaryDirectory() as name:
        tied = pathlib.Path(name)
        weights = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
        (tied / "config.json").write_text(json.dumps(config))
        save_file(weights, tied / "model.safetensors", {"format": "pt"})
        found["tied, with another head"] = loss(AutoModelForCausalLM.from_pretrained(tied), ids)
        head = weights.pop("lm_head.weight")
        save_file(weights, tied / "model.safetensors", {"format": "pt"})
        found["tied"] = loss(AutoModelForCausalLM.from_pretrained(tied), ids)
        weights["lm_head.weight"] = head
        del weights["model.embed_tokens.weight"]
        save_file(weights, tied / "model.safetensors", {"format": "pt"})
        found["tied, with the head only"] = loss(AutoModelForCausalLM.from_pretrained(tied), ids)
    return found


def fused(name, directory):
    """Saves a model of make.py with fused experts. Its loss is that of the recorded runs' first step."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved, save_original_format=False)
        shutil.copy(pathlib.Path(saved) / "model.safetensors", directory / f"{name}_fused.safetensors")


def coded(directory):
    """Saves a gpt-oss whose experts have random codes in MXFP4, and returns the loss of transformers, which decodes them."""
    torch.manual_seed(9)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2, "swiglu_limit": 2.0}
    sizes = SIZES | {"hidden_size": 32, "num_hidden_layers": 1, "sliding_window": 8} | heads | experts
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as name:
        saved = pathlib.Path(name)
        model.save_pretrained(saved)
        weights = load_file(saved / "model.safetensors")
        for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, inputs, outputs = weights.pop(name).shape
            weights[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16)).to(torch.uint8)
            weights[f"{name}_scales"] = torch.randint(120, 127, (count, outputs, inputs // 32)).to(torch.uint8)
        config = json.loads((saved / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
        (saved / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(weights, saved / "model.safetensors", {"format": "pt"})
        for file in ["config.json", "model.safetensors"]:
            shutil.copy(saved / file, directory / f"gpt_oss_mxfp4.{file.rpartition('.')[2]}")
        options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
        return loss(AutoModelForCausalLM.from_pretrained(saved, **options), stream(SEQUENCES * LENGTH + 1, 256))


START, END = "<|start|>", "<|end|>"
ENTRY = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
WORD = ENTRY | {"special": False, "normalized": True, "single_word": True}


def decoder(*tokens):
    return {str(id): entry | {"content": content} for id, content, entry in tokens}


# Files beside the tokenizer, by name. Ids from 278 on are new.
CONFIGURED = [
    {},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((278, START, ENTRY), (279, END, ENTRY))}},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((279, END, ENTRY), (278, START, ENTRY))}},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((280, START, ENTRY), (283, END, ENTRY))}},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((278, START, ENTRY | {"rstrip": True}))}},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((278, "user", WORD), (279, "as", WORD))}},
    {"tokenizer_config.json": {"added_tokens_decoder": decoder((277, "</s>", ENTRY | {"lstrip": True}))}},
    {"tokenizer_config.json": {"eos_token": END, "pad_token": START}},
    {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": END, "lstrip": True}}},
    {"tokenizer_config.json": {"image_token": END, "additional_special_tokens": [START]}},
    {"tokenizer_config.json": {"extra_special_tokens": [START, END]}},
    {"tokenizer_config.json": {"extra_special_tokens": {"image_token": START}}},
    {"tokenizer_config.json": {"eos_token": "hello"}},
    {"added_tokens.json": {END: 279, START: 278}},
    {"added_tokens.json": {"user": 278}},
    {"added_tokens.json": {END: 278}, "special_tokens_map.json": {"eos_token": END}},
    {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [START]}},
    {"special_tokens_map.json": {"eos_token": {"content": END, "lstrip": False, "rstrip": True, "normalized": False}}},
    {"special_tokens_map.json": {"eos_token": START}, "tokenizer_config.json": {"eos_token": END}},
    {
        "tokenizer_config.json": {"added_tokens_decoder": decoder((278, START, ENTRY))},
        "special_tokens_map.json": {"eos_token": END},
        "added_tokens.json": {"user": 278},
    },
]
TEXTS = [
    "<|start|>user\nhello<|end|>\n<|start|>assistant\n there <|end|>",
    "hello users, user: as the user asks </s> <s>hello <|start|> hello",
]


def configured(directory):
    """The ids of TEXTS with each of the files of CONFIGURED."""
    found = []
    for files in CONFIGURED:
        with tempfile.TemporaryDirectory() as name:
            model = pathlib.Path(name)
            shutil.copy(directory / "tokenizer.json", model)
            for file, content in files.items():
                if file == "tokenizer_config.json":
                    content = {"tokenizer_class": "PreTrainedTokenizerFast"} | content
                (model / file).write_text(json.dumps(content))
            if "tokenizer_config.json" not in files:
                (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            read = AutoTokenizer.from_pretrained(model)
            ids = [read(text, add_special_tokens=False).input_ids for text in TEXTS]
            read_files = [file for file in sorted(model.iterdir()) if file.name != "tokenizer.json"]
            files = {file.name: json.loads(file.read_text()) for file in read_files}
            found.append({"files": files, "ids": ids, "eos_token": read.eos_token})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    directory = parser.parse_args().out / "directories"
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    (directory / "model").mkdir(parents=True, exist_ok=True)
    make(directory / "model")
    for name in ("mixtral_tiny", "qwen3_moe_tiny"):
        fused(name, directory)
    recorded = {"losses": losses(directory / "model") | {"mxfp4": coded(directory)}, "texts": TEXTS, "configured": configured(directory / "model")}
    (directory / "recorded.json").write_text(json.dumps(recorded, indent=1) + "\n")


main()
