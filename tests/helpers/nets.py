"""A file of problems for the command line."""

NETS = """
import sys
import torch
from torch import nn

print("a model that speaks")

class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).transpose(1, 2)

class Loses(nn.Linear):
    def forward(self, x):
        return {}["nothing"]

def classes(rows):
    return torch.zeros(rows, dtype=torch.int64)

def small():
    return nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.zeros(8, 4), classes(8)

def wide():
    return nn.Linear(7, 3), nn.CrossEntropyLoss(), torch.zeros(8, 4), classes(8)

def net():
    return nn.Linear(4, 3)

def pair():
    return nn.Linear(4, 1), nn.BCEWithLogitsLoss(), torch.zeros(6, 4), torch.zeros(6, 1)

def time_major():
    return TimeMajor(), nn.CrossEntropyLoss(), torch.zeros(7, 6, 3), torch.zeros(7, 6, dtype=torch.int64)

def keywords():
    class Masked(nn.Linear):
        def forward(self, pair, mask, extra=None):
            return super().forward(sum(pair) + extra["shift"]) * mask[:, None]

    inputs = {"pair": (torch.zeros(8, 4), torch.zeros(8, 4)), "mask": torch.zeros(8), "extra": {"shift": torch.zeros(8, 4)}}
    return Masked(4, 3), nn.CrossEntropyLoss(), inputs, classes(8)

def loses():
    return Loses(4, 3), nn.CrossEntropyLoss(), torch.zeros(8, 4), classes(8)

def reads_values():
    return nn.Linear(int(torch.tensor([4]).item()), 3), nn.MSELoss(), torch.zeros(6, 4), torch.zeros(6, 3)

class Packs(nn.LSTM):
    def forward(self, inputs):
        return super().forward(nn.utils.rnn.pack_padded_sequence(inputs[None], [len(inputs)]))[1][0]

def packs():
    return Packs(4, 3), nn.CrossEntropyLoss(), torch.zeros(8, 4), classes(8)

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

made = nn.Linear(4, 3), nn.MSELoss(), torch.zeros(6, 4), torch.zeros(6, 3)
"""
