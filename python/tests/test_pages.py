"""The examples of pages and docstrings."""

import doctest
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from needs import need_torch

import pserver

ROOT = Path(__file__).parents[2]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def examples() -> list[Any]:
    found = []
    for page in (ROOT / "README.md", ROOT / "docs/PYTHON.md", ROOT / "python/README.md"):
        for number, rest in enumerate(page.read_text().split("```python\n")[1:]):
            found.append(pytest.param(rest.split("```")[0], id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("text", examples())
def test_an_example_of_a_page_runs(text: str) -> None:
    if "torch" in text:
        need_torch()
    exec(compile(text, "example", "exec"), {})


def test_examples_of_docstrings_run() -> None:
    assert doctest.testmod(pserver).failed == 0 and doctest.testmod(pserver).attempted > 0
    if HAS_TORCH:
        module = importlib.import_module("pserver.torch._rules")
        assert doctest.testmod(module).failed == 0
