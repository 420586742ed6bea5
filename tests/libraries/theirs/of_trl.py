"""Runs TRL's own tests with subclasses ``class Exact(BalancedTrainer, X)`` in place of its trainers.

The tests are those of TRL's repository at f2cd57710 (1.10.0.dev0), the newest commit that was at hand for ``trl``
1.16.0. Tests that 1.16.0 itself fails count on neither side::

    git clone https://github.com/huggingface/trl && mkdir theirs
    git -C trl archive f2cd57710 tests scripts pyproject.toml trl/chat_templates | tar x -C theirs
    python tests/libraries/theirs/of_trl.py theirs

They need models and data sets of a hub. TRL has scripts that make them, which run here first without a network, and
write folders of the same names (``trl-internal-testing/tiny-Qwen2ForCausalLM-2.5``) into the checkout. The tokenizers
are trained on the data, and there are no models of images. With ``OURS=2`` the devices are ``["cpu"] * 2``, and each
has half of the rows that a test asks for, if the number is even.
"""

import importlib
import os
import sys
from pathlib import Path

from exact import exact
from suite import Suite, main

PLACE = "trl-internal-testing"
NAMES = ("SFT", "DPO", "Reward", "KTO", "GRPO")
# Templates of chats, by the endings of the script that makes a model.
TEMPLATES = {
    "qwen2_for_causal_lm_2_5": "qwen2_5",
    "qwen2_for_sequence_classification_2_5": "qwen2_5",
    "qwen3_for_causal_lm": "qwen3",
    "qwen3_for_sequence_classification": "qwen3",
    "qwen3_moe_for_causal_lm": "qwen3",
    "qwen3_moe_for_sequence_classification": "qwen3",
    "llama_for_causal_lm_3": "llama3",
    "llama_for_causal_lm_3_1": "llama3_1",
    "llama_for_causal_lm_3_2": "llama3_2",
    "llama_for_sequence_classification_3_2": "llama3_2",
    "gpt_oss_for_causal_lm": "gptoss",
    "glm4_moe_for_causal_lm": "glm4moe",
    "cohere_for_causal_lm": "cohere",
    "cohere2_for_causal_lm": "cohere2",
    "deepseek_v3_for_causal_lm": "deepseekv3",
    "gemma_for_causal_lm": "gemma",
    "gemma2_for_causal_lm": "gemma",
    "lfm2_for_causal_lm": "lfm2",
    "lfm2_for_causal_lm_2_5": "lfm2_2_5",
    "mistral_for_causal_lm_0_1": "llama3",
    "mistral_for_causal_lm_0_2": "llama3",
    "nemotron_3_nano_for_causal_lm": "nemotron_3_nano",
    "gpt_neox_for_causal_lm": "",
    "gpt_neox_for_sequence_classification": "",
}
REASONS = {
    "target_parameters": "Replicas in one process refuse `target_parameters` of an adapter by name",
    "Actual .not effective. batch size": "TRL refuses one row for a device, half of the two that the test asks for",
    "estimate of the KL|log_probs_after_training_raises": "KTO has a mean over the rows of a forward inside: refused by name",
    "Gpt_?Oss|gpt_oss|Moe|harmony": "The loss of a router depends on all rows of a forward, and is refused by name",
    "adaptive_entropy": "The coefficient changes in the forward of the first shard, which is refused by name",
    "completions_all_masked": "A batch of three cannot be halved, and one of six completions that are drawn has an end",
    "steps_per_generation": "Tokens of other updates count in the loss, which is refused by name",
    "entropy_filter": "A quantile of the batch makes rows depend on each other, which is refused by name",
    r"loss_types.sft|multi_loss": "The loss `sft` is a mean over tokens, expanded to the rows, which is refused by name",
}


