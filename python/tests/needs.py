"""What tests cannot run without."""

from typing import Any

import pytest


def need_torch(part: str = "torch") -> Any:
    """PyTorch or one of its modules; the test, or the whole module of tests, is skipped where it is not installed."""
    reason = "torch is not installed; `sh bench/peers/install.sh torch target/kits` has one"
    return pytest.importorskip(part, reason=reason)
