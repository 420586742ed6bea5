"""A file of networks for the command line."""

NETS = """
import sys
import torch
from torch import nn

print("a model that speaks")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.head(self.embedding(x))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x, y):
        return self.linear(x * y)

class Pair(Two):
    def forward(self, x):
        return self.linear(x), x

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, pair, mask, extra=None):
        first, second = pair
        return self.linear(first + second + extra["shift"]) * mask[:, None]

class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])

class Sum(nn.Module):
    def forward(self, x):
        return x.sum(0)

class Loses(nn.Module):
    def forward(self, x):
        return {}["nothing"]

class Waiting(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x) * x.sum().item()

class Picky(Waiting):
    def forward(self, x):
        if not x.is_meta and type(x) is torch.Tensor:
            raise ArithmeticError("I do not like small numbers")
        return nn.Linear.forward(self, x)

def small():
    return nn.Linear(4, 3)

def pair():
    return nn.Linear(4, 1), nn.BCEWithLogitsLoss()

def reads_values():
    return nn.Linear(int(torch.tensor([4]).item()), 3)

def with_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

def recurrent():
    return nn.Sequential(nn.LSTM(4, 3))

class packs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 3)
    def forward(self, inputs):
        return self.layer(nn.utils.rnn.pack_padded_sequence(inputs[None], [len(inputs)]))[1][0]

def needs(width):
    return nn.Linear(width, 3)

def fails():
    raise KeyError("weights")

def leaves():
    sys.exit(3)

def number():
    return 3

def distance(output, target):
    return (output - target).abs().mean()

made = nn.Linear(4, 3)
"""
