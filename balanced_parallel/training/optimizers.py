"""The optimizers of a step: gradients are unscaled, multiplied and clipped, then all optimizers
step together.
"""

import contextlib
import itertools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from ..batch.containers import describe
from ..loss.sums import Weight
from ..optim.balanced import BalancedOptimizer, refuse_closures
from ..replicas.owners import ShardedGradient
from ..runtime import collectives
from ..runtime.torch_private import (
    count_graph_nodes,
    hooks_of,
    is_sharded,
    local_tensors,
    version_of,
    versions,
)
from ..runtime.values import forget_gradients
from .sync import UpdateSync

Optimizers = Optimizer | Sequence[Optimizer]
Schedulers = LRScheduler | Sequence[LRScheduler]


class ParameterUpdate:
    """One step of several optimizers, together or not at all, over the parameters that their groups
    have now.

    ``trained`` are the parameters of model and criterion by name, each once. ``norm`` returns the
    norm of gradients, and ``clip`` clips those of parameters to a largest norm.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        trained: Mapping[str, Tensor],
        skip_above: float | None = None,
        norm: Callable[[list[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
        clip: Callable[[list[Tensor], float, Tensor], None] = torch.nn.utils.clip_grads_with_norm_,
    ) -> None:
        self.optimizers = optimizers
        self._skip_above = skip_above
        self._norm = norm
        self._clip = clip
        self.trained = trained
        self.has_stepped = False
        self.grad_norm: Tensor | None = None
        # The numbers of steps before the update.
        self._steps = {
            each: each.steps for each in optimizers if isinstance(each, BalancedOptimizer)
        }
        self._parameters: list[Tensor] = []  # Each parameter of the optimizers is here once.
        # For a scaler: these, and trained parameters of other optimizers. The sharded ones come first.
        self.param_groups: list[dict[str, list[Tensor]]] = []
        # The gradients after the last add(), with names and version counters.
        self._noted: list[tuple[str, Tensor, int]] = []
        for optimizer in optimizers:
            claim = _claims.get(optimizer)
            if claim is None:
                _claims[optimizer] = _free_claim(optimizer)
                # A wrapper of an optimizer may have no hooks, or a plain dict of them.
                with contextlib.suppress(AttributeError, TypeError):
                    optimizer.register_step_pre_hook(_drop_claimed)
            elif claim.nodes != count_graph_nodes():
                _warn_of_others(optimizer, claim)
        owner: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers if len(optimizers) > 1 else ()):
            for parameter in _parameters_of(optimizer):
                first = owner.setdefault(id(parameter), number)
                if first != number:
                    names = [name for name, tensor in trained.items() if tensor is parameter]
                    raise ValueError(
                        f"{names[0] if names else 'a parameter'} of shape {tuple(parameter.shape)} is in the optimizers {first} "
                        f"and {number}, expected in one of them: both would update it"
                    )

    def forget_gradients(self) -> None:
        """Drops the gradients of all parameters, in the optimizers and outside."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, BalancedOptimizer):
                optimizer.zero_grad()  # It has pieces.
            else:
                for group in optimizer.param_groups:
                    forget_gradients(group["params"])
        forget_gradients(self.trained.values())
        self._noted = []

    def note_gradients(self) -> None:
        """Notes the gradients of a window that goes on."""
        claim = Claim(count_graph_nodes(), weakref.ref(self), 0)
        _claims.update(dict.fromkeys(self.optimizers, claim))
        gradients = {
            name: parameter.grad
            for name, parameter in self.trained.items()
            if parameter.grad is not None
        }
        self._noted = list(
            zip(gradients, gradients.values(), versions([*gradients.values()]), strict=True)
        )

    def check_gradients(self) -> None:
        """Raises ``RuntimeError`` if noted gradients were cleared, changed or applied, but for those
        that owners have taken, which have another type since.
        """
        is_applied = any(_claims[optimizer].is_free for optimizer in self.optimizers)
        for name, gradient, version in self._noted:
            present = self.trained[name].grad
            is_same = present is gradient and versions([gradient]) == [version]
            is_taken = present is not None and type(present) is not type(gradient)
            if is_applied or not (is_same or is_taken):
                raise RuntimeError(
                    f"the gradient of {name} was cleared or changed before apply(), expected that of the rows that were added: "
                    "leave out zero_grad(), clipping and other backwards there, and call apply() before another step of the model"
                )

    def run(
        self,
        sync: UpdateSync,
        factor: Weight,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float | None,
    ) -> None:
        """Unscales the reduced gradients, makes them those of the loss by a factor, clips them, and
        steps the optimizers.

        Hooks of parameters are called before the clipping, once, with the gradient of the whole
        batch. Scaled gradients are one optimizer's to the scaler, which would otherwise skip each
        optimizer on its own.
        """
        groups = itertools.chain(*[optimizer.param_groups for optimizer in self.optimizers])
        parameters = itertools.chain(*[group["params"] for group in groups])
        # The hash of a tensor would be another call.
        self._parameters = [*{id(each): each for each in parameters}.values()]
        whole = cast(Optimizer, self)
        try:
            self._finish_gradients(sync, factor, scaler)
            # An overflow in one optimizer makes the gradients of the others zero here.
            if max_grad_norm is not None:
                present = map(operator.attrgetter("grad"), self._parameters)
                norm = self._norm([*filter(torch.is_tensor, present)])
                # Shards have summed it over the ranks.
                self.grad_norm = norm if type(norm) is Tensor else norm.full_tensor()  # type: ignore[attr-defined]
                self._clip(self._parameters, max_grad_norm, norm)
            if scaler is None:
                self.step()
            else:
                scaler.step(whole)  # unless it found an overflow
                scaler.update()
            for optimizer in self.optimizers:
                parameters = itertools.chain(*[group["params"] for group in optimizer.param_groups])
                gradients = [each.grad for each in parameters if each.grad is not None]
                first = weakref.ref(gradients[0] if gradients else self)
                written = sum(map(version_of, gradients))
                _claims[optimizer] = Claim(
                    count_graph_nodes(), first, written, gradients=len(gradients)
                )
            if len(self.trained) > len(self._parameters):
                self._note_others()
        except BaseException as error:
            # The other ranks step, and learn of it in the next update.
            with collectives.telling(error):
                self._take_part(scaler, max_grad_norm)
            _forget_unscaled(scaler)
            raise

    def _take_part(self, scaler: torch.amp.GradScaler | None, max_grad_norm: float | None) -> None:
        """Takes part in what the other ranks exchange, after a failure on this rank: sums over
        shards, and the parameters of a ``BalancedOptimizer``.
        """
        if any(map(is_sharded, self._parameters)):
            if scaler is not None:
                with contextlib.suppress(RuntimeError):  # It is done already.
                    scaler.unscale_(cast(Optimizer, self))
            if max_grad_norm is not None and self.grad_norm is None:
                self._norm([each.grad for each in self._parameters if each.grad is not None])
        for each, steps in self._steps.items():
            each.take_part(steps)

    def _note_others(self) -> None:
        """Notes gradients that stay in parameters of other optimizers, as a GAN's generator has."""
        ids = {*map(id, self._parameters)}
        for parameter in self.trained.values():
            if id(parameter) not in ids and parameter.grad is not None:
                _left[parameter.grad] = version_of(parameter.grad)

    def _finish_gradients(
        self, sync: UpdateSync, factor: Weight, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Unscales and multiplies the gradients, and calls the hooks of parameters with them."""
        everywhere = {id(each): each for each in (*self._parameters, *self.trained.values())}
        # The owners' pieces are scaled in place of a gradient that stands for them.
        tensors = [each for each in everywhere.values() if type(each.grad) is not ShardedGradient]
        if scaler is not None:
            self.param_groups = [{"params": sorted(tensors, key=is_sharded, reverse=True)}]
            scaler.unscale_(cast(Optimizer, self))
        sync.multiply(tensors, factor)
        parameters = [parameter for parameter in self.trained.values() if any(hooks_of(parameter))]
        if parameters and any(
            isinstance(optimizer, BalancedOptimizer) for optimizer in self.optimizers
        ):
            raise TypeError(
                "a parameter has a hook of its gradient, of which BalancedOptimizer has pieces, expected no hook"
            )
        for parameter in parameters:
            gradient = parameter.grad
            forget_gradients([parameter])
            if gradient is not None:
                # autograd calls the hooks, and sets the gradient that they return
                parameter.backward(gradient)

    def step(self) -> None:
        """Steps every optimizer, unless the norm of the gradients is above the limit."""
        norm = self.grad_norm
        if norm is not None and self._skip_above and not norm <= self._skip_above:
            return
        for optimizer in self.optimizers:
            _claims[optimizer] = _OWN  # the hook lets this step pass
            try:
                optimizer.step()
            # SAM has a default for the closure that it needs
            except (AssertionError, TypeError) as error:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() failed without a closure: {error}; if it needs one, call "
                    "optimizer.step(closure) in a loop of your own"
                ) from error
        self.has_stepped = True


def _forget_unscaled(scaler: torch.amp.GradScaler | None) -> None:
    """Forgets what was unscaled, so that the step can be repeated."""
    if scaler is not None:
        scaler.update(scaler.get_scale())  # The scale stays.


class Claim(NamedTuple):
    """The gradients of an optimizer that were applied, or are those of a window."""

    nodes: int  # The graph nodes at that time.
    first: Callable[[], object]  # A weak reference to the first gradient.
    written: int  # The writes to all of them.
    is_free: bool = False  # A step by hand may follow: a loop of the user has applied them.
    gradients: int = 0  # The number of gradients.


_OWN = Claim(-1, object, 0)  # lets a step of TrainStep pass
# Several steps, and loops by hand, may share optimizers and schedulers, so their states are of the
# process.
_claims: weakref.WeakKeyDictionary[Optimizer, Claim] = weakref.WeakKeyDictionary()
# The gradients that a step has left in parameters of other optimizers, with their versions.
_left = WeakIdKeyDictionary()
# The epoch after a TrainStep.
_epochs: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()


def _drop_claimed(optimizer: Optimizer, *arguments: object) -> None:
    """Runs before each step of an optimizer: by TrainStep, by a loop of the user, or by a line of
    an old loop.
    """
    claim = _claims.get(optimizer, _OWN)  # a wrapper of an optimizer is another object
    if claim is _OWN:
        return
    # Clipping writes once to each. Another backward adds to zeros.
    is_kept = _is_applied(optimizer, claim, writes=1) or claim.nodes == count_graph_nodes()
    if is_kept and not claim.is_free:
        optimizer.zero_grad()
        warnings.warn(
            "optimizer.step() was called, but TrainStep steps the optimizer itself, so these gradients are dropped, and nothing "
            "is updated: leave optimizer.step() out, or call optimizer.zero_grad() and run a backward of your own before it",
            stacklevel=3,
        )
    else:  # an update by hand, which steps its schedulers by hand as well
        _claims[optimizer] = _free_claim(optimizer)
        for scheduler in [scheduler for scheduler in _epochs if scheduler.optimizer is optimizer]:
            del _epochs[scheduler]


def _free_claim(optimizer: Optimizer) -> Claim:
    """Returns the claim of gradients that a loop of the user applies."""
    gradients = _gradients_of(optimizer)
    first = weakref.ref(gradients[0] if gradients else optimizer)
    return Claim(count_graph_nodes(), first, sum(versions(gradients)), is_free=True)


def _is_applied(optimizer: Optimizer, claim: Claim, writes: int) -> bool:
    """Returns True if the gradients of an optimizer are those of a claim, with so many writes to each
    since then at most.
    """
    gradients = _gradients_of(optimizer)
    if not gradients or claim.first() is not gradients[0]:
        return False
    return sum(versions(gradients)) <= claim.written + writes * len(gradients)


def _warn_of_others(optimizer: Optimizer, claim: Claim) -> None:
    """Warns of gradients that an update of TrainStep drops: of a backward since the last step."""
    if _is_applied(optimizer, claim, writes=0):
        return
    present = _gradients_of(optimizer)
    # Parameters were added to the optimizer.
    if claim.gradients and len(present) != claim.gradients:
        return
    gradients = local_tensors(each for each in present if _left.get(each) != version_of(each))
    if any(each.layout != torch.strided or bool(each.any()) for each in gradients):
        warnings.warn(
            "a backward or clipping has written to gradients since the last step of their optimizer, and this update drops them, "
            "expected none: return the sum of the losses from one criterion, or run all backwards by hand; else call "
            "optimizer.zero_grad() before step(...)",
            stacklevel=8,
        )


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [each.grad for each in _parameters_of(optimizer) if each.grad is not None]


def step_schedulers(schedulers: Sequence[LRScheduler]) -> None:
    """Steps every scheduler after an update.

    Raises ``RuntimeError`` if one was stepped by hand since the update before.
    """
    for scheduler in schedulers:
        epoch = getattr(scheduler, "last_epoch", 0)
        # a state that was loaded is hardly the next one
        if epoch == _epochs.get(scheduler, math.nan) + 1:
            raise RuntimeError(
                f"{type(scheduler).__name__} was stepped by hand, but TrainStep steps it after each update, expected one of "
                "both: leave scheduler.step() out, or scheduler= here"
            )
        scheduler.step()
        _epochs[scheduler] = epoch + 1


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def each_optimizer(optimizers: Optimizers) -> list[Optimizer]:
    """Returns a list of one or several optimizers."""
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    each = _listed(optimizers, Optimizer, "optimizer")
    if not each:
        raise ValueError("no optimizer was given, expected one or more")
    return each


def each_scheduler(schedulers: Schedulers | None) -> list[LRScheduler]:
    """Returns a list of one, several or no schedulers."""
    each = [] if schedulers is None else _listed(schedulers, LRScheduler, "scheduler")
    for scheduler in each:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric: call its step(metric) after validation, and leave it out of scheduler= here"
            )
    return each


def _listed(value: Any, kind: type, name: str) -> list[Any]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    for entry in listed:
        if not isinstance(entry, kind):
            raise TypeError(
                f"the {name} is {describe(entry)}, expected an instance of {kind.__name__}, or a list of them"
            )
    return listed


def check_optimizers(update: ParameterUpdate, schedulers: Sequence[LRScheduler]) -> None:
    """Checks that the optimizers update parameters of the model or of the criterion, and the
    schedulers these optimizers.
    """
    for scheduler in schedulers:  # a wrapper of an optimizer shares its groups
        if not any(
            scheduler.optimizer.param_groups is optimizer.param_groups
            for optimizer in update.optimizers
        ):
            raise ValueError(
                f"{type(scheduler).__name__} was made for another {type(scheduler.optimizer).__name__}, expected the optimizer "
                "of this step: its learning rate would never change"
            )
    trained = {id(tensor) for tensor in update.trained.values()}
    for number, optimizer in enumerate(update.optimizers):
        refuse_closures(type(optimizer), "TrainStep")
        parameters = _parameters_of(optimizer)
        if isinstance(optimizer, BalancedOptimizer):  # The groups have the shards.
            parameters = [*itertools.chain(*[each["params"] for each in optimizer.recipe.groups])]
        if isinstance(optimizer, torch.optim.Muon) and any(map(is_sharded, parameters)):
            raise TypeError(
                "Muon over shards of strategy='fsdp' differs by percents, because it multiplies pieces in bfloat16, expected "
                "BalancedOptimizer(model, torch.optim.Muon, matrices, lr=...), which updates whole matrices"
            )
        if parameters and not any(id(parameter) in trained for parameter in parameters):
            raise ValueError(
                f"optimizer {number} ({type(optimizer).__name__}) has {len(parameters)} parameter(s), and none is a parameter of "
                "the model or the criterion: nothing would be trained, so make it of model.parameters(), once that is wrapped"
            )
