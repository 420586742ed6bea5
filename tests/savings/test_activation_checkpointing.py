"""Blocks of a model that are checkpointed."""

import torch
from helpers.memory_problems import LanguageModel, conv_net, perceptron, tokens
from torch import nn

from balanced_parallel.savings.activation_checkpointing import Checkpointed, checkpoint_blocks, find_blocks


def test_checkpointed_blocks_have_equal_gradients_and_state_dict():
    assert find_blocks(LanguageModel()) == ("layers.0", "layers.1", "layers.2")
    assert find_blocks(perceptron()) == ("0", "1", "2", "3")
    assert find_blocks(conv_net()) == ()
    nets = [LanguageModel(), LanguageModel()]
    checkpoint_blocks(nets[1], find_blocks(nets[1]))
    checkpoint_blocks(nets[1], find_blocks(nets[1]))  # once is enough
    assert isinstance(nets[1].layers[0], Checkpointed)
    assert isinstance(nets[1].layers[0], nn.TransformerEncoderLayer)
    for net in nets:
        net(tokens(2)).sum().backward()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert nets[0].state_dict().keys() == nets[1].state_dict().keys()
