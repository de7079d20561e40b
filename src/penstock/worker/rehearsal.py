"""A dry run of a model's steps on meta tensors, before weights are loaded: every kernel launch, without arithmetic.

It runs the same code as real steps, so the kernels that it records (`ops/compile.py::recording`) are those that steps need."""

import copy
from collections.abc import Callable

import torch

from penstock.core.state import lay_out
from penstock.layers.build import Values
from penstock.layers.decoder import Decoder
from penstock.layers.draft_head import Join
from penstock.layers.spec import ModelSpec
from penstock.layers.step import StateView, Step
from penstock.models.adapters import layout
from penstock.ops.attention import AttentionOps, Span
from penstock.ops.attention_work import FIELDS
from penstock.ops.compile import Job, recording
from penstock.ops.experts import ExpertsOps
from penstock.ops.gpu import Chip
from penstock.ops.lora import Groups, LoraOps, Slabs, size
from penstock.ops.registry import Kernels
from penstock.ops.sample_table import WIDTH
from penstock.ops.step import Moving
from penstock.quant.scheme import empty
from penstock.worker.adapters import LowRankDelta
from penstock.worker.arena import Arena
from penstock.worker.dummy import dummy_plan, spread
from penstock.worker.graphs import Buckets
from penstock.worker.step import Bucket, fitted

_META = torch.device("meta")
_INTS = torch.int32


