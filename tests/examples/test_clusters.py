"""The files for clusters, dry-run: Slurm's commands, Kubeflow's operator and Ray are stubs, the flags are parsed by torchrun."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from helpers.pages import PAGES, ROOT
from helpers.ranks import run_ranks
from torch.distributed.run import get_args_parser

CLUSTERS = ROOT / "examples" / "clusters"
FLAGS = ["--task", "digits", "--steps", "2", "--batch-size", "13", "--devices", "cpu"]


def run_with(programs, script, flags, folder, **environment):
    """Runs a shell script with some programs in front of the others. Returns a ``subprocess.CompletedProcess``."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = ["bash", str(CLUSTERS / script), *flags]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60
    )


def dry_run(script, folder, **environment):
    """Returns the command with which a script runs torchrun."""
    stub = f'#!{sys.executable}\nimport json, sys\njson.dump(sys.argv, open({str(folder / "command")!r}, "w"))\n'
    scontrol = '#!/bin/sh\ntest "$*" = "show hostnames gpu[7-8]"\necho gpu7; echo gpu8\n'
    done = run_with(
        {"torchrun": stub, "srun": stub, "scontrol": scontrol}, script, FLAGS, folder, **environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "command").read_text())


def parse(command, monkeypatch):
    """Returns the flags of torchrun and those of scripts/train.py."""
    assert Path(command[0]).name == "torchrun"
    launcher = get_args_parser().parse_args(command[1:])
    assert launcher.training_script == "scripts/train.py"
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return launcher, importlib.import_module("train").make_parser().parse_args(
        launcher.training_script_args
    )


def test_torchrun_by_hand(tmp_path, monkeypatch):
    launcher, flags = parse(dry_run("torchrun.sh", tmp_path, HEAD="host1", HOSTS="3"), monkeypatch)
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.rdzv_backend) == ("3", "gpu", "c10d")
    assert launcher.rdzv_endpoint == "host1:29400"
    assert (flags.steps, flags.batch_size) == (2, 13)


