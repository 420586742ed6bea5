"""``BalancedTrainer`` against a plain loop on one device, for the heads of transformers."""

import pytest
import torch
from helpers.trainers import MODELS, make_arguments, make_model, make_rows, pad, train, train_plainly

from balanced_parallel.integrations.transformers import BalancedTrainer


def train_by(head, arguments, rows=19, **settings):
    rows = make_rows(head, rows)
    return train(BalancedTrainer(make_model(head), arguments, train_dataset=rows, data_collator=pad, **settings))


@pytest.mark.parametrize("head", [head for head in MODELS if head != "routers"])
def test_heads(head):
    expected = train_plainly(make_model(head), make_rows(head, 19), 8)
    numbers = train_by(head, make_arguments(gradient_accumulation_steps=2), device_ids=["cpu"] * 2)
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected), rtol=1e-4, atol=1e-5)
