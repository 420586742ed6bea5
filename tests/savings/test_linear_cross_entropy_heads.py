"""Language models of transformers whose logits do not exist in training."""

import copy
import inspect
import os

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.slow import slow
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
)
from balanced_parallel.savings import replace_lm_head

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")
WORDS = 37
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "head_dim": 4,
}


def gpt2():
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": WORDS}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return build(transformers.GPT2Config(**sizes, **dropout), transformers.GPT2LMHeadModel)


def llama(**settings):
    return build(transformers.LlamaConfig(**SIZES | settings), transformers.LlamaForCausalLM)


def phi(**settings):
    sizes = {**SIZES, "num_key_value_heads": 2}
    return build(transformers.PhiConfig(**sizes | settings), transformers.PhiForCausalLM)


def build(config, kind):
    torch.manual_seed(0)
    return kind(config).double().train()


MODELS = {
    "gpt2, tied": gpt2,
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "phi, bias": phi,
}


def batch(rows=5, positions=9):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (rows, positions), generator=generator)
    labels = tokens.clone()
    labels[:3, 1:], labels[-1, 4:] = (-100, -100)  # No label of the first of two shards counts.
    return tokens, labels


def loss_of_logits(model, tokens, labels, items=None):
    """Loss of the logits in float64: transformers' own is in float32."""
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(
        logits, labels[:, 1:].flatten(), reduction="mean" if items is None else "sum"
    )
    return loss if items is None else loss / items


def expected_of(model, tokens, labels, items=None):
    plain = copy.deepcopy(model)
    loss = loss_of_logits(plain, tokens, labels, items)
    loss.backward()
    return loss.detach(), gradients(plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=str)
def test_loss_and_gradients_equal_those_of_the_logits(name, items):
    model = MODELS[name]()
    tokens, labels = batch()
    loss, expected = expected_of(model, tokens, labels, items)
    before = model(tokens, labels=labels, num_items_in_batch=items)
    assert_close(before.loss.double(), loss, rtol=1e-5, atol=0)
    replace_lm_head(model)
    replace_lm_head(model)  # once is enough
    output = model(tokens, labels=labels, num_items_in_batch=items)
    assert output.logits is None
    assert "logits" not in output
    assert type(output) is type(before)
    output.loss.backward()
    assert_equal(output.loss, loss)
    assert_same_gradients(gradients(model), expected)
    entries = model(tokens, labels=labels, return_dict=False, use_cache=False)
    assert [entry.dim() for entry in entries] == [0]


def test_labels_may_be_shifted_already():
    model = llama()
    tokens, labels = batch()
    loss, _ = expected_of(model, tokens, labels)
    replace_lm_head(model)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    assert_equal(model(tokens, labels=labels, shift_labels=shifted).loss, loss)


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_as_before(name):
    model = MODELS[name]()
    tokens, _ = batch()
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(tokens),
    }
    expected = model(tokens).logits, model.eval().generate(tokens, **settings)
    keys = list(model.state_dict())
    signature = inspect.signature(model.forward)
    replace_lm_head(model)
    assert_close(
        (model(tokens).logits, model.generate(tokens, **settings)), expected, rtol=0, atol=0
    )
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert type(model).__name__ == type(MODELS[name]()).__name__


def own_loss():
    return DataParallelCriterion(
        lambda output, labels: output.loss,
        weight=lambda output, labels: (labels[:, 1:] != -100).sum(),
    )


@pytest.mark.parametrize(
    ("config", "kind", "settings"),
    [
        ("Gemma2Config", "Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}),
        ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 2.0}),
        ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.5}),
    ],
)
def test_models_that_change_their_logits_are_refused(config, kind, settings):
    model = build(getattr(transformers, config)(**SIZES | settings), getattr(transformers, kind))
    tokens, labels = batch()
    replace_lm_head(model)
    with pytest.raises(
        TypeError,
        match=f"{kind} changes its logits between the head and the loss.*leave out replace_lm_head",
    ):
        model(tokens, labels=labels)
    assert model(tokens).logits.shape == (*tokens.shape, WORDS)


def test_other_models_are_refused():
    with pytest.raises(
        TypeError,
        match="Linear has no loss_function, expected a causal language model",
    ):
        replace_lm_head(torch.nn.Linear(2, 2))
    model = llama()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(
        TypeError, match="the head of LlamaForCausalLM is a torch.*Sequential, expected nn.Linear"
    ):
        replace_lm_head(model)
    model = llama()
    replace_lm_head(model)
    model.loss_function = F.cross_entropy
    tokens, labels = batch()
    with pytest.raises(
        TypeError, match="the loss function of LlamaForCausalLM is .*expected ForCausalLMLoss"
    ):
        model(tokens, labels=labels)


TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
PEFT = {
    "body": {},
    "head is saved": {"modules_to_save": ["lm_head"]},
    "head and embedding are saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "tied": TIED,
}


def adapted(settings, *, first=False):
    """Returns Phi in a ``PeftModel``, with all adapters drawn anew."""
    peft = pytest.importorskip("peft")
    model = phi(
        tie_word_embeddings=not settings.keys().isdisjoint(
            ("ensure_weight_tying", "trainable_token_indices")
        )
    )
    if first:
        replace_lm_head(model)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **settings})
    ).double()
    numbers = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1, generator=numbers)
    return model


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft 0.21 reads it
@pytest.mark.parametrize("name", [*PEFT])
@pytest.mark.parametrize("first", [False, slow(True)], ids=["after", "before"])
def test_models_of_peft_equal_the_plain_model(name, first):
    tokens, labels = batch()
    plain = adapted(PEFT[name])
    loss, expected = expected_of(plain, tokens, labels)
    model = adapted(PEFT[name], first=first)
    replace_lm_head(model)
    assert model(tokens, labels=labels).logits is None
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.0
    )
    step = TrainStep(
        DataParallelModel(model, ["cpu"] * 2), own_loss(), optimizer, micro_batch_size=1
    )
    assert_equal(step({"input_ids": tokens, "labels": labels}, labels), loss)
    assert_same_gradients(gradients(model), expected)
    assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=0)
    with model.disable_adapter():  # the head is the original one
        found = model(tokens, labels=labels).loss
        expected = loss_of_logits(model, tokens, labels)
    assert abs(expected - loss) > 1e-7
    assert_equal(found, expected)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft 0.21 reads it
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "peft.tuners.lora.layer.Linear"),
        ({"trainable_token_indices": [1]}, "peft.*TrainableTokensWrapper"),
    ],
    ids=["lora", "tokens"],
)
def test_adapters_of_the_head_are_refused(settings, kind):
    message = rf"the head of PhiForCausalLM is a {kind}, expected nn.Linear: leave the head out of the adapters of peft"
    with pytest.raises(TypeError, match=message):
        replace_lm_head(adapted(settings))
    model = adapted(settings, first=True)
    tokens, labels = batch()
    with pytest.raises(TypeError, match=message):
        model(tokens, labels=labels)
