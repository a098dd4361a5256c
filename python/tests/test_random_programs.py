"""Random programs of a PyTorch user have the weights that DDP and torch's optimizer give them."""

import os

from needs import need_torch

need_torch()

PROGRAMS = 200 if os.environ.get("PSERVER_FULL") == "1" else 10
BEGIN = int(os.environ.get("PSERVER_SEED", "0"))


def test_random_programs_have_torchs_weights_or_an_exception_that_says_what_to_do() -> None:
    from random_programs import compare

    ended = {seed: text for seed in range(BEGIN, BEGIN + PROGRAMS) if (text := compare(seed))}
    assert len(ended) <= PROGRAMS // 10, ended
