"""The training loops that libraries publish, in our own words: diffusers and sentence-transformers."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    simulate,
)

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("double")]

LAYOUTS = ["by hand", "step", "micro-batches", "simulated, by hand", "simulated, micro-batches"]


def values(tensors):
    return [tensor.detach().cpu().clone() for tensor in tensors]


class Moved:
    """A loop that was moved: replicas, a criterion, and a step or a loop by hand."""

    def __init__(self, layout, devices, net, criterion, optimizer, *, clip=None, whole=False):
        self.model = DataParallelModel(net, devices)
        self.criterion = DataParallelCriterion(criterion, whole=whole)
        self.optimizer = optimizer
        self.clip = clip
        self.step = None
        if "by hand" not in layout:
            size = 2 if "micro" in layout else None
            self.step = TrainStep(
                self.model, self.criterion, optimizer, micro_batch_size=size, max_grad_norm=clip
            )

    def update(self, inputs, targets):
        if self.step is not None:
            return self.step(inputs, targets).item()
        return update_by_hand(
            self.model, self.criterion, self.optimizer, inputs, targets, self.clip
        )


def update_by_hand(model, criterion, optimizer, inputs, targets, clip):
    loss = criterion(model(*inputs), *targets)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_equal_loops(layout, run, plain):
    """Compares the losses and the values that a program leaves on replicas with those of plain PyTorch."""
    devices = ["cpu"] * 2
    with contextlib.ExitStack() as stack:
        if "simulated" in layout:
            devices = stack.enter_context(simulate(3)).devices
        losses, left = run(lambda *args, **kwargs: Moved(layout, devices, *args, **kwargs).update)
    expected_losses, expected = plain
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    for one, other in zip(left, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def plainly(net, criterion, optimizer, *, clip=None, whole=False):
    def update(inputs, targets):
        return update_by_hand(net, criterion, optimizer, inputs, targets, clip)

    return update


def mean_of_noise(output, noise, times):
    return F.mse_loss(output.sample, noise)


def weighed_by_ratio(output, noise, times):
    """The loss of Hang et al. (arXiv:2303.09556), as the example of diffusers has it."""
    ratio = (10.0 - times / 12.0).exp2()
    weights = torch.stack([ratio, 5.0 * torch.ones_like(times)], dim=1).min(dim=1)[0] / ratio
    errors = F.mse_loss(output.sample, noise, reduction="none")
    return (errors.mean(dim=list(range(1, errors.dim()))) * weights).mean()


def train_diffusion(make_update, criterion):
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import EMAModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    net = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = CLIPTextConfig(
        vocab_size=50, num_hidden_layers=1, bos_token_id=0, eos_token_id=2, **settings
    )
    encoder = CLIPTextModel(config).eval().requires_grad_(False)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    average = EMAModel(net.parameters(), decay=0.9)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    update = make_update(net, criterion, optimizer, clip=1.0)
    losses = []
    for _ in range(3):
        images, noise = torch.randn(2, 7, 4, 8, 8)
        times = torch.randint(0, 100, (7,))
        with torch.no_grad():
            words = encoder(torch.randint(3, 50, (7, 9))).last_hidden_state
        noisy = scheduler.add_noise(images, noise, times)
        losses.append(update((noisy, times, words), (noise, times)))
        average.to(next(net.parameters()).device)
        average.step(net.parameters())
    return losses, values([*net.parameters(), *average.shadow_params])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("criterion", [mean_of_noise, weighed_by_ratio])
def test_diffusion_with_a_frozen_text_encoder_and_an_average(layout, criterion):
    plain = train_diffusion(plainly, criterion)
    assert_equal_loops(layout, lambda make: train_diffusion(make, criterion), plain)


class Pairs(nn.Module):
    """The embeddings of two texts."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, first, second):
        outputs = [self.encoder(features) for features in (first, second)]
        return [output["sentence_embedding"] for output in outputs]


def rank_pairs(embeddings):
    """The loss of negatives in the batch: each text belongs to the one of its own row."""
    first, second = embeddings
    scores = 20 * F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def compare_similarities(embeddings, similarities):
    return F.mse_loss(F.cosine_similarity(*embeddings), similarities)


def train_embeddings(make_update, folder, criterion, *, whole):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=65, num_hidden_layers=1, **settings)).save_pretrained(folder)
    layer = Transformer(str(folder), max_seq_length=12)
    encoder = SentenceTransformer(modules=[layer, Pooling(16)], device="cpu").double()
    net = Pairs(encoder)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    update = make_update(net, criterion, optimizer, whole=whole)
    draws = np.random.default_rng(0)
    losses = []
    for _ in range(3):
        texts = [" ".join(draws.choice(words[5:], draws.integers(3, 9))) for _ in range(14)]
        inputs = tuple(dict(encoder.preprocess(part)) for part in (texts[:7], texts[7:]))
        targets = () if whole else (torch.from_numpy(draws.random(7)),)
        losses.append(update(inputs, targets))
    return losses, values(net.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("criterion", [rank_pairs, compare_similarities])
def test_embeddings_of_pairs(layout, criterion, tmp_path):
    whole = criterion is rank_pairs
    plain = train_embeddings(plainly, tmp_path, criterion, whole=whole)
    assert_equal_loops(
        layout, lambda make: train_embeddings(make, tmp_path, criterion, whole=whole), plain
    )
