"""What is around the libraries' kernels; the kernels themselves run on a GPU only, see test_chunked.py."""

import pytest
import torch
from torch import Tensor

from aspire.attention.chunks import ChunkGroup
from aspire.attention.libraries import FlashChunks, RectangleChunks
from aspire.ops.merge_attention.reference import merge_attention


def piece(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    logits = torch.einsum("qhd,nhd->hqn", query, key.repeat_interleave(groups, 1)) * scale
    if causal:
        seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        logits = logits.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqn,nhd->qhd", logits.softmax(-1), value.repeat_interleave(groups, 1)), logits.logsumexp(-1)


def edge(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return piece(query, key, value, scale, causal=True)


def make_group(sizes: list[tuple[int, int]]) -> ChunkGroup:
    starts = torch.tensor([[0, 0], *sizes], dtype=torch.int32).cumsum(0).int()
    spans = tuple((int(a), int(b)) for a, b in zip(starts[:-1, 0], starts[1:, 0], strict=True))
    return ChunkGroup(spans, torch.arange(int(starts[-1, 1])), starts[:, 0], starts[:, 1],
                      tuple(keys for _, keys in sizes))


def test_a_rectangle_and_an_edge_are_the_whole() -> None:
    """Without context, with less than a step of it, with several steps, and one that ends at the chunk's start.

    Planted faults: the cut rounded up; padded queries merged as well; the edge's keys from 0.
    """
    group = make_group([(9, 9), (5, 12), (7, 60), (8, 40)])
    query, key, value = torch.randn(29, 6, 4), torch.randn(121, 2, 4), torch.randn(121, 2, 4)
    shapes = []

    def rectangle(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        shapes.append((len(query), len(key)))
        return piece(query, key, value, scale, causal=False)

    out = RectangleChunks(rectangle, edge, merge_attention, query_step=8, key_step=16)(query, key, value, group, 0.5)
    expected = [edge(q, k, v, 0.5)[0] for q, k, v in zip(
        query.split(group.num_queries), key.split(group.num_keys), value.split(group.num_keys), strict=True)]
    torch.testing.assert_close(out, torch.cat(expected))
    assert shapes == [(8, 48), (8, 32)]


def test_flash_is_for_cuda() -> None:
    assert not FlashChunks().supports(torch.zeros(1, 1, 64, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_cudnn_equals_flash(dim: int) -> None:
    """Odd lengths, grouped heads, keys that lie in a larger tensor. Planted faults: those of the test above."""
    from aspire.attention.libraries import CudnnChunks
    from aspire.ops.merge_attention.triton import merge_attention as kernel
    from aspire.testing.attention_checks import TOLERANCE, relative_error

    group = make_group([(700, 3001), (300, 300), (1000, 1900), (517, 9000)])
    to_gpu = ChunkGroup(group.spans, group.keys, group.query_start.cuda(), group.key_start.cuda(), group.num_keys)
    query = torch.randn(2517, 12, dim, device="cuda", dtype=torch.bfloat16)[:, :8]
    key, value = torch.randn(2, 14201, 2, dim, device="cuda", dtype=torch.bfloat16)
    library = CudnnChunks(kernel)
    if not library.supports(query):
        pytest.skip("cuDNN's attention is used from Hopper on")
    out = library(query, key, value, to_gpu, dim ** -0.5)
    expected = FlashChunks()(query, key, value, to_gpu, dim ** -0.5)
    assert relative_error(out, expected) < 2 * TOLERANCE[torch.bfloat16]  # each is that far from the truth
