"""GET /metrics: Prometheus text under vLLM's names where vLLM has one, under aspire: otherwise.

Everything is read at scrape time from EngineStats and Latency; nothing is registered globally.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from aspire.async_engine import AsyncLLM, EngineStats, Histogram, Latency

LABELS = ("model_name", "engine")

COUNTERS = (
    ("vllm:num_preemptions", "Preemptions.", "num_preemptions"),
    ("vllm:prompt_tokens", "Prompt tokens processed.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Output tokens.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_hits"),
    ("vllm:spec_decode_num_drafts", "Verifications that had drafts to check.", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Drafts that reached a verdict.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", "num_accepted_tokens"),
    ("aspire:steps", "Engine steps.", "num_steps"),
    ("aspire:kv_offload_blocks_offloaded", "KV blocks copied to host memory.", "num_offloaded"),
    ("aspire:kv_offload_blocks_restored", "KV blocks copied back from host memory.", "num_restored"),
)
GAUGES = (
    ("vllm:num_requests_running", "Requests in the batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests in the queue.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", "kv_usage"),
    ("aspire:kv_blocks_used", "KV blocks held by requests.", "num_blocks_used"),
    ("aspire:kv_offload_blocks", "Blocks of host memory for KV.", "num_host_blocks"),
    ("aspire:kv_offload_blocks_used", "Of these, in use.", "num_host_blocks_used"),
    ("aspire:verifications_in_flight", "Verification rows in the last step.", "num_verifying"),
    ("aspire:drafts_in_flight", "Sparse rows in the last step.", "num_drafting"),
    ("aspire:step_seconds", "Duration of the last step.", "step_seconds"),
    ("aspire:predicted_step_seconds", "The cost model's price of the last step.", "predicted_step_seconds"),
)
HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", "first_token"),
    ("vllm:inter_token_latency_seconds", "Between two deliveries to a request.", "inter_token"),
    ("vllm:request_time_per_output_token_seconds", "Mean over a request, first token left out.", "per_output_token"),
    ("vllm:e2e_request_latency_seconds", "Arrival to end.", "end_to_end"),
    ("vllm:request_queue_time_seconds", "Arrival to first scheduling.", "queue"),
    ("vllm:request_prompt_tokens", "Prompt length.", "prompt_length"),
    ("vllm:request_generation_tokens", "Output length.", "output_length"),
)


class Metrics:
    """A Prometheus collector over one AsyncLLM."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # (route, status)
        self._llm = llm
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)  # type: ignore[arg-type]

    def count_response(self, route: str, status: int) -> None:
        self.responses[route, status] += 1

    def render(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats, latency = self._llm.stats, self._llm.latency
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter
        for name, text, field in GAUGES:
            value = getattr(stats, field)
            if value is not None:
                gauge = GaugeMetricFamily(name, text, labels=LABELS)
                gauge.add_metric(self._labels, value)
                yield gauge
        for name, text, field in HISTOGRAMS:
            yield self._histogram(name, text, getattr(latency, field))
        yield self._per_position(stats)
        yield self._draft_lengths(stats)
        yield self._finished(latency)
        yield self._responses()

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, buckets=histogram.buckets(), sum_value=histogram.total)
        return family

    def _per_position(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position.",
                                     labels=(*LABELS, "position"))
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric((*self._labels, str(position)), count)
        return family

    def _draft_lengths(self, stats: EngineStats) -> Metric:
        """A histogram with one bucket per length."""
        family = HistogramMetricFamily("aspire:draft_length", "Drafts per verification.", labels=LABELS)
        histogram = Histogram([float(length) for length in range(max(1, len(stats.draft_lengths)))])
        for length, count in enumerate(stats.draft_lengths):
            histogram.record(float(length), count)
        family.add_metric(self._labels, buckets=histogram.buckets(), sum_value=histogram.total)
        return family

    def _finished(self, latency: Latency) -> Metric:
        family = CounterMetricFamily("vllm:request_success", "Outputs that ended, by reason.",
                                     labels=(*LABELS, "finished_reason"))
        for reason, count in sorted({"stop": 0, "length": 0, "abort": 0, **latency.finished}.items()):
            family.add_metric((*self._labels, reason), count)
        return family

    def _responses(self) -> Metric:
        family = CounterMetricFamily("aspire:http_responses", "HTTP responses; status 499: the client left.",
                                     labels=("route", "status"))
        for (route, status), count in sorted(self.responses.items()):
            family.add_metric((route, str(status)), count)
        return family
