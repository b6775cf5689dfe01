"""Lines of code per part of the house, without blank lines, comments and docstrings; printed by `make lint`."""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = {"core": 3500, "backends": 400, "adapters": 600}


def code_lines(path: Path) -> int:
    """Lines that hold a token which is neither a comment nor part of a docstring."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in skip and token.type != tokenize.ENCODING:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def part(path: Path) -> str:
    """Which part of the house a file belongs to."""
    first, second, *_ = path.relative_to(ROOT).parts
    if first != "weightbus":
        return f"{first}/{second}"
    return second if second in ("testing", "cli") else "core"


def main() -> int:
    """Print the table; 0 always: a budget that is passed needs a sentence, not a red build."""
    totals: dict[str, int] = {}
    for folder in ("weightbus", "backends", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            totals[part(path)] = totals.get(part(path), 0) + code_lines(path)
    for name, count in totals.items():
        budget = BUDGETS.get(name.split("/")[0])
        print(f"{name:<30}{count:>6}" + (f"  of {budget}" if budget else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
