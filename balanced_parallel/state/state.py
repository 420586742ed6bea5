"""The state of a run between two updates: model, criterion, optimizers, schedulers, gradient scaler
and random numbers.

Any number of devices or ranks may load it. For a file, it is a tree of plain values in JSON, and
tensors for ``torch.distributed.checkpoint``. Nothing of it is a pickle.
"""

import collections
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..optim.balanced import BalancedOptimizer
from ..runtime import collectives, torch_private, values
from ..runtime.devices import is_accelerator, on_device
from ..runtime.random_numbers import generator_states, set_generators
from ..training.settings import TrainedObjects, names_by_group

_REMEDY = "build model and optimizer as they were when the state was saved"
_ENTRIES = {
    "model",
    "criterion",
    "optimizers",
    "schedulers",
    "scaler",
    "random",
    "python",
    "numpy",
    "layout",
    "weight_before",  # The step has it itself, and the next.
    "limit",
}


class TrainedState(TrainedObjects):
    """The state of the objects of a training step."""

    def save(self) -> dict[str, Any]:
        """Returns the state. Every rank calls this. Tensors are not copied."""
        scaler = self.precision.scaler
        name, keys, *others = np.random.get_state(legacy=True)
        return {
            "model": _module_state(self.model.module),
            "criterion": dict(self.criterion.state_dict()),
            "optimizers": [state_by_name(optimizer, self.trained) for optimizer in self.optimizers],
            "schedulers": [
                {"class": class_name(scheduler), **scheduler.state_dict()}
                for scheduler in self.schedulers
            ],
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": {f"rank{collectives.rank()}": generator_states(self.model.devices)},
            "python": random.getstate(),
            "numpy": (name, np.asarray(keys).tolist(), *others),
            "layout": self._layout(),
        }

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state that :meth:`check` has accepted."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self.model.module, state_dict["model"])
        self.criterion.load_state_dict(state_dict["criterion"])
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(numbered_state(optimizer, self.trained, state))
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(
                {name: value for name, value in state.items() if name != "class"}
            )
        scaler = self.precision.scaler_on(self.model.devices[0])
        if scaler is not None and state_dict["scaler"]:
            scaler.load_state_dict(state_dict["scaler"])
        rank = collectives.rank()
        saved = state_dict["random"]
        devices = self.model.devices
        if state_dict["layout"] == self._layout():
            set_generators(saved[f"rank{rank}"], devices)
            random.setstate(state_dict["python"])
            np.random.set_state(state_dict["numpy"])
        else:
            (of_one,) = saved.values()  # the CPU's generator is the same on all ranks
            seed_anew(of_one["cpu"], devices, rank * len(devices))

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raises the errors of :meth:`TrainStep.load_state_dict`, without changing anything."""
        values.check_type(
            "state_dict", state_dict, Mapping, "what a TrainStep's state_dict() returns"
        )
        if missing := _ENTRIES - state_dict.keys():
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing))}, expected what a TrainStep's state_dict() returns"
            )
        for name, parts in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            classes = [state["class"] for state in state_dict[name]]
            expected = [class_name(part) for part in parts]
            if classes != expected:
                raise ValueError(
                    f"the state has the {name} {classes}, expected {expected}: {_REMEDY}"
                )
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            numbered_state(optimizer, self.trained, state)
        check_same_tensors("model", _module_state(self.model.module), state_dict["model"])
        check_same_tensors("criterion", self.criterion.state_dict(), state_dict["criterion"])

    def load_target(
        self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        """Returns memory for a saved tensor, laid out as its parameter if that is sharded over
        ranks; otherwise None.
        """
        shaped = self.model.module.state_dict()
        shaped |= {
            torch_private.uncompiled_name(name): parameter
            for name, parameter in self.trained.items()
        }
        like = next((shaped[name] for name in path if name in shaped), None)
        if torch_private.is_sharded(like) and like.shape == size:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return None

    def parameters(self) -> dict[str, Tensor]:
        """Returns the parameters of model and criterion by their keys in the state."""
        module = self.model.module
        model = parameters_of(module, _module_state(module))
        criterion = parameters_of(self.criterion, self.criterion.state_dict())
        return split_tensors({"model": model, "criterion": criterion})[1]

    def digest(self) -> str:
        """Returns the digest of the parameters. Every rank calls this."""
        lines = []
        for key, stored in self.parameters().items():
            whole = stored.full_tensor() if torch_private.is_sharded(stored) else stored
            lines.append(describe_bits(key, whole))
        return digest_lines(lines)

    def _layout(self) -> list[object]:
        return [
            collectives.world_size(),
            [device.type for device in dict.fromkeys(self.model.devices)],
        ]


def seed_anew(of_cpu: Tensor, devices: Sequence[torch.device], first: int) -> None:
    """Sets the CPU's generator, and gives ``devices`` seeds that follow from it: all different, and
    others than before.

    The state of the CPU's generator is the same on all ranks. ``first`` is the first device's
    number among those of all ranks.
    """
    torch.set_rng_state(of_cpu)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.set_rng_state(of_cpu)
    for number, device in enumerate(dict.fromkeys(devices)):
        if is_accelerator(device):
            with on_device(device, None):
                torch.get_device_module(device).manual_seed((seed + first + number) % 2**63)


def parameters_of(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors in the state of a module that are not buffers.

    A buffer that requires a gradient is learned as a parameter is.
    """
    buffers = {
        torch_private.uncompiled_name(name)
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if not buffer.requires_grad
    }
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and torch_private.uncompiled_name(name) not in buffers
    }


