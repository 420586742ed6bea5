"""``BalancedTrainer`` before the trainers of TRL and sentence-transformers: each against itself with all rows in one forward."""

import functools
import tempfile

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.trainers import ARGUMENTS
from torch.testing import assert_close

from balanced_parallel import simulate

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

THREE = ["cpu"] * 3
SETTINGS = {**ARGUMENTS, "bf16": False, "gradient_checkpointing": False}


@functools.cache
def exact(kind):
    from balanced_parallel.integrations.transformers import BalancedTrainer

    return type("Exact", (BalancedTrainer, kind), {})


def lora():
    from peft import LoraConfig

    modules = ["q_proj", "v_proj"]
    return LoraConfig(
        r=2,
        target_modules=modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )


def sft(columns, model=None, peft=False, chat=False, **more):
    import trl
    from helpers.language_rows import chats, language_rows, make_language_model, make_tokenizer

    rows = chats(13) if chat else language_rows(13, *columns)
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": make_tokenizer()}
    data |= {"peft_config": lora()} if peft else {}
    return trl.SFTTrainer, trl.SFTConfig, (make_language_model(),), data, more


def dpo(peft=False, reference=True, **more):
    import trl
    from helpers.language_rows import language_rows, make_language_model, make_tokenizer

    rows = language_rows(13, "prompt", "chosen", "rejected")
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": make_tokenizer()}
    data |= {"peft_config": lora()} if peft else {"ref_model": make_language_model(1)}
    return trl.DPOTrainer, trl.DPOConfig, (make_language_model(),), data, more


def reward():
    import trl
    from helpers.language_rows import language_rows, make_reward_model, make_tokenizer

    rows = language_rows(13, "chosen", "rejected")
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": make_tokenizer()}
    return (
        trl.RewardTrainer,
        trl.RewardConfig,
        (make_reward_model(),),
        data,
        {"center_rewards_coefficient": 0.1},
    )


def kto(**more):
    import trl
    from helpers.language_rows import language_rows, make_language_model, make_tokenizer

    rows = language_rows(
        13, "prompt", "completion", label=[number % 3 == 0 for number in range(13)]
    )
    data = {"train_dataset": rows, "processing_class": make_tokenizer()}
    return (
        trl.KTOTrainer,
        trl.KTOConfig,
        (make_language_model(), make_language_model(1)),
        data,
        more,
    )


def longest(completions, **others):
    """Returns the rewards of completions."""
    return [float(len(text.split()) + text.count("w1")) for text in completions]


def grpo(**more):
    import trl
    from helpers.language_rows import language_rows, make_language_model, make_tokenizer

    data = {
        "train_dataset": language_rows(13, "prompt"),
        "processing_class": make_tokenizer(),
        "reward_funcs": longest,
    }
    more = {"num_generations": 2, "max_completion_length": 5, "max_steps": 3, "seed": 3, **more}
    return trl.GRPOTrainer, trl.GRPOConfig, (make_language_model(),), data, more


def rloo(**more):
    import trl

    _, _, models, data, settings = grpo(**more)
    return trl.RLOOTrainer, trl.RLOOConfig, models, data, settings


def distillation(**more):
    import trl
    from helpers.language_rows import language_rows, make_language_model, make_tokenizer

    data = {"train_dataset": language_rows(13, "prompt"), "processing_class": make_tokenizer()}
    models = make_language_model(), make_language_model(1)
    settings = {"max_completion_length": 5, "max_steps": 3, "seed": 3, **more}
    return trl.DistillationTrainer, trl.DistillationConfig, models, data, settings


def sentences(loss, *columns, **others):
    from helpers.language_rows import language_rows, make_tokenizer
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = SentenceTransformer(
        modules=[StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=8)], device="cpu"
    )
    rows = language_rows(13, *columns, **others)
    heads = (8, 5) if loss == "SoftmaxLoss" else ()
    data = {
        "train_dataset": rows,
        "eval_dataset": rows,
        "loss": getattr(losses, loss)(model, *heads),
    }
    return SentenceTransformerTrainer, SentenceTransformerTrainingArguments, (model,), data, {}