def test_slurm(tmp_path, monkeypatch):
    variables = {
        "JOB_ID": "123456",
        "NNODES": "2",
        "JOB_NODELIST": "gpu[7-8]",
        "SUBMIT_DIR": str(tmp_path),
    }
    command = dry_run(
        "slurm.sbatch", tmp_path, **{f"SLURM_{name}": value for name, value in variables.items()}
    )
    assert (Path(command[0]).name, command[1]) == ("srun", "--kill-on-bad-exit=1")
    launcher, flags = parse(command[2:], monkeypatch)
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.rdzv_id) == ("2", "gpu", "123456")
    assert launcher.rdzv_endpoint == "gpu7:23456"
    assert (flags.out, flags.steps, flags.resume) == (Path("runs/123456"), 2, True)
    settings = [
        line.split()[1]
        for line in (CLUSTERS / "slurm.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {"--nodes=2", "--ntasks-per-node=1"} <= set(settings)  # one torchrun for each host


def run_tasks(folder, *, ends):
    """Runs the script with one task per GPU, on two hosts. Returns its exit code, each task's command, and what it has queued."""
    variables = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    programs = {
        "srun": f'#!/bin/sh\nshift\nfor rank in 0 1; do SLURM_PROCID=$rank ./{ends} "$@" || exit 1; done\n',
        "ends": '#!/bin/sh\nmkdir -p runs/7 && touch runs/7/summary.json && exec "$@"\n',
        "is_stopped": '#!/bin/sh\nexec "$@"\n',
        "fails": "#!/bin/sh\nexit 3\n",
        "python": f'#!/bin/sh\necho {" ".join(f"${name}" for name in variables)} "$@" >> tasks\n',
        "scontrol": '#!/bin/sh\nif test "$1" = show; then echo gpu7; echo gpu8; else echo "$@" >> queued; fi\n',
    }
    slurm = {
        "NTASKS": "2",
        "NTASKS_PER_NODE": "1",
        "LOCALID": "0",
        "JOB_ID": "7",
        "JOB_NODELIST": "gpu[7-8]",
    }
    slurm = {f"SLURM_{name}": value for name, value in slurm.items()} | {
        "SLURM_SUBMIT_DIR": str(folder)
    }
    done = run_with(programs, "slurm_tasks.sbatch", ["--steps", "2"], folder, **slurm)
    tasks, queued = (
        (folder / name).read_text() if (folder / name).exists() else ""
        for name in ("tasks", "queued")
    )
    return done.returncode, [line.split() for line in tasks.splitlines()], queued


def test_slurm_with_one_task_per_gpu(tmp_path):
    code, tasks, queued = run_tasks(tmp_path, ends="ends")
    assert [task[:6] for task in tasks] == [
        [str(rank), "2", "0", "1", "gpu7", "20007"] for rank in (0, 1)
    ]
    assert tasks[0][6:] == [
        "scripts/train.py",
        "--out",
        "runs/7",
        "--checkpoint-every",
        "100",
        "--resume",
        "--steps",
        "2",
    ]
    assert (code, queued) == (0, "")


@pytest.mark.parametrize(
    ("ends", "code", "queued"), [("is_stopped", 0, "requeue 7\n"), ("fails", 1, "")]
)
def test_slurm_queues_a_job_again_that_was_stopped(tmp_path, ends, code, queued):
    found, _, lines = run_tasks(tmp_path, ends=ends)
    assert (found, lines) == (code, queued)


def test_kubernetes(monkeypatch):
    job = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy = job["spec"]["elasticPolicy"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert worker["replicas"] == policy["maxReplicas"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    # the variables that the operator sets: pkg/controller.v1/pytorch/elastic.go of kubeflow/training-operator 1.8
    monkeypatch.setenv("PET_NNODES", f"{policy['minReplicas']}:{policy['maxReplicas']}")
    monkeypatch.setenv("PET_NPROC_PER_NODE", job["spec"]["nprocPerNode"])
    monkeypatch.setenv("PET_RDZV_BACKEND", policy["rdzvBackend"])
    monkeypatch.setenv("PET_RDZV_ENDPOINT", f"{job['metadata']['name']}-worker-0:23456")
    monkeypatch.setenv("PET_MAX_RESTARTS", str(policy["maxRestarts"]))
    launcher, flags = parse([*container["command"], *container["args"]], monkeypatch)
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.rdzv_backend) == ("2:2", "8", "c10d")
    assert (launcher.rdzv_endpoint, launcher.max_restarts) == (
        "balanced-parallel-worker-0:23456",
        3,
    )
    assert (flags.steps, flags.checkpoint_every, flags.resume) == (200, 100, True)


class Trainer(types.SimpleNamespace):
    """Stub of ``ray.train.torch.TorchTrainer``."""

    def __init__(self, function, **settings):
        super().__init__(function=function, **settings)

    def fit(self):
        return self


def load_ray_example():
    """Imports the file with a stub of Ray."""
    names = {
        "ScalingConfig": types.SimpleNamespace,
        "TorchConfig": types.SimpleNamespace,
        "TorchTrainer": Trainer,
    }
    stubs = {name: types.ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch")}
    for module in stubs.values():
        vars(module).update(names)
    spec = importlib.util.spec_from_file_location("ray_train", CLUSTERS / "ray_train.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec.loader.exec_module(module)
    return module


def run_as_ray_does(rank, config):
    import torch.distributed as dist

    dist.init_process_group("gloo")  # Ray has started it, and has set the environment
    load_ray_example().train_rank(config)
    dist.destroy_process_group()
    return dist.is_initialized()


def test_ray_train(tmp_path):
    trainer = load_ray_example().main(16, [*FLAGS, "--out", str(tmp_path)])
    assert (trainer.scaling_config.num_workers, trainer.scaling_config.use_gpu) == (16, True)
    assert run_ranks(2, run_as_ray_does, trainer.train_loop_config, fresh=True) == [False, False]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ranks"], summary["steps"]) == (2, 2)


@pytest.mark.parametrize("path", sorted(CLUSTERS.iterdir()), ids=lambda path: path.name)
def test_page_links_to_every_file(path):
    assert f"(../../examples/clusters/{path.name})" in PAGES["docs/recipes/several_hosts.md"]
