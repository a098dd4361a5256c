"""What tests cannot run without."""

from typing import Any

import pytest

NO_TORCH = "torch is not installed; `sh bench/peers/install.sh torch target/kits` has one"


def need_torch(part: str = "torch") -> Any:
    """PyTorch or one of its modules; the test, or the whole module of tests, is skipped where it is not installed."""
    return pytest.importorskip(part, reason=NO_TORCH)
