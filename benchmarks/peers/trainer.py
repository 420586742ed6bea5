"""The ``Trainer`` of ``transformers``: https://huggingface.co/docs/transformers/main_classes/trainer

In one process it wraps the model in ``nn.DataParallel`` when it sees several GPUs; under torchrun, in DDP.
"""

import os
import tempfile

import torch
from transformers import Trainer, TrainingArguments


def train(model, rows, batch_size, micro_batch_size, lr):
    """Trains on all rows."""
    devices = int(os.environ.get("WORLD_SIZE", torch.accelerator.device_count()))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=batch_size // (micro_batch_size * devices),
        num_train_epochs=1,
        learning_rate=lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        use_cpu="WORLD_SIZE" in os.environ,  # simulation: gloo
    )
    Trainer(model, arguments, train_dataset=rows).train()
