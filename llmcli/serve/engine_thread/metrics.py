"""Counts the work of a server, and writes the counts as Prometheus text.

Times are defined as in `bench load`: the time of a token is the time since the previous token; for
the first token, since the request.

prometheus-client is not used: most values belong to the engine and are only read when they are
requested, but the library would store each of them again, in a registry for the whole process.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmcli.hardware.gpu_usage import GpuUsage
from llmcli.runtime.disk_cache.disk_cache import DiskUsage
from llmcli.runtime.engine.schedule import EngineLoad
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import KVReport

LLAMA_SERVER_PREFIX = "llamacpp:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds of buckets in seconds: those of vLLM, plus smaller ones for small models.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
ANSWER_TIME_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
)
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Time from the request to the first token.",
        FIRST_TOKEN_BUCKETS,
    ),
    "time_to_first_reply_token_seconds": (
        "Time from the request to the first token after the thinking.",
        FIRST_TOKEN_BUCKETS,
    ),
    "inter_token_latency_seconds": ("Gaps between the tokens of an answer.", TOKEN_GAP_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean gap of an answer of two or more tokens.",
        TOKEN_GAP_BUCKETS,
    ),
    "request_queue_time_seconds": (
        "Time from the request to the first prompt pass.",
        FIRST_TOKEN_BUCKETS,
    ),
    "request_prefill_time_seconds": ("Time of the passes over a prompt.", FIRST_TOKEN_BUCKETS),
    "e2e_request_latency_seconds": (
        "Time from the request to the last token.",
        ANSWER_TIME_BUCKETS,
    ),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKEN_COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens of an answer.", TOKEN_COUNT_BUCKETS),
}


GPU_GAUGES: tuple[tuple[str, str, Callable[[GpuUsage], float | None]], ...] = (
    ("gpu_busy_ratio", "Share of the time in which a GPU computes, 0 to 1.", lambda gpu: gpu.busy),
    (
        "gpu_memory_busy_ratio",
        "Share of the time in which a GPU's memory is read or written.",
        lambda gpu: gpu.memory_busy,
    ),
    ("gpu_memory_used_bytes", "Used memory of a GPU.", lambda gpu: gpu.used_bytes),
    ("gpu_memory_bytes", "Memory of a GPU.", lambda gpu: gpu.total_bytes),
    ("gpu_power_watts", "Power of a GPU.", lambda gpu: gpu.watts),
)


DISK_COUNTERS: tuple[tuple[str, str, Callable[[DiskUsage], int]], ...] = (
    ("prompt_tokens_disk", "Prompt tokens read from the disk.", lambda disk: disk.read_tokens),
    ("disk_cache_read_bytes", "Bytes of states that were restored.", lambda disk: disk.read_bytes),
    ("disk_cache_written_bytes", "Bytes of states written.", lambda disk: disk.written_bytes),
    ("disk_cache_dropped_files", "Files dropped for others.", lambda disk: disk.dropped),
    ("disk_cache_damaged_files", "Files that could not be used.", lambda disk: disk.damaged),
    ("disk_cache_failed_writes", "States that were not written.", lambda disk: disk.failed),
    ("disk_cache_bugs", "Unexpected exceptions of the cache on disk.", lambda disk: disk.bugs),
)
DISK_GAUGES: tuple[tuple[str, str, Callable[[DiskUsage], int]], ...] = (
    ("disk_cache_bytes", "Bytes of the files of all models.", lambda disk: disk.used_bytes),
    ("disk_cache_max_bytes", "Largest number of these bytes.", lambda disk: disk.max_bytes),
    ("disk_cache_files", "Files of this model.", lambda disk: disk.entries),
    ("disk_cache_queued_bytes", "Bytes that wait to be written.", lambda disk: disk.queued_bytes),
    ("disk_cache_writing", "1 if states can be written.", lambda disk: int(disk.is_writing)),
)


class Histogram:
    """Counts values by bucket. `upper_bounds`: the largest value of each bucket."""

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self.upper_bounds, self.counts, self.sum = upper_bounds, [0] * (len(upper_bounds) + 1), 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count values. A value that equals an upper bound belongs to that bucket."""
        for value in values:
            self.counts[bisect_left(self.upper_bounds, value)] += 1
            self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield the histogram's lines of Prometheus text: cumulative counts, sum and count."""
        total = 0
        for end, count in zip((*map(str, self.upper_bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{end}"}} {total}'
        yield f"{name}_sum {self.sum:.9g}"
        yield f"{name}_count {total}"


@dataclass(frozen=True, slots=True)
class LiveGauges:
    """Values that are read from the engine when the metrics are requested.

    `saved_cells`: how many more cells of the KV cache would be used if sequences did not share
    prefixes. `resident_bytes`: the resident memory of this process; None if unknown. `gpus`: the
    use of NVIDIA GPUs by all programs; empty without NVML. `disk`: the prefix cache on disk; None
    without one.
    """

    load: EngineLoad
    kv: KVReport
    saved_cells: int
    resident_bytes: int | None
    gpus: tuple[GpuUsage, ...] = ()
    disk: DiskUsage | None = None


class ServerMetrics:
    """The counters and histograms of one server. All methods are callable from every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms = {
            name: Histogram(upper_bounds) for name, (_, upper_bounds) in HISTOGRAMS.items()
        }
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._cached = self._cancelled = self._embedded = self._drafted = self._accepted = 0
        self._drafts = self._embedding_passes = self._longest = 0
        self._last_token_at: float | None = None

    def record_token(self) -> None:
        """Record that a token was generated now."""
        self._last_token_at = time.monotonic()

    @property
    def last_token_age(self) -> float | None:
        """Seconds since the last token of any answer; None before the first token."""
        return None if self._last_token_at is None else time.monotonic() - self._last_token_at

    def record_answer(self, answer: Answer) -> None:
        """Add a finished answer to the counters and histograms."""
        gaps = [token.ms / 1e3 for token in answer.tokens[1:]]
        values_by_histogram: dict[str, list[float]] = {
            "request_prompt_tokens": [answer.prompt_tokens],
            "request_generation_tokens": [len(answer.tokens)],
            "request_prefill_time_seconds": [answer.prompt_ms / 1e3],
            "inter_token_latency_seconds": gaps,
        }
        if answer.tokens:
            values_by_histogram["request_queue_time_seconds"] = [answer.queue_ms / 1e3]
            values_by_histogram["time_to_first_token_seconds"] = [answer.ttft_ms / 1e3]
            values_by_histogram["e2e_request_latency_seconds"] = [answer.ttft_ms / 1e3 + sum(gaps)]
        if answer.ttfo_ms is not None:
            values_by_histogram["time_to_first_reply_token_seconds"] = [answer.ttfo_ms / 1e3]
        if gaps:
            values_by_histogram["request_time_per_output_token_seconds"] = [answer.tpot_ms / 1e3]
        with self._lock:
            self._finished[answer.finish] += 1
            self._cached += answer.cached_tokens
            self._longest = max(self._longest, answer.prompt_tokens + len(answer.tokens))
            self._drafts += answer.n_drafts
            self._drafted += answer.n_drafted or 0
            self._accepted += answer.n_accepted
            for name, values in values_by_histogram.items():
                self._histograms[name].add(values)

    def record_cancelled(self, count: int) -> None:
        """Count answers that were canceled because their client disconnected."""
        with self._lock:
            self._cancelled += count

    def record_rejection(self, reason: str) -> None:
        """Count a rejected request. `reason`: "busy" or "stopping"."""
        with self._lock:
            self._rejected[reason] += 1

    def record_embedding(self, tokens: int, n_passes: int = 0) -> None:
        """Count the tokens of texts for which embeddings were computed, and the passes over them."""
        with self._lock:
            self._embedded += tokens
            self._embedding_passes += n_passes

    def render(self, model: str, gauges: LiveGauges) -> str:
        """Return all metrics as Prometheus text. `model`: the name of the served model."""
        with self._lock:
            lines = [*self._counters(gauges), *self._gauges(model, gauges)]
            for name, (description, _) in HISTOGRAMS.items():
                lines += _head(name, "histogram", description)
                lines += self._histograms[name].lines(f"llmcli_{name}")
            lines += self._llama_server_metrics(gauges)
        return "\n".join(lines) + "\n"

    def _counters(self, gauges: LiveGauges) -> Iterator[str]:
        load = gauges.load
        for name, description, value in (
            ("prompt_tokens", "Prompt tokens computed.", load.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the cache.", self._cached),
            ("generation_tokens", "Tokens drawn.", load.tokens),
            (
                "num_preemptions",
                "Answers preempted in a full cache, to be resumed later.",
                load.n_preemptions,
            ),
            ("requests_cancelled", "Answers cancelled by a disconnect.", self._cancelled),
            ("embedding_tokens", "Tokens of embedded texts.", self._embedded),
            ("spec_decode_num_draft_tokens", "Draft tokens.", self._drafted),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", self._accepted),
        ):
            yield from _head(f"{name}_total", "counter", description)
            yield f"llmcli_{name}_total {value}"
        if gauges.disk is not None:
            for name, description, read in DISK_COUNTERS:
                yield from _head(f"{name}_total", "counter", description)
                yield f"llmcli_{name}_total {read(gauges.disk)}"
        yield from _head("request_success_total", "counter", "Finished answers by reason.")
        for reason in ("stop", "length", "cancelled", "context_full", "repetition", "failed"):
            labels = f'{{finished_reason="{reason}"}}'
            yield f"llmcli_request_success_total{labels} {self._finished[reason]}"
        yield from _head("admission_rejections_total", "counter", "Rejected requests by reason.")
        for reason in ("busy", "stopping"):
            yield f'llmcli_admission_rejections_total{{reason="{reason}"}} {self._rejected[reason]}'

    def _gauges(self, model: str, gauges: LiveGauges) -> Iterator[str]:
        load, kv = gauges.load, gauges.kv
        for name, description, value in (
            ("num_requests_running", "Answers that are running.", load.n_running),
            ("num_requests_waiting", "Answers that are waiting.", load.n_waiting),
            ("num_requests_preempted", "Waiting answers that were preempted.", load.n_preempted),
            ("kv_cells", "Cells of the cache.", load.n_cells),
            ("kv_cells_used", "Cells that hold a token.", load.used_cells),
            (
                "kv_cells_saved",
                "Further cells that would be used without sharing.",
                gauges.saved_cells,
            ),
            (
                "kv_cache_usage_perc",
                "Share of cells that hold a token, 0 to 1.",
                load.used_cells / load.n_cells,
            ),
            ("kv_cache_bytes", "Bytes of the cache.", kv.allocated_bytes or kv.predicted_bytes),
            ("last_token_age_seconds", "Time since the last token.", self.last_token_age),
        ):
            if value is not None:
                yield from _head(name, "gauge", description)
                yield f"llmcli_{name} {value:.9g}"
        if gauges.resident_bytes is not None:
            yield "# HELP process_resident_memory_bytes Resident memory."
            yield "# TYPE process_resident_memory_bytes gauge"
            yield f"process_resident_memory_bytes {gauges.resident_bytes}"
        if gauges.disk is not None:
            for name, description, read_disk in DISK_GAUGES:
                yield from _head(name, "gauge", description)
                yield f"llmcli_{name} {read_disk(gauges.disk)}"
        for name, description, read in GPU_GAUGES:
            values = [(gpu, value) for gpu in gauges.gpus if (value := read(gpu)) is not None]
            yield from _head(name, "gauge", description) if values else ()
            for gpu, value in values:
                labels = f'{{gpu="{gpu.index}",name="{_escape_label(gpu.name)}"}}'
                yield f"llmcli_{name}{labels} {value:.9g}"
        yield from _head("model_info", "gauge", "The served model.")
        yield f'llmcli_model_info{{model="{_escape_label(model)}"}} 1'

    def _llama_server_metrics(self, gauges: LiveGauges) -> Iterator[str]:
        """Yield the metrics of llama-server under its names, so that dashboards for it work."""
        load = gauges.load
        prompt_seconds = self._histograms["request_prefill_time_seconds"].sum
        token_seconds = self._histograms["inter_token_latency_seconds"].sum
        n_gaps = sum(self._histograms["inter_token_latency_seconds"].counts)
        n_passes = load.n_passes + self._embedding_passes
        for name, kind, description, value in (
            (
                "prompt_tokens_total",
                "counter",
                "Prompt tokens computed.",
                load.prompt_tokens + self._embedded,
            ),
            (
                "prompt_tokens_cached_total",
                "counter",
                "Prompt tokens found in the cache.",
                self._cached,
            ),
            ("prompt_seconds_total", "counter", "Time of the passes over prompts.", prompt_seconds),
            ("tokens_predicted_total", "counter", "Tokens drawn.", load.tokens),
            (
                "tokens_predicted_seconds_total",
                "counter",
                "Time between the tokens of answers.",
                token_seconds,
            ),
            ("n_decode_total", "counter", "Forward passes.", n_passes),
            (
                "n_tokens_max",
                "counter",
                "Tokens of the longest prompt with its answer.",
                self._longest,
            ),
            ("spec_decode_num_drafts_total", "counter", "Drafts that were checked.", self._drafts),
            ("spec_decode_num_draft_tokens_total", "counter", "Draft tokens.", self._drafted),
            (
                "spec_decode_num_accepted_tokens_total",
                "counter",
                "Accepted draft tokens.",
                self._accepted,
            ),
            (
                "prompt_tokens_seconds",
                "gauge",
                "Prompt tokens a second.",
                load.prompt_tokens / prompt_seconds if prompt_seconds else 0.0,
            ),
            (
                "predicted_tokens_seconds",
                "gauge",
                "Tokens of an answer a second.",
                n_gaps / token_seconds if token_seconds else 0.0,
            ),
            ("requests_processing", "gauge", "Answers that are running.", load.n_running),
            ("requests_deferred", "gauge", "Answers that are waiting.", load.n_waiting),
            (
                "n_busy_slots_per_decode",
                "gauge",
                "Mean number of answers in a pass.",
                load.pass_sequences / load.n_passes if load.n_passes else 0.0,
            ),
        ):
            yield from _head(name, kind, description, LLAMA_SERVER_PREFIX)
            yield f"{LLAMA_SERVER_PREFIX}{name} {value:.9g}"


def _head(name: str, kind: str, description: str, prefix: str = "llmcli_") -> tuple[str, str]:
    return f"# HELP {prefix}{name} {description}", f"# TYPE {prefix}{name} {kind}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
