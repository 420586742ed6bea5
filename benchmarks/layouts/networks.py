"""Seven small models that draw random numbers in training, each with a batch, a criterion and its weight."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Problem(NamedTuple):
    """A model with a batch and a loss."""

    module: nn.Module
    inputs: Tensor
    targets: tuple[Tensor, ...]
    criterion: Any
    weight: Any


class DropPath(nn.Module):
    """Stochastic depth as in timm: one draw for each row."""

    def forward(self, x: Tensor) -> Tensor:
        """Drops whole rows."""
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.8).div_(0.8) if self.training else x


class Mixed(nn.Module):
    """Many kinds of draws: of rows, of tokens, time-major, inside of LSTM and attention, shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3)  # time-major
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.path, self.head = DropPath(), nn.Linear(8, 6)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of images."""
        x = F.dropout2d(F.leaky_relu(self.norm(self.conv(images))), 0.2, self.training)
        x = F.feature_alpha_dropout(x, 0.1, self.training)
        tokens = x.flatten(2).transpose(1, 2)  # rows, time, features
        tokens = tokens + self.path(self.attention(tokens, tokens, tokens)[0])
        series = F.dropout(tokens.transpose(0, 1), 0.1, self.training)
        x = self.lstm(series)[0].transpose(0, 1)
        flat = F.alpha_dropout(x.reshape(-1, 8), 0.1, self.training).view_as(x)
        soft = F.gumbel_softmax(flat, tau=2.0)
        picked = torch.multinomial(flat.detach().softmax(-1).mean(1), 3)  # features of each row
        features = (flat * soft + 0.1 * torch.randn_like(flat)).mean(1) + 0.01 * picked.sum(1, keepdim=True) * torch.rand(())
        return F.linear(features, F.dropout(self.head.weight, 0.3, self.training), self.head.bias)  # DropConnect: no rows


class VAE(nn.Module):
    """Returns the loss of each row, with a sample of the latent variable."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss of each row."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (self.decoder(z) - x).pow(2).sum(1) + divergence


class Diffusion(nn.Module):
    """Predicts the noise that it has added, at a random time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 8)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("signal", torch.linspace(0.99, 0.01, 100))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the loss of each row."""
        times = torch.randint(0, 100, (images.shape[0],), device=images.device)
        noise, signal = torch.randn_like(images), self.get_buffer("signal")[times].view(-1, 1, 1, 1)
        hidden = self.first(signal.sqrt() * images + (1 - signal).sqrt() * noise) + self.time(times)[:, :, None, None]
        return (self.second(F.dropout2d(F.silu(hidden), 0.1, self.training)) - noise).pow(2).mean((1, 2, 3))


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        """Returns the logits of each token."""
        return self.model(tokens).logits


def make_mlp() -> nn.Module:
    """Returns three layers with dropout of 0.5 and 0.2."""
    hidden = nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*hidden, nn.Linear(32, 5))


def make_bert(attention: str, layers: int = 2) -> nn.Module:
    """Returns a small BERT with its own rates of dropout, 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48)
    config._attn_implementation = attention
    return Logits(BertForMaskedLM(config))


def make_gpt2(layers: int = 2, width: int = 32) -> nn.Module:
    """Returns a small GPT-2 with its own rates of dropout, 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **ends)
    return Logits(GPT2LMHeadModel(config))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over the labels of a (rows, time) batch that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def count_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the divisor of :func:`token_loss`."""
    return (labels != -100).sum()


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "MLP": ("vectors", make_mlp),
    "mixed": ("images", Mixed),
    "VAE": ("vectors of its own loss", VAE),
    "DDPM": ("images of its own loss", Diffusion),
    "BERT eager": ("text", lambda: make_bert("eager")),
    "BERT sdpa": ("text", lambda: make_bert("sdpa")),
    "GPT-2": ("text", make_gpt2),
}


def make_problem(name: str, rows: int, dtype: torch.dtype = torch.float64, *, ignored: float = 0.3) -> Problem:
    """Returns a model and its batch, equal at each call.

    Args:
        name: of the model.
        rows: of the batch.
        dtype: of the model.
        ignored: share of the labels of text that do not count, so that rows have different numbers of them.
    """
    torch.manual_seed(len(name))
    kind, make = MODELS[name]
    module = make().to(dtype)
    if kind == "text":
        tokens, labels = torch.randint(0, 40, (rows, 10)), torch.randint(0, 40, (rows, 10))
        return Problem(module, tokens, (labels.masked_fill(torch.rand(rows, 10) < ignored, -100),), token_loss, count_labels)
    inputs = torch.randn((rows, 3, 8, 8) if "images" in kind else (rows, 12), dtype=dtype)
    if "its own loss" in kind:
        return Problem(module, inputs, (), torch.mean, "rows")
    return Problem(module, inputs, (torch.randint(0, 5, (rows,)),), nn.CrossEntropyLoss(), None)
