"""Compares llama.cpp on our GGUF files with transformers, and merged adapters with PEFT.

    pip install -r requirements.txt llama-cpp-python==0.3.36 gguf
    python gguf_models.py OUT
    python gguf.py logits FSDP-CKPT OUT [NAME ..]      each architecture in f32 and f16, tokens and chat templates
    python gguf.py bytes FSDP-CKPT OUT                 quantized tensors, beside those of llama.cpp's quantizer
    python gguf.py greedy FSDP-CKPT OUT                a model trained here: 20 answers of q8_0 and transformers
    python gguf.py merge FSDP-CKPT OUT                 `fsdp-ckpt merge` and merge_and_unload
    python gguf.py large FSDP-CKPT OUT                 a model of 100 M parameters: times, and peak memory

A package that is missing here may be in the environment of LLAMA_CPP, which is searched last. Each line of the output
begins with "ok" or "FAILED".
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy

if "LLAMA_CPP" in os.environ:
    sys.path += [str(path) for path in pathlib.Path(os.environ["LLAMA_CPP"]).glob("lib/python3*/site-packages")]
# The package gguf, not this file.
here = str(pathlib.Path(__file__).resolve().parent)
sys.path = [path for path in sys.path if path and str(pathlib.Path(path).resolve()) != here]
import llama_cpp

sys.path.append(here)

failed = False


def report(fine, text):
    global failed
    failed |= not fine
    print("ok    " if fine else "FAILED", text, flush=True)


def convert(program, source, out, quantization, *more):
    command = [program, "convert", source, out, "--to", "gguf", "--quantize", quantization, "--json", *more]
    out.unlink(missing_ok=True)
    return json.loads(subprocess.run([str(word) for word in command], check=True, capture_output=True).stdout)


# llama.cpp's numbers of quantizations.
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q6_k": 18, "bf16": 32}


def requantize(source, out, quantization):
    """Converts a GGUF file by llama.cpp."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[quantization], 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp can't convert {source} to {quantization}; VERBOSE=1 shows why")


@llama_cpp.llama_log_callback
def quiet(level, text, user):
    if level >= 3 and os.environ.get("VERBOSE"):
        sys.stderr.write(text.decode(errors="replace"))


llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


# Largest difference of logits, relative to their spread.
LIMIT = 1e-4


