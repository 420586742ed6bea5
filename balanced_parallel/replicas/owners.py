"""Owners of gradients, for a :class:`BalancedOptimizer`.

Each device owns an equal part of a bucket's elements, or whole parameters, and receives the sums of
these. ::

    parameters   | weight            | bias | weight       |        pieces share the memory of the replicas
    owners       | device 0    | device 1    | device 2    |        reduce-scatter -> update of a piece -> all-gather

``parameter.grad`` then is a :class:`ShardedGradient`. An operation gathers this gradient alone, and
writes it back. Views write through, because they are taken again of the gathered gradient::

    parameter.grad.norm()               gather -> norm
    parameter.grad.mul_(2)              gather -> mul_ -> scatter
    parameter.grad.detach()[0].zero_()  gather -> detach -> [0] -> zero_ -> scatter
"""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import torch_private, transport
from ..runtime.streams import wait_for_sums
from ..runtime.torch_private import foreach_add_, map_tensors
from ..runtime.transport import MemoryLayout, layout_of
from ..runtime.values import set_gradient, set_memory

# one replica's, by the place of the parameter in its bucket; none for an unused parameter
Gradients = dict[int, Tensor]
View = Callable[[Any], Any]  # takes a view of a tensor


def is_dense(tensor: Tensor) -> bool:
    """Returns True for a tensor that is not sparse."""
    return bool(tensor.layout == torch.strided)


class Piece:
    """A run of one parameter's elements, the ``index``-th of a bucket, in the memory of the device
    that owns it.

    ``values`` is a leaf for the optimizer to update, flat if it is not the whole parameter.
    ``places`` are the same elements on all devices.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        index: int,
        run: slice,
        owner: torch.device,
        copies: Mapping[torch.device, Tensor],
    ) -> None:
        # A gradient that refers to its parameter would never be freed.
        self.parameter: Callable[[], Any] = weakref.ref(parameter)
        self.index = index
        self.owner = owner
        self.run = run
        self.is_whole = run.stop - run.start == parameter.numel()
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        # A version counter of its own tells the writes of the optimizer, and of the caller.
        self.values = self.places[owner].data.requires_grad_()

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this piece of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.run]

    def repoint(self, copies: Mapping[torch.device, Tensor]) -> None:
        """Takes the memory of other copies of the parameter, which has moved."""
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        set_memory(self.values, self.places[self.owner])


class OwnedParameter:
    """A parameter with pieces, which have the gradient that is in ``parameter.grad``."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.parameter = pieces[0].parameter
        self._gradient: ShardedGradient | None = None  # The pieces have its parts.

    def add(self, parts: list[Tensor]) -> None:
        """Adds parts to ``parameter.grad``. Without parts it is zero, if it was None."""
        parameter = self.parameter()
        whole = parameter.grad
        if type(whole) is Tensor:
            # This is in place, as autograd does it.
            whole.add_(ShardedGradient(parameter, self, parts))
            return
        self.follow()
        gradient = self._gradient
        if gradient is None:
            gradient = ShardedGradient(parameter, self, [])
        if gradient.parts:
            foreach_add_(gradient.parts, parts)
        else:
            gradient.parts.extend(parts)
        self._give(gradient)

    def follow(self) -> None:
        """Gives the pieces the gradient that is in ``parameter.grad`` now.

        If it is the same as before, the pieces may have others since, or none.
        """
        parameter = self.parameter()
        gradient = parameter.grad
        if gradient is not self._gradient:
            if gradient is not None and getattr(gradient, "source", None) != (self, ()):
                settle(parameter)
                whole = check_dense(parameter.grad)
                parts = [piece.cut(whole).to(piece.owner, copy=True) for piece in self.pieces]
                gradient = ShardedGradient(parameter, self, parts)
            self._give(gradient)
        elif gradient is not None and gradient.parts:
            parts = [piece.values.grad for piece in self.pieces if piece.values.grad is not None]
            if len(parts) < len(self.pieces):
                self._give(None)
            else:
                gradient.parts[:] = parts

    def _give(self, gradient: "ShardedGradient | None") -> None:
        self._gradient = gradient
        set_gradient(self.parameter(), gradient)
        parts = [] if gradient is None else gradient.parts
        for piece, part in itertools.zip_longest(self.pieces, parts):
            set_gradient(piece.values, part)


def _of_whole(name: str) -> Any:
    return lambda gradient, *arguments: getattr(gradient.clone(), name)(*arguments)


