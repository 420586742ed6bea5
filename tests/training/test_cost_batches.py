"""``collate=``: the collators of Hugging Face and of torch fit as they are."""

import copy

import pytest
import torch
from helpers.problems import assert_same_gradients, gradients
from torch import nn
from torch.utils.data import default_collate

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep


def train(net, criterion, samples, **settings):
    model = DataParallelModel(net, ["cpu"] * 3)
    step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.0), **settings)
    return step(samples, return_outputs=True)


def test_a_collator_of_hugging_face(double):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, "a"))
    collate = transformers.DataCollatorForTokenClassification(
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    )
    samples = [
        {"input_ids": torch.randint(1, 30, (n,)).tolist(), "labels": torch.randint(5, (n,)).tolist(), "attention_mask": [1] * n}
        for n in (3, 17, 5, 2, 9, 4, 4)
    ]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 5}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net = transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=30, **sizes, **rates))
    plain = copy.deepcopy(net)
    expected = plain(**collate(samples))
    expected.loss.backward()
    criterion = DataParallelCriterion(lambda output, labels: output.loss, weight=lambda output, labels: (labels != -100).sum())
    settings = {"cost": lambda sample: len(sample["input_ids"]), "collate": collate, "micro_batch_cost": 20}
    loss, outputs = train(net, criterion, samples, **settings)
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), gradients(plain))
    assert outputs.logits.gather().shape == expected.logits.shape


def test_default_collate(double):
    samples = [(torch.randn(4), number % 3) for number in range(7)]  # it returns a list
    net = nn.Linear(4, 3)
    expected = nn.functional.cross_entropy(net(torch.stack([row for row, _ in samples])), torch.arange(7) % 3)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    loss, outputs = train(net, criterion, samples, cost=lambda sample: 1.0, collate=default_collate)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    assert outputs.gather().shape == (7, 3)
