"""Trains the family in two rounds: data workers and one process for each job, side by side, over all GPUs there are.

    python -m training.canary.run --work DIR --minutes 14                    # everything
    python -m training.canary.run --work DIR --collect OUT --wait 500        # from another shell: what there is by then, packed
    python -m training.canary.run --rounds second                            # the second round on the committed members
    python -m training.canary.run --smoke                                    # all of it in miniature, on the CPU

The first round makes the members; the second what stands on them (heads, adapters), canary-edge, and further training of
members that have not learnt to retrieve. DIR/ROUND/data holds shards, DIR/ROUND/NAME what a job writes. Run it again with the
same DIR to resume the members; what stands on them begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from training.canary.documents import EDGE, MIXTURES
from training.canary.members import MEMBERS
from training.canary.prepare import prepare
from training.canary.ship import place

TEXT = Path("build/canary/text")
DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", "../shared/data"))
MOST_WORKERS = 40
PACKED = ("log.jsonl", "output.txt", "model")
FIRST = tuple(name for name, member in MEMBERS.items() if EDGE not in member.buckets)


@dataclass(frozen=True)
class Job:
    """A process of the second round: `python -m training.canary.MODULE NAME`, the flag that takes the folder of the member that
    it stands on, and that member. It trains for `share` of the round's minutes, or `steps`.
    """

    module: str
    flag: str = ""
    trunk: str = ""
    share: float = 1.0
    steps: int | None = None
    data: bool = True


SECOND = {
    "canary-eagle": Job("frozen", "--trunk", "canary", share=0.75),
    "canary-mla": Job("frozen", "--trunk", "canary-mla", share=0.5),
    "canary-pirate": Job("adapters", "--trunk", "canary", steps=600, data=False),
    "canary-telegram": Job("adapters", "--trunk", "canary", steps=600, data=False),
    "canary-edge": Job("train", steps=600),
    "canary-draft": Job("train", "--start", "canary-draft"),
    "canary-moe": Job("train", "--start", "canary-moe"),
}
FAMILY = tuple(dict.fromkeys((*FIRST, *SECOND)))


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=_some(MIXTURES), default=list(MIXTURES), help="first, second, or both (the default)")
    parser.add_argument("--members", type=_some(FAMILY), default=list(FAMILY),
                        help="names of members, heads and adapters, separated by commas (default: all)")
    parser.add_argument("--work", type=Path, default=Path("build/canary"))
    parser.add_argument("--text", type=Path, default=TEXT, help="what is read; made from --data if it is not there")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with text/ and tools/ that prepare.py reads")
    parser.add_argument("--minutes", type=float, default=14.0, help="of the first round")
    parser.add_argument("--further", type=float, default=8.0, help="minutes of the second round")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts for each skill and measurement")
    parser.add_argument("--tokens", type=float, default=1.2e9, help="tokens to generate; they are read again when used up")
    parser.add_argument("--workers", type=int, default=0, help="data processes; default: the cores that the members leave")
    parser.add_argument("--collect", type=Path, help="pack results into this folder, train nothing")
    parser.add_argument("--wait", type=float, default=0.0, help="with --collect: wait so many seconds for the end")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


def _some(possible: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument's type: some of these names, separated by commas."""
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(possible):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; possible are {', '.join(possible)}")
        return names

    return parse


def main() -> int:
    """The command; its exit status is 1 if a member failed."""
    args = arguments()
    if args.smoke:
        return smoke(args)
    if args.collect:
        return collect(args)
    return max(play(args, name, []) for name in args.rounds)


