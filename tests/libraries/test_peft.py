"""Adapters of peft on distinct devices, beside one device: rounding, several adapters, and weights that are merged in between."""

import pytest
import torch
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

peft = pytest.importorskip("peft")

WORDS = 50


def make(dtype=torch.float64, **settings):
    """Returns a model of BERT with an adapter, whose computation stays in its own dtype."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    base = BertForMaskedLM(
        BertConfig(vocab_size=WORDS, num_attention_heads=2, **sizes, **rates)
    ).to(dtype)
    config = peft.LoraConfig(r=2, init_lora_weights=False, **settings)
    return peft.get_peft_model(base, config).to(dtype).train()


def batches(number=4):
    """Returns batches of 8 rows with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(number):
        tokens = torch.randint(WORDS, (8, 12), generator=generator)
        counted = torch.arange(12) < torch.randint(2, 13, (8, 1), generator=generator)
        yield {"input_ids": tokens, "labels": tokens.where(counted, -100)}


def values(net):
    return {name: parameter.detach().cpu().clone() for name, parameter in net.named_parameters()}


def adapters(net):
    """Returns what may be trained: an adapter that is not active yet too."""
    return [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad or "lora_" in name
    ]


def train_plainly(net, between, kind=torch.optim.AdamW, rate=5e-3):
    optimizer = kind(adapters(net), lr=rate)
    losses = []
    for number, batch in enumerate(batches()):
        loss = net(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        between(net, net, number)
    return losses, values(net)


def train_in_parts(net, between, kind=torch.optim.AdamW, rate=5e-3, devices=3):
    """Trains on simulated devices, in micro-batches."""
    with simulate(devices):
        model = DataParallelModel(net, range(devices))
        optimizer = kind(adapters(net), lr=rate)
        criterion = DataParallelCriterion(lambda output: output.loss)
        step = TrainStep(model, criterion, optimizer, micro_batch_size=4)
        losses = []
        for number, batch in enumerate(batches()):
            losses.append(float(step(batch)))
            between(net, model, number)
        return losses, values(net)


def nothing(net, model, number):
    """Leaves the model as it is between two updates."""


def check(result, expected, **tolerances):
    losses, parameters = result
    assert losses == pytest.approx(expected[0], rel=1e-10)
    for name, parameter in parameters.items():
        assert_close(parameter, expected[1][name], **tolerances, msg=name)


ALL = {"target_modules": "all-linear", "use_rslora": True, "bias": "all"}


def test_all_layers_with_a_bias():
    expected = train_plainly(make(**ALL), nothing)
    check(train_in_parts(make(**ALL), nothing), expected, rtol=1e-6, atol=1e-8)


def test_the_bias_of_keys_has_a_gradient_of_rounding_errors():
    """Attention does not depend on it. AdamW divides rounding errors by their size, in float32 by up to its learning rate."""
    expected = train_plainly(make(torch.float32, **ALL), nothing)
    losses, parameters = train_in_parts(make(torch.float32, **ALL), nothing)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    for name, parameter in parameters.items():
        if not name.endswith("key.base_layer.bias"):
            assert_close(parameter, expected[1][name], rtol=1e-3, atol=1e-4, msg=name)


def with_a_second():
    net = make(target_modules=["query", "value"])
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["key", "dense"])
    net.add_adapter("second", config)
    return net.double()


def test_another_adapter_is_trained_after_two_updates():
    def change(net, model, number):
        if number == 1:
            net.set_adapter("second")

    expected = train_plainly(with_a_second(), change)
    check(train_in_parts(with_a_second(), change), expected, rtol=1e-8, atol=1e-10)


def test_two_adapters_at_once():
    def activate(net):
        net.base_model.set_adapter(["default", "second"])
        return net

    expected = train_plainly(activate(with_a_second()), nothing)
    check(train_in_parts(activate(with_a_second()), nothing), expected, rtol=1e-8, atol=1e-10)


def test_weights_are_merged_between_updates():
    """Other devices compute with the weights that the first one has merged, and without them afterwards."""

    def evaluate(results):
        def between(net, model, number):
            net.merge_adapter()
            batch = next(batches())
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits
            results.append(logits.gather("cpu") if model is not net else logits)
            net.unmerge_adapter()

        return between

    plain = []
    parts = []
    expected = train_plainly(make(target_modules=["query", "dense"]), evaluate(plain))
    result = train_in_parts(make(target_modules=["query", "dense"]), evaluate(parts))
    check(result, expected, rtol=1e-8, atol=1e-10)
    assert_close(parts, plain, rtol=1e-9, atol=1e-9)


def test_a_model_without_its_adapters_is_trained_on():
    """``merge_and_unload`` returns another model, which is wrapped anew."""

    def unload(train):
        net = make(target_modules=["query", "dense"])
        train(net, nothing)
        merged = net.to("cpu").merge_and_unload()
        for parameter in merged.parameters():
            parameter.requires_grad_(True)
        return merged

    plain = unload(train_plainly)
    parts = unload(train_in_parts)
    expected = train_plainly(plain, nothing, torch.optim.SGD)
    check(train_in_parts(parts, nothing, torch.optim.SGD), expected, rtol=1e-8, atol=1e-10)


def make_llama(config):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=2, **sizes))
    return peft.get_peft_model(base.double(), config).double().train()


WORDS_OF_ADAPTERS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LORA = {**WORDS_OF_ADAPTERS, "r": 2, "init_lora_weights": False}
KINDS = {
    # A forward puts the place of a word in each row into hooks, which replicas have shared.
    "aLoRA": lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[5]),
    "DoRA": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "head": lambda: peft.LoraConfig(**LORA | {"target_modules": ["embed_tokens", "lm_head"]}),
    "words": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[3, 4, 5]),
    "VeRA": lambda: peft.VeraConfig(**WORDS_OF_ADAPTERS, r=4, init_weights=False),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind):
    expected = train_plainly(make_llama(KINDS[kind]()), nothing, torch.optim.SGD, 0.1)
    result = train_in_parts(make_llama(KINDS[kind]()), nothing, torch.optim.SGD, 0.1)
    # The loss of Llama is computed in float32.
    assert result[0] == pytest.approx(expected[0], rel=2e-6)
    for name, parameter in result[1].items():
        assert_close(parameter, expected[1][name], rtol=1e-6, atol=1e-6, msg=name)


def test_an_adapter_of_sparse_weights():
    net = make_llama(peft.ShiraConfig(r=2, init_weights=False, **WORDS_OF_ADAPTERS))
    expected = net(**next(batches())).loss.item()
    criterion = DataParallelCriterion(lambda output: output.loss)
    optimizer = torch.optim.SGD(adapters(net), lr=0.1)
    step = TrainStep(DataParallelModel(net, ["cpu"] * 3), criterion, optimizer, micro_batch_size=2)
    assert step(next(batches())).item() == pytest.approx(expected, rel=2e-6)
