"""Draws the pictures of docs/internals.md and docs/debug.md. To run it: ``python docs/drawings.py``.

They are 480 wide, so that their letters can be read on a phone. They have no ground, and lines and words in a grey that can be
read on white and on black. Text, so that a change shows in a diff. A test compares them.
"""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
WIDTH = 480
FORWARD, BACKWARD, NETWORK, PLAIN, IDLE = "#cfe2f3", "#d9ead3", "#fce5cd", "#ffffff", "#eeeeee"
GREY, RED, IN_BOX = "#757575", "#d64541", "#111"  # on any ground, on any ground, and in a box


class Drawing:
    """Boxes, words and arrows."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, words: str = "", color: str = PLAIN) -> None:
        """Draws a box with lines of words in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}" stroke="{GREY}"/>'
        )
        lines = words.split("\n") if words else []
        for index, line in enumerate(lines):
            self.words(x + width / 2, y + height / 2 + 5 + 17 * (index - (len(lines) - 1) / 2), line, "middle", IN_BOX)

    def words(self, x: float, y: float, words: str, anchor: str = "start", color: str = GREY) -> None:
        """Writes one line."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{words}</text>')

    def mark(self, x: float, y: float, number: int) -> None:
        """Writes a number to which the page refers."""
        self.words(x, y, f"[{number}]", color=RED)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draws an arrow."""
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{GREY}" fill="none" marker-end="url(#tip)"/>')

    def dashes(self, x: float, y: float, to_y: float) -> None:
        """Draws a dashed line downwards."""
        self.parts.append(f'<path d="M{x:g} {y:g}V{to_y:g}" stroke="{RED}" stroke-dasharray="4 3" fill="none"/>')

    def svg(self) -> str:
        """Returns the picture."""
        shape = 'viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
        tip = f'<marker id="tip" {shape}><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker>'
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
        return "\n".join([head, f"<defs>{tip}</defs>", *self.parts, "</svg>\n"])


def replicas() -> Drawing:
    """Draws the autograd graph of a module on three devices."""
    drawing = Drawing(462)
    columns = (40, 180, 320)
    drawing.box(150, 10, 180, 30, "module.parameters()")
    drawing.mark(340, 30, 1)
    drawing.box(130, 72, 220, 30, "one function per bucket")
    drawing.mark(360, 92, 2)
    drawing.arrow(240, 40, 240, 70)
    for index, (x, rows) in enumerate(zip(columns, ("rows 0-2", "rows 3-4", "rows 5-6"), strict=True)):
        middle = x + 60
        drawing.arrow(240 + (index - 1) * 50, 102, middle, 136)
        drawing.box(x, 138, 120, 44, f"copies on\ndevice {index}")
        drawing.arrow(middle, 182, middle, 208)
        drawing.box(x, 210, 120, 44, f"replica {index}\n{rows}", FORWARD)
        drawing.arrow(middle, 254, middle, 280)
        drawing.box(x, 282, 120, 28, f"output {index}")
        drawing.arrow(middle, 310, middle, 334)
        drawing.box(x, 336, 120, 28, "sum, count", FORWARD)
        drawing.arrow(middle, 364, 240 + (index - 1) * 50, 396)
    for y, number in ((165, 3), (237, 4), (355, 5), (418, 6)):
        drawing.mark(446 if number < 6 else 380, y, number)
    drawing.box(110, 398, 260, 30, "sum of sums / sum of counts", FORWARD)
    drawing.words(240, 450, "loss", "middle")
    drawing.arrow(16, 60, 16, 430)
    drawing.words(10, 50, "forward")
    drawing.arrow(470, 430, 470, 60)
    drawing.words(474, 50, "backward", "end")
    return drawing


def buckets() -> Drawing:
    """Draws the timeline of the sums in a backward."""
    drawing = Drawing(182)
    drawing.words(98, 20, "time")
    drawing.arrow(130, 15, 470, 15)
    for y, name in ((32, "replica 0"), (70, "replica 1")):
        drawing.words(8, y + 20, name)
        for index, layers in enumerate(("layers 6, 5", "layers 4, 3", "layers 2, 1")):
            drawing.box(90 + 90 * index, y, 88, 30, layers, BACKWARD)
    drawing.words(8, 140, "side streams")
    for index in range(3):
        drawing.box(182 + 90 * index, 120, 80, 30, f"sum B{index}", NETWORK)
        drawing.dashes(180 + 90 * index, 102, 120)
    drawing.box(448, 32, 26, 68, "", IDLE)
    drawing.dashes(446, 26, 156)
    drawing.mark(172, 172, 1)
    drawing.mark(436, 172, 2)
    return drawing


def ddp() -> Drawing:
    """Draws one update of two ranks."""
    drawing = Drawing(216)
    drawing.words(60, 20, "no_sync", color=GREY)
    drawing.words(236, 20, "the last micro-batch", color=GREY)
    drawing.dashes(230, 8, 118)
    rows = (
        (32, "rank 0", (("F0", 58), ("B0", 99), ("F1", 144), ("B1", 185), ("F2", 232))),
        (74, "rank 1", (("F0", 58), ("B0", 99), ("F1", 232))),
    )
    for y, name, blocks in rows:
        drawing.words(8, y + 20, name)
        for words, x in blocks:
            drawing.box(x, y, 40 if words[0] == "F" else 44, 30, words, FORWARD if words[0] == "F" else BACKWARD)
        drawing.box(276, y, 96, 30, "B2" if y == 32 else "B1", BACKWARD)
        drawing.box(426, y, 50, 30, "step")
    drawing.words(8, 152, "network")
    drawing.box(296, 132, 46, 30, "sum 0", NETWORK)
    drawing.box(343, 132, 46, 30, "sum 1", NETWORK)
    drawing.box(390, 132, 34, 30, "loss", NETWORK)
    for x, number in ((238, 1), (266, 2), (334, 3), (398, 4)):
        drawing.mark(x, 182, number)
    drawing.dashes(274, 104, 168)
    drawing.words(58, 208, "F forward, B backward, sum: a bucket's all-reduce", color=GREY)
    return drawing


def batch() -> Drawing:
    """Draws one effective batch, cut over ranks, devices and time."""
    drawing = Drawing(268)
    for index in range(3):
        drawing.words((150, 285, 410)[index], 20, f"micro-batch {index}", "middle")
    cells = (
        ("rank 0\ndevice 0", ("rows 0-3", "rows 4-7", "rows 8-9")),
        ("rank 0\ndevice 1", ("rows 10-13", "rows 14-17", "row 18")),
        ("rank 1\ndevice 0", ("rows 19-22", "rows 23-24", "no rows")),
    )
    for row, (name, rows) in enumerate(cells):
        y = 30 + 54 * row
        drawing.box(6, y, 72, 48, name, IDLE)
        for column, words in enumerate(rows):
            found = f"{words}\nsum, count" if words != "no rows" else words
            drawing.box(84 + 131 * column, y, 128, 48, found, FORWARD if words != "no rows" else IDLE)
    drawing.box(84, 200, 390, 56, "loss = sum of sums / sum of counts\ngradient = sum of gradients / sum of counts")
    return drawing


def layouts() -> Drawing:
    """Draws what TrainStep asks of each layout."""
    drawing = Drawing(252)
    drawing.box(120, 8, 240, 44, "TrainStep\nmicro-batches, one update", FORWARD)
    drawing.box(120, 80, 240, 30, "GradientSync")
    drawing.arrow(240, 52, 240, 78)
    columns = (
        ("replicas", "one process\nthe model on\neach device", "sum per bucket"),
        ("ddp", "one process\nper device, the\nwhole model", "all-reduce"),
        ("fsdp", "one process\nper device, a\nshard of it", "reduce-scatter"),
    )
    for index, (name, words, collective) in enumerate(columns):
        x = 8 + 158 * index
        drawing.arrow(180 + 60 * index, 110, x + 74, 138)
        drawing.box(x, 140, 148, 104)
        drawing.words(x + 74, 158, f'"{name}"', "middle", RED)
        for line, text in enumerate(words.split("\n")):
            drawing.words(x + 74, 178 + 17 * line, text, "middle", IN_BOX)
        drawing.words(x + 74, 234, collective, "middle", IN_BOX)
    return drawing


def fsdp() -> Drawing:
    """Draws one micro-batch of two blocks under FSDP2."""
    drawing = Drawing(214)
    drawing.words(136, 20, "forward", color=GREY)
    drawing.words(274, 20, "backward", color=GREY)
    for y, name in ((52, "network"), (94, "compute"), (136, "whole"), (178, "shards")):
        drawing.words(8, y, name)
    for x, words in ((80, "AG 1"), (136, "AG 2"), (228, "AG 2"), (284, "AG 1"), (348, "RS 2"), (412, "RS 1")):
        drawing.box(x, 32, 54, 30, words, NETWORK)
    for x, width, block in ((136, 44, 1), (182, 44, 2), (284, 62, 2), (348, 62, 1)):
        is_forward = width == 44
        drawing.box(x, 74, width, 30, f"{'F' if is_forward else 'B'}{block}", FORWARD if is_forward else BACKWARD)
        drawing.box(x, 116, width, 30, f"{block}")
    drawing.box(80, 158, 386, 30, "parameters, gradients, optimizer state", IDLE)
    drawing.words(80, 206, "AG all-gather, RS reduce-scatter of a block", color=GREY)
    return drawing


# Milliseconds of an update in torch's profiler: two simulated devices, two micro-batches. The backward has threads of torch.
PROFILE = {
    "calling thread": [(0, 266, "micro-batch"), (266, 567, "micro-batch"), (567, 611, "update")],
    "replica on sim:0": [(37, 117, "replica"), (269, 352, "replica")],
    "replica on sim:1": [(40, 129, "replica"), (279, 372, "replica")],
    "backward": [(540, 562, "reduction")],
}


def profile() -> Drawing:
    """Draws the ranges of an update."""
    drawing = Drawing(216)
    drawing.words(120, 16, "time")
    drawing.arrow(156, 11, 470, 11)
    for index, (name, ranges) in enumerate(PROFILE.items()):
        y = 26 + 46 * index
        drawing.words(6, y + 19, name)
        for begin, end, words in ranges:
            x, width = 120 + begin * 0.57, (end - begin) * 0.57
            color = BACKWARD if words == "reduction" else FORWARD
            drawing.box(x, y, width, 28, words if width > 45 else "", color)
            if words == "replica":
                drawing.box(x + width + 1, y, 4, 28, color=NETWORK)
    drawing.words(460, 68, "update, gather", "end")
    drawing.words(198, 160, "criterion", color=GREY)
    drawing.words(420, 184, "reduction", "end")
    return drawing


DRAWINGS = {drawing.__name__: drawing for drawing in (replicas, buckets, ddp, batch, layouts, fsdp, profile)}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
