"""/metrics: the frontend's counters and the engine's last snapshot, under vLLM's names where vLLM has them.

The registry belongs to one app. Everything is collected when scraped; nothing is formatted on the path of a token."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.core.steptime import TERMS
from penstock.engine.async_llm import AsyncLLM
from penstock.server.connections import Counts
from penstock.server.fleet import Fleet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = ("model_name", "engine")

TIER_GAUGES = (
    ("capacity_bytes", "Bytes that a cache tier can hold."),
    ("used_bytes", "Bytes that a cache tier holds."),
    ("cached_pages", "Pages that can be found in a cache tier."),
    ("available", "Whether a cache tier can be used (1), or is off or left alone for a while (0)."))
TIER_COUNTERS = (
    ("hit_tokens", "Prompt tokens found in a cache tier."),
    ("stored_pages", "Pages that became findable in a cache tier."),
    ("evicted_pages", "Pages evicted from a cache tier."),
    ("bytes_in", "Bytes moved into a cache tier from another."),
    ("bytes_out", "Bytes moved out of a cache tier into another."),
    ("failures", "Pages of a cache tier that could not be read, and were recomputed."),
    ("late_loads", "Loads from a cache tier that were given up because it did not answer in time."))
"""Fields of `core/request.py::TierStats`, published as penstock:cache_FIELD by tier."""

CONNECTIONS = {"accepted": "Connections taken in.", "evicted": "Idle connections closed because there were too many.",
               "refused": "Connections closed, and requests answered with 503, because there were too many connections.",
               "timed_out": "Connections closed because a request, or the reading of its answer, took too long."}
"""Fields of `server/connections.py::Counts`, published as penstock:connections_FIELD."""


class EngineCollector(Collector):
    """Renders an AsyncLLM's statistics. Yields nothing until the engine is ready."""

    def __init__(self, llm: AsyncLLM, model_name: str, connections: Callable[[], Counts]) -> None:
        self.llm = llm
        self.values = (model_name, "0")
        self.connections = connections

    def collect(self) -> Iterator[Metric]:
        if self.llm.info is None:
            return
        yield from self._gauges()
        yield from self._states()
        yield from self._counters()
        yield from self._tiers()
        yield from self._histograms()
        for name, count in asdict(self.connections()).items():
            yield self._one(CounterMetricFamily(f"penstock:connections_{name}", CONNECTIONS[name], labels=LABELS), count)
        yield self._cache_config()

    def _gauges(self) -> Iterator[Metric]:
        stats = self.llm.stats
        for name, doc, value in (
            ("vllm:num_requests_running", "Sequences that hold a row now.", stats.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a row.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", stats.kv_usage),
            ("penstock:pages_used", "Slabs of the KV arena in use.", stats.pages_used),
            ("penstock:pages_total", "Slabs of the KV arena.", stats.pages_total),
            ("penstock:plans_in_flight", "Steps in flight: submitted to the worker, without a result yet.", stats.in_flight),
            ("penstock:step_time_error", "Error of predicted step times: |predicted - measured| / measured, recent mean.",
             stats.step_time_error),
            ("penstock:requests_live", "Requests that this frontend has open.", self.llm.live),
            ("penstock:engine_up", "1 while the engine is alive and not stuck.", 0 if self.llm.unhealthy() else 1),
            ("penstock:engine_silence_seconds", "Time since the last message from the engine.", self.llm.silence)):
            yield self._one(GaugeMetricFamily(name, doc, labels=LABELS), value)

    def _states(self) -> Iterator[Metric]:
        """Gauges with a label of their own."""
        stats = self.llm.stats
        waits = {"capacity": stats.waiting, "deferred": stats.grammars_waiting}
        yield self._by(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason",
                       "Waiting requests: for capacity, or for their grammar.", "reason", waits.items())
        yield self._by(GaugeMetricFamily, "penstock:step_time_seconds", "The model of step time: seconds by term.", "term",
                       zip(TERMS, stats.step_time, strict=False))
        uneven = [max(picks) * len(picks) / max(1, sum(picks)) for picks in stats.expert_picks]
        yield self._by(GaugeMetricFamily, "penstock:expert_imbalance",
                       "Picks of a layer's most picked expert over the mean: 1 is even.", "layer", enumerate(uneven))
        yield from self._adapters()

    def _adapters(self) -> Iterator[Metric]:
        stats, names = self.llm.stats, {adapter.digest: name for name, adapter in self.llm.adapters.items()}
        counts = {names.get(digest, digest[:12]): both for digest, both in stats.adapters.items()}
        running, waiting = (",".join(sorted(name for name, both in counts.items() if both[i])) for i in (0, 1))
        lora = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that run and wait; the value is the time.",
                                 labels=("model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters"))
        lora.add_metric((self.values[0], str(self.llm.info.max_loras if self.llm.info else 0), waiting, running), stats.time)
        yield lora
        for i, state in enumerate(("running", "waiting")):
            yield self._by(GaugeMetricFamily, f"penstock:adapter_requests_{state}", f"Sequences of an adapter, {state}.",
                           "adapter", ((name, both[i]) for name, both in counts.items()))

    def _counters(self) -> Iterator[Metric]:
        stats, figures = self.llm.stats, self.llm.traffic.figures
        for name, doc, value in (
            ("vllm:prompt_tokens", "Prompt tokens of the requests taken in.", figures.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", stats.cached_tokens),
            ("vllm:generation_tokens", "Tokens generated.", figures.generation_tokens),
            ("vllm:num_preemptions", "Preempted sequences.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("vllm:external_prefix_cache_hits", "Prompt tokens found in host, disk and remote tiers.", self._further),
            ("penstock:prefix_cache_misses", "Prompt tokens not found in the prefix cache.",
             stats.prompt_tokens - stats.cached_tokens),
            ("vllm:corrupted_requests", "Sequences that failed for logits that are not finite.", figures.finished["error"]),
            ("penstock:requests_aborted", "Sequences aborted by a client or ended by a stop string.",
             figures.finished["abort"]),
            ("penstock:requests_refused", "Requests that the engine refused.", figures.refused),
            ("penstock:steps", "Steps that the engine ran.", stats.steps),
            ("penstock:plan_seconds", "Host time for planning steps and applying results.", stats.plan_seconds),
            ("penstock:worker_seconds", "Worker time in steps.", stats.worker_seconds),
            ("penstock:kernel_seconds", "Worker time in the model's forward pass and head.", stats.kernel_seconds),
            ("penstock:expert_hits", "Picks of experts that were on the device, where some are in host memory alone.",
             stats.expert_hits),
            ("vllm:spec_decode_num_drafts", "Times that tokens were drafted for a sequence.", stats.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.", stats.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", stats.accepted_tokens),
            ("penstock:spec_decode_ahead", "Verifications for whose outcomes it was drafted ahead.", stats.ahead_tries),
            ("penstock:spec_decode_ahead_hits", "Of those, how many outcomes had drafts ready.", stats.ahead_hits),
            ("penstock:grammars_compiled", "Grammars compiled for constrained answers.", stats.grammars_compiled),
            ("penstock:grammars_cached", "Constrained requests whose grammar was compiled before.", stats.grammars_cached),
            ("penstock:grammar_seconds", "Time of compiling grammars, beside the steps.", stats.grammar_seconds),
            ("penstock:masked_tokens", "Tokens chosen under a mask.", stats.masks),
            ("penstock:mask_seconds", "Time in which masks were computed.", stats.mask_seconds),
            ("penstock:forced_tokens", "Tokens that a grammar left no choice about.", stats.forced_tokens)):
            yield self._one(CounterMetricFamily(name, doc, labels=LABELS), value)
        yield self._by(CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens_per_pos",
                       "Drafted tokens that were kept, by place.", "position", enumerate(stats.accepted_by_place))
        yield self._by(CounterMetricFamily, "penstock:rank_seconds", "Time in steps, of each of several ranks.", "rank",
                       enumerate(stats.rank_seconds))
        picked = map(sum, zip(*stats.expert_picks, strict=True))
        yield self._by(CounterMetricFamily, "penstock:expert_picks", "How often tokens were sent to an expert, of all layers.",
                       "expert", enumerate(picked))
        yield self._by(CounterMetricFamily, "vllm:request_success", "Finished sequences by why they ended.",
                       "finished_reason", figures.finished.items())

    def _tiers(self) -> Iterator[Metric]:
        stats = self.llm.stats
        for kind, fields in ((GaugeMetricFamily, TIER_GAUGES), (CounterMetricFamily, TIER_COUNTERS)):
            for field, doc in fields:
                yield self._by(kind, f"penstock:cache_{field}", doc, "tier",
                               ((tier.name, getattr(tier, field)) for tier in stats.tiers))
        missed, further = stats.prompt_tokens - stats.cached_tokens, self._further
        yield self._by(CounterMetricFamily, "vllm:prompt_tokens_by_source",
                       "Prompt tokens by where their cache entries came from.", "source",
                       (("local_compute", missed), ("local_cache_hit", stats.cached_tokens - further),
                        ("external_kv_transfer", further)))
        yield self._by(CounterMetricFamily, "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by tier.", "source",
                       ((tier.name, tier.hit_tokens) for tier in stats.tiers))

    def _histograms(self) -> Iterator[Metric]:
        figures = self.llm.traffic.figures
        for name, doc, histogram in (
            ("vllm:time_to_first_token_seconds", "From submission to the first token.", figures.first_token),
            ("vllm:inter_token_latency_seconds", "Between one token and the next.", figures.between_tokens),
            ("vllm:request_time_per_output_token_seconds", "Decoding time a token, by sequence.", figures.per_token),
            ("vllm:e2e_request_latency_seconds", "From submission to the end.", figures.end_to_end),
            ("vllm:request_queue_time_seconds", "Waiting for a row the first time.", figures.queue),
            ("vllm:request_inference_time_seconds", "From the first row to the end.", figures.inference),
            ("vllm:request_prefill_time_seconds", "From the first row to the first token.", figures.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the end.", figures.decode),
            ("vllm:request_prompt_tokens", "Prompt lengths.", figures.prompt_lengths),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", figures.computed_prompts),
            ("vllm:request_generation_tokens", "Output lengths, by sequence.", figures.output_lengths),
            ("vllm:request_params_max_tokens", "The most tokens asked for.", figures.max_tokens),
            ("vllm:request_params_n", "Sequences asked for in one request.", figures.sequences),
            ("vllm:request_num_preemptions", "How often a sequence was preempted.", figures.preemptions),
            ("vllm:iteration_tokens_total", "Tokens of a step: computed and generated ones.", figures.step_tokens)):
            family = HistogramMetricFamily(name, doc, labels=LABELS)
            family.add_metric(self.values, histogram.cumulative(), histogram.total)
            yield family

    def _cache_config(self) -> Metric:
        info = self.llm.info
        assert info is not None
        facts = {"block_size": info.page_size, "num_gpu_blocks": info.kv_tokens // info.page_size, "cache_dtype": info.dtype,
                 "kv_bytes": info.kv_bytes, "kv_tokens": info.kv_tokens, "kv_cache_size_tokens": info.kv_tokens,
                 "kv_cache_max_concurrency": f"{info.kv_tokens / info.max_model_len:.2f}",
                 "enable_prefix_caching": info.prefix_caching}
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is laid out.", labels=("engine", *facts))
        family.add_metric(("0", *map(str, facts.values())), 1)
        return family

    @property
    def _further(self) -> int:
        """Prompt tokens found in host, disk and remote tiers."""
        return sum(tier.hit_tokens for tier in self.llm.stats.tiers if tier.name != "device")

    def _one(self, family: Metric, value: float) -> Metric:
        family.add_metric(self.values, value)  # type: ignore[attr-defined]
        return family

    def _by(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, doc: str, label: str,
            values: Iterable[tuple[object, float]]) -> Metric:
        """A metric with a sample for each value of one more label."""
        family = kind(name, doc, labels=(*LABELS, label))
        for value, count in values:
            family.add_metric((*self.values, str(value)), count)
        return family


class FleetCollector(Collector):
    """Renders all loaded models: each metric once, with the samples of every model."""

    def __init__(self, fleet: Fleet, connections: Callable[[], Counts]) -> None:
        self.fleet = fleet
        self.connections = connections

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for slot in self.fleet.loaded:
            for metric in EngineCollector(slot.llm, slot.label, self.connections).collect():
                whole = found.setdefault(metric.name, metric)
                if whole is not metric:
                    whole.samples += [sample for sample in metric.samples if sample not in whole.samples]
        yield from found.values()
        sleep = GaugeMetricFamily("vllm:engine_sleep_state", "Whether a model sleeps: its engine has ended until /wake_up.",
                                  labels=(*LABELS, "sleep_state"))
        for slot in self.fleet.slots:
            asleep = slot.state == "sleeping"
            for state, holds in (("awake", not asleep), ("weights_offloaded", asleep and slot.level != "2"),
                                 ("discard_all", asleep and slot.level == "2")):
                sleep.add_metric((slot.label, "0", state), holds)
        yield sleep


def metrics_page(fleet: Fleet, connections: Callable[[], Counts]) -> Callable[[], bytes]:
    """Returns what renders the metrics of one app."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(fleet, connections))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
