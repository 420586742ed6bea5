"""Checks that need a GPU, in two parts of less than eight minutes. Each writes a table to $OUT, else under runs/.

python scripts/gpu_check.py                 the part for this machine: one for one GPU, many for several
python scripts/gpu_check.py one             the first GPU listed twice, and beside the CPU
python scripts/gpu_check.py many            all GPUs: races, gradients, step times, ranks
python scripts/gpu_check.py memory          predicted and used memory of seven models, also a check of the first part
python scripts/gpu_check.py --simulate      both parts on simulated devices, as a test of the script

A row is "ok", "TOO FAR", or "not possible here" with a reason. An error is a row too, and the other checks go on.
The exit code is 1 if a row is "TOO FAR". Keep the file under benchmarks/ together with the commit that was checked.
"""

import argparse
import faulthandler
import functools
import gc
import json
from collections.abc import Mapping

import many_gpus
import one_gpu
import torch
from machine import Machine
from memory import check_memory, models
from ranks import rank_main
from steps import digest
from table import Check, run_checks

from balanced_parallel import simulate

LONGEST = 475.0  # seconds: a part that waits forever prints its threads and ends
SIMULATED = {"one": 1, "many": 2, "memory": 1, "rank": 1, "digest": 1}  # number of devices


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser("gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", nargs="?", choices=list(SIMULATED), help="default: by the number of GPUs; rank and digest are used by the others")
    add("--only", metavar="NAME", help="one check of a part, or one of the models of memory")
    add("--simulate", action="store_true", help="on simulated devices; without a part, both parts")
    add("--devices", metavar="LIST", help="of digest, such as cuda:0,cuda:0")
    add("--gloo", action="store_true", help="of rank: gloo in place of NCCL")
    add("--plain", action="store_true", help="of rank: torch's DDP alone")
    return parser


def checks_of(part: str, only: str | None) -> Mapping[str, Check]:
    """Returns the checks of a part.

    Raises:
        ValueError: there is no check with the name ``only``.
    """
    if part == "memory":
        if only is not None and only not in models():
            raise ValueError(f"--only={only!r}, expected one of {', '.join(models())}")
        return {"memory": functools.partial(check_memory, only=only)}
    checks = one_gpu.CHECKS if part == "one" else many_gpus.CHECKS
    if only is not None and only not in checks:
        raise ValueError(f"--only={only!r}, expected one of {', '.join(checks)}")
    return checks if only is None else {only: checks[only]}


def run_part(part: str, machine: Machine, flags: argparse.Namespace) -> bool:
    """Runs one part, or prints the result of a process that a part has started. Returns False if a check failed."""
    if part == "rank":
        result = rank_main(machine, "gloo" if flags.gloo or machine.simulated else "nccl", only_plain=flags.plain)
        if result["rank"] == 0:
            print(json.dumps(result), flush=True)
        return True
    if part == "digest":
        devices = [torch.device(name) for name in flags.devices.split(",")] if flags.devices else machine.devices
        print(json.dumps({"digest": digest(machine, devices)}), flush=True)
        return True
    return run_checks(part, machine, checks_of(part, flags.only))


def main() -> None:
    """Runs the parts that the command line selects. The exit code is 1 if a check fails."""
    parser = make_parser()
    flags = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 is compared with the CPU's
    if flags.only is not None:
        try:
            checks_of(flags.part or "one", flags.only)
        except ValueError as error:
            parser.error(str(error))
    gc.freeze()  # the objects of torch's modules: a collection between checks takes a tenth of the time
    fine = True
    if flags.simulate:
        for part in [flags.part] if flags.part else ["one", "many"]:
            with simulate(SIMULATED[part]) as cluster:
                fine &= run_part(part, Machine(cluster.devices, cluster), flags)
    else:
        if not torch.cuda.is_available():
            parser.exit(1, "gpu_check.py: there is no GPU here; --simulate runs the same checks without one\n")
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        part = flags.part or ("one" if len(devices) == 1 else "many")
        if part == "many" and len(devices) == 1:
            parser.exit(1, "gpu_check.py: this machine has one GPU, and the part many needs two\n")
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        fine = run_part(part, Machine(devices[:1] if part in ("one", "memory") else devices), flags)
    if not fine:
        parser.exit(1)


if __name__ == "__main__":
    main()