SCORES = [number % 5 / 4 for number in range(13)]
CASES = {
    "sft": functools.partial(sft, ["prompt", "completion"]),
    "sft of assistants": functools.partial(sft, [], chat=True, assistant_only_loss=True),
    "sft, smoothed": functools.partial(sft, ["prompt", "completion"], label_smoothing_factor=0.1),
    "sft, packed": functools.partial(
        sft, ["text"], packing=True, packing_strategy="wrapped", max_length=8
    ),
    "sft without padding": functools.partial(sft, ["text"], padding_free=True, max_length=None),
    "sft of an adapter": functools.partial(sft, ["prompt", "completion"], peft=True),
    "dpo": dpo,
    "dpo of two losses": functools.partial(dpo, loss_type=["ipo", "hinge"]),
    "dpo of an adapter": functools.partial(dpo, peft=True),
    "dpo, computed before": functools.partial(dpo, precompute_ref_log_probs=True),
    "reward": reward,
    "kto without kl": functools.partial(kto, loss_type="apo_zero_unpaired"),
    "grpo": functools.partial(grpo, loss_type="grpo"),
    "bnpo": functools.partial(grpo, loss_type="bnpo"),
    "dr_grpo": functools.partial(grpo, loss_type="dr_grpo"),
    "dapo": functools.partial(grpo, loss_type="dapo"),
    # It was divided by the number of tokens, as the rest of the loss.
    "dapo and the entropy": functools.partial(grpo, loss_type="dapo", entropy_coef=0.5),
    "rloo": functools.partial(rloo, beta=0.0),
    "cosines": functools.partial(sentences, "CosineSimilarityLoss", "a", "b", score=SCORES),
    "a head": functools.partial(
        sentences, "SoftmaxLoss", "a", "b", label=[number % 5 for number in range(13)]
    ),
    "triplets": functools.partial(sentences, "TripletLoss", "a", "b", "c"),
}
LOGGED = ("loss", "grad_norm", "num_tokens")


def run(case, *, evaluates, is_exact=True, devices=None, **settings):
    """Trains. Returns the log, and the loss of an evaluation."""
    torch.manual_seed(7)
    kind, config, models, data, more = (CASES[case] if isinstance(case, str) else case)()
    arguments = config(tempfile.mkdtemp(), **{**SETTINGS, **more, **settings})
    if is_exact:
        data["device_ids"] = devices
    trainer = (exact(kind) if is_exact else kind)(*models, args=arguments, **data)
    trainer.train()
    numbers = [
        [entry[name] for name in LOGGED if name in entry]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return numbers, trainer.evaluate()["eval_loss"] if evaluates else None


def compare(result, expected):
    # a sum of losses of rows that cancel is zero, up to rounding
    assert_close(torch.tensor(result[0]), torch.tensor(expected[0]), rtol=2e-4, atol=2e-5)
    if expected[1] is not None:
        assert result[1] == pytest.approx(expected[1], rel=3e-4)


def has_evaluation(case):
    return case.startswith(("sft", "dpo", "reward", "cos", "a head", "triplets"))


@pytest.mark.parametrize("case", CASES)
def test_accumulation_and_replicas(case):
    evaluates = has_evaluation(case)
    whole = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 13}
    expected = run(case, evaluates=evaluates, is_exact=False, **whole)
    compare(run(case, evaluates=evaluates, gradient_accumulation_steps=3), expected)
    compare(run(case, evaluates=evaluates, devices=THREE), expected)


def run_rank(rank, case, evaluates):
    return run(
        case, evaluates=evaluates, per_device_train_batch_size=1, gradient_accumulation_steps=3
    )


@pytest.mark.parametrize(
    "case", ["sft", "sft, smoothed", "sft without padding", "sft of an adapter", "dpo", "reward"]
)
def test_ranks(case):
    evaluates = case != "sft without padding"  # 13 rows do not fill the last batch
    whole = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 13}
    expected = run(case, evaluates=evaluates, is_exact=False, **whole)
    first, second = run_ranks(2, run_rank, case, evaluates, fresh=True)
    compare(first, expected)
    # The last update has no tokens of the second rank, which prints nothing.
    compare(
        ([entry[:2] for entry in second[0]], second[1]),
        ([entry[:2] for entry in expected[0]], expected[1]),
    )


def run_both(rank, case):
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    return [run(case, evaluates=False, is_exact=is_exact, **settings) for is_exact in (False, True)]


@pytest.mark.parametrize("case", ["grpo", "dr_grpo", "dapo"])
def test_ranks_with_completions_of_their_own(case):
    """Ranks draw other completions than one device. Losses of TRL are right if all rows have the same weight."""
    for expected, result in run_ranks(2, run_both, case, fresh=True):
        compare(result, expected)


def test_a_model_of_reference_that_follows_on_distinct_devices():
    """TRL mixes the weights of the model into those of ``ref_model`` after each update, with ``.data``."""
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.4}
    case = functools.partial(dpo, **synced)
    whole = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 13}
    expected = run(case, evaluates=True, is_exact=False, **whole)
    with simulate(3):
        compare(run(case, evaluates=True, devices=range(3)), expected)
    constant, _ = run(dpo, evaluates=False, is_exact=False, **whole)
    assert abs(constant[-1][1] / expected[0][-1][1] - 1) > 0.01


def with_adapter(make, **more):
    kind, config, models, data, settings = make(**more)
    return kind, config, models, data | {"peft_config": lora()}, settings


@pytest.mark.parametrize(
    "case",
    [
        functools.partial(grpo, num_iterations=2, loss_type="grpo"),
        functools.partial(with_adapter, grpo, beta=0.1, loss_type="grpo"),
        functools.partial(rloo, beta=0.0, normalize_advantages=True),
    ],
    ids=["two iterations", "an adapter and its reference", "normalized advantages"],
)
def test_forwards_of_trl_itself_on_distinct_devices(case, monkeypatch):
    """TRL moves completions to the device of the arguments, where the model was not."""
    draw = torch.multinomial
    # All devices draw the same completions.
    monkeypatch.setattr(
        torch,
        "multinomial",
        lambda shares, num_samples: draw(shares.cpu(), num_samples).to(shares.device),
    )
    expected, _ = run(case, evaluates=False, is_exact=False, per_device_train_batch_size=6)
    with simulate(3):
        result, _ = run(case, evaluates=False, devices=range(3))
    # Tokens are counted where completions are new.
    assert_close([*map(torch.tensor, result)], [*map(torch.tensor, expected)], rtol=2e-4, atol=2e-5)


