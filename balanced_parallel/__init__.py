"""Train with the batch you want on the GPUs you have.

However a batch is split (over devices, over processes, over time), the loss and the gradients are those of the one big
batch. A map of the house, in the order in which its rooms build on each other:

    devices       what devices there are
    streams       work beside the computation
    sizes         bytes as people write them
    ambient       thread-local state that a replica's worker carries
    nesting       tuples, mappings, dataclasses: taken apart and rebuilt
    dims          dimensions of the rows, entry by entry
    ranks         the running process group: sums over ranks, rows of all of them
    provenance    the replica that computed a tensor
    gathering     pieces put back together                  gather
    per_replica   one value per replica, and its rows       PerReplica
    marks         arguments whose rows are elsewhere        Whole, Rows
    rows          the rows of a batch, counted and cut
    scattering    rows cut over devices                     scatter
    shares        how many rows for which device
    adding        gradients of the replicas, added up
    deferral      gradients that stay with the replicas
    reduction     buckets of gradients, reduced as they come
    ownership     which device owns which elements
    shells        a module's tree, and copies of it
    writes        writes through .data, and of optimizers
    watching      writes that nothing records
    replication   replicas that live between steps
    execution     one worker per replica
    batchnorm     statistics over all rows in flight        convert_sync_batchnorm
    losses        what each loss of torch divides by        loss_weight
    reductions    the reduction of a criterion
    summation     whether a criterion's source is a sum
    weighting     sums and counts, divided once             weighted_mean
    terms         one replica's part of a loss
    precision     autocast and gradient scaling             Precision
    model         a batch over the devices                  DataParallelModel
    output_rows   the rows of a criterion's outputs
    criterion_settings  what a mean divides by, said by the caller
    criterion     the loss where the outputs are            DataParallelCriterion
    optimizer     gradients and state spread over devices   BalancedOptimizer
    microbatching a batch over time
    accumulation  what a window holds until it is applied
    update        gradients divided, clipped and stepped on
    step_settings what a step is given, checked
    step          one effective batch, one exact update     TrainStep
    partition     a loss and those of its parts
    recording     what each module of a program gives
    diagnosis     known reasons for a difference
    examination   what will break or unbalance under replicas
    verification  the plain program beside the split one    verify
    launch        one process per device, under torchrun    parallelize
    memory        what a step needs, before it runs         memory.estimate, memory.plan
    simulation    accelerators on the CPU, bytes counted    simulate
"""

from . import memory
from .batchnorm import convert_sync_batchnorm
from .criterion import DataParallelCriterion
from .gathering import gather
from .launch.parallelize import parallelize
from .losses import loss_weight
from .marks import Rows, Whole
from .model import DataParallelModel
from .optimizer import BalancedOptimizer
from .per_replica import PerReplica
from .precision import Precision
from .scattering import scatter
from .simulation import simulate
from .step import TrainStep
from .verification import verify
from .weighting import weighted_mean

__version__ = "0.1.0"

__all__ = [
    "BalancedOptimizer",
    "DataParallelCriterion",
    "DataParallelModel",
    "PerReplica",
    "Precision",
    "Rows",
    "TrainStep",
    "Whole",
    "convert_sync_batchnorm",
    "gather",
    "loss_weight",
    "memory",
    "parallelize",
    "scatter",
    "simulate",
    "verify",
    "weighted_mean",
]
