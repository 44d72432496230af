"""Attention by heads: each rank computes some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark, whole_shape
from lightning_pp.tensor.randomness import drawn_by_rank
from lightning_pp.tensor.region import Region, Rule, cuts_of, origins_of

Arguments = tuple[Any, ...]


def scaled_dot_product_attention(
    region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """Attention of the heads, or of the sequences of a batch, that this rank has."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    heads = [given.pop(name) for name in names[:3]]
    origins = origins_of(args, kwargs)
    sharded = [(each, cut) for each in heads if (cut := cut_of(each)) is not None]
    mask = given.pop("attn_mask", None)
    if not sharded:
        raise CutError("has a sharded mask and whole heads", origins)
    position = max(each.dim() - cut.dim for each, cut in sharded)
    if position < 3 or any(each.dim() - cut.dim != position for each, cut in sharded):
        shapes = [whole_shape(each) for each in heads]
        inner = [cut.origins for each, cut in sharded if each.dim() - cut.dim < 3] or [origins]
        raise CutError(
            f"has query, key and value of shapes {shapes}, sharded in other dimensions than heads",
            frozenset().union(*inner),
        )
    query = heads[0]
    sizes = [whole_shape(each)[-position] for each in heads]
    cut = cut_of(query)
    if cut is None:
        if sizes[0] != sizes[1]:
            raise CutError(f"has {sizes[0]} whole query heads and {sizes[1]} sharded key heads", origins)
        cut = sharded[0][1]
        query = region.fitted(query, position, cut)
    cut = replace(cut, origins=origins)
    key, value = (_heads(region, each, position, cut) for each in heads[1:])
    mask = region.fitted(mask, position, cut)
    if given.get("dropout_p", 0.0):
        with drawn_by_rank(region, query.device):
            result = func(query, key, value, attn_mask=mask, **given)
    else:
        result = func(query, key, value, attn_mask=mask, **given)
    return mark(result, cut.at(result.dim() - position))


def _heads(region: Region, each: Tensor, position: int, cut: Cut) -> Tensor:
    """The key or value heads that this rank's query heads attend to."""
    own, size = cut_of(each), whole_shape(each)[-position]
    if size == cut.size:
        fitted: Tensor = region.fitted(each, position, cut)
        return fitted
    per_head, of_rank = cut.size // size, cut.size // region.num_ranks
    if len(cut.segments) > 1 or cut.size % size:
        raise CutError(f"has {cut.size} query heads in segments {list(cut.segments)} and {size} key heads", cut.origins)
    if own is not None:
        if own.segments != (size,):
            raise CutError(f"has {size} key heads in segments {list(own.segments)}", cut.origins)
        return each
    if of_rank % per_head and per_head % of_rank:
        raise CutError(f"has {of_rank} query heads on a rank and {per_head} to a key head", cut.origins)
    first = region.rank * of_rank // per_head
    return region.copied(each).narrow(each.dim() - position, first, max(1, of_rank // per_head))


def multi_head_attention_forward(
    region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """What ``nn.MultiheadAttention`` calls, for weights of query, key and value in one parameter."""
    names = ("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k")
    more = ("bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")
    given = {**dict(zip(names + more, args, strict=False)), **kwargs}
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
    has_more = any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    is_plain = weight is not None and not has_more and not given["add_zero_attn"] and given["query"].dim() == 3
    if is_plain and region.adopt is not None and not given["num_heads"] % region.num_ranks:
        weight, bias = region.adopt(weight, bias, given["query"], 0, 3)
    if cut_of(weight) is None and not cuts_of(args, kwargs):
        return func(*args, **kwargs)
    if not is_plain or cut_of(weight) is None:
        raise CutError("has weights or biases that cannot be sharded by heads", origins_of(args, kwargs))
    with region.entered_again():
        return _attend({**given, "in_proj_weight": weight, "in_proj_bias": bias})


def _attend(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention in functions that have rules; tensors are (length, batch, width)."""
    query, key, value = given["query"], given["key"], given["value"]
    weight, bias, num_heads = given["in_proj_weight"], given["in_proj_bias"], given["num_heads"]
    if query is key and key is value:
        projected = F.linear(query, weight, bias).chunk(3, -1)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        projected = tuple(
            F.linear(each, w, b) for each, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)
        )
    q, k, v = (each.view(*each.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for each in projected)
    mask = _joined_mask(given, q.shape[0], num_heads)
    dropout_p = given["dropout_p"] if given.get("training", True) else 0.0
    weights = None
    if given.get("need_weights", True):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        heads = weights @ v
        if given.get("average_attn_weights", True):
            weights = torch.einsum("bhqk->bqk", weights) / num_heads
    else:
        is_causal = bool(given.get("is_causal", False)) and mask is None
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    output = F.linear(heads.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    return output, weights


def _joined_mask(given: dict[str, Any], batch: int, num_heads: int) -> Tensor | None:
    """The masks of pairs and of keys as one that is added, broadcast over heads where it is the same for them."""
    mask, padding, dtype = given.get("attn_mask"), given.get("key_padding_mask"), given["query"].dtype
    # a causal mask may be left out where torch's kernel makes its own
    if given.get("is_causal", False) and padding is None and not given.get("need_weights", True):
        return None
    joined = None
    for each, is_padding in ((mask, False), (padding, True)):
        if each is None:
            continue
        if each.dtype is torch.bool:
            each = torch.zeros_like(each, dtype=dtype).masked_fill_(each, float("-inf"))
        if is_padding:
            each = each[:, None, None, :]
        elif each.dim() == 3:
            each = each.view(batch, num_heads, *each.shape[1:])
        joined = each if joined is None else joined + each
    return joined


RULES: dict[str, Rule] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "multi_head_attention_forward": multi_head_attention_forward,
}
