"""Time, memory and text of a plan for GPT-2, a plain GPT, Llama 8B and Qwen3 8B with LoRA, on the command line.

Run without arguments, it prints the table of README.md. Arguments are names of problems: ``main.py small xl``.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = {
    "small": "--batch-size 64 --devices 2 --precision bf16 --device-kind rtx4090",
    "xl": "--batch-size 64 --devices 2 --precision bf16 --device-kind rtx4090",
    "xl on one": "--batch-size 64 --devices 1 --precision bf16 --device-kind rtx4090",
    "plain": "--batch-size 64 --devices 2 --precision bf16 --device-kind rtx4090",
    "lora": "--batch-size 4 --devices 2 --precision bf16 --device-kind rtx4090",
    "llama": "--batch-size 64 --devices 8 --precision bf16 --device-kind h100",
}


def measure(name: str) -> tuple[str, float, float, float]:
    """Returns the verdict of a plan, its seconds, its seconds of all processors, and its largest process in GiB."""
    command = [sys.executable, "-m", "balanced_parallel", "plan", "--problem", f"{HERE / 'problems.py'}:{name.split()[0]}"]
    begin = time.monotonic()
    with subprocess.Popen([*command, *COMMANDS[name].split()], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)  # with the processes that it has waited for
    sys.stderr.write(output)
    verdict = output.partition("\n")[0]
    return verdict, time.monotonic() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    """Prints the table."""
    print("| model | verdict | seconds | CPU seconds | largest process |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or COMMANDS:
        verdict, seconds, processors, size = measure(name)
        print(f"| {name} | {verdict} | {seconds:.0f} | {processors:.0f} | {size:.2f} GiB |", flush=True)


if __name__ == "__main__":
    main()