def make_tokenizer(checkout: Path, template: str):
    """Returns a tokenizer trained on the data of the tests."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|unknown|>"]
    trained = ByteLevelBPETokenizer()
    texts = [path.read_text() for path in sorted(checkout.glob("scripts/*dataset.py"))]
    trained.train_from_iterator(texts, 2000, special_tokens=special, show_progress=False)
    names = ("pad_token", "eos_token", "bos_token", "unk_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, **dict(zip(names, special, strict=True))
    )
    if template:
        path = checkout / "trl/chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = path.read_text()
    return tokenizer


def make_models(checkout: Path) -> None:
    """Runs TRL's scripts of tiny models, which write them into the checkout."""
    import torch
    import transformers
    from scripts.generate_tiny_models import _common

    def save(model, tokenizer, generation, prefix=None, suffix=None, create_pr=None):
        names = (prefix, type(model).__name__, suffix)
        folder = checkout / PLACE / "-".join(name for name in names if name)
        model.generation_config = generation
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    for name in ("check_transformers_version", "smoke_test", "check_dtype_pattern"):
        setattr(_common, name, lambda *arguments: None)
    _common.print_config_diff = lambda *arguments: None
    _common.push_to_hub = save
    config = transformers.GenerationConfig()
    transformers.GenerationConfig.from_pretrained = lambda *names, **settings: config
    for script, template in TEMPLATES.items():
        tokenizer = make_tokenizer(checkout, template)
        folder = "for_causal_lm" if "causal" in script else "for_sequence_classification"
        kind = script.partition("_for_")[0]

        size = len(tokenizer)

        def make_config(name, kind=kind, size=size, **settings):
            return transformers.AutoConfig.for_model(kind, vocab_size=size, **settings)

        transformers.AutoTokenizer.from_pretrained = lambda *names, made=tokenizer, **settings: made
        transformers.AutoConfig.from_pretrained = make_config
        torch.manual_seed(0)
        importlib.import_module(f"scripts.generate_tiny_models.{folder}.{script}")


def make_data(checkout: Path) -> None:
    """Runs TRL's scripts of data sets, which write them into the checkout."""
    import datasets

    configs: dict[str, list[str]] = {}

    def save(rows, name, config_name):
        splits = rows if isinstance(rows, datasets.DatasetDict) else {"train": rows}
        lines = configs.setdefault(name, [])
        lines += [f"- config_name: {config_name}", "  data_files:"]
        for split, each in splits.items():
            each.to_parquet(checkout / name / config_name / f"{split}.parquet")
            lines += [f"  - split: {split}", f"    path: {config_name}/{split}.parquet"]

    datasets.Dataset.push_to_hub = datasets.DatasetDict.push_to_hub = save
    for name in ("zen", "toolcall", "harmony"):
        script = importlib.import_module(f"scripts.generate_{name}_dataset")
        script.main(test_size=0.1, push_to_hub=True, repo_id=f"{PLACE}/{name}")
    for name, lines in configs.items():
        (checkout / name / "README.md").write_text("\n".join(["---", "configs:", *lines, "---\n"]))


def pytest_configure(config):
    """Changes what tests import from TRL."""
    config.addinivalue_line("markers", "slow: as in TRL")
    import trl

    found = importlib.import_module("trl.import_utils")
    for name in ("harbor", "joblib", "openreward"):  # The newer version has no such functions.
        vars(found).setdefault(f"is_{name}_available", lambda: False)
    trainer = importlib.import_module("trl.trainer.sft_trainer")
    for name in ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"):
        vars(trainer).setdefault(name, None)
    kind = os.environ.get("OURS")
    if not kind:
        return
    for name in NAMES:
        setattr(trl, f"{name}Trainer", exact(getattr(trl, f"{name}Trainer"), int(kind)))


if __name__ == "__main__":
    checkout = Path(sys.argv[1]).resolve()
    selected = "-m 'not slow' -k 'not VLM and not vlm and not vllm and not Vision'"
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", PYTEST_ADDOPTS=selected)
    if not (checkout / PLACE).exists():
        sys.path.insert(0, str(checkout))
        make_data(checkout)
        make_models(checkout)
    files = [f"tests/test_{name.lower()}_trainer.py" for name in NAMES]
    main(Suite("of_trl", ".", files, {"2": "two devices"}, REASONS))
