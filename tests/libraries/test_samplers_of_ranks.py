"""A ``RankBatchSampler`` made before the process group, in the loaders of Accelerate, Fabric and Lightning on two ranks."""

import pytest
import torch
from helpers.ranks import run_ranks
from torch.utils.data import DataLoader

from balanced_parallel import RankBatchSampler

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

ROWS = torch.arange(14)


def rows_of(loader):
    return [batch.tolist() for batch in loader]


def with_accelerate(rank, sampler):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    loader = DataLoader(ROWS, batch_sampler=sampler)
    with pytest.raises(RuntimeError, match="are cut again, as accelerator.prepare"):
        rows_of(accelerator.prepare(loader))
    return rows_of(DataLoader(ROWS, batch_sampler=sampler))


def with_fabric(rank, sampler):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    assert fabric.world_size == 2
    loader = DataLoader(ROWS, batch_sampler=sampler)
    return rows_of(fabric.setup_dataloaders(loader, use_distributed_sampler=False))


def with_lightning(rank, sampler):
    from lightning.pytorch import LightningModule, Trainer

    from balanced_parallel.integrations.lightning import BalancedDDPStrategy

    class Reader(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.rows = []

        def training_step(self, batch):
            if torch.is_grad_enabled():
                self.rows.append(batch.tolist())
            return self.layer(batch[:, None].float()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    silent = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    sizes = {"accelerator": "cpu", "devices": 2, "max_epochs": 1}
    trainer = Trainer(
        strategy=BalancedDDPStrategy(), use_distributed_sampler=False, **silent, **sizes
    )
    module = Reader()
    trainer.fit(module, DataLoader(ROWS, batch_sampler=sampler))
    return module.rows


@pytest.mark.parametrize("function", [with_accelerate, with_fabric, with_lightning])
def test_each_rank_has_its_rows_of_each_batch(function):
    sampler = RankBatchSampler(range(len(ROWS)), batch_size=6, seed=0)
    batches = zip(*run_ranks(2, function, sampler, fresh=True), strict=True)
    expected = [*RankBatchSampler(range(len(ROWS)), batch_size=6, seed=0)]
    assert [first + second for first, second in batches] == expected
