"""Models that compute their own loss of several parts. One count for all of it is named, and the advice of the page is exact."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from balanced_parallel import DataParallelCriterion, DataParallelModel, verify

CPUS = ["cpu"] * 3
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "num_key_value_heads": 1}
WORDS = torch.randint(40, (7, 9), generator=torch.Generator().manual_seed(0))
LABELS = WORDS.where(torch.arange(9) < torch.tensor([[9], [2], [3], [5], [9], [2], [3]]), -100)
STARTS, ENDS = torch.tensor([1, 2, 50, 60, 3, 9, 9]), torch.tensor([5, 4, 77, 60, 6, 2, 9])  # from 9 on, they are ignored


def own_loss(out, *targets):
    return out.loss


def count_next_words(out, labels):
    return (labels[:, 1:] != -100).sum()


def mixtral():
    net = MixtralForCausalLM(MixtralConfig(**SIZES, **ROUTERS, num_local_experts=4))
    return net, {"labels": LABELS}, count_next_words


def qwen2_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    net = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **ROUTERS, **experts))
    return net, {"labels": LABELS}, count_next_words


def question_answering():
    return BertForQuestionAnswering(BertConfig(**SIZES)), {"start_positions": STARTS, "end_positions": ENDS}, "rows"


def pretraining():
    def count(out, labels, following):
        return (labels != -100).sum()

    targets = {"labels": LABELS, "next_sentence_label": torch.tensor([0, 1, 1, 0, 1, 0, 0])}
    return BertForPreTraining(BertConfig(**SIZES)), targets, count


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, question_answering, pretraining])
def test_one_count_for_a_loss_of_several_parts_is_named(make):
    torch.manual_seed(0)
    net, targets, weight = make()
    criterion = DataParallelCriterion(own_loss, weight=weight)
    report = verify(net.eval(), criterion, {"input_ids": WORDS, **targets}, tuple(targets.values()), device_ids=CPUS)
    assert not report.equal
    assert report.reasons == (
        "the model computes its own loss, and a part of it is no mean over what weight= counts: weight= counts something else, "
        "or the loss has another part, such as a router loss or a second mean: compute the parts in the criterion "
        "(docs/huggingface.md)",
    )


def test_question_answering_with_one_count_is_exact_where_it_counts_both():
    torch.manual_seed(0)
    net, targets, _ = question_answering()
    targets = {"start_positions": STARTS, "end_positions": STARTS}
    criterion = DataParallelCriterion(own_loss, weight=lambda out, starts, ends: (starts < 9).sum())
    report = verify(net.eval(), criterion, {"input_ids": WORDS, **targets}, tuple(targets.values()), device_ids=CPUS)
    assert report.equal, report


def test_outputs_that_hooks_of_the_first_forward_capture_come_once():
    torch.manual_seed(0)
    net, _, _ = mixtral()  # transformers registers hooks when an output is first asked for
    model = DataParallelModel(net, CPUS)
    for _ in range(2):
        assert [len(out.router_logits) for out in model(WORDS)] == [2, 2, 2]
    assert len(net.model.layers[0].mlp.gate._forward_hooks) == 1
    plain, split = net(WORDS, output_hidden_states=True), model(WORDS, output_hidden_states=True)
    for expected, found in zip(plain.hidden_states, split.hidden_states.gather(), strict=True):
        torch.testing.assert_close(found, expected)
