"""Records the results of transformers for the chat templates in tests/golden/chat: python chat_templates.py.
PyTorch is not needed."""

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
CHAT = HERE.parent / "golden" / "chat"
SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> "
    "<|user|> <|assistant|> <|system|> <|end|>"
).split()
TEXT = ["the user asks and the assistant answers, as the system says: hello there, how are you today?"] * 20


def message(role, content, **others):
    return {"role": role, "content": content, **others}


ONE = [message("user", "How are you?"), message("assistant", "Fine, and you?\n")]
TWO = [*ONE, message("user", " Grüße! 你好"), message("assistant", "skip\n\nhello")]
SYSTEM = [message("system", "Be brief. "), *TWO]
CALL = {"function": {"name": "add", "arguments": {"b": 2, "a": [1, 2.5, None, True], "é": "<&'\">"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <a> & b", "parameters": {}}}]
WITH_TOOLS = [
    message("user", "1 + 2?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    message("tool", "3"),
    message("assistant", "It is 3."),
]
# Names of templates, with conversations and other arguments.
CASES = {
    "chatml": [(ONE, {}), (TWO, {}), (SYSTEM, {}), (WITH_TOOLS, {"tools": TOOLS}), (SYSTEM, {"tools": TOOLS})],
    "llama3": [(ONE, {}), (SYSTEM, {}), (TWO, {"date_string": "01 Jan 2026"})],
    "gemma": [(ONE, {}), (TWO, {}), (SYSTEM, {}), (TWO[1:], {})],
    "mistral": [(ONE, {}), (TWO, {}), (SYSTEM, {}), (WITH_TOOLS[2:], {})],
    "phi3": [(ONE, {}), (TWO, {}), (SYSTEM, {})],
    "generation": [(ONE, {}), (TWO, {}), (SYSTEM, {})],
    "python": [
        (SYSTEM, {"extra": {"z": [1, {"y": "ü"}], "b": {}}}),
        ([message("user", "one two three", name="Ann")], {"extra": {"b": {"c": []}}}),
    ],
}


def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXT, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return bpe


def main():
    bpe = tokenizer()
    bpe.save(str(CHAT / "tokenizer.json"), pretty=False)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (CHAT / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    cases = []
    for name, conversations in CASES.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
        fast.chat_template = (CHAT / f"{name}.jinja").read_text()
        for messages, others in conversations:
            for prompt in (False, True):
                case = {"template": name, "line": {"messages": messages, **others}, "add_generation_prompt": prompt}
                try:
                    given = {"add_generation_prompt": prompt, **others}
                    case["text"] = fast.apply_chat_template(messages, tokenize=False, **given)
                    tokens = fast.apply_chat_template(
                        messages, return_dict=True, return_assistant_tokens_mask=name == "generation", **given
                    )
                    case["ids"] = tokens["input_ids"]
                    if name == "generation":
                        case["mask"] = tokens["assistant_masks"]
                except Exception as error:
                    case["error"] = str(error)
                cases.append(case)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (CHAT / "recorded.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
