"""The registered ops as a page of the docs."""

from __future__ import annotations

import inspect

from latte.ops.registry import FORMS, registered_ops

HEADER = """# Ops

Made from the registry by `python -m latte.ops.listing > docs/ops.md`; a test keeps it so. Every op is checked by `latte
doctor` and timed by `latte bench --suite registry`.

| op | what it computes | state | forms | file |
|---|---|---|---|---|
"""


def page() -> str:
    """One row for each op: its first sentence, whether it carries a state, its forms, and where it lives."""
    rows = []
    for op in registered_ops():
        first = (inspect.getdoc(op.call) or "").splitlines()[0].replace("|", "\\|")
        file = inspect.unwrap(op.call).__module__.replace(".", "/") + ".py"
        forms = ", ".join(name for name in FORMS if name in op.forms)
        rows.append(f"| `{op.name}` | {first} | {'yes' if op.causal else ''} | {forms} | `{file}` |\n")
    return HEADER + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