def play(args: argparse.Namespace, name: str, extra: list[str]) -> int:
    """One round from its data to its end; 1 if a job failed. `extra` goes to the jobs that train on shards."""
    if not args.text.exists():
        prepare(args.data, args.text)
    work = args.work / name
    data = work / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "stop").unlink(missing_ok=True)
    (work / "done").unlink(missing_ok=True)
    commands = _commands(args, name, data, extra)
    workers = args.workers or max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - len(commands) - 1))
    makers = [_start("data", ["--text", args.text, "--out", data, "--worker", k, "--tokens", int(args.tokens / workers),
                              "--mixture", name],
                     work / f"data-{k:02d}.txt", {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"})
              for k in range(workers)]
    gpus = torch.cuda.device_count() or 1
    trainers = {}
    for number, (job, (module, command)) in enumerate(commands.items()):
        (work / job).mkdir(exist_ok=True)
        variables = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        if torch.cuda.is_available():
            # The first has a GPU to itself, if there are several.
            variables["CUDA_VISIBLE_DEVICES"] = str(0 if number == 0 or gpus == 1 else 1 + (number - 1) % (gpus - 1))
        trainers[job] = _start(module, [job, "--out", work / job, *command], work / job / "output.txt", variables)
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in trainers.values()])
    failed = [job for job, process in trainers.items() if process.wait()]
    (data / "stop").touch()
    for process in makers:
        process.wait()
    (work / "done").write_text(json.dumps({"failed": failed}) + "\n")
    print("trained", ", ".join(job for job in trainers if job not in failed), "- failed:", ", ".join(failed) or "none")  # noqa: T201
    return int(bool(failed))


def _chosen(args: argparse.Namespace, name: str) -> list[str]:
    """The jobs of a round that were asked for."""
    jobs = FIRST if name == "first" else tuple(SECOND)
    return [job for job in jobs if job in args.members]


def _commands(args: argparse.Namespace, name: str, data: Path, extra: list[str]) -> dict[str, tuple[str, list[object]]]:
    """Module and arguments of each job of a round."""
    commands: dict[str, tuple[str, list[object]]] = {}
    for job in _chosen(args, name):
        if name == "first":
            commands[job] = "train", ["--data", data, "--minutes", args.minutes, "--steps", args.steps,
                                      "--prompts", args.prompts, *extra]
            continue
        each = SECOND[job]
        trained = args.work / "first" / each.trunk / "model"
        command: list[object] = [each.flag, trained if trained.exists() else place(each.trunk)] if each.flag else []
        command += ["--steps", min(args.steps, each.steps or args.steps)]
        if each.data:
            command += ["--data", data, "--minutes", args.further * each.share, *extra]
        if each.module == "train":
            command += ["--prompts", args.prompts]
        commands[job] = each.module, command
    return commands


def _start(module: str, command: list[object], output: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", f"training.canary.{module}", *map(str, command)], stdout=file,
                                stderr=subprocess.STDOUT, env={**os.environ, **variables})


def collect(args: argparse.Namespace) -> int:
    """Waits for the end of the training, then packs COLLECT/ROUND/NAME.tar.gz for each job. Prints each log's last line."""
    until = time.monotonic() + args.wait
    while not (args.work / args.rounds[-1] / "done").exists() and time.monotonic() < until:
        time.sleep(1)
    for name in args.rounds:
        (args.collect / name).mkdir(parents=True, exist_ok=True)
        for job in _chosen(args, name):
            folder = args.work / name / job
            log = folder / "log.jsonl"
            tail = (log if log.exists() else folder / "output.txt").read_text()[-1500:] if folder.exists() else "not started"
            print(name, job, "->", tail.strip().splitlines()[-1] if tail.strip() else "nothing yet")  # noqa: T201
            with tarfile.open(args.collect / name / f"{job}.tar.gz", "w:gz") as tar:
                for part in PACKED:
                    if (folder / part).exists():
                        tar.add(folder / part, arcname=f"{job}/{part}")
    done = (args.work / args.rounds[-1] / "done").exists()
    print("all done" if done else "still training")  # noqa: T201
    return 0


def smoke(args: argparse.Namespace) -> int:
    """A few steps of everything named, on the CPU, with all that comes before and after."""
    with tempfile.TemporaryDirectory() as folder:
        args.work, args.steps, args.workers, args.tokens, args.prompts = Path(folder), 5, 1, 8e6, 4
        status = 0
        for name in args.rounds:
            status |= play(args, name, ["--rows", "0.1", "--device", "cpu"])
        args.collect = Path(folder) / "out"
        collect(args)
        for output in sorted(Path(folder).glob("*/*/output.txt")):
            print(output.read_text()[-3000:])  # noqa: T201
        return status


if __name__ == "__main__":
    sys.exit(main())
