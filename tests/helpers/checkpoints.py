"""Complete checkpoints of any parts."""

from balanced_parallel import Checkpoints


class Part:
    """An object of a user with state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save(folder, number, *, keep=3, **parts):
    """Saves a checkpoint, and waits until it is complete."""
    checkpoints = Checkpoints(folder, keep=keep, **parts)
    checkpoints.save(number)
    checkpoints.wait()


def load(folder, **parts):
    return Checkpoints(folder, **parts).load_latest()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(step):
    """Returns all tensors of the state of a step, and everything else."""
    state = step.state_dict()
    tensors = {
        **state["model"],
        **{f"{n}/{k}": v for n, s in state["optimizers"][0]["state"].items() for k, v in s.items()},
    }
    groups = [dict(group) for group in state["optimizers"][0]["param_groups"]]
    return {name: tensor.clone() for name, tensor in tensors.items()}, groups, state["schedulers"]
