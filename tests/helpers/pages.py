"""The README and the pages of docs/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)
