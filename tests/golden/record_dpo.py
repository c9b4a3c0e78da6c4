"""Records preference tuning with TRL's DPOTrainer, in one process on the CPU: record_dpo.py --out DIR [--micro-batches N]

    pip install -r ../interop/requirements.txt trl==1.16.0

Writes DIR/dpo (pairs.jsonl, adapters/, run*.json) and DIR/chat/preferences.json, which README.md describes. The model
is llama3_tiny. Its tokens are the bytes of the text, as in `train` without a tokenizer.
"""

import argparse
import json
import pathlib
import random
import tempfile
import warnings

import peft
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE / "llama3_tiny"
VOCABULARY = 131
LENGTH, STEPS, PAIRS = 32, 20, 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
REWARDS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]
# By file name: the adapters, and beta. `new` adapters add nothing before the first step.
RUNS = {"run": (None, 0.1), "run_lora": ("new", 0.3), "run_lora_from": ("trained", 0.1)}

SKY = [{"role": "user", "content": "What color is the sky?"}]
SYSTEM = [{"role": "system", "content": "Be brief. "}, *SKY]
BLUE = [{"role": "assistant", "content": "It is blue."}]
GREEN = [{"role": "assistant", "content": "It is green, the user says.\n"}]
AGAIN = [*BLUE, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
CONVERSATIONS = [
    {"prompt": SKY, "chosen": BLUE, "rejected": GREEN},
    {"prompt": SYSTEM, "chosen": AGAIN, "rejected": GREEN},
    {"chosen": SKY + BLUE, "rejected": SKY + GREEN},
    {"chosen": SKY + AGAIN, "rejected": SKY + BLUE + GREEN},
]
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    # The tokens of the prompt's end depend on what follows.
    {"prompt": "the assist", "chosen": "ant answers", "rejected": " the user"},
    {"chosen": "hello there, you", "rejected": "hello there, how"},
]
TEMPLATES = ["chatml", "llama3", "phi3"]


def pairs():
    """Texts of many lengths: some are longer than a sequence, and two prompts fill it."""
    draw = random.Random(13)
    text = lambda least, most: "".join(draw.choices("abcdef ,.", k=draw.randint(least, most)))
    for number in range(STEPS * PAIRS + 2):
        prompt = text(LENGTH + 1, LENGTH + 4) if number in (9, 50) else text(1, 24)
        yield {"prompt": prompt, "chosen": text(1, 18) + prompt[-1], "rejected": text(1, 18) + "!"}


def bytes_tokenizer():
    vocabulary = {chr(id): id for id in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\0", pad_token="\0")


class Recorder(DPOTrainer):
    """Reads pairs in order, uses AdamW on all parameters, and records the steps."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, **ADAMW)
        return self.optimizer

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        last = self.state.log_history[-1]
        if "grad_norm" in last:
            loss = sum(self.losses) / len(self.losses)
            step = {"step": last["step"], "loss": loss, "grad_norm": last["grad_norm"]}
            self.trajectory = [*getattr(self, "trajectory", []), step | {name: last[name] for name in REWARDS}]
            self.losses = []


def load():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")


def make_adapters(out):
    torch.manual_seed(17)
    model = get_peft_model(load(), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_B" in name:
                tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(out)
    config = out / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": None}
    fields["target_modules"].sort()
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (out / "README.md").unlink(missing_ok=True)


def train(file, adapters, micro_batches, folder):
    kind, beta = RUNS[file]
    arguments = DPOConfig(
        folder,
        beta=beta,
        max_length=LENGTH + 1,
        max_steps=STEPS,
        per_device_train_batch_size=PAIRS // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=CLIP,
        learning_rate=ADAMW["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    model, others = load(), {}
    if kind == "trained":
        model = PeftModel.from_pretrained(model, adapters, is_trainable=True)
    elif kind == "new":
        others["peft_config"] = LoraConfig(**LORA, task_type="CAUSAL_LM")
    else:
        others["ref_model"] = load()
    data = Dataset.from_list(list(pairs()))
    trainer = Recorder(model, args=arguments, train_dataset=data, processing_class=bytes_tokenizer(), **others)
    assert len(trainer.train_dataset) == STEPS * PAIRS
    if kind == "new":
        start = load_file(adapters / "adapter_model.safetensors")
        start = {name: tensor * ("lora_A" in name) for name, tensor in start.items()}
        set_peft_model_state_dict(trainer.model, start)
    trainer.train()
    settings = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    settings |= {"peft": peft.__version__, "beta": beta, "adapters": kind, "micro_batches": micro_batches}
    settings |= {"pairs": PAIRS, "seq_len": LENGTH, "steps": STEPS, "clip_grad_norm": CLIP} | ADAMW
    return settings | {"trajectory": trainer.trajectory}


def tokenized():
    """Lines with the tokens that TRL makes of them: prompt, chosen and rejected."""
    for name in TEMPLATES:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(HERE / "chat" / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        tokenizer.chat_template = (HERE / "chat" / f"{name}.jinja").read_text()
        trainer = DPOTrainer.__new__(DPOTrainer)
        trainer._tokenizer = tokenizer
        for line in CONVERSATIONS + (TEXTS if name == TEMPLATES[0] else []):
            arguments = DPOConfig(tempfile.gettempdir(), max_length=None, bf16=False, use_cpu=True)
            read = trainer._prepare_dataset(Dataset.from_list([line]), tokenizer, arguments, "train")[0]
            ids = {part: read[f"{part}_ids"] for part in ("prompt", "chosen", "rejected")}
            yield {"template": name, "line": line, **ids}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--micro-batches", type=int, default=1, choices=[1, 2, 4])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = options.out / "dpo"
    out.mkdir(parents=True, exist_ok=True)
    (out / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs()))
    make_adapters(out / "adapters")
    for file in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            recorded = train(file, out / "adapters", options.micro_batches, folder)
        (out / f"{file}.json").write_text(json.dumps(recorded, indent=1) + "\n")
    (options.out / "chat").mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in tokenized())
    (options.out / "chat" / "preferences.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
