"""FakeEngine: a scripted engine for tests of everything above the engine. No model, no torch.

It keeps block accounts, advances requests by several tokens a step like a speculating engine, and can be told to be
slow or to fail. What it says is a pure function of the prompt.
"""

import codecs
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aspire.engine_stats import EngineStats, RequestView
from aspire.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams
from aspire.schedule.plan import TokenLogprobs


class FakeTokenizer:
    """Bytes as tokens 0 to 255; 256 begins a text, 257 ends an output; a chat template in the style of ChatML."""

    bos_token_id = 256
    eos_token_id = 257
    all_special_tokens = ("<bos>", "<eos>")
    all_special_ids = (256, 257)
    chat_template = "chatml with <tool_call> and </think>"

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return [self.bos_token_id] * add_special_tokens + list(text.encode())
        except UnicodeEncodeError:
            raise TypeError("TextEncodeInput must be text") from None  # what a real tokenizer says of lone surrogates

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces: list[bytes] = []
        for token in token_ids:
            if token < 256:
                pieces.append(bytes([token]))
            elif not skip_special_tokens:
                pieces.append(self.all_special_tokens[token - 256].encode())
        return b"".join(pieces).decode(errors="replace")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<0x{token:02X}>" if token < 256 else self.all_special_tokens[token - 256] for token in token_ids]

    def apply_chat_template(self, messages: Sequence[dict[str, object]], *, tools: object = None,
                            tokenize: bool = False, add_generation_prompt: bool = True,
                            continue_final_message: bool = False, chat_template: str | None = None,
                            **extra: object) -> str:
        assert not tokenize, "the fake template makes text"
        text = "".join(f"[tools {tools}]\n" for _ in range(1) if tools) + "".join(
            f"<{message['role']}>{message.get('content') or ''}\n" for message in messages)
        text += "".join(f"[{name}={value}]" for name, value in sorted(extra.items()))
        return text[:-1] if continue_final_message else text + ("<assistant>" if add_generation_prompt else "")


def echo_reply(prompt: str, params: SamplingParams) -> str:
    """The default script: say the prompt backwards."""
    return prompt[::-1]


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class _Sequence:
    index: int
    tokens: list[int]  # the whole script
    num_shown: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_verifications: int = 0
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=_utf8_decoder)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sequences: list[_Sequence]
    blocks: int
    priority: int
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None


