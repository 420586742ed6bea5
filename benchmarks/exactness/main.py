"""Errors of the gradient of one update, compared with the one big batch, for frameworks used as their documentation says.

One update of a small GPT-2 (random weights, float64, no dropout) on ragged text: 2 ranks x 4 micro-batches of 2 rows, whose
numbers of target words differ. Run without arguments, it measures every framework and writes the README beside it.
"""

import argparse
import contextlib
import importlib.metadata
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reports import environment  # noqa: E402

RANKS, MICRO_BATCHES, ROWS, LENGTH, WORDS = 2, 4, 2, 24, 97


def build(loss_type: str | None = None) -> GPT2LMHeadModel:
    """Returns a small GPT-2 in float64, equal at each call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends, use_cache=False)).double()
    model.loss_function = causal_loss
    if loss_type is not None:
        model.loss_type = loss_type
    return model


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | None = None, **_: Any) -> Tensor:
    """transformers' own loss (ForCausalLMLoss), without its cast to float32, which would hide every error below 1e-7."""
    flat, targets = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(flat, targets)
    return nn.functional.cross_entropy(flat, targets, reduction="sum") / num_items_in_batch


def make_rows() -> tuple[Tensor, Tensor]:
    """Returns tokens and labels of all rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (RANKS * MICRO_BATCHES * ROWS, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (len(tokens), 1), generator=generator)  # the rest of a row is padding
    labels = tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return tokens, labels


def rank_micro_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the micro-batches of one rank."""
    tokens, labels = make_rows()
    rows = slice(rank * MICRO_BATCHES * ROWS, (rank + 1) * MICRO_BATCHES * ROWS)
    return list(zip(tokens[rows].split(ROWS), labels[rows].split(ROWS), strict=True))


def run_plain() -> nn.Module:
    """The plain program: the one big batch."""
    model, (tokens, labels) = build(), make_rows()
    model(input_ids=tokens, labels=labels).loss.backward()
    return model


def run_ddp() -> nn.Module:
    """The mean loss of each micro-batch over the number of micro-batches, no_sync until the last."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(build())
    for index, (tokens, labels) in enumerate(rank_micro_batches(dist.get_rank())):
        with contextlib.nullcontext() if index == MICRO_BATCHES - 1 else model.no_sync():
            (model(input_ids=tokens, labels=labels).loss / MICRO_BATCHES).backward()
    return model.module


def run_accelerate() -> nn.Module:
    """The loop of its guide, with gradient_accumulation_steps, accumulate() and backward()."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model = accelerator.prepare_model(build())
    for tokens, labels in rank_micro_batches(accelerator.process_index):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=labels).loss)
    return accelerator.unwrap_model(model)


def run_fabric() -> nn.Module:
    """The loop of its guide, with no_backward_sync() while accumulating, and the division that its sample leaves out."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend="gloo"), precision="64-true")
    fabric.launch()
    model = fabric.setup_module(build())
    for index, (tokens, labels) in enumerate(rank_micro_batches(fabric.global_rank)):
        with fabric.no_backward_sync(model, enabled=index < MICRO_BATCHES - 1):
            fabric.backward(model(input_ids=tokens, labels=labels).loss / MICRO_BATCHES)
    return model.module


def run_trainer() -> nn.Module:
    """The default loop: a window is fetched ahead, and the model divides by num_items_in_batch of all ranks. This number includes
    the first label of each row, which is not predicted, because the name of GPT2LMHeadModel does not end in ForCausalLM."""
    return train_with_trainer(None)


def run_told_trainer() -> nn.Module:
    """The same with model.loss_type = "ForCausalLM" set by hand, which tells it that labels are shifted."""
    return train_with_trainer("ForCausalLM")


def train_with_trainer(loss_type: str | None) -> nn.Module:
    """Runs one update of the Trainer. Returns a model with its gradients."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    tokens, labels = make_rows()
    rows = [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]
    kept = build(loss_type)

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
            for parameter, copy in zip(model.parameters(), kept.parameters(), strict=True):
                copy.grad = parameter.grad.clone()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=1,
            max_grad_norm=0.0,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        Trainer(build(loss_type), arguments, train_dataset=rows, callbacks=[Keep()]).train()
    return kept