def rehearse(spec: ModelSpec, kernels: Kernels, *, dtype: torch.dtype, rows: int, tokens: int, max_model_len: int, page: int,
             graph_tokens: int, chip: Chip, adapters: tuple[int, int] | None = None,
             found: Callable[[Job], object] = id) -> list[Job]:
    """Kernels of steps of up to `tokens` tokens and `rows` segments, each told to `found`; `adapters`: as configured."""
    kernels = _without_values(kernels)
    with recording(chip, found) as jobs, torch.inference_mode():
        model, groups = _model(spec, kernels, dtype, max_model_len, page)
        known = torch.empty(rows, max_model_len, dtype=_INTS, device=_META)
        tables = [torch.empty(rows, -(-max_model_len // page), dtype=_INTS, device=_META)] * groups
        slabs = None if adapters is None else Slabs(layout(model.spec), *adapters, dtype, _META)
        # An eager step may need any number of hidden states, all for scored prompts. First, as its kernels compile longest.
        _forward(model, Bucket(tokens, 1), known, tables, page, None)
        # Any number of rows may be sampled after any step.
        for lines in _examples(tokens) if spec.ends and not spec.head.borrowed else ():
            logits = model.head(torch.empty(lines, spec.width, dtype=dtype, device=_META))
            if lines in (1, 2, rows) and kernels.chosen["sample"].capturable:
                # Several ranks exchange candidates; what else there is to do, each does with the gathered logits.
                whole = torch.empty(lines, spec.vocab_size, dtype=logits.dtype, device=_META) if spec.ranks > 1 else logits
                _sample(kernels, whole, known)
                if spec.ranks > 1:
                    kernels.sample.candidates(logits, torch.empty(rows, WIDTH, dtype=_INTS, device=_META),
                                              *torch.empty(2, lines, dtype=_INTS, device=_META))
        # Powers of two first: nearly every kernel is among theirs, and is compiled while the other sizes are gone through.
        for bucket in sorted(buckets(rows, tokens, graph_tokens, max_model_len), key=lambda one: one.tokens.bit_count() > 1):
            _forward(model, bucket, known, tables, page, bucket.segments)
            if slabs is not None:
                _forward(model, bucket, known, tables, page, bucket.segments, slabs=slabs)
        for ends in _examples(fitted(rows)):
            _forward(model, Bucket(tokens, 1), known, tables, page, ends)
        # Where drafts are verified, segments move.
        of = Moving(*(torch.empty(rows, dtype=_INTS, device=_META) for _ in Moving._fields))
        for length in (of.row, None):
            kernels.move_step(of, list(torch.empty(2, 1, FIELDS, dtype=_INTS, device=_META)), length)
        for before in kernels.attention.contexts(max_model_len - tokens):
            _forward(model, Bucket(tokens, 1), known, tables, page, 1, before)
        if isinstance(model.embedding, Join):
            # A draft head reads the target's states before its step.
            for size in _examples(fitted(tokens)):
                model.embedding.reduce(torch.empty(size, model.embedding.spec.read, dtype=dtype, device=_META))
    return list(jobs.values())


def _without_values(kernels: Kernels) -> Kernels:
    """Returns a copy of `kernels` in which no-ops replace the reference implementations: they launch none of our kernels, and
    read tensor values."""
    kernels = copy.copy(kernels)
    attention, experts, lora = AttentionOps(), ExpertsOps(), LoraOps()
    for ops, method in ((attention, "apply"), (experts, "apply"), (lora, "shrink"), (lora, "expand")):
        setattr(ops, method, _alike)
    silent = {"attention": attention, "experts": experts, "lora": lora, "rope_write": _alike, "cache_write": _alike,
              "delta_rule": lambda x, shape, *_rest: x.new_empty(len(x), shape.heads * shape.value_size)}
    for op, call in silent.items():
        if not kernels.chosen[op].capturable:
            setattr(kernels, op, call)
    return kernels


def _alike(x: torch.Tensor, *_rest: object, **_named: object) -> torch.Tensor:
    return torch.empty_like(x)


def buckets(rows: int, tokens: int, graph_tokens: int, max_model_len: int) -> list[Bucket]:
    """Buckets of captured steps, and samples of eager ones, of any size: where no graph serves or prompts are scored."""
    eager = {Bucket(size, segments) for size in _examples(fitted(tokens)) for segments in (1, min(fitted(rows), size))}
    padded = Buckets(graph_tokens, rows, max_model_len).all() if graph_tokens else []
    return sorted(eager.union(padded), key=lambda bucket: (bucket.tokens, bucket.segments))


def _examples(most: int) -> list[int]:
    """Returns all small sizes, and larger ones around the sizes where launches change: powers of two and multiples of 128."""
    powers = [size for power in range(7, 20) for size in (1 << power, (1 << power) + 1, 3 << (power - 1))]
    return [size for size in sorted({most, *range(1, 129), *range(128, 1 << 14, 128), *powers}) if size <= most]


def _model(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, max_model_len: int, page: int) -> tuple[Decoder, int]:
    """Returns the model on meta tensors with one block of each kind and the last one, and its number of cache groups.

    Blocks are of one kind if their specs, how their matrices are stored and the alignment of their cache fields are equal."""
    name = str(dtype).removeprefix("torch.")
    states = spec.states(name)
    none = lay_out(states, page, 0)
    arena = Arena(lay_out(states, page, 4 * none.slab_bytes), _META).views(states)
    views = [arena[place] for place in spec.held(name)]
    stored: dict[str, list[object]] = {}
    for parameter in spec.parameters():
        layer, _, rest = parameter.name.removeprefix("blocks.").partition(".")
        stored.setdefault(layer, []).append((rest, parameter.scheme))
    kinds: dict[tuple[object, ...], tuple[int, list[StateView]]] = {}
    at = 0
    for number, block in enumerate(spec.blocks):
        mine = views[at:at + sum(len(mixer.states(name)) for mixer in block.mixers)]
        at += len(mine)
        places = [(view.group, *(field.data_ptr() % 16 for field in view.fields.values())) for view in mine]
        last = number == len(spec.blocks) - 1  # of which a step computes fewer rows
        kinds.setdefault((last, block, *stored[str(spec.first + number)], *places), (number, mine))
    short = spec.with_blocks([number for number, _ in kinds.values()])
    values = Values()
    for parameter in short.parameters():
        if parameter.scheme is None or parameter.decoded:
            plain = getattr(torch, parameter.dtype or name)
            values[parameter.name] = torch.empty(parameter.shape, dtype=plain, device=_META)
        else:
            values[parameter.name] = empty(parameter.scheme, parameter.shape, dtype, _META, kernels, parameter.stack,
                                           parameter.resident)
    model = Decoder(short, values, kernels, dtype=dtype, device=_META, max_model_len=max_model_len)
    model.attach([view for _, mine in kinds.values() for view in mine])
    return model, len(none.groups)


def _forward(model: Decoder, bucket: Bucket, known: torch.Tensor, tables: list[torch.Tensor], page: int,
             ends: int | None, before: int = 0, slabs: Slabs | None = None) -> None:
    """Runs a step and takes `ends` hidden states (None: all). Segments follow `before` positions. `slabs`: with adapters."""
    segments, tokens = bucket.segments, bucket.tokens

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=_INTS, device=_META)

    plan = dummy_plan(spread(tokens, segments), before)
    counts, contexts = plan.counts, plan.starts + plan.counts
    work, library = list[torch.Tensor | None](), list[list[Span]]()
    for one in model.works:
        library.append(one.ops.library_spans(one.geometry, counts, contexts))
        found = one.ops.prepare(one.geometry, counts, contexts, segments, tokens, library[-1])
        work.append(None if found is None else ints(len(found)))
    query_start, context = ints(segments + 1), ints(segments)
    model.kernels.bring(ints(segments), query_start[:segments])
    built = model.kernels.build_step(known, tables, ints(segments), ints(segments), query_start, page, tokens,
                                     tables[0].shape[1])
    wanted = None if ends is None or ends == tokens else ints(ends)
    step = Step(built.tokens, built.positions, query_start, context, built.groups, work, library, wanted)
    if slabs is not None:
        slots, lora = len(slabs.data), model.kernels.lora
        step.delta, step.end_delta = (LowRankDelta(lora, slabs, Groups.of(ints(size(rows, slots)), rows, slots), {})
                                      for rows in (tokens, ends or 0))
    model.forward(step)


def _sample(kernels: Kernels, logits: torch.Tensor, known: torch.Tensor) -> None:
    """Launches every sampling and scoring kernel."""
    lines, ops = len(logits), kernels.sample

    def ints(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=_INTS, device=_META)

    table, lists, row, position, picked = ints(len(known), WIDTH), ints(4096), ints(lines), ints(lines), ints(lines)
    ops.edit(logits, table, lists, known, row, position, picked)
    ops.mask(logits, ints(lines, -(-logits.shape[1] // 32)), picked)
    ops.penalize(logits, table, known, row, position, picked)
    for threshold in (None, ops.threshold(logits, table, row)):
        tokens = ops.choose(logits, table, known, row, position, threshold)
    ops.choose(logits, table, known, row, position, None, ints(lines), ints(1))
    for which in (None, picked):
        ops.score(logits, tokens, 20, which)
