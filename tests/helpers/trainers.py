"""Small models of transformers with random rows, trained by a ``Trainer`` and by a plain loop on one device."""

import tempfile

import torch
import transformers
from helpers.optimizers import sgd
from torch.nn import functional as F
from transformers import TrainingArguments

WORDS = 61
LENGTH = 9
LLAMA = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES = {**LLAMA, "num_attention_heads": 2, "max_position_embeddings": 16}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROUTERS = {
    "num_local_experts": 4,
    "num_key_value_heads": 2,
    "num_attention_heads": 2,
    "output_router_logits": True,
}
GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_ff": 32,
    "d_kv": 8,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
}

# Each head has a class, a configuration and targets.
MODELS = {
    "classes": ("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": 3}, "class"),
    "classes of gpt2": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {**GPT2, **DROPOUT, "pad_token_id": 0},
        "class of 2",
    ),
    "numbers": (
        "BertForSequenceClassification",
        "BertConfig",
        {**SIZES, "num_labels": 1},
        "number",
    ),
    "several classes": (
        "BertForSequenceClassification",
        "BertConfig",
        {**SIZES, "num_labels": 3},
        "several",
    ),
    "choices": ("BertForMultipleChoice", "BertConfig", SIZES, "choice"),
    "tags": ("BertForTokenClassification", "BertConfig", {**SIZES, "num_labels": 5}, "tags"),
    "masked words": ("BertForMaskedLM", "BertConfig", SIZES, "words"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, **DROPOUT}, "words"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_attention_heads": 2}, "words"),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "dropout_rate": 0.0}, "words"),
    "replaced words": (
        "ElectraForPreTraining",
        "ElectraConfig",
        {**SIZES, "embedding_size": 16},
        "replaced",
    ),
    "answers": ("BertForQuestionAnswering", "BertConfig", SIZES, "answer"),
    "images": (
        "ViTForImageClassification",
        "ViTConfig",
        {**VISION, "patch_size": 4, "num_labels": 3},
        "image",
    ),
    "routers": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, **ROUTERS}, "words"),
    "sentences": ("BertForPreTraining", "BertConfig", SIZES, "sentences"),
}


def make_model(head):
    """Returns a model of transformers with random weights, always the same ones, and no dropout."""
    kind, config, sizes, _ = MODELS[head]
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**sizes)
    if head == "several classes":
        settings.problem_type = "multi_label_classification"
    return getattr(transformers, kind)(settings)


def make_rows(head, number):
    """Returns rows of 2 to 9 words, padded to 9, and their targets. Many targets are not counted."""
    kind = MODELS[head][3]
    generator = torch.Generator().manual_seed(1)

    def draw(high, *size, low=0):
        return torch.randint(low, high, size, generator=generator)

    rows = []
    for _ in range(number):
        length = int(draw(LENGTH + 1, 1, low=2))
        words = draw(WORDS, LENGTH, low=2)
        counted = torch.arange(LENGTH) < length
        row = {"input_ids": words.where(counted, torch.tensor(0)), "attention_mask": counted.long()}
        if kind == "tags":
            row["labels"] = draw(5, LENGTH).where(counted, -100)
        elif kind in ("words", "sentences"):
            row["labels"] = words.where(counted, -100)
        elif kind == "replaced":
            row["labels"] = words % 2  # the loss leaves out what the mask leaves out
        if kind == "sentences":
            row["next_sentence_label"] = draw(2, 1)[0]
        elif kind.startswith("class"):
            row["labels"] = draw(3 if kind == "class" else 2, 1)[0]
        elif kind == "number":
            row["labels"] = torch.randn((), generator=generator)
        elif kind == "several":
            row["labels"] = draw(2, 3).float()
        elif kind == "choice":
            row = {name: torch.stack([value, value.flip(0)]) for name, value in row.items()} | {
                "labels": draw(2, 1)[0]
            }
        elif kind == "answer":
            inside = draw(
                2, 2
            ).bool()  # Otherwise they are after the text, where they do not count.
            row |= dict(
                zip(
                    ("start_positions", "end_positions"),
                    draw(length, 2).where(inside, LENGTH),
                    strict=True,
                )
            )
        elif kind == "image":
            row = {
                "pixel_values": torch.randn(3, 8, 8, generator=generator),
                "labels": draw(3, 1)[0],
            }
        rows.append(row)
    return rows


def pad(rows):
    """Collates rows, without the columns that are padding in all of them. An answer may be in the padding, so it stays."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    is_cut = "attention_mask" in batch and "start_positions" not in batch
    longest = int(batch["attention_mask"].sum(1).max()) if is_cut else LENGTH
    return {
        name: value[:, :longest].contiguous() if value.shape[1:] == (LENGTH,) else value
        for name, value in batch.items()
    }


def model_loss(model, batch):
    """Returns the loss that the model computes."""
    return model(**batch).loss


def train_plainly(model, rows, window, loss_of=model_loss, learning_rate=0.5):
    """Trains on one device, with a whole window at a time. Returns loss and norm of the gradient of each update."""
    optimizer = sgd(model, lr=learning_rate)
    numbers = []
    for start in range(0, len(rows), window):
        loss = loss_of(model.train(), pad(rows[start : start + window]))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    return numbers


ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "train_sampling_strategy": "sequential",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_arguments(folder=None, **settings):
    """Returns arguments of a Trainer that trains as :func:`train_plainly` does, with two rows for each device."""
    return TrainingArguments(folder or tempfile.mkdtemp(), **{**ARGUMENTS, **settings})


def train(trainer, **settings):
    """Trains. Returns loss and norm of the gradient of each update, as the log has them."""
    trainer.train(**settings)
    return [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def shifted_loss(outputs, labels, num_items_in_batch=None):
    """Returns the loss of a causal model, as users of ``compute_loss_func`` write it."""
    total = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return total / (
        (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )
