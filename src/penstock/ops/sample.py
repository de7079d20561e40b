"""The operation `sample` in plain PyTorch: choosing tokens, filters, penalties, logit edits and log probabilities.

Parameters that vary by row are in a table on the device (`ops/sample_table.py`), so the host passes only row numbers to a step.
`worker/sampler.py` decides which of these functions a step needs."""

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import NOT_FINITE
from penstock.ops import noise
from penstock.ops.sample_table import EDIT_WIDTH, Column, Edit, Feature
from penstock.ops.table import register


class SampleOps:
    """S lines of logits [S, V] (float32, or bfloat16 and float16 where nothing is changed in them) belong to the table's rows
    `row` [S] int32. `position` [S] int32 is where each line's sampled token will stand, which is also how many tokens the row
    has; `tokens` [R, L] int32 are the rows' tokens. A row of -1 is padding: nothing is read or written for it.

    A NaN or +inf among a line's logits survives every operation, so that `choose` finds it."""

    def choose(self, logits: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
               position: torch.Tensor, threshold: torch.Tensor | None = None, out: torch.Tensor | None = None,
               shift: torch.Tensor | None = None) -> torch.Tensor:
        """The next tokens [S] int32: `elect` of `candidates`.

        Rows without Feature.RANDOM take the largest logit, the lowest id of equals. Others draw by the softmax of scaled logits
        not below `threshold` [S] float32. NOT_FINITE (0 in `tokens`) where a logit is NaN or +inf, or all -inf."""
        values, places = self.candidates(logits, table, row, position, threshold)
        return self.elect(values, places, tokens, row, position, out, shift)

    def candidates(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
                   threshold: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The best token of each of some parts of a line, the parts in the order of the vocabulary: values [S, P] float32 and
        ids [S, P] int32. `first` is the id of the logits' first token, where they are a share of the vocabulary.

        The value of a token is its logit; for rows with Feature.RANDOM a race's, whose winner is drawn."""
        mine = table[row.long()]
        drawn = (mine[:, Column.FEATURES] & int(Feature.RANDOM) > 0).nonzero()[:, 0]
        if len(drawn) < len(row):
            best, value = _largest(logits)
        if len(drawn) == len(row):
            best, value = _largest(_race(logits, mine, position, threshold, first))
        elif len(drawn):
            some = _race(logits[drawn], mine[drawn], position[drawn], None if threshold is None else threshold[drawn], first)
            best[drawn], value[drawn] = _largest(some)
        return value[:, None], best[:, None].int() + first

    def perturbed(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[S, V] float32: values whose largest `choose` takes, without filters: logits, or a race's with Feature.RANDOM."""
        mine, x = table[row.long()], logits.float()
        drawn = (mine[:, Column.FEATURES, None] & int(Feature.RANDOM)) > 0
        return torch.where(drawn, _race(x, mine, position, None, 0), x)

    def elect(self, values: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
              position: torch.Tensor, out: torch.Tensor | None = None, shift: torch.Tensor | None = None) -> torch.Tensor:
        """The best candidate of each line [S] int32, the lowest id of equals, also written into `tokens` at its position.
        Results are in `out` if given, perhaps the host's memory, once the device has come so far. With `shift` [1] int32 they
        are so many elements behind its start, and `out` is returned: a captured graph writes to another place each time."""
        chosen, value = places[:, 0], values[:, 0]
        if values.shape[1] > 1:
            best, value = _largest(values)
            chosen = places.gather(1, best[:, None])[:, 0]
        chosen = chosen.masked_fill(~value.isfinite(), NOT_FINITE)
        real = row >= 0
        if bool(real.all()):
            tokens[row.long(), position.long()] = chosen.clamp(min=0)
        else:
            tokens[row[real].long(), position[real].long()] = chosen[real].clamp(min=0)
        if out is not None and shift is not None:
            out[int(shift):int(shift) + len(chosen)] = chosen
            return out
        return chosen if out is None else out.copy_(chosen, non_blocking=True)

    def threshold(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """[S] float32: what a line's scaled logit must at least be to be drawn; -inf for rows without Feature.FILTER.

        With x the logits times INVERSE_TEMPERATURE, in float32: first those below max(x) + LOG_MIN_P go, then those that TOP_K
        or more are larger than, then those that are preceded, among the tokens still there, by larger ones with TOP_P of the
        probability or more. Equals at a border all stay, so that nothing depends on an order among them."""
        found = torch.full((len(row),), -torch.inf, device=logits.device)
        mine = table[row.long()]
        lines = (mine[:, Column.FEATURES] & int(Feature.FILTER) > 0).nonzero()[:, 0]
        if not len(lines):
            return found
        mine = mine[lines]
        real = mine.view(torch.float32)
        x = logits[lines].float() * real[:, Column.INVERSE_TEMPERATURE, None]
        vocab = x.shape[1]
        top_k, top_p = mine[:, Column.TOP_K].long(), real[:, Column.TOP_P].double()
        k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)[:, None]
        widest = int(k.max())
        if int(k.min()) == vocab and not bool((top_p < 1).any()):
            found[lines] = x.amax(-1) + real[:, Column.LOG_MIN_P]
            return found
        descending = x.topk(widest, -1).values if widest < vocab else x.sort(-1, descending=True).values
        floor = descending[:, :1] + real[:, Column.LOG_MIN_P, None]
        floor = torch.maximum(floor, descending.gather(1, k - 1))
        weights = (descending - descending[:, :1]).exp().double().masked_fill_(descending < floor, 0)
        reached = weights.cumsum(-1)
        kept = (reached - weights < top_p[:, None] * reached[:, -1:]) & (descending >= floor)
        border = descending.gather(1, kept.sum(-1, keepdim=True).clamp_(min=1) - 1)
        found[lines] = torch.where(top_p[:, None] < 1, torch.maximum(floor, border), floor)[:, 0]
        return found

    def probabilities(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor,
                      threshold: torch.Tensor | None = None) -> torch.Tensor:
        """[S, V] float32: the distributions from which `choose` draws for rows with Feature.RANDOM."""
        x = logits.float() * table[row.long()].view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]
        if threshold is not None:
            x = x.masked_fill(x < threshold[:, None], -torch.inf)
        return x.softmax(-1)

    def penalize(self, logits: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
                 position: torch.Tensor, lines: torch.Tensor) -> None:
        """Repetition, frequency and presence penalties on the `lines` [L] int32 of logits (float32), in place.

        From the tokens in the rows: there is no state to keep in step."""
        where, mine = lines.long(), row[lines.long()].long()
        columns = table[mine]
        real = columns.view(torch.float32)
        length = position[where][:, None]
        known = tokens[mine, :int(length.max())].long()
        at = torch.arange(known.shape[1], device=logits.device)[None]
        there = at < length
        generated = there & (at >= columns[:, Column.PROMPT, None])
        # Positions beyond a row's tokens may hold anything: point them at token 0 with weight 0.
        known = known.masked_fill(~there, 0)
        x = logits[where]
        counts = torch.zeros_like(x).scatter_add_(1, known, generated.float())
        seen = torch.zeros_like(x).scatter_add_(1, known, there.float()) > 0
        repetition = real[:, Column.REPETITION, None]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x -= counts * real[:, Column.FREQUENCY, None]
        x -= (counts > 0) * real[:, Column.PRESENCE, None]
        logits[where] = x

    def edit(self, logits: torch.Tensor, table: torch.Tensor, lists: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
             position: torch.Tensor, lines: torch.Tensor) -> None:
        """Allowed tokens and edits of the `lines` [L] int32 of logits (float32), in place. `lists` [N] int32 is what the
        table's columns ALLOWED and EDITS point into. Masking adds -inf."""
        words, output = lists.cpu().numpy(), tokens.cpu().numpy()
        mine = row[lines.long()]
        where: list[list[npt.NDArray[np.int32]]] = [[], [], []]
        for line, own, known, parameters in zip(lines.tolist(), mine.tolist(), position[lines.long()].tolist(),
                                                table[mine.long()].tolist(), strict=True):
            if parameters[Column.FEATURES] & Feature.ALLOWED:
                first = parameters[Column.ALLOWED]
                _allow(logits[line], words[first:first + parameters[Column.ALLOWED_WORDS]])
            if parameters[Column.FEATURES] & Feature.EDIT:
                first, count = parameters[Column.EDITS], parameters[Column.EDIT_COUNT]
                edits = words[first:first + count * EDIT_WIDTH].reshape(count, EDIT_WIDTH)
                edits = edits[_hold(edits, words[first:], output[own, parameters[Column.PROMPT]:known])]
                for column, part in zip(where, (np.full(len(edits), line), edits[:, Edit.TOKEN], edits[:, Edit.VALUE]),
                                        strict=True):
                    column.append(part.astype(np.int32))
        if where[0]:
            at, token, value = (torch.from_numpy(np.concatenate(column)).to(logits.device) for column in where)
            logits.index_put_((at.long(), token.long()), value.view(torch.float32), accumulate=True)

    def mask(self, logits: torch.Tensor, bits: torch.Tensor, lines: torch.Tensor) -> None:
        """Adds -inf, in place, to what the masks exclude: bits [L, words] int32 belong to the `lines` [L] int32 of logits
        (float32). Token t may be chosen if bit t % 32 of word t // 32 is set; tokens beyond the last word may not."""
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        for line, words in zip(lines.tolist(), bits, strict=True):
            allowed = ((words[:, None] >> shifts) & 1).flatten()[:logits.shape[1]] > 0
            logits[line, :len(allowed)].add_(torch.where(allowed, 0.0, -torch.inf))
            logits[line, len(allowed):] -= torch.inf

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int,
              lines: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids (int32), log probabilities (float32) and ranks (int32), each [L, M + top]: of `tokens` [L, M] int32 first, or [L]
        with M 1, then of the `top` most likely, under the softmax of the logits' `lines` [L] int32 (None: of all).

        A rank is 1 + how many tokens are more likely. A token below 0 (NOT_FINITE) is scored as token 0."""
        x = (logits if lines is None else logits[lines.long()]).float().log_softmax(-1)
        mine = tokens.long().clamp(min=0).view(len(tokens), -1)
        value = x.gather(1, mine)
        rank = 1 + torch.cat([(x > one).sum(-1, keepdim=True) for one in value.split(1, 1)], 1)
        best = x.topk(min(top, x.shape[1]), -1)
        ranks = torch.arange(1, best.indices.shape[1] + 1, device=x.device).expand(len(mine), -1)
        return (torch.cat((mine, best.indices), 1).int(), torch.cat((value, best.values), 1), torch.cat((rank, ranks), 1).int())


def _largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each line of x [S, V] is largest, the first place of equals, and that value as float32. A NaN counts as largest."""
    best = x.argmax(-1)
    return best, x.gather(1, best[:, None])[:, 0].float()


def _race(logits: torch.Tensor, mine: torch.Tensor, position: torch.Tensor, threshold: torch.Tensor | None,
          first: int) -> torch.Tensor:
    """Values whose largest is the token drawn, for the table's lines `mine` [S, WIDTH]. `first` is the first token's id."""
    x = logits * mine.view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]
    if threshold is not None:
        x.masked_fill_(x < threshold[:, None], -torch.inf)
    key = noise.keys(mine[:, Column.SEED_KEY], position)[:, None]
    ids = torch.arange(first, first + x.shape[1], dtype=torch.int32, device=x.device)[None]
    # argmax(x - log E) is argmin(E / p) without the exponential and the sum of a softmax.
    return noise.exponential(key, ids).log_().neg_().add_(x)


def _allow(line: torch.Tensor, words: npt.NDArray[np.int32]) -> None:
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:len(line)]
    line[len(allowed):] -= torch.inf
    line[:len(allowed)] += torch.where(torch.from_numpy(allowed).to(line.device) > 0, 0.0, -torch.inf)


def _hold(edits: npt.NDArray[np.int32], words: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Whether each of the edits [count, EDIT_WIDTH] applies after `output`; `words`: the lists from the first edit on."""
    length = edits[:, Edit.LENGTH]
    holds: npt.NDArray[np.bool_] = (len(output) < edits[:, Edit.UNTIL]) & (length <= len(output))
    for i in np.flatnonzero(holds & (length > 0)).tolist():
        suffix = words[edits[i, Edit.SUFFIX]:][:length[i]]
        holds[i] = np.array_equal(suffix, output[len(output) - length[i]:])
    return holds


register("sample", "reference", rank=0, capturable=False)(SampleOps())
