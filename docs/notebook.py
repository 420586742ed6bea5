"""Runs the notebook of the recipes on the CPU, and stores the outputs of its cells in it. To run it: ``python docs/notebook.py``.

It needs no Jupyter. A cell prints, and its last line is shown as text, and as HTML if the object has it.
"""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "recipes" / "notebook.ipynb"


def shown(value: object) -> dict[str, Any]:
    """Returns what Jupyter shows for the value of a last line."""
    html = getattr(value, "_repr_html_", None)
    data = {"text/plain": lines(repr(value))} | ({"text/html": lines(html())} if html else {})
    return {"output_type": "execute_result", "data": data, "metadata": {}}


def lines(text: str) -> list[str]:
    """Returns the lines of a text, with their ends, as the files of notebooks have them."""
    return text.splitlines(keepends=True)


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell. Returns its outputs."""
    body = ast.parse(source.rstrip().rstrip(";")).body
    is_quiet = source.rstrip().endswith(";")
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    outputs: list[dict[str, Any]] = []
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None and not is_quiet:
        outputs.append(shown(value))
    return outputs


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = run("".join(cell["source"]), names)
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = number
    return notebook


if __name__ == "__main__":
    filled = with_outputs(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    NOTEBOOK.write_text(json.dumps(filled, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
