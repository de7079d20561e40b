"""`--layout auto` of the commands: fills in ranks, stages and replicas."""

import argparse
from dataclasses import asdict, replace

from penstock.config.schema import EngineOptions
from penstock.engine import layout


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("auto",), help="auto: ranks, stages and replicas by the model's size, "
                                                            "GPUs and links; by default those that other flags name")


def laid_out(args: argparse.Namespace, options: EngineOptions) -> tuple[EngineOptions, str]:
    """The options with the layout filled in, and why; "" if it is not asked for."""
    if args.layout is None:
        return options, ""
    found, why = layout.auto(asdict(options))
    return replace(options, **found), why
