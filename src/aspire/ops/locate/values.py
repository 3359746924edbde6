"""What a step is given, what the slots hold, and where that puts everything.

Letters: T tokens, R rows, N picks (token positions whose logits are needed), K draft limit, Q scoring queries a row,
V scoring full rows, D scoring sparse rows, U block-table entries that change, S slots (the last is scratch), B entries
of a block table, L contexts.
"""

from dataclasses import dataclass

from torch import Tensor

from aspire.ops.sample.rows import SamplingRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs on the device, all int32. A slot occurs once, scratch any number of times."""

    token_row: Tensor  # [T]; -1: padding
    token_offset: Tensor  # [T] place inside its row
    token_given: Tensor  # [T] token id where the host knows it (prefill)
    query_start: Tensor  # [R + 1]
    slot: Tensor  # [R]; scratch: padding, whose other fields are 0
    start: Tensor  # [R] first position of rows whose position the host knows (prefill)
    row_tokens: Tensor  # [R]
    num_drafted: Tensor  # [R] drafts to verify, or made before this one
    decode: Tensor  # [R] 1: inputs and positions come from the slot's state
    sparse: Tensor  # [R] 1: sparse row
    rests: Tensor  # [R] 1: sparse row that renews no lists, and reads lists in the layers that renew them
    emits: Tensor  # [R] 1: the pick is output
    pick_token: Tensor  # [N] token index
    pick_row: Tensor  # [N]; -1: padding
    pick_index: Tensor  # [R, K + 1] row's picks as indices into N
    verify_token: Tensor  # [V, Q] scoring queries of full rows that sample, -1: unused
    verify_row: Tensor  # [V]; -1: padding
    draft_row: Tensor  # [D]; -1: padding
    update_index: Tensor  # [U] flat index into the block table, distinct but for padding
    update_block: Tensor  # [U]


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The tensors of all slots that a step reads or changes, and the numbers that go with them."""

    num_known: Tensor  # int64 [S]
    tokens: Tensor  # int64 [S, K + 1]: last known token, drafts
    block_table: Tensor  # int32 [S, B]
    tail_start: Tensor  # int32 [S] where a sparse row's tail begins; 0 for scratch
    quota: Tensor  # int32 [S] units to select; 0 for scratch
    temperature: Tensor  # float32 [S]
    top_k: Tensor  # int32 [S]
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seed: Tensor  # int64 [S]
    tail_of: Tensor  # int32 [L] tail by context length
    quota_of: Tensor  # int32 [L]
    block_size: int
    unit: int  # tokens of a selected unit
    first_unit: int  # the first that may be selected

    @property
    def scratch(self) -> int:
        return len(self.num_known) - 1


@dataclass(frozen=True, slots=True)
class ScoringRows:
    """N rows whose queries score: verifying full rows first (the first `num_verify`), drafting rows after."""

    token: Tensor  # int32 [N, Q], -1 unused
    row: Tensor  # int32 [N], -1: padding
    slot: Tensor  # int64 [N], scratch for padding
    num_verify: int
    first: Tensor  # int32 [N] candidates for the slot's lists: units [first, last)
    last: Tensor  # int32 [N]
    wanted: Tensor  # int32 [N] how many of them


@dataclass(frozen=True, slots=True)
class Located:
    """What the model, the attention and the sampler need of a step."""

    tokens: Tensor  # int64 [T]; 0: padding
    positions: Tensor  # int64 [T]; 0: padding
    slot_mapping: Tensor  # int64 [T]; -1: padding
    kv_len: Tensor  # int32 [R]
    sparse: Tensor  # bool [R]
    rests: Tensor  # bool [R]
    picks: SamplingRows  # of N; padding: as scratch asks for, at position 0
    scoring: ScoringRows  # V + D of them; Q is 1 where V is 0
    draft_token: Tensor  # int32 [D, 1]: the queries of those that draft, alone
