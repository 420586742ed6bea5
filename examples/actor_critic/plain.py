"""Trains an actor and a critic in a corridor. The same program with balanced_parallel is balanced.py."""

import torch
from torch import nn
from torch.nn import functional as F

UPDATES, WALKERS, HORIZON, FIELDS, DISCOUNT = 12, 10, 8, 6, 0.9
DEVICE = torch.accelerator.current_accelerator(check_available=True) or "cpu"


def walk(fields, actions):
    """Moves walkers to the left (0) or right (1). The last field has a reward and ends the episode. The next begins anywhere."""
    fields = (fields + 2 * actions - 1).clamp(min=0)
    ended = fields == FIELDS - 1
    return fields.where(~ended, torch.randint(FIELDS - 1, (WALKERS,))), ended


class ActorCritic(nn.Module):
    """Logits of the actions ``[rows, 2]``, and values ``[rows]``, of fields in a corridor."""

    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Embedding(FIELDS, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, fields):
        """Returns logits and values."""
        hidden = self.body(fields).tanh()
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def actor_critic_loss(logits, values, actions, returns):
    """Returns the losses of actor and critic, less a bonus for entropy, in the mean over rows."""
    advantages = (returns - values).detach()
    actor = F.cross_entropy(logits, actions, reduction="none") * advantages
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    return (actor + 0.5 * (values - returns).square() - 0.01 * entropy).mean()


@torch.no_grad()
def play(model, fields):
    """Plays some steps of all walkers. Returns where they end, and fields, actions and discounted returns of all steps."""
    steps = []
    for _ in range(HORIZON):
        logits, _ = model(fields)
        actions = torch.multinomial(logits.softmax(1).cpu(), 1)[:, 0]
        following, ended = walk(fields, actions)
        steps.append((fields, actions, ended))
        fields = following
    _, values = model(fields)
    returns = [values.cpu()]
    for _, _, ended in reversed(steps):
        returns.insert(0, torch.where(ended, 1.0, DISCOUNT * returns[0]))
    visited, actions, _ = map(torch.cat, zip(*steps, strict=True))
    return fields, visited, actions, torch.cat(returns[:-1])


def main():
    """Trains for some updates, and returns their losses."""
    torch.manual_seed(0)
    model, fields = nn.DataParallel(ActorCritic().to(DEVICE)), torch.randint(FIELDS - 1, (WALKERS,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for update in range(1, UPDATES + 1):
        fields, visited, actions, returns = play(model, fields)
        logits, values = model(visited)
        loss = actor_critic_loss(logits, values, actions.to(DEVICE), returns.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        print(f"update {update}: loss {loss.item():.4f}, return {returns.mean():.4f}")
    return losses


if __name__ == "__main__":
    main()