class Model:
    """A GGUF file in llama.cpp, with a cache of keys and values in f32."""

    def __init__(self, path, context=64):
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {path}; VERBOSE=1 shows why")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.width = llama_cpp.llama_model_n_embd(self.model)
        self.context_size = context

    def metadata(self, key):
        buffer = ctypes.create_string_buffer(1 << 16)
        length = llama_cpp.llama_model_meta_val_str(self.model, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode()

    def run(self, tokens, embeddings=False):
        """Returns the logits of all tokens, or their embeddings."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.context_size
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = 0
        params.embeddings = embeddings
        params.pooling_type = 0
        context = llama_cpp.llama_init_from_model(self.model, params)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = int(token), at, 1, 0
            batch.logits[at] = 1
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        width = self.width if embeddings else self.size
        read = llama_cpp.llama_get_embeddings_ith if embeddings else llama_cpp.llama_get_logits_ith
        rows = [numpy.ctypeslib.as_array(read(context, at), (width,)).copy() for at in range(len(tokens))]
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return numpy.stack(rows)

    def tokenize(self, text):
        text = text.encode()
        tokens = (llama_cpp.llama_token * (len(text) + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, text, len(text), tokens, len(tokens), True, True)
        return list(tokens[:count])

    def close(self):
        llama_cpp.llama_model_free(self.model)


def difference(found, expected):
    """Returns the largest difference relative to the spread of the expected numbers."""
    return float(numpy.abs(found - expected).max() / expected.std())


def logits(program, out, names):
    """Compares llama.cpp with transformers in f32 and f16. llama.cpp expands the f16 file to f32 before it runs it,
    because it rounds activations in products with f16. It also runs the file as it is, and differs from transformers
    at most twice as much as this rounding changes transformers' logits."""
    for name in names:
        dir = out / name
        expected = numpy.load(dir / "expected.npz")
        for quantization in ["f32", "f16"]:
            path = out / f"{name}-{quantization}.gguf"
            convert(program, dir, path, quantization)
            rounding = difference(expected[f"rounded_{quantization}"], expected[quantization])

            def compare(model, most, what):
                # More tokens than a sliding window of 8 has.
                found = model.run(expected["tokens"], embeddings=name == "bert")
                apart = difference(found, expected[quantization])
                report(apart < most, f"{name} {what}: logits differ by {apart:.1e} of their spread, at most {most:.0e}")

            model = Model(path)
            if quantization == "f16":
                expanded = out / f"{name}-expanded.gguf"
                requantize(path, expanded, "f32")
                full = Model(expanded)
                compare(full, 2 * rounding if name == "gpt2_table" else LIMIT, "f16 as f32")
                full.close()
                compare(model, 2 * rounding, "f16")
            else:
                compare(model, 2 * rounding if name == "gpt2_table" else LIMIT, "f32")
            if quantization == "f32" and (dir / "expected.json").exists():
                record = json.loads((dir / "expected.json").read_text())
                found = [model.tokenize(prompt) for prompt in record["prompts"]]
                wrong = [at for at, ids in enumerate(record["ids"]) if ids != found[at]]
                details = [f"{record['prompts'][at]!r}: {found[at]} != {record['ids'][at]}" for at in wrong[:2]]
                report(not wrong, f"{name}: {len(found) - len(wrong)} of {len(found)} prompts have equal tokens {details}")
                if "chat" in record:
                    report(render(model) == record["chat"], f"{name}: the chat template renders the same")
            model.close()


def render(model):
    """Renders the template in the file by llama-cpp-python's formatter."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    from gguf_models import MESSAGES

    text = lambda id: llama_cpp.llama_vocab_get_text(model.vocab, id).decode() if id >= 0 else ""
    formatter = Jinja2ChatFormatter(
        template=model.metadata("tokenizer.chat_template"),
        eos_token=text(llama_cpp.llama_vocab_eos(model.vocab)),
        bos_token=text(llama_cpp.llama_vocab_bos(model.vocab)),
    )
    return formatter(messages=MESSAGES).prompt


def quantized_bytes(program, out):
    import gguf
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(out / "wide")
    tokens = torch.arange(24)[None] * 7 % 300
    with torch.no_grad():
        expected = model(tokens).logits[0].numpy()
    weights = {tensor.name: tensor for tensor in read(gguf, program, out, "f32")}
    for quantization in ["f16", "bf16", "q8_0", "q4_0", "q6_k", "q4_k_m"]:
        ours = read(gguf, program, out, quantization)
        requantize(out / "wide-f32.gguf", out / f"theirs-{quantization}.gguf", quantization)
        theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(out / f"theirs-{quantization}.gguf").tensors}
        wrong = [tensor.name for tensor in ours if tensor.tensor_type != theirs[tensor.name].tensor_type]
        blocks, different, errors = 0, 0, numpy.zeros(2)
        for tensor in ours:
            both = [tensor, theirs[tensor.name]]
            size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
            bytes_of = [numpy.frombuffer(each.data.tobytes(), numpy.uint8).reshape(-1, size) for each in both]
            blocks += len(bytes_of[0])
            different += int((bytes_of[0] != bytes_of[1]).any(1).sum())
            exact = weights[tensor.name].data.reshape(-1)
            errors += [((gguf.quants.dequantize(each.data, each.tensor_type).reshape(-1) - exact) ** 2).sum() for each in both]
        model = Model(out / f"wide-{quantization}.gguf")
        apart = difference(model.run(tokens[0].tolist()), expected)
        model.close()
        # Sums in another order choose another scale now and then.
        ratio = errors[0] / errors[1]
        report(not wrong and len(ours) == len(theirs) and different <= blocks / 100 and abs(ratio - 1) < 1e-3,
               f"{quantization}: {blocks - different} of {blocks} blocks equal those of llama.cpp's quantizer, other "
               f"types: {wrong}, ratio of squared errors {ratio:.6f}; logits differ by {apart:.1e} of their spread")


def read(gguf, program, out, quantization):
    path = out / f"wide-{quantization}.gguf"
    convert(program, out / "wide", path, quantization)
    return gguf.GGUFReader(path).tensors


def greedy(program, out):
    import torch
    import transformers

    from gguf_models import TEXTS, byte_level

    tokenizer = byte_level()
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = transformers.LlamaForCausalLM(config)
    texts = [f"Question {at}: what is {at} plus {at}? Answer: {2 * at}.\n" for at in range(40)] + TEXTS
    rows = [tokenizer(text)["input_ids"][:64] for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        ids = rows[step % len(rows)]
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dir = out / "trained"
    model.eval().save_pretrained(dir)
    tokenizer.save_pretrained(dir)
    path = out / "trained.gguf"
    convert(program, dir, path, "q8_0")
    served = Model(path)
    equal = 0
    for at in range(20):
        prompt = tokenizer(f"Question {at}: what is")["input_ids"]
        ours, theirs = list(prompt), list(prompt)
        for _ in range(16):
            ours.append(int(served.run(ours)[-1].argmax()))
            with torch.no_grad():
                theirs.append(int(model(torch.tensor([theirs])).logits[0, -1].argmax()))
        equal += ours == theirs
    served.close()
    report(equal == 20, f"q8_0: {equal} of 20 greedy answers of 16 tokens are equal, loss {loss.item():.2f}")


def merge(program, out):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    kinds = {
        "plain": {}, "rslora": {"use_rslora": True}, "head": {"modules_to_save": ["lm_head"]},
        "patterns": {"alpha_pattern": {"v_proj": 3}, "rank_pattern": {"v_proj": 2}},
    }
    for name in ["llama", "gpt2"]:
        for kind, settings in kinds.items() if name == "llama" else [("plain", {})]:
            base = transformers.AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32)
            torch.manual_seed(0)
            config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False,
                                task_type="CAUSAL_LM", **settings)
            model = get_peft_model(base, config)
            adapters, merged = out / f"{name}-{kind}", out / f"{name}-{kind}-merged"
            model.save_pretrained(adapters)
            subprocess.run(["rm", "-rf", str(merged)], check=True)
            subprocess.run([program, "merge", str(out / name), str(adapters), str(merged)], check=True, capture_output=True)
            theirs = model.merge_and_unload().state_dict()
            ours = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
            apart = max(float((ours[key] - value).abs().max() / value.abs().max()) for key, value in theirs.items())
            report(apart < 1e-6, f"{name} {kind}: merged weights differ from merge_and_unload by {apart:.1e}")


MEASURE = """
import os, subprocess, sys
_, status, usage = os.wait4(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, 0)
print([usage.ru_utime, usage.ru_maxrss >> 10])
sys.exit(status != 0)
"""


def large(program, out):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(out / "large")
    tokens = [(7 * at * at + 3 * at + 5) % config.vocab_size for at in range(24)]

    def logits():
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    expected = {"f32": logits()}
    size = sum(parameter.numel() for parameter in model.parameters())
    # A file of 16 bits has matrices in f16, and norms in f32.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half().float())
    expected["f16"] = logits()
    print(f"      {size / 1e6:.0f} M parameters, {4 * size >> 20} MiB")
    for quantization in ["f32", "f16", "q8_0", "q4_k_m"]:
        path = out / f"large-{quantization}.gguf"
        path.unlink(missing_ok=True)
        start = time.monotonic()
        command = [program, "convert", out / "large", path, "--to", "gguf", "--quantize", quantization, "--json"]
        # The peak of a child is at least its parent's memory at the fork, so that a small process starts it.
        small = [sys.executable, "-c", MEASURE, *[str(word) for word in command]]
        user, memory = json.loads(subprocess.run(small, check=True, capture_output=True).stdout)
        seconds = time.monotonic() - start
        read = path
        if quantization == "f16":
            # As in `logits`: llama.cpp rounds activations in products with f16.
            read = out / "large-expanded.gguf"
            requantize(path, read, "f32")
        llama = Model(read)
        apart = difference(llama.run(tokens), expected.get(quantization, expected["f32"]))
        llama.close()
        fine = memory < 4 * size >> 22 and (quantization not in expected or apart < LIMIT)
        report(fine, f"{quantization}: {path.stat().st_size >> 20} MiB in {seconds:.1f} s ({user:.1f} s of "
                     f"user time), peak memory {memory} MiB; logits differ by {apart:.1e} of their spread")
        path.unlink()
        read.unlink(missing_ok=True)


if __name__ == "__main__":
    command, program, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    match command:
        case "logits":
            logits(program, out, sys.argv[4:] or sorted(path.parent.name for path in out.glob("*/expected.npz")))
        case "bytes":
            quantized_bytes(program, out)
        case "greedy":
            greedy(program, out)
        case "merge":
            merge(program, out)
        case "large":
            large(program, out)
    sys.exit(failed)
