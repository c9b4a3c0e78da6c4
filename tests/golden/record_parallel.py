"""Records runs of PyTorch's tensor parallelism with FSDP2, on four CPU ranks:
torchrun --nproc-per-node 4 record_parallel.py --out DIR [--models NAME ..] [--runs RUN ..] [--from DIR] [--checkpoints]

    pip install -r ../interop/requirements.txt

Trains each model on each mesh as README.md describes, and writes DIR/NAME/RUN.json. With --from, the runs resume from
the checkpoint DIR/NAME/step-N, and the files have the steps after it. With --checkpoints, the run `dp2_tp2_sequence`
also writes DIR/NAME/final.safetensors and, for a model with an untied head, DIR/NAME/dcp_step10 and
DIR/NAME/dcp_step10_hf; a run that resumes from step 10 writes the loaded state.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import warnings

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from record import ADAMW, CLIP, FLAT, HERE, LENGTH, STEPS, resumed, save

# The sizes of tensor parallelism that divide each model.
MODELS = {"llama_tp_tiny": (2, 4), "llama_tp_tied_tiny": (2,)}
SEQUENCES = 6
SAVED = "dp2_tp2_sequence"
SAVE_AT = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """The numbers of replicas, shards and tensor parallel ranks, and whether the latter use sequence parallelism."""

    replicate: int
    shard: int
    tensor: int
    sequence: bool = False

    def meshes(self):
        """The data parallel mesh and the tensor parallel mesh."""
        sizes = (self.replicate, self.shard, self.tensor)
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        return mesh["dp_replicate", "dp_shard"] if self.replicate > 1 else mesh["dp_shard"], mesh["tp"]


MESHES = {"dp2_tp2": Run(1, 2, 2), "tp4": Run(1, 1, 4), "replicate2_tp2": Run(2, 1, 2)}
# By file name.
RUNS = MESHES | {f"{name}_sequence": dataclasses.replace(run, sequence=True) for name, run in MESHES.items()}


def parallelized(model, mesh, sequence):
    """The usual plan of a Llama. Sequence parallelism shards the activations between layers along the sequence."""
    between = Shard(1) if sequence else Replicate()
    column, row = ColwiseParallel, RowwiseParallel
    block = {f"self_attn.{name}_proj": column() for name in "qkv"}
    block |= {"self_attn.o_proj": row(output_layouts=between), "mlp.down_proj": row(output_layouts=between)}
    block |= {"mlp.gate_proj": column(), "mlp.up_proj": column()}
    root = {"model.embed_tokens": row(input_layouts=Replicate(), output_layouts=between)}
    root["lm_head"] = column(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    if sequence:
        whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        attention = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
        attention |= {"desired_input_kwarg_layouts": {"hidden_states": Replicate()}}
        block |= {"self_attn": PrepareModuleInput(**attention), "mlp": PrepareModuleInput(**whole)}
        block |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        root["model.norm"] = SequenceParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, root)
    if model.config.tie_word_embeddings:
        # Each has become a separate parameter with the same layout.
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def sharded(name, run):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="sdpa").train()
    data_mesh, tensor_mesh = run.meshes()
    parallelized(model, tensor_mesh, run.sequence)
    for block in model.model.layers:
        fully_shard(block, mesh=data_mesh)
    return fully_shard(model, mesh=data_mesh), data_mesh, tensor_mesh


def batch(tokens, step, run, mesh):
    """The sequences of this rank and its tensor parallel ranks, and the next tokens."""
    ranks = run.replicate * run.shard
    coordinate = mesh.get_coordinate()
    rank = coordinate[0] if len(coordinate) == 1 else coordinate[0] * run.shard + coordinate[1]
    size = SEQUENCES // ranks
    first = ((step - 1) * ranks + rank) * size
    starts = [sequence * LENGTH for sequence in range(first, first + size)]
    return [torch.stack([tokens[start + shift :][:LENGTH] for start in starts]) for shift in (0, 1)]


def loss_of(model, inputs, targets):
    # Transformers would treat a rank's part of the sequence as all of it.
    positions = torch.arange(LENGTH).unsqueeze(0)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    logits = model(inputs, attention_mask=mask, position_ids=positions).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def clipped(parameters):
    """Replaces `clip_grad_norm_`, which rejects gradients on different meshes: without sequence parallelism norms are
    on the data parallel mesh only. Each gradient's norm is computed over its own mesh."""
    gradients = [parameter.grad for parameter in parameters]
    norms = [gradient.norm() for gradient in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(norms).norm()
    for gradient in gradients:
        gradient.to_local().mul_((CLIP / (total + 1e-6)).clamp(max=1.0))
    return total.item()


def checkpointed(model, optim, out):
    """Saves in both layouts, a tied head only once."""
    if model.config.tie_word_embeddings:
        return
    state = dict(zip(("model", "optim"), get_state_dict(model, optim, options=FLAT)))
    dcp.save(state, checkpoint_id=out / f"dcp_step{SAVE_AT}")
    writer = HuggingFaceStorageWriter(str(out / f"dcp_step{SAVE_AT}_hf"), save_distributed=True)
    dcp.save(state["model"], storage_writer=writer)


def train(name, run, checkpoint, out):
    tokens = torch.from_numpy(numpy.fromfile(HERE / "tokens.bin", dtype="<u2").astype("int64"))
    model, data_mesh, tensor_mesh = sharded(name, run)
    classic = checkpoint is not None and (checkpoint / ".metadata").exists()
    # Updated one at a time, because they are on different meshes. A classic checkpoint contains the learning rate.
    optim = torch.optim.AdamW(model.parameters(), **ADAMW | ({"lr": 0.0} if classic else {}), foreach=False)
    done = resumed(model, optim, checkpoint) if checkpoint else 0
    if out and done == SAVE_AT:
        checkpointed(model, optim, out)
    trajectory = []
    for step in range(done + 1, STEPS + 1):
        inputs, targets = batch(tokens, step, run, data_mesh)
        with loss_parallel():
            loss = loss_of(model, inputs, targets)
            loss.backward()
        norm = clipped(list(model.parameters()))
        optim.step()
        optim.zero_grad()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        # Tensor parallel ranks have the same loss.
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        trajectory.append({"step": step, "loss": mean.item(), "grad_norm": norm})
        if out and step == SAVE_AT:
            checkpointed(model, optim, out)
    if out:
        save(name, model, out / "final.safetensors")
    return trajectory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
    parser.add_argument("--from", dest="checkpoints", type=pathlib.Path)
    parser.add_argument("--checkpoints", dest="save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in options.models:
        for file in options.runs:
            run = RUNS[file]
            if run.tensor not in MODELS[name]:
                continue
            folder = options.out / name
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint = options.checkpoints and next((options.checkpoints / name).glob("step-*"))
            trajectory = train(name, run, checkpoint, folder if options.save and file == SAVED else None)
            settings = {"torch": torch.__version__, **dataclasses.asdict(run), "seq_len": LENGTH}
            settings |= {"batch_per_rank": SEQUENCES // (run.replicate * run.shard), "steps": STEPS}
            settings |= {"clip_grad_norm": CLIP, **ADAMW, "trajectory": trajectory}
            if dist.get_rank() == 0:
                (folder / f"{file}.json").write_text(json.dumps(settings, indent=1))
    dist.destroy_process_group()
    # During the interpreter's shutdown, a thread of PyTorch sometimes aborts the process, although everything is
    # written.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
