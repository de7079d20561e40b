"""Write MODEL quantized: into a folder OUT as compressed-tensors, which vLLM, SGLang and transformers read too, or into a file
OUT.gguf, which llama.cpp reads.
Rounding is to nearest, or for integers by GPTQ with a text to calibrate on (--calibrate FILE). --text prints the perplexity of
a text before and after; --skills the graded answers of a chat model."""

import argparse
import gc
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock.checkpoint import dtype_of, read_config, resolve_folder
from penstock.config.flags import at_least, integer
from penstock.core.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder or a hub id; canary is the small model that comes with Penstock")
    parser.add_argument("out", type=Path, help="a new folder, or a new file that ends in .gguf")
    parser.add_argument("--scheme", required=True, help="fp8, fp8_block, fp8_weights, int8, int8_weights, int4, int4_zeros, "
                        "mxfp4, mxfp8 or nvfp4; of a .gguf file: q8_0, q6_k, q5_1, q5_0, q4_1, q4_0, q4_k or q4_k_m")
    parser.add_argument("--rules", action="append", default=[], metavar="PATTERN=SCHEME",
                        help="exceptions: modules (with * or re:...), first or last layer, and a scheme or plain")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="calibrate on this text")
    parser.add_argument("--method", choices=("gptq", "awq", "smoothquant"), default="gptq",
                        help="with --calibrate: round integers so that later columns make up for each error (gptq), or fold "
                        "scales of inputs into the norms, for weights (awq) or for activations in 8 bits (smoothquant)")
    parser.add_argument("--samples", type=integer, default=128, metavar="N",
                        help="windows of the text that it is calibrated on (default: 128)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="print the perplexity of this text, before and after")
    parser.add_argument("--window", type=integer, default=512, metavar="N",
                        help="tokens of the text that are read at a time (default: 512)")
    parser.add_argument("--skills", type=integer, default=0, metavar="N",
                        help="ask so many graded prompts of each of canary's skills, before and after")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for --text and --skills")


def run(args: argparse.Namespace) -> int:
    """Writes the folder; prints sizes and what was lost. ConfigError or ModelError says what cannot be done."""
    from penstock.engine.loading import shown
    from penstock.models import gguf_out, quantized

    rules = {}
    for rule in args.rules:
        pattern, sign, scheme = rule.rpartition("=")
        if not sign or not pattern:
            raise ConfigError(f"--rules {rule!r} is not of the form PATTERN=SCHEME")
        rules[pattern] = scheme
    if args.method != "gptq" and args.calibrate is None:
        raise ConfigError(f"--method {args.method} needs a text to calibrate on; add --calibrate FILE")
    for name, least in (("skills", 0), ("samples", 1), ("window", 3)):
        at_least(args, least, name)
    for name, path in (("text", args.text), ("calibrate", args.calibrate)):
        try:
            _ = path and path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--{name}: there is no file {path} that is text in UTF-8: {error}") from None
    if args.calibrate is not None and args.out.suffix == ".gguf":
        raise ConfigError("--calibrate rounds what a folder stores; GGUF's blocks are rounded to nearest. Leave it out")
    folder = resolve_folder(args.model)
    dtype = dtype_of(folder, read_config(folder))
    moments = _moments(folder, dtype, args) if args.calibrate is not None else None
    if args.out.is_file() or (args.out.is_dir() and any(args.out.iterdir())):
        raise ConfigError(f"{args.out} is not empty; name a new folder or file")
    write, more = (gguf_out.write, ()) if args.out.suffix == ".gguf" else (quantized.write, (moments, args.method))
    found: list[dict[str, float]] = []
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=None, unit="B", unit_scale=True, desc="quantize", leave=False) as bar:
            nbytes = write(folder, args.out, args.scheme, rules, dtype, shown(bar),
                           lambda: found.append(_measured(folder, args)), *more)
    except BaseException as error:
        if found and args.out.exists() and not isinstance(error, FileExistsError):  # begun here
            shutil.rmtree(args.out) if args.out.is_dir() else args.out.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{args.out} cannot be written: {error}; name another place, or make room") from None
        raise
    before = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"{args.out}: {nbytes:,} bytes of tensors, {nbytes / before:.0%} of {before:,}")
    after = _measured(args.out, args)
    for name, value in found[0].items():
        print(f"{name}: {value:.4g} before, {after[name]:.4g} after")
    return 0


def _moments(folder: Path, dtype: str, args: argparse.Namespace) -> Any:
    """The model with the calibration text. ConfigError: the scheme or the text does not serve."""
    from penstock.models import configured
    from penstock.quant.dialects.at_load import SCHEMES
    from penstock.quant.integer import serves
    from penstock.text import Tokenizer
    from penstock.worker.calibration import Moments

    scheme = SCHEMES[args.scheme](128) if args.scheme in SCHEMES else None
    if args.method == "gptq" and scheme is not None and not serves(scheme):
        raise ConfigError(f"--calibrate rounds integers, and {args.scheme} has none; leave it out, or take int4, int4_zeros, "
                          "int8 or int8_weights")
    ids = Tokenizer.load(folder).encode(args.calibrate.read_text("utf-8"))
    windows = [ids[at:at + args.window] for at in range(0, len(ids), args.window)][:args.samples]
    if sum(map(len, windows)) < args.window:
        raise ConfigError(f"--calibrate {args.calibrate} has {len(ids)} tokens; it needs at least {args.window}, better a "
                          "hundred times as many")
    return Moments(folder, configured(folder), dtype, args.device, windows)


def _measured(model: Path, args: argparse.Namespace) -> dict[str, float]:
    """A model's perplexity on the text and its share of right answers, by name, as far as asked for."""
    # Late: torch.
    from penstock.canary.suite import SKILLS, graded, prompts
    from penstock.cli.eval import answers, perplexity
    from penstock.engine.llm import LLM

    found: dict[str, float] = {}
    if args.text is None and not args.skills:
        return found
    longest = {} if args.skills else {"max_model_len": max(64, args.window + 1)}
    with LLM(str(model), device=args.device, **longest) as llm:
        if args.text is not None:
            found["perplexity"], _ = perplexity(llm, args.text.read_text("utf-8"), args.window)
        if args.skills:
            scores = [graded(items, answers(llm, items)) for items in (prompts(skill, args.skills) for skill in SKILLS)]
            found["skills"] = sum(score.right for score in scores) / max(1, sum(score.asked for score in scores))
            found |= {score.skill: score.share for score in scores}
    gc.collect()
    return found
