"""What the reducer of ``DistributedDataParallel`` needs beside the gradients of a loss: the loss itself and its weight, summed in
the same buckets, and word of every parameter that a rank has not used, for which it would wait."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..batch import nested
from ..loss.weighting import Weight, widen, zero_of
from ..runtime.collectives import sum_over_ranks

__all__: list[str] = []


class Completion:
    """Completes the reductions of one model.

    ``totals`` is one parameter more for the reducer. Its gradient is the loss, the weight, whether this rank has failed, and for
    each of the ``parameters`` whether this rank has a gradient.

    Args:
        parameters: those that the reducer is built for, in its order.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.totals = nn.Parameter(widen(parameters[0].new_zeros(3 + len(parameters))))
        self.has_hook = False  # which may round what is in the buckets, so the totals have to travel beside them
        self._model: DistributedDataParallel | None = None
        self._sparse: list[torch.Tensor] = []
        self._left_out: set[int] = set()  # by some loss so far: the reducer's indices
        self._has_absent = False  # whether this rank has no gradient for some of the parameters
        self._mine: torch.Tensor | None = None  # the totals of this rank
        self._following: list[Any] = []

    def attach(self, model: DistributedDataParallel) -> None:
        """Has it work for ``model``, whose reducer was built with ``totals`` as its first parameter."""
        embeddings = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse]
        learned = set(map(id, self.parameters))
        self._model = model
        self._sparse = [embedding.weight for embedding in embeddings if id(embedding.weight) in learned]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_following": [], "_mine": None}

    def begin_sparse_gradients(self) -> None:
        """The reducer refuses a sparse gradient that is not there, as on a rank that has counted nothing."""
        for weight in [weight for weight in self._sparse if weight.grad is None and torch.is_grad_enabled()]:
            nowhere = torch.empty(1, 0, dtype=torch.long, device=weight.device)
            nothing = weight.new_empty(0, *weight.shape[1:])
            weight.grad = torch.sparse_coo_tensor(nowhere, nothing, weight.shape, check_invariants=True)

    def follow(self, output: Any) -> None:
        """Has every backward through ``output``, whatever its loss is, end with what is missing."""
        learned = [leaf for _, leaf in nested.leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        self._following = [leaf.register_hook(self._queue) for leaf in learned]

    def _queue(self, gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._awaited():  # not where torch.autograd.grad asks, which accumulates nothing, nor again for a second output
            self.announce(self.totals.new_zeros(()), 0)
            self.finish()
            if self._has_absent or self.has_hook:
                self.take_totals()

    def roots(self) -> list[torch.Tensor]:
        """Roots for a backward that reduces, beside the losses: they lead to what losses left out before, so that no bucket
        waits for that until :meth:`finish`."""
        return [self._zero_leading_to(self._left_out)] if self._left_out else []

    @contextlib.contextmanager
    def reducing(self, total: torch.Tensor, weight: Weight) -> Iterator[None]:
        """Completes the reduction of the backward in this block, for a loss and a weight of this rank.

        The reduction of a backward that raises is completed too, and :meth:`take_totals` then raises on the other ranks. They
        wait for it, and the reducer does not begin another before."""
        self.announce(total, weight)
        assert self._mine is not None
        try:
            yield
        except Exception:
            self._mine[2] = 1
            with contextlib.suppress(RuntimeError):  # the first failure is the one to hear of
                self.finish()
                self.take_totals()
            raise
        self.finish()

    def announce(self, total: torch.Tensor, weight: Weight) -> None:
        """The loss and the weight of this rank, for the next backward that reduces, which the caller will :meth:`finish`. This is
        what can be done while no rank waits."""
        for hook in self._following:
            hook.remove()
        self._mine = torch.ones_like(self.totals, dtype=torch.float64 if self.has_hook else None, requires_grad=False)
        self._mine[0], self._mine[1], self._mine[2] = total, weight, 0

    def finish(self) -> None:
        """Gives the reducer what a backward has left: the totals, and the parameters that were left out."""
        assert self._mine is not None
        absent = [index for index, parameter in enumerate(self.parameters, 3) if parameter.grad is None]
        if absent:
            self._mine[absent] = 0
        self._has_absent = bool(absent)
        self.totals.grad = None
        # a hook that compresses whole buckets would lose the gradients beside numbers as large as these
        given = torch.zeros_like(self.totals) if self.has_hook else self._mine.to(self.totals)
        torch.autograd.backward([self.totals], [given])
        while awaited := self._awaited():
            self._left_out.update(awaited)
            torch.autograd.backward([self._zero_leading_to(awaited)])

    def _zero_leading_to(self, indices: Iterable[int]) -> torch.Tensor:
        known = [self.totals, *self.parameters]
        return zero_leading_to([known[index] for index in sorted(indices)])

    def take_totals(self) -> tuple[float, float]:
        """What all ranks together announced. Gradients of parameters for which no rank had one become ``None``: the reducer
        leaves zeros there, and the plain program nothing, which optimizers pass over.

        Raises:
            RuntimeError: the backward of a rank has failed.
        """
        assert self._model is not None
        assert self._mine is not None
        assert self.totals.grad is not None
        averages, mine = self.totals.grad, self._mine
        self.totals.grad = self._mine = None
        if self.has_hook:
            loss, weight, failed, *counts = sum_over_ranks(mine).tolist()
        else:
            loss, weight, failed, *counts = [average * self._model.process_group.size() for average in averages.tolist()]
        if failed:
            raise RuntimeError(
                f"{failed:.0f} of {self._model.process_group.size()} ranks failed in the backward, expected none: nothing was "
                "updated, and the step can be repeated"
            )
        if 0 in counts:
            for parameter, count in zip(self.parameters, counts, strict=True):
                parameter.grad = parameter.grad if count else None
        return loss, weight

    def _awaited(self) -> list[int]:
        """The parameters that the reducer waits for, up to a hundred. Only the text of its error names them; autograd's graph
        does not show what a reentrant checkpoint used, nor a loss of the user's beside ours."""
        assert self._model is not None
        try:
            self._model._check_reducer_finalized()
        except RuntimeError as error:
            named = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if named is None:
                raise
            return [int(index) for index in named[1].split()]
        return []


def zero_leading_to(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """:func:`zero_of` for the reducer, which waits for all that it was made for, also for those that are frozen now."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            return zero_of(*parameters)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
