"""Tensors and modules in plain attributes, which all replicas share."""

from collections.abc import Iterator

from torch import Tensor, nn

__all__: list[str] = []

OWN_PACKAGES = ("torch.", "balanced_parallel.")  # packages whose modules run as replicas
_FINDINGS = (
    (nn.Parameter, "holds parameters that are not registered: make it an nn.ParameterList or an nn.ParameterDict"),
    (Tensor, "holds tensors, which stay on the first device: use register_buffer"),
    (nn.Module, "holds modules that are not registered: make it an nn.ModuleList or an nn.ModuleDict"),
)


def unregistered_tensors(module: nn.Module) -> Iterator[str]:
    """Yields plain attributes with tensors or modules. All replicas share them, whatever their device."""
    registered = {id(entry) for entry in (*module.parameters(), *module.buffers(), *module.modules())}
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith(OWN_PACKAGES):
            continue
        for key, value in layer.__dict__.items():
            entries = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            unregistered = [] if key.startswith("_") else [entry for entry in entries if id(entry) not in registered]
            if any(_is_trained(entry) for entry in unregistered):
                yield f"unregistered: {key} of {described(name, layer)} holds tensors that require gradients: use nn.Parameter"
                continue
            for kind, finding in _FINDINGS:
                if any(isinstance(entry, kind) for entry in unregistered):
                    yield f"unregistered: {key} of {described(name, layer)} {finding}"
                    break


def _is_trained(entry: object) -> bool:
    is_plain = isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter)
    return is_plain and entry.requires_grad and entry.is_leaf  # type: ignore[attr-defined]


def described(name: str, layer: nn.Module) -> str:
    """Returns the name and the type of a module."""
    return f"{name} ({type(layer).__name__})" if name else type(layer).__name__
