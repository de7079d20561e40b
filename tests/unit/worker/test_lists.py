"""The words that sampling parameters say their lists take are those that the worker stores."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import RequestError
from penstock.core.plan import Enter
from penstock.core.sampling import EDIT_WORDS, MAX_LIST_WORDS, SamplingParams
from penstock.ops.sample_table import EDIT_WIDTH, WIDTH
from penstock.worker.rows import _block


@pytest.mark.parametrize("params", [
    SamplingParams(logit_bias={3: 1.0, 70: -2.0}), SamplingParams(allowed_token_ids=[5, 99]),
    SamplingParams(bad_words_token_ids=[[1], [2, 3, 4], [5, 6]]),
    SamplingParams(min_tokens=2, bad_words_token_ids=[[9, 9]], allowed_token_ids=[31], logit_bias={1: 0.5})])
def test_counted_as_stored(params: SamplingParams) -> None:
    stored = _block(Enter(0, [1], 1, params, 7, [2, 8, 11]), np.zeros(WIDTH, np.int32))
    assert EDIT_WORDS == EDIT_WIDTH and len(stored) == params.list_words(3)


def test_too_long_lists_are_refused() -> None:
    SamplingParams(bad_words_token_ids=[[1] * 8] * 2000).check_vocabulary(10)
    for params, name in ((SamplingParams(bad_words_token_ids=[[1] * 1000] * 40), "bad_words"),
                         (SamplingParams(logit_bias=dict.fromkeys(range(7000), 1.0)), "logit_bias"),
                         (SamplingParams(allowed_token_ids=[40 * MAX_LIST_WORDS]), "allowed_token_ids")):
        with pytest.raises(RequestError, match="device memory") as refused:
            params.check_vocabulary(50 * MAX_LIST_WORDS)
        assert refused.value.param == name
