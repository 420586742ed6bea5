"""Runs the Python blocks of pages as a reader would: ``python run_pages.py FOLDER PAGE...``.

The blocks of a page, in their order, are one file, which runs as ``__main__`` in a process and a folder of its own. Processes are
forked from this one, so torch is imported once, and traces for ``memory`` run without a child of their own. Prints one line of
JSON: the pages that failed, with their last lines of output.
"""

import json
import os
import re
import runpy
import signal
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 100


def run(page: str, folder: Path) -> str:
    """Returns the end of what a page printed if it failed, otherwise nothing."""
    folder.mkdir(parents=True)
    program, output = folder / "page.py", folder / "output.txt"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    program.write_text("\n".join(blocks), encoding="utf-8")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        with open("output.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(SECONDS)
        sys.argv = [str(program)]
        status = 1
        try:
            runpy.run_path(str(program), run_name="__main__")
            status = 0
        except Exception:  # noqa: BLE001 - the page may raise any
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "" if status == 0 else f"status {status}: " + output.read_text()[-1500:]


def main() -> None:
    """Runs the pages, those that need transformers last."""
    import torch._dynamo  # noqa: F401 - before the forks: each page would, at its first optimizer

    from balanced_parallel.memory.trace import fakes

    fakes.FORKS = False
    folder, *pages = sys.argv[1:]
    failures, after = {}, [page for page in pages if "transformers import" in (ROOT / page).read_text(encoding="utf-8")]
    for page in [*(page for page in pages if page not in after), *after]:
        if page in after:
            import transformers  # noqa: F401
        before = sum(os.times()[:4])
        failure = run(page, Path(folder) / page)
        print(f"{page}: {sum(os.times()[:4]) - before:.1f} s of the processor", file=sys.stderr)
        if failure:
            failures[page] = failure
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