class FakeEngine:
    """See the module. `script` gives the text of an output; an output ends with EOS unless max_tokens comes first."""

    def __init__(self, script: Callable[[str, SamplingParams], str] = echo_reply, *, tokens_per_step: int = 3,
                 step_seconds: float = 0.0, num_blocks: int = 4096, block_size: int = 16, max_num_seqs: int = 64,
                 max_model_len: int = 4096, fail_after: int | None = None) -> None:
        """fail_after: `step` raises once that many steps were made."""
        self.tokenizer = FakeTokenizer()
        self.model_name = "fake"
        self.max_model_len = max_model_len
        self.script = script
        self.tokens_per_step = tokens_per_step
        self.step_seconds = step_seconds
        self.fail_after = fail_after
        self._num_blocks, self._block_size, self._max_num_seqs = num_blocks, block_size, max_num_seqs
        self._running: list[_Live] = []
        self._waiting: list[_Live] = []
        self._totals = {"steps": 0, "prompt": 0, "output": 0, "drafts": 0, "drafted": 0, "accepted": 0}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *,
            prompt: str | None = None, priority: int = 0) -> None:
        room = self.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids or room < 1:
            raise ValueError(f"prompt must have 1 to {self.max_model_len - 1} tokens, got {len(prompt_token_ids)}")
        ids = tuple(prompt_token_ids)
        text = self.tokenizer.decode(ids)
        reply = [*self.script(text, params).encode(), self.tokenizer.eos_token_id]
        limit = min(room, params.max_tokens or room)
        if params.ignore_eos:
            reply = (reply[:-1] * math.ceil(limit / max(1, len(reply) - 1)))[:limit]
        blocks = math.ceil((len(ids) + limit) / self._block_size)
        if blocks > self._num_blocks:
            raise ValueError(f"prompt and max_tokens need {blocks} blocks, the cache has {self._num_blocks}")
        sequences = [_Sequence(index, reply[:limit]) for index in range(params.n)]
        self._waiting.append(_Live(request_id, prompt, ids, params, sequences, blocks, priority))
        self._waiting.sort(key=lambda live: live.priority)
        self._totals["prompt"] += len(ids)

    def prepare(self, params: SamplingParams) -> None:
        """A fake grammar takes as long as a regex says: "sleep 0.5"; "refuse" is refused."""
        regex = params.structured_outputs.regex if params.structured_outputs is not None else None
        if regex is not None and regex.startswith("sleep "):
            time.sleep(float(regex.removeprefix("sleep ")))
        if regex == "refuse":
            raise ValueError("structured_outputs.regex must be a regular expression, got 'refuse'")

    def abort(self, request_id: str) -> None:
        self._running = [live for live in self._running if live.request_id != request_id]
        self._waiting = [live for live in self._waiting if live.request_id != request_id]

    def step(self) -> list[RequestOutput]:
        if self.fail_after is not None and self._totals["steps"] >= self.fail_after:
            raise RuntimeError("injected failure")
        self._totals["steps"] += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while (self._waiting and len(self._running) < self._max_num_seqs
               and self._used + self._waiting[0].blocks <= self._num_blocks):
            self._running.append(self._waiting.pop(0))
        outputs = [self._advance(live) for live in self._running]
        done = {output.request_id for output in outputs if output.finished}
        self._running = [live for live in self._running if live.request_id not in done]
        return outputs

    def stats(self) -> EngineStats:
        totals = self._totals
        views = [RequestView(live.request_id, "verify", len(live.prompt_token_ids),
                             len(live.prompt_token_ids) + live.sequences[0].num_shown, live.sequences[0].num_shown,
                             self.tokens_per_step - 1, 0.9) for live in self._running]
        views += [RequestView(live.request_id, "waiting", len(live.prompt_token_ids), 0, 0) for live in self._waiting]
        drafts = totals["drafts"]
        return EngineStats(
            num_running=len(self._running), num_waiting=len(self._waiting), num_blocks=self._num_blocks,
            num_blocks_used=self._used, num_steps=totals["steps"], num_prompt_tokens=totals["prompt"],
            num_output_tokens=totals["output"], num_drafts=drafts, num_draft_tokens=totals["drafted"],
            num_accepted_tokens=totals["accepted"], accepted_per_position=(drafts,) * (self.tokens_per_step - 1),
            draft_lengths=(0,) * (self.tokens_per_step - 1) + (drafts,), num_verifying=len(self._running),
            step_seconds=self.step_seconds, requests=tuple(views))

    @property
    def _used(self) -> int:
        return sum(live.blocks for live in self._running)

    def _advance(self, live: _Live) -> RequestOutput:
        if live.first_token is None:
            live.first_token = time.monotonic()
        for sequence in live.sequences:
            if sequence.finish_reason is None:
                self._extend(sequence, live.params)
        finished = all(sequence.finish_reason for sequence in live.sequences)
        outputs = tuple(self._output(live, sequence) for sequence in live.sequences)
        prompt_logprobs = None
        if live.params.prompt_logprobs is not None:
            count = live.params.prompt_logprobs
            prompt_logprobs = (None, *(fake_logprobs(token, count) for token in live.prompt_token_ids[1:]))
        return RequestOutput(live.request_id, live.prompt, live.prompt_token_ids, outputs, finished,
                             outputs[0].metrics, prompt_logprobs)

    def _extend(self, sequence: _Sequence, params: SamplingParams) -> None:
        before = sequence.num_shown
        sequence.num_shown = min(len(sequence.tokens), before + self.tokens_per_step)
        sequence.num_verifications += 1
        self._totals["output"] += sequence.num_shown - before
        self._totals["drafts"] += 1
        self._totals["drafted"] += self.tokens_per_step - 1
        self._totals["accepted"] += sequence.num_shown - before - 1
        if sequence.num_shown == len(sequence.tokens):
            ended = sequence.tokens[-1] == self.tokenizer.eos_token_id
            sequence.finish_reason = (FinishReason.STOP if ended else FinishReason.LENGTH).value
        fresh = bytes(token for token in sequence.tokens[before:sequence.num_shown] if token < 256)
        sequence.text += sequence.decoder.decode(fresh, sequence.finish_reason is not None)
        found = [(sequence.text.find(stop), stop) for stop in params.stop_strings if stop in sequence.text]
        if found:
            position, sequence.stop_reason = min(found)
            sequence.finish_reason = FinishReason.STOP.value
            sequence.text = sequence.text[:position]
            sequence.num_shown = len(sequence.text.encode())
        if params.logprobs is not None:
            sequence.logprobs += [fake_logprobs(token, params.logprobs)
                                  for token in sequence.tokens[len(sequence.logprobs):sequence.num_shown]]
            del sequence.logprobs[sequence.num_shown:]

    def _output(self, live: _Live, sequence: _Sequence) -> CompletionOutput:
        ids = tuple(sequence.tokens[:sequence.num_shown])
        text = sequence.text if sequence.finish_reason else _safe(sequence.text, live.params.stop_strings)
        logprobs = None if live.params.logprobs is None else tuple(sequence.logprobs)
        drafted = sequence.num_verifications * (self.tokens_per_step - 1)
        accepted = max(0, len(ids) - sequence.num_verifications)
        metrics = RequestMetrics(drafted, accepted, sequence.num_verifications, 0, 0, 0.9, 3.0,
                                 (live.first_token or 0.0) - live.arrival, None,
                                 (live.first_token or 0.0) - live.arrival)
        return CompletionOutput(sequence.index, text, ids, None, logprobs, sequence.finish_reason,
                                sequence.stop_reason, metrics)


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    """-token/1000 for the token itself; the runners-up are its successors."""
    top = tuple(((token + i) % 256, -(token + 1000 * i) / 1000) for i in range(count))
    return TokenLogprobs(token, -token / 1000, top, 1)


def _safe(text: str, stops: Sequence[str]) -> str:
    """Hold back an end that may become a stop string."""
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[:len(text) - held] if held else text
