"""Checkpointed blocks of Hugging Face models, which make a cache of keys and values in training too."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from balanced_parallel import savings

BATCH = {"input_ids": torch.arange(36).view(3, 12), "labels": torch.arange(36).view(3, 12)}


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, attention_dropout=0.1, **sizes))


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
@pytest.mark.parametrize("make", [llama, t5])
def test_gradients_are_those_without_checkpoints(double, make, share):
    torch.manual_seed(0)
    plain = make().train()
    net = copy.deepcopy(plain)
    kept = savings.checkpoint_activations(net, budget="1GiB", inputs=BATCH).kept
    savings.checkpoint_activations(net, budget=int(share * kept), inputs=BATCH)
    for each in (plain, net):
        torch.manual_seed(1)
        each(**BATCH).loss.backward()
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_generation_has_its_cache():
    net = llama().eval()
    expected = net.generate(BATCH["input_ids"], max_new_tokens=4, do_sample=False)
    savings.checkpoint_activations(net)
    assert net.generate(BATCH["input_ids"], max_new_tokens=4, do_sample=False).equal(expected)
    assert net(**BATCH, use_cache=True).past_key_values.get_seq_length() == 12  # also with a graph


def test_a_cache_with_earlier_tokens_is_refused():
    net, cache = llama().train(), DynamicCache()
    with torch.no_grad():
        net(BATCH["input_ids"][:, :5], past_key_values=cache)
    savings.checkpoint_activations(net, blocks=["model.layers.1"])
    with pytest.raises(ValueError, match=r"gets a cache with the keys of \d+ tokens for 7 new ones"):
        net(BATCH["input_ids"][:, 5:], past_key_values=cache)
