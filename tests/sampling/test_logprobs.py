"""Token log probabilities against float64 and by hand."""

import torch

from aspire.sampling.logprobs import token_logprobs


def test_values_ranks_and_tops() -> None:
    """Fails when ranks count from 0, or when tops come in ascending order."""
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)) * 3
    token = torch.tensor([0, 5, int(logits[2].argmax()), 36, int(logits[4].argmin())])
    entries = token_logprobs(logits, token, 4).to_host([0, 1, 4, 3, 2])
    exact = logits.double().log_softmax(dim=1)
    for row, entry in enumerate(entries):
        order = logits[row].argsort(descending=True).tolist()
        assert entry.token_id == int(token[row])
        assert abs(entry.logprob - float(exact[row, token[row]])) < 1e-5
        assert entry.rank == order.index(entry.token_id) + 1
        assert [i for i, _ in entry.top] == order[: [0, 1, 4, 3, 2][row]]
        assert all(abs(value - float(exact[row, i])) < 1e-5 for i, value in entry.top)


def test_ties_and_masked_tokens() -> None:
    """Ties go to the lower id and share a rank; -inf logits stay -inf. Fails with topk, which orders ties freely."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 1.0, 3.0]])
    entry = token_logprobs(logits, torch.tensor([5]), 5).to_host([5])[0]
    assert [i for i, _ in entry.top] == [1, 2, 5, 0, 4]
    assert entry.rank == 1
    assert token_logprobs(logits, torch.tensor([3]), 0).to_host([0])[0].logprob == -torch.inf


def test_a_row_alone_has_the_same_bits() -> None:
    """Logprobs equal between autoregressive decoding (one row) and a verification (many)."""
    logits = torch.randn(17, 4097, generator=torch.Generator().manual_seed(1)) * 5
    token = torch.arange(17) * 11
    together = token_logprobs(logits, token, 3)
    for row in range(17):
        alone = token_logprobs(logits[row : row + 1], token[row : row + 1], 3)
        assert torch.equal(alone.logprob[0], together.logprob[row])
        assert torch.equal(alone.top_logprob[0], together.top_logprob[row])
