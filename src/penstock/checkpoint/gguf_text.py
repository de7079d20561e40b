"""The tokenizer in a GGUF file's metadata, as the files that a Hugging Face folder has for it: tokenizer.json for BPE,
tokenizer.model for SPM, tokenizer_config.json with special tokens and chat template."""

import json
import struct
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
"""Token types, the same in GGUF and sentencepiece."""

CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = (rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",)
_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
              r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?")
_OTHER_THAN_HAN = _CASED.replace(_UPPER, f"[{_UPPER}&&[^\\p{{Han}}]]").replace(_LOWER, f"[{_LOWER}&&[^\\p{{Han}}]]")
_FOUR_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FOUR = (rf"{_CASED}|\p{{N}}{{1,3}}|{_FOUR_REST}",)
_ASIAN = "一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LATIN_TO_COPTIC = ("A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ"
                    "-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰"
                    "-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")

_SPACED = ("gemma4", "sarvam-moe", "granite-embed-multi-311m")
"""Tokenizers that merge characters, not bytes, and have ▁ for spaces."""
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
                     "dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(_SPACED, (r"[^\n]+|\n+",)),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "ufakzeka": (rf"{_WORDS}|\p{{N}}|{_REST}",),
    "k2-horizon": (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\x{{200C}}\x{{200D}}]+|\p{{N}}{{1,3}}|{_REST}",),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
                    _QWEN2),
    "qwen35": (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+",),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "mellum", "modern-bert",
                     "gigachat", "a.x-4.0", "roberta-bpe", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en",
                     "jina-v2-code"), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie", "granite-embed-multi-97m"), _FOUR),
    "tekken": (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": (*_DEEPSEEK3[:2], _DEEPSEEK3[2].replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": ("[\r\n]", rf"\s?[{_LATIN_TO_COPTIC}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+",
                     r"\p{N}+"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "kimi-k2": (rf"\p{{Han}}+|{_OTHER_THAN_HAN}|\p{{N}}{{1,3}}|{_REST}",),
    "seed-coder": (rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{_ASIAN}]+", _DEEPSEEK3[2]),
    "exaone-moe": (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",),
    "youtu": ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", rf"{_CASED}|\p{{N}}|{_FOUR_REST}"),
    "jais-2": (rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
               + "|".join(rf"\s{{{1 << i}}}(?!\S)" for i in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s",),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_SENTENCES,)), "viking": (_SENTENCES, r"\p{N}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (
        rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", *_FOUR)),
    "laguna": (r"[^\n]+|\n+", *_QWEN2),
    "minicpm5": (r"\p{N}{1,3}", rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}"),
    "chameleon": ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")}
"""Expressions that cut a text before merges, one after another, by `tokenizer.ggml.pre`: models' own, by llama.cpp's names."""

_WHOLE_NAMES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
                          "glm4", "glm5", "jina-v5-nano", "youtu", "minicpm5", "granite-embed-multi-97m"})
"""Tokenizers that take a whole word that is a token before they merge."""
_BOS_NAMES = _WHOLE_NAMES - {"glm4", "glm5", "youtu", "minicpm5", "granite-embed-multi-97m"} | {"chameleon"}
"""Tokenizers that prepend bos unless the file says otherwise."""

_LAST = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
                   "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<|flush|>", "<|calls|>", "<EOT>", "_<EOT>", "[EOT]",
                   "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["})
"""Tokens that end an answer wherever they are added tokens: files name one of them only."""


def files_of(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Contents by name of file. ModelError for a tokenizer that is not known."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "gemma4", "llama") or not isinstance(tokens, list):
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; possible are 'gpt2' and 'gemma4' (BPE) and 'llama' (SPM). "
                         "Name the model's own tokenizer with --tokenizer")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    lists = {"token_type": types, "scores": metadata.get("tokenizer.ggml.scores", types),
             "merges": metadata.get("tokenizer.ggml.merges", [] if kind == "llama" else None)}
    for name, given in lists.items():
        if not isinstance(given, list) or (name != "merges" and len(given) != len(tokens)):
            raise ModelError(f"tokenizer.ggml.{name} is {str(given)[:40]}; possible is a list, of types and scores for each of "
                             f"the {len(tokens)} tokens. Name the model's own tokenizer with --tokenizer")
    if kind == "gemma4":
        metadata = {**metadata, "tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": True}  # some files deny it
    settings = _settings(metadata, tokens, kind)
    found = {"tokenizer_config.json": _json(settings), "generation_config.json": _json(_generation(metadata, tokens, types))}
    if kind == "llama":
        found["tokenizer.model"] = _spm(metadata, tokens, types)
    else:
        found["tokenizer.json"] = _json(_bpe(metadata, tokens, types, settings))
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _token(metadata: Mapping[str, Any], tokens: list[str], role: str) -> str | None:
    token = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return tokens[token] if isinstance(token, int) and 0 <= token < len(tokens) else None


def _settings(metadata: Mapping[str, Any], tokens: list[str], kind: str) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found: dict[str, Any] = {name: token for role, name in roles.items() if (token := _token(metadata, tokens, role))}
    found["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _BOS_NAMES))
    found["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    if template := metadata.get("tokenizer.chat_template"):
        more = [{"name": name, "template": metadata[f"tokenizer.chat_template.{name}"]}
                for name in metadata.get("tokenizer.chat_templates") or () if f"tokenizer.chat_template.{name}" in metadata]
        found["chat_template"] = [{"name": "default", "template": template}, *more] if more else template
    return found


def _generation(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Tokens that end an answer, and the sampling that the file asks for."""
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    ends += [token for token, (name, kind) in enumerate(zip(tokens, types, strict=False))
             if kind in (_CONTROL, _USER) and name in _LAST]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(token for token in ends if token is not None))}
    return found | {key: value for key in ("temperature", "top_k", "top_p", "min_p") if (
        value := metadata.get(f"general.sampling.{'temp' if key == 'temperature' else key}")) is not None}


def _bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ModelError(f"tokenizer.ggml.pre is {pre!r}; possible are {', '.join(sorted(SPLITS))}. Name the model's own "
                         "tokenizer with --tokenizer")
    vocabulary = {name: token for token, name in enumerate(tokens)}
    added = [{"id": token, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": kind in (_CONTROL, _UNKNOWN)}
             for token, (name, kind) in enumerate(zip(tokens, types, strict=False)) if kind in (_CONTROL, _USER, _UNKNOWN)]
    splits = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in SPLITS[pre]]
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spaced, normalizer, decoder = pre in _SPACED, None, level
    if spaced:
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                    {"type": "ByteFallback"}, {"type": "Fuse"}]}
    front = [settings["bos_token"]] if settings["add_bos_token"] and "bos_token" in settings else []
    back = [settings["eos_token"]] if settings["add_eos_token"] and "eos_token" in settings else []
    ends = {"type": "TemplateProcessing", "single": _template(front, back, "A", 0),
            "pair": _template(front, back, "A", 0) + _template([], back, "B", 1),
            "special_tokens": {name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in (*front, *back)}}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits if spaced else [*splits, level]},
            "post_processor": ends, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": settings.get("unk_token") if spaced else None,
                      "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": spaced,
                      "byte_fallback": spaced, "ignore_merges": pre in _WHOLE_NAMES, "vocab": vocabulary,
                      "merges": list(metadata.get("tokenizer.ggml.merges") or [])}}


def _template(front: list[str], back: list[str], text: str, number: int) -> list[dict[str, Any]]:
    special = [[{"SpecialToken": {"id": name, "type_id": number}} for name in names] for names in (front, back)]
    return [*special[0], {"Sequence": {"id": text, "type_id": number}}, *special[1]]


def _spm(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> bytes:
    """A sentencepiece ModelProto (github.com/google/sentencepiece, sentencepiece_model.proto)."""
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = types.index(_UNKNOWN) if unknown is None and _UNKNOWN in types else unknown or 0
    found = bytearray()
    for token, (name, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        # sentencepiece wants exactly one unknown token; files have more.
        kind = _UNKNOWN if token == unknown else _CONTROL if kind == _UNKNOWN else kind
        text = name.encode("utf-8", "surrogateescape")
        found += _field(1, _field(1, text) + struct.pack("<Bf", 2 << 3 | 5, score) + _number(3, kind))
    trainer = _number(3, 2) + _number(4, len(tokens)) + _number(35, int(_BYTE in types)) + _number(40, unknown)
    for field, role, usual in ((41, "bos", 1), (42, "eos", 2), (43, "padding", -1)):
        trainer += _number(field, metadata.get(f"tokenizer.ggml.{role}_token_id", usual) & (1 << 64) - 1)
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer = _field(1, b"identity") + _number(3, int(space)) + _number(4, 0) + _number(5, 1)
    return bytes(found + _field(2, trainer) + _field(3, normalizer))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