def describe_bits(key: str, stored: Tensor) -> str:
    """Returns a line with the name of a stored tensor, its dtype, its shape and the digest of its
    bits.
    """
    bits = stored.cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(bits.numpy().data).hexdigest()
    return f"{torch_private.uncompiled_name(key)} {stored.dtype} {list(stored.shape)} {digest}"


def digest_lines(lines: Iterable[str]) -> str:
    """Returns the digest of lines in any order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _module_state(module: nn.Module) -> dict[str, Any]:
    # takes seconds to import
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return dict(get_model_state_dict(module))


def state_by_name(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the state of an optimizer, with names where ``torch.optim`` has numbers.

    Parameters without one keep theirs.
    """
    groups = names_by_group(optimizer, trained)
    state = optimizer.state_dict()
    names = [*itertools.chain(*groups)]
    return {
        "class": class_name(optimizer),
        "state": {names[number]: entries for number, entries in state["state"].items()},
        "param_groups": [
            {**group, "params": members}
            for group, members in zip(state["param_groups"], groups, strict=True)
        ],
    }


def numbered_state(
    optimizer: Optimizer, trained: Mapping[str, Tensor], state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a state from :func:`state_by_name` as the optimizer's ``load_state_dict()`` takes it."""
    groups = names_by_group(optimizer, trained)
    saved = state_dict["param_groups"]
    numbers = {name: number for number, name in enumerate(itertools.chain(*groups))}
    if len(groups) != len(saved):
        raise ValueError(
            f"the state has {len(saved)} param groups, expected {len(groups)}: {_REMEDY}"
        )
    for place, (names, group) in enumerate(zip(groups, saved, strict=True)):
        if different := sorted({*names} ^ {*group["params"]}):
            raise ValueError(
                f"param group {place} of the state has {len(group['params'])} parameters, expected {len(names)}, and only one "
                f"has {', '.join(different[:3])}: {_REMEDY}"
            )
    return {
        "state": {numbers[name]: entries for name, entries in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]}
            for names, group in zip(groups, saved, strict=True)
        ],
    }


