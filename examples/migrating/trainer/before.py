"""Trains a language model with the Trainer of transformers on all GPUs: python before.py"""

import tempfile

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

ROWS, LENGTH, WORDS = 50, 24, 97
BATCH_SIZE, ACCUMULATION = 2, 2


def load_rows():
    """Returns lines of 2 to 24 words. Labels of the padding are -100."""
    words = torch.randint(WORDS, (ROWS, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    labels = words.where(torch.arange(LENGTH) < lengths, -100)
    return [{"input_ids": words[row], "labels": labels[row]} for row in range(ROWS)]


def make_net():
    """Returns a small GPT-NeoX with random weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=WORDS, use_cache=False, **sizes))


def main():
    """Trains for one epoch. Returns the module and the losses that a log shows."""
    torch.manual_seed(0)
    model = make_net()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=5.0,
        logging_steps=1,
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=load_rows())
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
