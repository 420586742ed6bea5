"""Trains models of transformers whose loss is the sum of two means with different counts: pretraining of BERT, and answers."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

ROWS, LENGTH, VOCABULARY = 7, 12, 50
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


def pretraining_losses(out, labels, following):
    """Returns the means over the masked words and over the rows. The model adds them."""
    words = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    return words, F.cross_entropy(out.seq_relationship_logits, following)


def answer_losses(out, starts, ends):
    """Returns half of the means over the starts and over the ends that are in the text."""
    length = out.start_logits.size(1)
    start = F.cross_entropy(out.start_logits, starts.clamp(max=length), ignore_index=length)
    return start / 2, F.cross_entropy(out.end_logits, ends.clamp(max=length), ignore_index=length) / 2


def train(model_class, targets, criterion):
    """Makes an update. Returns its loss and that of the model itself, with all rows."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    net = model_class(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    inputs = {"input_ids": torch.randint(VOCABULARY, (ROWS, LENGTH))}
    expected = net(**inputs, **targets).loss.item()
    model = DataParallelModel(net, DEVICES)
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters(), lr=1e-3), micro_batch_size=2)
    return step(inputs, tuple(targets.values())).item(), expected


def main():
    """Returns a pair of losses for each model."""
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH)).where(torch.rand(ROWS, LENGTH) < 0.4, -100)
    starts, ends = torch.randint(LENGTH + 2, (2, ROWS))  # from LENGTH on they are outside of the text
    pretraining = DataParallelCriterion(
        pretraining_losses,
        weight=(lambda labels, following: (labels != -100).sum(), lambda labels, following: len(following)),
    )
    answers = DataParallelCriterion(
        answer_losses,
        weight=(lambda starts, ends: (starts < LENGTH).sum(), lambda starts, ends: (ends < LENGTH).sum()),
    )
    pairs = {"labels": labels, "next_sentence_label": torch.randint(2, (ROWS,))}
    spans = {"start_positions": starts, "end_positions": ends}
    losses = [train(BertForPreTraining, pairs, pretraining), train(BertForQuestionAnswering, spans, answers)]
    for loss, expected in losses:
        print(f"loss {loss:.4f}, that of the model with all rows {expected:.4f}")
    return losses


if __name__ == "__main__":
    main()
