"""Trains on a Ray cluster: ``python examples/clusters/ray_train.py 16 --steps 200`` on 16 GPUs.

Ray starts one process for each GPU, sets the environment variables that torchrun would set, and starts the process group.
``parallelize`` uses both. All hosts must see this repository at the same path.
"""

import runpy
import sys
from pathlib import Path

from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"


def train_rank(config):
    """Runs the script in this rank, as ``python`` would run it."""
    sys.path.insert(0, str(Path(config["script"]).parent))
    sys.argv = [config["script"], *config["flags"]]
    runpy.run_path(config["script"], run_name="__main__")


def main(ranks, flags):
    """Starts the ranks, and waits for them."""
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"script": str(SCRIPT), "flags": flags},
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=True),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl"),  # gloo for what is on the host
    )
    return trainer.fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
