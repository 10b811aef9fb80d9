"""Writes docs/faults.md from the kinds and from what the tests say that they prove.

python -m tests.faults.table            write the page (from the root of the repository)
python -m tests.faults.table --check    exit with 1 where the page is not what it would write
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .catalogue import GROUPS, KINDS, NOT_YET, PROOFS, Proof

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"

HEAD = """# Faults

PyTorch's hooks fail in {total} known ways, most of them in silence; PyTorch 2.13 itself gets 13 of them right. This
page says of each what Hookline does. `make faults` writes it from the tests, and a test fails when the two differ.

* *right*: the value is the one that an independent computation gives, or what people asked for happens.
* *refused*: a clear error names the cause and the way round it, before anything wrong comes out.
* *by definition*: what was asked for cannot be had from a hook of that kind; the row says what gives it.
* *not yet*: compiled code and several processes.

| | kinds |
|---|---:|
{counts}

The last column names tests in `tests/faults/`. A plain number such as #598 is an issue or a pull request of
[pytorch/pytorch](https://github.com/pytorch/pytorch/issues).
"""


def collect() -> None:
    """Import the tests, which fills PROOFS."""
    for file in sorted(HERE.glob("test_*.py")):
        if file.stem != "test_table":
            importlib.import_module(f"{__package__}.{file.stem}")


def decision_of(number: int) -> str:
    """The decision of a kind; a kind without a test is not yet decided."""
    proofs = PROOFS.get(number, [])
    decisions = {proof.decision for proof in proofs}
    assert len(decisions) < 2, f"the tests of kind {number} disagree: {decisions}"
    return decisions.pop() if decisions else NOT_YET


def page() -> str:
    """The text of docs/faults.md."""
    counted = Counter(decision_of(number) for number in KINDS)
    counts = "\n".join(f"| {decision} | {count} |" for decision, count in counted.most_common())
    parts = [HEAD.format(total=len(KINDS), counts=counts)]
    for group in GROUPS:
        parts += [f"## {group}\n", "| | in PyTorch | decision | in Hookline | tests |\n|---:|---|---|---|---|"]
        parts += [*_rows(group), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _rows(group: str) -> Iterator[str]:
    for number, kind in KINDS.items():
        if kind.group == group:
            proofs = PROOFS.get(number, [])
            reports = f" ({kind.reports})" if kind.reports else ""
            cells = [str(number), kind.title + reports, decision_of(number), _how(proofs), _tests(proofs)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _how(proofs: list[Proof]) -> str:
    return next((proof.how for proof in proofs if proof.how), "")


def _tests(proofs: list[Proof]) -> str:
    return ", ".join(f"`{proof.test}`" for proof in proofs)


def main() -> int:
    """Write the page, or compare it."""
    collect()
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
