"""A stand-in for ``encoding.parallel`` of PyTorch-Encoding, which compiles CUDA extensions and cannot be installed here.

https://github.com/zhanghang1989/PyTorch-Encoding (MIT-style license). Their two classes subclass ``nn.DataParallel``. The model
does not gather its outputs. The criterion scatters the targets, computes a loss per replica, and returns the sum of the losses
over their number.
"""

from torch import nn


class DataParallelModel(nn.DataParallel):
    def gather(self, outputs, output_device):
        return outputs


class DataParallelCriterion(nn.DataParallel):
    def forward(self, inputs, *targets, **kwargs):
        targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        arguments = [output + target for output, target in zip(inputs, targets, strict=True)]
        losses = self.parallel_apply(replicas, arguments, kwargs)
        return sum(loss.to(losses[0].device) for loss in losses) / len(losses)