def sum_over_tokens(outputs, labels, num_items_in_batch=None):
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return losses / num_items_in_batch


def sft_of_a_function():
    kind, config, models, data, more = sft(["prompt", "completion"])
    return kind, config, models, data | {"compute_loss_func": sum_over_tokens}, more


@pytest.mark.parametrize(
    "case", [CASES["sft, smoothed"], sft_of_a_function, CASES["kto without kl"]]
)
def test_forwards_that_trl_replaces_and_its_device_are_those_of_the_replica(case):
    """A function around the forward called that of the first device. KTO moves rows to that of the accelerator."""
    whole = {"per_device_train_batch_size": 6}
    expected = run(case, evaluates=False, is_exact=False, **whole)
    with simulate(3):
        compare(run(case, evaluates=False, devices=range(3)), expected)


def test_activation_offloading_of_trl_is_refused_on_several_devices():
    """One object has what all threads save for the backward."""
    case = functools.partial(sft, ["text"], activation_offloading=True)
    with pytest.raises(ValueError, match="activation_offloading=True with 3 devices"):
        run(case, evaluates=False, devices=THREE)


def test_a_model_of_reference_in_bf16_keeps_the_forward_that_trl_gives_it():
    """accelerate puts autocast around it, and takes both away if it is asked for the model without autocast."""
    expected, _ = run(
        dpo, evaluates=False, is_exact=False, per_device_train_batch_size=6, bf16=True
    )
    result, _ = run(dpo, evaluates=False, devices=THREE, bf16=True)
    assert_close(torch.tensor(result), torch.tensor(expected), rtol=0.05, atol=0.01)


def test_a_window_of_masked_completions_has_a_loss_of_zero():
    """It was nan, which Trainer leaves out of the mean that it prints."""
    settings = {"mask_truncated_completions": True, "logging_nan_inf_filter": False}
    case = functools.partial(grpo, loss_type="dapo", max_completion_length=1, **settings)
    expected = run(case, evaluates=False, is_exact=False, per_device_train_batch_size=6)
    assert [entry[:2] == [0, 0] for entry in expected[0]] == [True, False, True]
    compare(run(case, evaluates=False, gradient_accumulation_steps=3), expected)
    compare(run(case, evaluates=False, per_device_train_batch_size=6), expected)


def test_micro_batches_of_trl_differ():
    """Tokens of micro-batches have other weights in ``loss_type="bnpo"``."""
    expected, _ = run("bnpo", evaluates=False, is_exact=False, per_device_train_batch_size=6)
    numbers, _ = run("bnpo", evaluates=False, is_exact=False, gradient_accumulation_steps=3)
    assert abs(numbers[1][1] / expected[1][1] - 1) > 0.05


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            functools.partial(dpo, loss_type=["sigmoid", "sft"]),
            "for some rows, and .* for others|is not a function of sums",
        ),  # a mean over tokens, expanded to rows
        (functools.partial(kto), "KTO has a mean over the rows"),
        # Two rows may be in one order before and after they are sorted.
        (functools.partial(dpo, loss_type=["aot"]), "AOT sorts the rows"),
        (functools.partial(dpo, loss_type=["aot_unpaired"]), "AOT sorts the rows"),
        (distillation, "is not a function of sums over the rows"),
        (
            functools.partial(sentences, "MultipleNegativesRankingLoss", "a", "b"),
            "depend on each other",
        ),
        (
            functools.partial(
                grpo, loss_type="dapo", steps_per_generation=2, gradient_accumulation_steps=1
            ),
            "expected equal numbers",
        ),
    ],
)
@pytest.mark.parametrize("parts", [{"gradient_accumulation_steps": 3}, {"devices": THREE}])
def test_losses_that_are_refused(case, text, parts):
    with pytest.raises(ValueError, match=text):
        run(case, evaluates=False, **parts)


def test_an_update_that_is_one_forward_may_have_negatives_in_its_batch():
    case = functools.partial(sentences, "MultipleNegativesRankingLoss", "a", "b")
    expected = run(case, evaluates=False, is_exact=False, per_device_train_batch_size=6)
    compare(run(case, evaluates=False, per_device_train_batch_size=6), expected)


def test_the_page_has_each_trainer_that_trl_exports():
    import trl
    from helpers.pages import ROOT

    page = (ROOT / "docs/recipes/trainer.md").read_text()
    names = [name for name in dir(trl) if name.endswith("Trainer")]
    assert len(names) >= 7
    assert not [name for name in names if f"| `{name}` |" not in page]
