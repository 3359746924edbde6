"""settle: what a step's verdicts change in the slots (torch, any device)."""

import torch
from torch import Tensor

from aspire.ops.locate.values import SlotTables, StepInputs


def settle(inputs: StepInputs, tables: SlotTables, verdicts: Tensor) -> None:
    """Write the outcome of a step into the slots' state. verdicts: int32 [R, K + 3], see ops.judge.

    Emitting rows: the pick after the accepted drafts becomes the last known token. Drafting rows: the pick joins the
    drafts. Other rows (unfinished prefill, padding) change nothing.
    """
    slot, emits = inputs.slot, inputs.emits.bool()
    num_accepted = verdicts[:, -2].long()
    bonus = verdicts.gather(1, num_accepted[:, None])[:, 0].long()  # [R]
    last = torch.where(emits, bonus, tables.tokens[slot, 0])
    tables.tokens[slot, 0] = last
    tables.num_known[slot] += torch.where(emits, num_accepted + 1, 0)
    drafts = inputs.sparse.bool() & ~emits
    column = torch.where(drafts, inputs.num_drafted + 1, 0)
    tables.tokens[slot, column] = torch.where(drafts, verdicts[:, 0], last)
