"""gpt-oss: harmony's channels."""

from penstock.dialects.description import Dialect, Written

DIALECTS = (
    Dialect("openai", written=Written("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"),
            harmony=True, parallel=False, aliases=("harmony", "gpt_oss", "gpt-oss"), reasoning_names=("openai_gptoss",
                                                                                                      "GptOss"),
            signs=(("<|channel|>", "<|message|>"),), rank=70),
)
