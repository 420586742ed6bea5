"""Programs that train whole models, rebuilt from the words of their sources. Parameters are on ``meta``."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

bf16 = torch.bfloat16


@dataclass(frozen=True)
class Program:
    """The arguments of ``memory.estimate``."""

    module: nn.Module
    criterion: Callable[..., Any]
    inputs: Any
    targets: Any
    settings: dict[str, Any] = field(default_factory=dict)


def on_meta(build: Callable[..., Program]) -> Callable[..., Program]:
    """Makes a function build its program without memory."""

    @functools.wraps(build)
    def built(*args: Any) -> Program:
        with torch.device("meta"):
            return build(*args)

    return built


def adam(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **settings: Any) -> Callable[..., torch.optim.Optimizer]:
    """Returns an optimizer with settings."""
    return functools.partial(kind, **settings)


# ZeroRedundancyOptimizer -------------------------------------------------------------------------------------------------------


class WithBuckets(nn.Module):
    """20 linear layers of 2,000 units and the buckets of DDP, without ``gradient_as_bucket_view``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(20)])
        layer = 2000 * 2001
        for number, size in enumerate([layer] + [2 * layer] * 9 + [layer]):
            self.register_buffer(f"bucket{number}", torch.empty(size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Runs the layers."""
        result: Tensor = self.layers(inputs)
        return result


@on_meta
def linear_layers(ranks: int) -> Program:
    """Builds the program of the tutorial: Adam's loop over tensors, with a part of the parameters of each rank."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        mine = list(parameters)
        return torch.optim.Adam(mine[: len(mine) // ranks], foreach=False)

    batch = torch.empty(20, 2000), torch.empty(20, 2000)
    return Program(WithBuckets(), nn.MSELoss(), *batch, {"optimizer": optimizer})


# Vision transformers -----------------------------------------------------------------------------------------------------------


class VisionBlock(nn.Module):
    """A block of a vision transformer. ``gated`` has the MLP of DINOv2's giant: SwiGLU, and scales of both branches."""

    def __init__(self, width: int, heads: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, hidden * (1 + gated)), nn.Linear(hidden, width)
        self.scales = nn.ParameterList(torch.empty(width) for _ in range(2 * gated))

    def forward(self, x: Tensor) -> Tensor:
        """Runs attention and the MLP."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + (attention * self.scales[0] if self.scales else attention)
        hidden = self.first(self.norms[1](x))
        if not self.scales:
            return x + self.second(F.gelu(hidden))
        gate, value = hidden.chunk(2, dim=-1)
        return x + self.second(F.silu(gate) * value) * self.scales[1]


class VisionTransformer(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, patch: int, classes: int, gated: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token, self.places = (
            nn.Parameter(torch.empty(1, 1, width)),
            nn.Parameter(torch.empty(1, (224 // patch) ** 2 + 1, width)),
        )
        self.blocks = nn.ModuleList(VisionBlock(width, heads, hidden, gated) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of images."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def _updated_in_backward(parameters: Any) -> torch.optim.Optimizer:
    """Updates each parameter as soon as its gradient is there. The result has nothing left to do."""
    tensors = list(parameters)
    for tensor in tensors:
        inner = torch.optim.Adam([tensor], foreach=False)

        def update(_: Tensor, inner: torch.optim.Optimizer = inner) -> None:
            inner.step()
            inner.zero_grad()

        tensor.register_post_accumulate_grad_hook(update)
    return torch.optim.SGD(tensors)


@on_meta
def vit_large(in_backward: bool) -> Program:
    """Builds ViT-L/16 with one image and Adam."""
    net = VisionTransformer(1024, 24, 16, 4096, 16, 1000)
    optimizer = _updated_in_backward if in_backward else torch.optim.Adam
    return Program(net, lambda output: output.sum(), torch.empty(1, 3, 224, 224), (), {"optimizer": optimizer})


@on_meta
def vit_giant() -> Program:
    """Builds DINOv2's giant in bf16 with checkpointed blocks and 32 images."""
    net = VisionTransformer(1536, 40, 24, 4096, 14, 10, gated=True).to(bf16)
    settings = {"optimizer": adam(torch.optim.AdamW, fused=True), "savings": ["checkpoint_activations"]}
    return Program(
        net, nn.CrossEntropyLoss(), torch.empty(32, 3, 224, 224, dtype=bf16), torch.empty(32, dtype=torch.int64), settings
    )


# LitGPT's LoRA -----------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm in several operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        return self.weight * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5))


class LoRAAttention(nn.Module):
    """Attention with LoRA on queries and values, and rotary positions on a part of each head."""

    def __init__(self, width: int, heads: int, rotary: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.lora_a, self.lora_b = nn.Parameter(torch.empty(16, width)), nn.Parameter(torch.empty(2 * width, 8))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Runs attention over all earlier positions."""
        rows, length, width = x.shape
        after_a = F.linear(F.dropout(x, 0.05, self.training), self.lora_a)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        zeros = after_b.transpose(0, 1).new_zeros(length * rows, 3 * width)
        places = torch.arange(2 * width, device=x.device)
        padded = zeros.index_copy(1, places, after_b.transpose(0, 1).reshape(-1, 2 * width))
        lora = padded.view(length, rows, 3 * width).transpose(0, 1) * 2.0
        qkv = (self.qkv(x) + lora).view(rows, length, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(rows, self.heads, length, -1) for part in qkv.split((1, 1, 1), dim=2))
        q, k = (self._rotate(part, cos, sin) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        result: Tensor = self.projection(y.reshape(rows, length, width))
        return result

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = x[..., : self.rotary]
        half = self.rotary // 2
        turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
        rotated = ((part * cos) + (turned * sin)).type_as(x)
        return torch.cat((rotated, x[..., self.rotary :]), dim=-1)


class LoRABlock(nn.Module):
    """A block of GPT-NeoX (attention beside the MLP, which may share its norm), or of Llama."""

    def __init__(self, kind: str, width: int, heads: int, rotary: int, hidden: int) -> None:
        super().__init__()
        is_llama = kind == "llama"
        self.kind = kind
        self.norm = Norm(width) if is_llama else nn.LayerNorm(width)
        self.other_norm = None if kind == "phi" else Norm(width) if is_llama else nn.LayerNorm(width)
        self.attention = LoRAAttention(width, heads, rotary, not is_llama)
        names = ("first", "gate", "second") if is_llama else ("first", "second")
        for name in names:
            sizes = (hidden, width) if name == "second" else (width, hidden)
            setattr(self, name, nn.Linear(*sizes, bias=not is_llama))

    def _mlp(self, x: Tensor) -> Tensor:
        if self.kind != "llama":
            return self.second(F.gelu(self.first(x), approximate="tanh" if self.kind == "phi" else "none"))
        first, gate = self.first(x), self.gate(x)
        return self.second(F.silu(first) * gate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Runs attention and the MLP."""
        normed = self.norm(x)
        attention = self.attention(normed, cos, sin)
        if self.kind == "llama":
            x = x + attention
            return x + self._mlp(self.other_norm(x))
        return x + attention + self._mlp(normed if self.other_norm is None else self.other_norm(x))


class LoRALanguageModel(nn.Module):
    """A language model of LitGPT whose weights are frozen but for LoRA. Its logits come in chunks of 128 positions."""

    def __init__(self, kind: str, words: int, width: int, depth: int, heads: int, rotary: int, hidden: int, length: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, words, bias=kind == "phi")
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LoRABlock(kind, width, heads, rotary, hidden) for _ in range(depth))
        self.norm = Norm(width) if kind == "llama" else nn.LayerNorm(width)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, rotary))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Returns the logits of chunks, in float32 as Lightning's Fabric converts them."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [chunk.float() for chunk in [self.head(part) for part in self.norm(x).split(128, dim=1)]]


class ChunkedLoss(nn.Module):
    """The loss of chunks of logits, which stay alive until the next loss if it keeps them, as a variable of the program does."""

    def __init__(self, keeps: bool = True) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, chunks: list[Tensor], targets: Tensor) -> Tensor:
        """Returns the mean loss of the next tokens."""
        self.chunks = None
        chunks = [*chunks[:-1], chunks[-1][..., :-1, :]]
        if self.keeps:
            self.chunks = chunks
        parts = [
            F.cross_entropy(chunk.reshape(-1, chunk.size(-1)), part.reshape(-1), ignore_index=-1, reduction="none")
            for chunk, part in zip(chunks, targets[..., 1:].split(128, dim=1), strict=True)
        ]
        return torch.cat(parts).mean()


# kind, words, width, depth, heads, rotary part of a head, hidden units, longest sequence of the data
LORA = {
    "phi-1.5": ("phi", 51200, 2048, 24, 32, 32, 8192, 1044),
    "StableLM-3B": ("neox", 50688, 4096, 16, 32, 32, 16384, 1034),
    "Llama-2-7B": ("llama", 32000, 4096, 32, 32, 128, 11008, 1304),
    "Llama-2-13B": ("llama", 32000, 5120, 40, 40, 128, 13824, 1304),
}


@on_meta
def lora(name: str, rows: int) -> Program:
    """Builds LitGPT's fine-tuning in bf16, with two of its micro-batches per update."""
    settings = LORA[name]
    tokens = torch.empty(2 * rows, settings[-1], dtype=torch.int64)
    net = LoRALanguageModel(*settings).to(bf16)
    for name in ("cos", "sin"):
        net.register_buffer(name, getattr(net, name).float())  # computed outside of the context in which bf16 is the default
    return Program(net, ChunkedLoss(), tokens, tokens, {"optimizer": torch.optim.AdamW, "micro_batch_size": rows})


class _OfAdapters(torch.optim.AdamW):
    """Updates the parameters of LoRA, which have 8 or 16 rows or columns, and clears the gradients of all."""

    def __init__(self, parameters: Any) -> None:
        self.every = list(parameters)
        super().__init__([each for each in self.every if each.dim() == 2 and not {8, 16}.isdisjoint(each.shape)])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters."""
        for parameter in self.every:
            parameter.grad = None


def sharded_lora(name: str, ranks: int, rows: int) -> Program:
    """Builds the fine-tuning on several devices with FSDP1 and checkpointed blocks.

    A block of FSDP1 is one flat parameter: with adapters in it, gradients of all of its weights are computed, which stay whole
    until the last micro-batch. The program begins with the longest sequence, so that no logits of that length are kept.
    """
    program = lora(name, rows)
    program.module.blocks.requires_grad_(True)
    settings = {"layout": "fsdp", "devices": ranks, "whole_gradients": True, "savings": ["checkpoint_activations"]}
    settings |= program.settings | {"optimizer": _OfAdapters}
    return Program(program.module, ChunkedLoss(keeps=False), program.inputs, program.targets, settings)


class _Saved(torch.autograd.Function):
    """An output whose graph has the input too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SavesInput(nn.Module):
    """A layer that saves its input for the backward, as those of bitsandbytes 0.41 with four bits."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        """Runs the layer."""
        result: Tensor = _Saved.apply(self.layer(input), input)
        return result


@on_meta
def qlora(name: str, nested: bool) -> Program:
    """Builds LitGPT's fine-tuning with one row, and four bits for the weights of the blocks."""
    from bitsandbytes.nn import LinearNF4

    program = lora(name, 1)
    for path, layer in list(program.module.blocks.named_modules()):
        if type(layer) is nn.Linear:
            has_bias = layer.bias is not None
            packed = LinearNF4(layer.in_features, layer.out_features, has_bias, bf16, compress_statistics=nested, device="meta")
            parent, _, place = path.rpartition(".")
            setattr(program.module.blocks.get_submodule(parent), place, SavesInput(packed.to(bf16).requires_grad_(False)))
    return program


# transformers ------------------------------------------------------------------------------------------------------------------


def _own_loss(output: Any, *_: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _with_labels(net: nn.Module, rows: int, length: int, settings: dict[str, Any]) -> Program:
    tokens = torch.empty(rows, length, dtype=torch.int64)
    return Program(net.train(), _own_loss, {"input_ids": tokens, "labels": tokens}, tokens, settings)


@on_meta
def gpt2() -> Program:
    """Builds GPT-2 with 2 rows of 16 tokens."""
    import transformers

    net = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    for number in range(12):
        net.transformer.h[number].register_buffer("mask", torch.empty(1024, 1024, dtype=torch.bool))  # of versions before 4.50
    return _with_labels(net, 2, 16, {"optimizer": torch.optim.AdamW})


@on_meta
def bert_base() -> Program:
    """Builds BERT's masked language model with 2 rows of 16 tokens."""
    import transformers

    return _with_labels(transformers.BertForMaskedLM(transformers.BertConfig()), 2, 16, {"optimizer": torch.optim.AdamW})


def _sum_of_logits(output: Any) -> Tensor:
    total: Tensor = output.logits.sum()
    return total


@on_meta
def bert_half(rows: int, length: int) -> Program:
    """Builds BERT in float16, whose loop keeps the output until the next forward, and makes no update."""
    import transformers

    net = transformers.BertLMHeadModel(transformers.BertConfig()).half().train()
    tokens = torch.empty(rows, length, dtype=torch.int64)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return Program(net, _sum_of_logits, inputs, (), {"optimizer": torch.optim.SGD, "keeps_outputs": True})


def _next_token_loss(output: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), tokens.flatten())


@on_meta
def llama_3b() -> Program:
    """Builds Llama 3.2 (3B) in bf16 with 2 rows of 4,096 tokens."""
    import transformers

    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
    others = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": True, "use_cache": False}
    config = transformers.LlamaConfig(**sizes, **others)
    net, tokens = transformers.LlamaForCausalLM(config).to(bf16).train(), torch.empty(2, 4096, dtype=torch.int64)
    return Program(net, _next_token_loss, {"input_ids": tokens}, tokens, {"optimizer": adam(torch.optim.AdamW, fused=True)})


# Convolutional networks --------------------------------------------------------------------------------------------------------


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, activation: Any = nn.ReLU
) -> list[nn.Module]:
    layers = [nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return [*layers, activation(inplace=True)] if activation else layers


class Residual(nn.Module):
    """A branch that is added to its input, or to a projection of it."""

    def __init__(self, branch: list[nn.Module], shortcut: list[nn.Module], activation: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.activation = nn.Sequential(*branch), nn.Sequential(*shortcut), activation

    def forward(self, x: Tensor) -> Tensor:
        """Adds the branch."""
        branch = self.branch(x)
        branch += self.shortcut(x)
        result: Tensor = self.activation(branch)
        return result


def _resnet50() -> nn.Module:
    layers, width = [*_convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for units, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(depth):
            step = stride if number == 0 else 1
            branch = [*_convolution(width, units, 1), *_convolution(units, units, 3, step)]
            branch += _convolution(units, 4 * units, 1, activation=None)
            shortcut = _convolution(width, 4 * units, 1, step, activation=None) if number == 0 else []
            layers.append(Residual(branch, shortcut, nn.ReLU(inplace=True)))
            width = 4 * units
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def _vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for units, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(width, units, 3, padding=1), nn.ReLU(inplace=True)]
            width = units
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, 1000))


def _mobilenet() -> nn.Module:
    layers, width = _convolution(3, 32, 3, 2, activation=nn.ReLU6), 32
    settings = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, units, depth, stride in settings:
        for number in range(depth):
            hidden, step = width * expansion, stride if number == 0 else 1
            branch = _convolution(width, hidden, 1, activation=nn.ReLU6) if expansion > 1 else []
            branch += _convolution(hidden, hidden, 3, step, hidden, nn.ReLU6)
            branch += _convolution(hidden, units, 1, activation=None)
            adds = step == 1 and width == units
            layers += [Residual(branch, [], nn.Identity())] if adds else branch
            width = units
    layers += [*_convolution(width, 1280, 1, activation=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, 1000))


NETWORKS = {"ResNet-50": _resnet50, "VGG-16": _vgg16, "MobileNetV2": _mobilenet}


@on_meta
def convolutional(name: str, rows: int) -> Program:
    """Builds a network of torchvision with images of 224 x 224 and Adam."""
    batch = torch.empty(rows, 3, 224, 224), torch.empty(rows, dtype=torch.int64)
    return Program(NETWORKS[name](), nn.CrossEntropyLoss(), *batch, {"optimizer": torch.optim.Adam})
