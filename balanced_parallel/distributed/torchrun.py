"""Environment variables that torchrun sets for a process. No other file reads them."""

import os
from dataclasses import dataclass, field

__all__: list[str] = []

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunEnvironment:
    """Numbers of a process: ``rank`` among all processes, and ``local_rank`` among those of its machine.

    ``master_address`` and ``master_port`` are those of rank 0's machine, where the ranks meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str = field(default="", compare=False)
    master_port: int = field(default=0, compare=False)

    @classmethod
    def detect(cls) -> "TorchrunEnvironment | None":
        """Reads the environment. Returns None outside of torchrun, if neither ``RANK`` nor ``WORLD_SIZE`` is set.

        Raises:
            ValueError: a variable is missing or invalid. The message names it.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        missing = [name for name in (*_NUMBERS, "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise ValueError(
                f"torchrun's environment lacks {', '.join(missing)}: start the script with torchrun, or unset RANK and WORLD_SIZE"
            )
        try:
            rank, world_size, local_rank, local_world_size, port = (int(os.environ[name]) for name in _NUMBERS)
        except ValueError as error:
            values = ", ".join(f"{name}={os.environ[name]!r}" for name in _NUMBERS)
            raise ValueError(f"torchrun's environment has {values}, expected integers") from error
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise ValueError(
                f"torchrun's environment has RANK={rank} of WORLD_SIZE={world_size} and LOCAL_RANK={local_rank} of "
                f"LOCAL_WORLD_SIZE={local_world_size}, expected each rank below its world's size"
            )
        if not 0 < port < 2**16:
            raise ValueError(f"torchrun's environment has MASTER_PORT={port}, expected 1 to 65535")
        return cls(rank, world_size, local_rank, local_world_size, os.environ["MASTER_ADDR"], port)
