"""Trains a mixture of experts of transformers. The loss of its routers is a product of two means over all tokens."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from balanced_parallel import AdditiveLoss, DataParallelCriterion, DataParallelModel, TrainStep

ROWS, LENGTH, VOCABULARY, EXPERTS, CHOSEN, COEFFICIENT = 7, 12, 50, 4, 2, 0.1
DEVICES = None if torch.accelerator.is_available() else ["cpu"] * 3  # all GPUs, or three replicas


class Routed(nn.Module):
    """Returns the logits of words and of routers, all with the rows first. Those of a router have a row for each token."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, tokens):
        """Returns both for a batch of tokens."""
        out = self.net(tokens)
        return out.logits, torch.stack([logits.view(*tokens.shape, -1) for logits in out.router_logits], 1)


def statistics(logits, routers, labels):
    """Returns sums over rows: the loss of words and their count; shares and choices of each expert, and their count."""
    words, logits = labels[:, 1:].flatten(), logits[:, :-1].flatten(0, 1)
    shares = routers.flatten(0, -2).softmax(1)
    chosen = torch.zeros_like(shares).scatter_(1, shares.topk(CHOSEN).indices, 1)
    loss = F.cross_entropy(logits, words, reduction="sum")
    return loss, (words != -100).sum(), shares.sum(0), chosen.sum(0), len(shares)


def finish(total):
    """Returns the loss of the model, from the sums over all rows."""
    loss, count, shares, chosen, number = total
    return loss / count + COEFFICIENT * EXPERTS * (shares / number * chosen / number).sum()


def main():
    """Makes an update. Returns its loss and that of the model itself, with all rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    routers = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    net = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **experts, **routers))
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    labels = tokens.where(torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1)), -100)
    expected = net(input_ids=tokens, labels=labels).loss.item()
    model = DataParallelModel(Routed(net), DEVICES)
    criterion = DataParallelCriterion(AdditiveLoss(statistics, finish))
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters(), lr=1e-3), micro_batch_size=2)
    loss = step(tokens, labels).item()
    print(f"loss {loss:.4f}, that of the model with all rows {expected:.4f}")
    return [(loss, expected)]


if __name__ == "__main__":
    main()
