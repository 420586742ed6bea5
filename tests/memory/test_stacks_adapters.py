"""Traces of models with adapters of peft from few blocks, compared with traces of all of their blocks; quantized weights."""

import pytest
import torch
from helpers.memory_problems import trace_both

from balanced_parallel import memory
from balanced_parallel.memory.estimation import make_request
from balanced_parallel.memory.problem import Problem

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning"),
]
DEPTH = 10
WORDS = torch.zeros(4, 16, dtype=torch.int64, device="meta")
LAYOUTS = {
    "single": {},
    "replicas": {"layout": "replicas", "devices": 2, "micro_batch_size": 1},
    "fsdp": {"layout": "fsdp", "devices": 2, "micro_batch_size": 2},
}
ADAPTERS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rsLoRA, dropout": {"use_rslora": True, "lora_dropout": 0.1},
    "all-linear": {"target_modules": "all-linear"},
    "a module saved": {"modules_to_save": ["lm_head"]},
    "some layers": {"layers_to_transform": [0, 3]},
    "GPT-2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "checkpoints": {},
}
WHOLE = {"some layers"}  # No eight blocks are alike.


def causal(kind):
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "use_cache": False,
    }
    if kind != "GPT2":
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2}
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))


def adapted(name):
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = causal("GPT2" if name == "GPT-2" else "Qwen3")
        if name == "checkpoints":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        return peft.get_peft_model(
            model,
            peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | ADAPTERS[name]),
        )


def problem_of(model):
    return Problem(
        model, lambda output, labels: output.loss, {"input_ids": WORDS, "labels": WORDS}, WORDS
    )


CASES = [(name, "single") for name in ADAPTERS] + [
    ("LoRA", "replicas"),
    ("GPT-2", "replicas"),
    ("LoRA", "fsdp"),
    ("checkpoints", "fsdp"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_few_blocks_with_adapters_make_the_trace_of_all(name, layout):
    """Operations of a block are in proportion to the rows, but for the norms of the weights of DoRA."""
    request = make_request(
        problem_of(adapted(name)), device_kind="h200", precision="bf16", **LAYOUTS[layout]
    )
    repeated, whole = trace_both(request)
    if name in WHOLE:
        assert repeated == [None] * 2
        return
    for few, every in zip(repeated, whole, strict=True):
        assert few[:-1] == every[:-1]
        assert few[-1] == pytest.approx(every[-1], rel=0.01 if name == "DoRA" else 0)


def quantized(setting):
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    pytest.importorskip("bitsandbytes")
    with torch.device("meta"):
        config = BitsAndBytesConfig(**{setting: True})
        return replace_with_bnb_linear(
            causal("Qwen3"), modules_to_not_convert=["lm_head"], quantization_config=config
        )


def test_four_bit_weights_are_packed():
    plain = memory.estimate(**vars(problem_of(causal("Qwen3"))), device_kind="rtx4090")
    report = memory.estimate(**vars(problem_of(quantized("load_in_4bit"))), device_kind="rtx4090")
    assert report.parts[0]["parameters"] < plain.parts[0]["parameters"]
    assert "4-bit weights" in report.assumed


def test_eight_bit_weights_are_refused_by_name():
    problem = vars(problem_of(quantized("load_in_8bit")))
    said = r"model.layers.0.self_attn.q_proj \(Linear8bitLt\) has a weight of bitsandbytes.* about a byte less"
    with pytest.raises(ValueError, match=said):
        memory.estimate(**problem)
    with pytest.raises(ValueError, match=said):
        memory.plan(**problem, batch_size=8, device_kind="rtx4090")