class ShardedGradient(Tensor):
    """A gradient of ``parts``, one for each piece of a parameter, or a view of it.

    Views share the list of parts. It is empty until something is added.
    """

    __torch_function__ = torch_private.no_torch_function  # type: ignore[assignment]
    __new__ = torch_private.new_wrapper  # type: ignore[assignment]
    __repr__ = _of_whole("__repr__")
    __reduce_ex__ = _of_whole("__reduce_ex__")
    tolist = _of_whole("tolist")
    numpy = _of_whole("numpy")
    data = property(
        Tensor.detach,
        lambda gradient, values: gradient.detach().copy_(values),
    )

    def __init__(
        self, like: Tensor, owned: OwnedParameter, parts: list[Tensor], *views: View
    ) -> None:
        self.source = owned, views
        self.parts = parts

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: object,
        arguments: Sequence[Any],
        settings: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an operator on gathered gradients."""
        if torch.Tag.inplace_view in function.tags:
            raise TypeError(
                f"{function} would change the shape of parameter.grad, whose elements are on several devices, expected "
                "an operator that keeps it: change a copy, parameter.grad.clone()"
            )
        wholes: dict[int, Tensor] = {}  # Keys are the ids of their parts.
        pairs: list[tuple[Tensor, Tensor]] = []
        gradients: dict[int, ShardedGradient] = {}  # Keys are the ids of arguments.

        def gathered(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, cls):
                return tensor
            if (key := id(tensor.parts)) not in wholes:
                wholes[key] = tensor._gather("meta" if function.is_view else tensor.device)
            views = tensor.source[1]
            value: Tensor = functools.reduce(lambda whole, view: view(whole), views, wholes[key])
            # The operator would not see that it is to be conjugated.
            plain = value if function.is_view else value.resolve_conj().resolve_neg()
            pairs.append((value, plain))
            gradients[id(plain)] = tensor
            return plain

        values, named = map_tensors(gathered, (arguments, settings or {}))
        result = function(*values, **named)
        if function.is_view:
            rest = values[1:]
            return arguments[0]._viewed(result, lambda whole: function(whole, *rest, **named))
        writes = torch_private.writes(function)
        for value, plain in pairs if writes else ():
            if plain is not value:
                value.copy_(plain)
        for gradient in gradients.values() if writes else ():
            whole = wholes[id(gradient.parts)]
            for piece, part in zip(gradient.source[0].pieces, gradient.parts, strict=True):
                transport.copy(part, piece.cut(whole))
        return map_tensors(lambda tensor: gradients.get(id(tensor), tensor), result)

    def _gather(self, device: torch.device | str) -> Tensor:
        """Returns the whole gradient; only its shape on the meta device."""
        owned, _ = self.source
        settle(owned.parameter())
        whole = torch.zeros_like(owned.parameter(), device=device)
        for piece, part in zip(owned.pieces, self.parts, strict=False):
            transport.copy(piece.cut(whole), part)
        return whole

    def _viewed(self, result: Tensor | list[Tensor], *views: View) -> object:
        if isinstance(result, Tensor):
            owned, before = self.source
            return ShardedGradient(result, owned, self.parts, *before, *views)
        each = enumerate(result)
        return [self._viewed(part, *views, operator.itemgetter(place)) for place, part in each]


# Buckets of all modules of the process. Two modules may share a parameter, and neither knows the
# other.
all_buckets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def settle(parameter: Tensor) -> None:
    """Adds what replicas hold for a parameter to its ``grad``."""
    wait_for_sums(is_read=True)
    for bucket in filter(None, [reference() for reference in all_buckets.valuerefs()]):
        if bucket.held and id(parameter) in bucket.kinds:
            bucket.reduce()


def _make_pieces(
    parameters: Sequence[nn.Parameter],
    copies: Sequence[Mapping[torch.device, Tensor]],
    owners: Mapping[Tensor, int] | None,
) -> Iterator[Piece]:
    """Yields a bucket's pieces in the order of their owners.

    A parameter whose memory has gaps is not cut.
    """
    devices = list(copies[0])
    # Collectives need equal sizes.
    share = max(-(-sum(parameter.numel() for parameter in parameters) // len(devices)), 1)
    begin = 0
    for index in sorted(
        range(len(parameters)), key=lambda index: owners[parameters[index]] if owners else 0
    ):
        parameter = parameters[index]
        copied = copies[index]
        end = begin + parameter.numel()
        is_cut = owners is None and all(copy.is_contiguous() for copy in copied.values())
        cuts = range((begin // share + 1) * share, end, share) if is_cut else ()
        for start, stop in itertools.pairwise([begin, *cuts, end]):
            owner = min(start // share, len(devices) - 1) if owners is None else owners[parameter]
            yield Piece(
                parameter, index, slice(start - begin, stop - begin), devices[owner], copied
            )
        begin = end


class BucketOwners:
    """The pieces of one bucket, in the order of their owners, which are the devices in ``copies``,
    the copies of each parameter.

    ``owners`` are the devices of whole parameters, by number. Without them, each device owns as
    many bytes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[dict[torch.device, Tensor]],
        owners: Mapping[Tensor, int] | None = None,
    ) -> None:
        self._devices = list(copies[0])
        self.pieces = [*_make_pieces(parameters, copies, owners)]
        groups = itertools.groupby(self.pieces, operator.attrgetter("index"))
        self.parameters = {index: OwnedParameter([*pieces]) for index, pieces in groups}
        self._owned = [
            [piece for piece in self.pieces if piece.owner == device] for device in self._devices
        ]
        is_cut = {piece.index for piece in self.pieces if not piece.is_whole}
        self._layouts = [
            MemoryLayout(parameter.shape) if index in is_cut else layout_of(parameter)
            for index, parameter in enumerate(parameters)
        ]
        sizes = [sum(piece.values.numel() for piece in owned) for owned in self._owned]
        padded = [max(sizes)] * len(sizes)
        is_padded = len(parameters) > 1 and sizes[:-1] == padded[:-1]
        self._sizes = padded if is_padded else sizes

    def take(self, replicas: Sequence[Gradients]) -> Callable[[], None]:
        """Allocates sums of the replicas' gradients on the owners.

        Returns a function that computes them.
        """
        learned = set(itertools.chain(*replicas))
        if not learned:
            return lambda: None
        layouts = [self._layouts[index] for index in self.parameters]
        flat = []
        for gradients in filter(None, replicas):
            like = next(iter(gradients.values()))
            dense = [
                check_dense(gradients[index])
                if index in gradients
                else like.new_zeros(layout.shape)
                for index, layout in zip(self.parameters, layouts, strict=True)
            ]
            flat.append(transport.pack(layouts, dense, sum(self._sizes)))
        sizes = zip(self._devices, self._sizes, strict=True)
        sums = [flat[0].new_empty(size, device=device) for device, size in sizes]

        @torch.no_grad()
        def compute() -> None:
            transport.reduce_scatter(flat, sums)
            gradients = itertools.chain(*map(self._unpack, self._owned, sums))
            for index, parameter in self.parameters.items():
                parts = [*itertools.islice(gradients, len(parameter.pieces))]
                if index in learned:
                    parameter.add(parts)

        return compute

    @torch.no_grad()
    def follow(self) -> None:
        """Gives the pieces the gradients that are in ``grad`` of the parameters."""
        for parameter in self.parameters.values():
            parameter.follow()

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        places = [[piece.places[device] for piece in self.pieces] for device in self._devices]
        if len(self._layouts) == 1 and all(
            place.is_contiguous() for row in places for place in row
        ):
            # needs no buffers
            whole = [row[0].as_strided((sum(self._sizes),), (1,)) for row in places]
            transport.all_gather(whole, self._sizes)
            torch.autograd.graph.increment_version([place for row in places for place in row])
            return
        gathered = [row[0].new_empty(sum(self._sizes)) for row in places]
        for number, owned in enumerate(self._owned):
            sent = gathered[number].split(self._sizes)[number]
            torch_private.foreach_copy_(
                self._unpack(owned, sent), [piece.values for piece in owned]
            )
        transport.all_gather(gathered, self._sizes)
        for row, flat in zip(places, gathered, strict=True):
            torch_private.foreach_copy_(row, self._unpack(self.pieces, flat))

    def _unpack(self, pieces: Sequence[Piece], flat: Tensor) -> list[Tensor]:
        layouts = [
            self._layouts[p.index] if p.is_whole else MemoryLayout(p.values.shape) for p in pieces
        ]
        return transport.unpack(layouts, flat)


def check_dense(gradient: Tensor) -> Tensor:
    """Returns the gradient. Raises ``TypeError`` if it is sparse."""
    if not is_dense(gradient):
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer sends gradients to their owners; set sparse=False in "
            "the embedding, or use a plain optimizer"
        )
    return gradient
