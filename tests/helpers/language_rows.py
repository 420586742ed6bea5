"""Rows of words for trainers of TRL and sentence-transformers, a tokenizer made from scratch, and small models for it."""

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

datasets.disable_progress_bars()

WORDS = 40
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}user {{ message['content'] }} "
    "{% else %}assistant {% generation %}{{ message['content'] }} eos {% endgeneration %}{% endif %}{% endfor %}"
)


def make_tokenizer():
    """Returns a tokenizer of numbered words: ``w3 w17``."""
    names = [
        "pad",
        "eos",
        "unknown",
        "user",
        "assistant",
        *(f"w{number}" for number in range(WORDS)),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="unknown")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="pad", eos_token="eos", unk_token="unknown"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_language_model(seed=0, kind=LlamaForCausalLM, **settings):
    """Returns a small language model whose logits differ clearly."""
    torch.manual_seed(seed)
    model = kind(
        LlamaConfig(vocab_size=WORDS + 5, eos_token_id=1, bos_token_id=1, **SIZES, **settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def make_reward_model():
    """Returns a small reward model."""
    return make_language_model(kind=LlamaForSequenceClassification, num_labels=1)


def draw(count, generator, low=2, high=9):
    """Returns texts of ``low`` to ``high`` words."""
    texts = []
    for _ in range(count):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        texts.append(
            " ".join(
                f"w{word}" for word in torch.randint(WORDS, (length,), generator=generator).tolist()
            )
        )
    return texts


def language_rows(number, *columns, **others):
    """Returns a data set with columns of texts, always the same ones, and other columns."""
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_dict(
        {column: draw(number, generator) for column in columns} | others
    )


def chats(number):
    """Returns a data set of conversations of one question and one answer."""
    rows = language_rows(number, "user", "assistant")
    messages = [
        [{"role": role, "content": row[role]} for role in ("user", "assistant")] for row in rows
    ]
    return datasets.Dataset.from_dict({"messages": messages})
