"""Trains a small detector as DETR does, with auxiliary layers. The same program with balanced_parallel is balanced.py."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

STEPS, BATCH_SIZE, CLASSES, QUERIES, SIZE = 12, 11, 3, 5, 16
DEVICE = torch.accelerator.current_accelerator(check_available=True) or "cpu"


def load_batches():
    """Yields pictures with up to three rectangles, and their classes and boxes: left, top, right and bottom, from 0 to 1."""
    for _ in range(STEPS):
        images, targets = 0.1 * torch.randn(BATCH_SIZE, CLASSES, SIZE, SIZE), []
        for image in images:
            labels = torch.randint(CLASSES, (int(torch.randint(4, ())),))
            starts, sizes = torch.randint(SIZE // 2, (2, len(labels), 2))
            boxes = torch.cat([starts, starts + sizes + 1], 1)
            for label, (left, top, right, bottom) in zip(labels, boxes, strict=True):
                image[label, top:bottom, left:right] += 1
            targets.append({"labels": labels, "boxes": boxes / SIZE})
        yield images, targets


class Net(nn.Module):
    """Patches of a picture, and queries that attend to them in two layers."""

    def __init__(self):
        super().__init__()
        self.patches, self.places = nn.Conv2d(CLASSES, 32, 4, 4), nn.Parameter(torch.randn((SIZE // 4) ** 2, 32))
        self.queries = nn.Parameter(torch.randn(QUERIES, 32))
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.classes, self.boxes = nn.Linear(32, CLASSES + 1), nn.Linear(32, 4)

    def forward(self, images):
        """Returns logits and boxes after each layer, ``[rows, layers, queries, ...]``."""
        memory = self.patches(images).flatten(2).transpose(1, 2) + self.places
        states = [self.queries.expand(len(images), -1, -1)]
        for layer in self.layers:
            states.append(layer(states[-1], memory))
        hidden = torch.stack(states[1:], 1)
        starts, sizes = self.boxes(hidden).sigmoid().chunk(2, -1)
        return self.classes(hidden), torch.cat([starts, starts + sizes], -1)


def overlap(boxes, others):
    """Returns the generalised intersection over union of boxes."""
    lows, highs = torch.minimum(boxes, others), torch.maximum(boxes, others)
    inner, outer = torch.cat([highs[..., :2], lows[..., 2:]], -1), torch.cat([lows[..., :2], highs[..., 2:]], -1)
    common, hull, first, second = ((box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (inner, outer, boxes, others))
    union = first + second - common
    return common / union - (hull - union) / hull


@torch.no_grad()
def match(logits, boxes, targets):
    """Returns the class and the box that each query is to find. Without an object, it is the last class, and its own box."""
    labels, wanted = torch.full(logits.shape[:2], CLASSES, device=logits.device), boxes.clone()
    for row, target in enumerate(targets):
        classes, others = target["labels"].to(boxes.device), target["boxes"].to(boxes)
        distance = (boxes[row][:, None] - others).abs().sum(-1) - overlap(boxes[row][:, None], others)
        queries, objects = linear_sum_assignment((distance - logits[row].softmax(-1)[:, classes]).cpu())
        labels[row, queries], wanted[row, queries] = classes[objects], others[objects]
    return labels, wanted


def detection_loss(logits, boxes, targets):
    """Returns the loss over all layers: cross entropy, where "no object" weighs 0.1, and errors of boxes over their number."""
    loss = 0.0
    for scores, places in zip(logits.unbind(1), boxes.unbind(1), strict=True):
        labels, wanted = match(scores, places, targets)
        is_object = labels != CLASSES
        count = is_object.sum().clamp(min=1)
        errors = 5 * (places - wanted).abs().sum(-1) + 2 * (1 - overlap(places, wanted))
        class_weights = scores.new_tensor([1.0] * CLASSES + [0.1])
        loss = loss + F.cross_entropy(scores.transpose(1, 2), labels, class_weights) + (errors * is_object).sum() / count
    return loss


def main():
    """Trains for some steps, and returns their losses."""
    torch.manual_seed(0)
    model = nn.DataParallel(Net().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, (images, targets) in enumerate(load_batches(), 1):
        loss = detection_loss(*model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
