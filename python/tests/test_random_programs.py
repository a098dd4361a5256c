"""Random programs of a PyTorch user have the weights that DDP and torch's optimizer give them."""

import os

import pytest
from needs import need_torch

need_torch()

BEGIN = int(os.environ.get("PSERVER_SEED", "0"))
PROGRAMS, PER_BLOCK = (200, 10) if os.environ.get("PSERVER_FULL") == "1" else (10, 5)


@pytest.mark.parametrize("first", range(BEGIN, BEGIN + PROGRAMS, PER_BLOCK))
def test_random_programs_have_torchs_weights_or_an_exception_that_says_what_to_do(first: int) -> None:
    from random_programs import compare

    ended = [text for seed in range(first, first + PER_BLOCK) if (text := compare(seed))]
    assert len(ended) <= 1, ended