def class_name(optimizer: Any) -> str:
    """Returns the class of a scheduler, or of the plain optimizer, however it is spread over
    devices or ranks.
    """
    if isinstance(optimizer, BalancedOptimizer):
        return optimizer.recipe[0].__name__
    # A ZeroRedundancyOptimizer has it.
    return type(getattr(optimizer, "optim", optimizer)).__name__


TreePath = tuple[Any, ...]
_PLAIN = (str, bool, int, float, type(None))
# MultiStepLR has a Counter
_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}


def split_tensors(state: object) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a tree for JSON, and its tensors by key: ``"step/model/0.weight"``.

    A tensor is its path, shape and dtype in the tree. A value that would not come back as it is
    raises ``TypeError``.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors), tensors


def _encode(value: Any, path: TreePath, tensors: dict[str, Tensor]) -> Any:
    """Returns the tree of a value.

    A list is a list, other containers and tensors are a dictionary with their kind as its key.
    """
    if isinstance(value, np.generic):
        value = value.item()  # a number of Python
    kind = type(value)
    name = kind.__name__
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        stored = tensors[tensor_key(path)] = _stored(value, path)
        return {"tensor": [path, stored.shape, str(stored.dtype)[6:], str(value.dtype)[6:]]}
    if kind in (list, tuple):
        entries = [
            _encode(entry, (*path, str(index)), tensors) for index, entry in enumerate(value)
        ]
        return entries if kind is list else {name: entries}
    if kind in _MAPPINGS.values() and all(type(key) in _PLAIN for key in value):
        return {
            name: [[key, _encode(entry, (*path, key), tensors)] for key, entry in value.items()]
        }
    raise TypeError(
        f"{tensor_key(path)} is a {name}, expected tensors, numbers, strings, and lists, tuples and dictionaries of them, with "
        "keys that are numbers or strings: a checkpoint has no pickled objects"
    )


def _stored(tensor: Tensor, path: TreePath) -> Tensor:
    """Returns a view of a tensor that safetensors can store: a complex tensor as pairs, types of
    one byte as uint8.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"{tensor_key(path)} is a {tensor.layout} tensor of {tensor.dtype}, expected a dense, plain one"
        )
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def join_tensors(tree: Any, find: Callable[[TreePath, torch.Size, torch.dtype], Tensor]) -> Any:
    """Returns the nested state of a tree from :func:`split_tensors`.

    ``find`` returns the stored tensor of a path, or memory for it, which may be filled afterwards.
    """
    if isinstance(tree, list):
        return [join_tensors(entry, find) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        path, shape, *names = value
        stored_dtype, dtype = (getattr(torch, name) for name in names)
        stored = find(tuple(path), torch.Size(shape), stored_dtype)
        if stored_dtype == dtype:
            return stored
        return torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)
    if kind == "tuple":
        return tuple(join_tensors(entry, find) for entry in value)
    return _MAPPINGS[kind]({key: join_tensors(entry, find) for key, entry in value})


def tensor_key(path: Iterable[object]) -> str:
    """Returns the name of a tensor.

    Other paths have other names: keys may contain a slash, and 1 is not ``"1"``.
    """
    return "/".join(
        quote(part, safe="") if isinstance(part, str) else f"%({part})" for part in path
    )


def check_same_tensors(name: str, tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ``RuntimeError`` if a saved state has other names or shapes, before any of it is
    loaded.
    """
    other = sorted(tensors.keys() ^ saved.keys())
    if other:
        different = ", ".join(other[:3])
        raise RuntimeError(
            f"the state of {name} has {len(saved)} entries, expected {len(tensors)}, and only one has {different}: {_REMEDY}"
        )
    for key, tensor in tensors.items():
        shape = list(getattr(saved[key], "shape", ()))
        if isinstance(tensor, Tensor) and not is_lazy(tensor) and list(tensor.shape) != shape:
            raise RuntimeError(
                f"{key} of {name} was saved with shape {shape}, expected {list(tensor.shape)}: {_REMEDY}"
            )
