"""Devices of outputs, and bytes that move between simulated devices."""

from collections import Counter

NAMES = [f"sim:{index}" for index in range(3)]


def devices_of(outputs):
    return [str(output.device) for output in outputs]


def traffic(cluster, before):
    moved = cluster.moved - before
    between = Counter({ends: count for ends, count in moved.items() if "cpu" not in ends})
    return moved - between, between