def run_ours() -> nn.Module:
    """A loop of parallelize(), step.add() for each micro-batch and step.apply(). Nothing is fetched ahead."""
    from balanced_parallel import TrainStep, parallelize

    def counted(output: object, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum()

    module = build()
    model, criterion = parallelize(module, lambda output, labels: output.loss, weight=counted)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    for tokens, labels in rank_micro_batches(dist.get_rank()):
        step.add({"input_ids": tokens, "labels": labels}, labels)
    step.apply()
    return module


FRAMEWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "hand-written DDP": ("torch", run_ddp),
    "Accelerate": ("accelerate", run_accelerate),
    "Lightning Fabric": ("lightning", run_fabric),
    "HF Trainer": ("transformers", run_trainer),
    "HF Trainer, told of the shift": ("transformers", run_told_trainer),
    "balanced_parallel": ("balanced-parallel", run_ours),
}


def measure(name: str, folder: Path) -> dict[str, Tensor]:
    """Returns the gradients of one framework, run on two new ranks."""
    target = folder / "gradients.pt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*launcher, str(HERE / "main.py"), "--only", name, "--save", str(target)], check=True, timeout=600)
    found: dict[str, Tensor] = torch.load(target)
    return found


def save_gradients(model: nn.Module, target: Path) -> None:
    """Saves the gradients of rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, target)


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the norm of the difference over the norm of the plain gradient, over all parameters."""
    difference = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return float(difference / torch.stack([gradient.norm() for gradient in expected.values()]).norm())


def report(errors: dict[str, float]) -> str:
    """Returns the text of the README."""
    labels = make_rows()[1]
    counts = (labels[:, 1:] != -100).sum(1).view(RANKS, MICRO_BATCHES, ROWS).sum(2).tolist()
    versions = {name: f"{package} {importlib.metadata.version(package)}" for name, (package, _) in FRAMEWORKS.items()}
    rows = [f"| {name} | {versions[name]} | {error:.1e} |" for name, error in errors.items()]
    idioms = [f"- {name}. {' '.join((run.__doc__ or '').split())}" for name, (_, run) in FRAMEWORKS.items()]
    return "\n".join(
        [
            "# Is the gradient of an update that of the one big batch?",
            "",
            (__doc__ or "").split("Run without")[0].split("\n", 2)[2].strip(),
            f"Target words of the micro-batches: {counts[0]} on the first rank, {counts[1]} on the second.",
            "",
            "| | version | relative error of the gradient |",
            "|---|---|---|",
            *rows,
            "",
            "Each by its documented idiom:",
            "",
            *idioms,
            "",
            f"Environment: {environment()}, CPU, gloo. "
            "The error is the norm of the difference over the norm of the plain program's gradient.",
            "",
            "To reproduce (it writes this file):",
            "",
            "```bash",
            ".venv/bin/pip install -c constraints.txt -r benchmarks/exactness/requirements.txt -e .",
            ".venv/bin/python benchmarks/exactness/main.py",
            "```",
            "",
        ]
    )


def main() -> None:
    """Measures every framework, or runs the one of ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FRAMEWORKS, help="run one framework on this rank (for the launcher)")
    parser.add_argument("--save", type=Path, help="where its gradients go")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.only:
        save_gradients(FRAMEWORKS[flags.only][1](), flags.save)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    expected = {name: parameter.grad for name, parameter in run_plain().named_parameters() if parameter.grad is not None}
    with tempfile.TemporaryDirectory() as folder:
        errors = {name: relative_error(measure(name, Path(folder)), expected) for name in FRAMEWORKS}
    text = report(errors)
    (HERE / "README.md").write_text(text)
    print(text)
    if errors["balanced_parallel"] > 1e-10:
        sys.exit("balanced_parallel is off by more than 1e-10")


if __name__ == "__main__":
    main()
