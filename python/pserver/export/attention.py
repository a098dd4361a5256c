"""Attention of `torch.nn`, with the batch as a dimension of its own.

PyTorch's `multi_head_attention_forward` views batch and heads as one dimension, which a program does not have. While a
model is exported, the function here stands in its place: the same formula over `[batch, heads, words, width]`.

Not here: `scaled_dot_product_attention`, which is an op (`layers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .layers import MASKED_SCORE

_pytorchs_forward = functional.multi_head_attention_forward


@contextmanager
def batched_attention() -> Iterator[None]:
    """Within it, `torch.nn.MultiheadAttention` and the transformer layers keep the batch apart from the heads."""
    before = functional.multi_head_attention_forward
    functional.multi_head_attention_forward = _forward
    try:
        yield
    finally:
        functional.multi_head_attention_forward = before


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    given: dict[str, Any] = dict(locals())
    is_plain = bias_k is None and bias_v is None and not add_zero_attn and static_k is None and static_v is None
    # PyTorch's function has other forms, and refuses what is wrong.
    if query.dim() != 3 or not is_plain or not _fits(query, key, value, embed_dim_to_check):
        return _pytorchs_forward(**given)
    if is_causal and attn_mask is None:
        return _pytorchs_forward(**given)
    words, batch = query.shape[:2]
    if attn_mask is not None and attn_mask.shape != (words, key.shape[0]):
        return _pytorchs_forward(**given)
    if key_padding_mask is not None and key_padding_mask.shape != (batch, key.shape[0]):
        return _pytorchs_forward(**given)
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None, "one of both is there"
        weights = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))

    def heads(words: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        # Words come first in PyTorch's layout.
        rows = functional.linear(words.transpose(0, 1), weight, bias)
        return rows.view(*rows.shape[:2], num_heads, embed_dim_to_check // num_heads).transpose(1, 2)

    q, k, v = (heads(*each) for each in zip((query, key, value), weights, biases))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    if attn_mask is not None:
        scores = scores + _added(attn_mask, scores)
    if key_padding_mask is not None:
        scores = scores + _added(key_padding_mask, scores)[:, None, None, :]
    shares = scores.softmax(3)
    if training and dropout_p > 0.0:
        shares = functional.dropout(shares, dropout_p)
    mixed = (shares @ v).transpose(1, 2).flatten(2)
    out = functional.linear(mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return out, None
    return out, shares.mean(1) if average_attn_weights else shares


def _fits(query: Tensor, key: Tensor, value: Tensor, width: int) -> bool:
    """Whether words, batch and width of the three belong together."""
    return query.shape[2] == width and key.shape[:2] == value.shape[:2] and key.shape[1] == query.shape[1]


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    """A mask as numbers that are added to scores."""
    if mask.dtype == torch.bool:
        return mask.to(scores.dtype) * MASKED_SCORE
    return mask.clamp(min=MASKED_SCORE)
