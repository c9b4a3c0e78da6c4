"""Records runs of classifiers and embedding models, on one process: record_texts.py --out DIR [--runs NAME ..]

    pip install -r ../interop/requirements.txt sentence-transformers==6.2.0

Makes the small models and the data of `texts` (see README.md), trains the models as `train --task` does, and writes
DIR/texts/RUN.json. The losses are those of transformers' `AutoModelForSequenceClassification`, and of
sentence-transformers' `MultipleNegativesRankingLoss` of the whole batch. With --keep, models and data in this directory
are used as they are.
"""

import argparse
import csv
import json
import pathlib
import random
import warnings

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, LlamaConfig
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent / "texts"
WORDS = "good bad fine poor great awful nice dull the a film book song was and very not it more than".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LABELS = ["negative", "neutral", "positive"]
STEPS, RECORDS, LENGTH, CLIP = 20, 6, 24, 1.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = {"hidden_size": 20, "intermediate_size": 43, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": len(SPECIAL) + len(WORDS), "max_position_embeddings": 32, "initializer_range": 0.2}
CONFIGS = {
    "bert": BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0),
    "llama": LlamaConfig(
        **SIZES, num_key_value_heads=2, head_dim=6, use_cache=False, pad_token_id=0, bos_token_id=None, eos_token_id=None
    ),
}
RUNS = {"classify_bert": "bert", "classify_llama": "llama", "embed_bert": "bert", "embed_llama": "llama"}


def tokenizer(kind):
    """A tokenizer of words. BERT's adds special tokens, and segment types of pairs."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        ends = [(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")]
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if kind == "bert":
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        names |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def text(source, longest=30):
    return " ".join(source.choices(WORDS, k=source.randint(1, longest)))


def write_data():
    """Records of many lengths. Some are longer than the sequences, and only BERT's have second texts."""
    source = random.Random(5)
    with open(HERE / "labelled.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "text_pair", "label"])
        for _ in range(STEPS * RECORDS):
            label = source.randrange(3)
            writer.writerow([f"{text(source)} {WORDS[label]}", text(source, 8), LABELS[label]])
    with open(HERE / "single.jsonl", "w") as file:
        for _ in range(STEPS * RECORDS):
            label = source.randrange(3)
            file.write(json.dumps({"text": f"{text(source)} {WORDS[label]}", "label": label}) + "\n")
    for name, columns in [("pairs", ["anchor", "positive"]), ("triplets", ["anchor", "positive", "negative"])]:
        with open(HERE / f"{name}.jsonl", "w") as file:
            for _ in range(STEPS * RECORDS):
                anchor = text(source)
                texts = [anchor, f"{text(source, 4)} {anchor}", text(source, 12)]
                file.write(json.dumps(dict(zip(columns, texts))) + "\n")


def make(kind):
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[kind], dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                tensor += 0.2 * torch.randn_like(tensor)
    model.config.id2label = dict(enumerate(LABELS))
    model.config.label2id = {label: i for i, label in enumerate(LABELS)}
    model = AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(0.2 * torch.randn_like(tensor) + ("norm" in name.lower() and name.endswith("weight")))
    model.save_pretrained(HERE / kind)
    tokenizer(kind).save_pretrained(HERE / kind)


def encoded(tokens, *texts):
    """Texts, cut and padded as transformers does."""
    return tokens(*texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")


def classify(kind):
    """The model, and the loss of transformers for each step."""
    model = AutoModelForSequenceClassification.from_pretrained(HERE / kind, dtype=torch.float32).train()
    tokens = PreTrainedTokenizerFast.from_pretrained(HERE / kind)
    if kind == "bert":
        rows = [*csv.DictReader(open(HERE / "labelled.csv", newline=""))]
        labels = [model.config.label2id[row["label"]] for row in rows]
    else:
        rows = [json.loads(line) for line in open(HERE / "single.jsonl")]
        labels = [row["label"] for row in rows]

    def loss(first):
        part = rows[first : first + RECORDS]
        columns = [[row[name] for row in part] for name in ("text", "text_pair") if name in part[0]]
        inputs = encoded(tokens, *columns)
        return model(**inputs, labels=torch.tensor(labels[first : first + RECORDS])).loss

    return model, loss


def embed(kind):
    """The model, and the loss of sentence-transformers for each step."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model = AutoModel.from_pretrained(HERE / kind, dtype=torch.float32)
    width = model.config.hidden_size
    transformer = Transformer(str(HERE / kind), max_seq_length=LENGTH)
    whole = SentenceTransformer(modules=[transformer, Pooling(width, pooling_mode="mean")], device="cpu").train()
    criterion = MultipleNegativesRankingLoss(whole)
    file = "triplets" if kind == "bert" else "pairs"
    rows = [json.loads(line) for line in open(HERE / f"{file}.jsonl")]

    def loss(first):
        part = rows[first : first + RECORDS]
        columns = [[row[name] for row in part] for name in part[0]]
        features = [whole.preprocess(texts) for texts in columns]
        assert all(feature["input_ids"].shape[1] <= LENGTH for feature in features)
        return criterion(features, torch.zeros(RECORDS))

    return whole, loss


def train(name):
    kind = RUNS[name]
    model, loss_of = classify(kind) if name.startswith("classify") else embed(kind)
    parameters = [parameter for fqn, parameter in model.named_parameters()]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    trajectory = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step * RECORDS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP).item()
        optimizer.step()
        trajectory.append({"step": step + 1, "loss": loss.item(), "grad_norm": norm})
    return trajectory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=RUNS)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not options.keep:
        HERE.mkdir(exist_ok=True)
        write_data()
        for kind in CONFIGS:
            make(kind)
    for name in options.runs:
        settings = {"torch": torch.__version__, "records": RECORDS, "seq_len": LENGTH, "steps": STEPS}
        settings |= {"clip_grad_norm": CLIP} | ADAMW | {"trajectory": train(name)}
        (options.out / "texts").mkdir(parents=True, exist_ok=True)
        (options.out / "texts" / f"{name}.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
