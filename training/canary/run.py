"""Trains the family: data workers and one process for each member, side by side, over all GPUs there are.

    python -m training.canary.run --work DIR --minutes 14                    # everything
    python -m training.canary.run --work DIR --collect OUT --wait 500        # from another shell: what there is by then, packed
    python -m training.canary.run --smoke                                    # all of it in miniature, on the CPU

DIR/data holds shards, DIR/NAME what `train` writes for a member. Run it again with the same DIR to resume.
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
from pathlib import Path

import torch
from training.canary.members import MEMBERS
from training.canary.prepare import prepare

TEXT = Path("build/canary/text")
DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", "../shared/data"))
MOST_WORKERS = 40
PACKED = ("log.jsonl", "output.txt", "model")


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default=",".join(MEMBERS), help="names, separated by commas")
    parser.add_argument("--work", type=Path, default=Path("build/canary"))
    parser.add_argument("--text", type=Path, default=TEXT, help="what is read; made from --data if it is not there")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with text/ and tools/ that prepare.py reads")
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--tokens", type=float, default=1.2e9, help="tokens to generate; they are read again when used up")
    parser.add_argument("--workers", type=int, default=0, help="data processes; default: the cores that the members leave")
    parser.add_argument("--collect", type=Path, help="pack results into this folder, train nothing")
    parser.add_argument("--wait", type=float, default=0.0, help="with --collect: wait so many seconds for the end")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


def main() -> int:
    """The command; its exit status is 1 if a member failed."""
    args = arguments()
    if args.smoke:
        return smoke(args)
    if args.collect:
        return collect(args)
    return train(args, [])


def train(args: argparse.Namespace, extra: list[str]) -> int:
    """Runs all processes to their end."""
    names = args.members.split(",")
    if not args.text.exists():
        prepare(args.data, args.text)
    data = args.work / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "stop").unlink(missing_ok=True)
    (args.work / "done").unlink(missing_ok=True)
    workers = args.workers or max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - len(names) - 1))
    makers = [_start("data", ["--text", args.text, "--out", data, "--worker", k, "--tokens", int(args.tokens / workers)],
                     args.work / f"data-{k:02d}.txt", {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"})
              for k in range(workers)]
    gpus = torch.cuda.device_count() or 1
    trainers = {}
    for place, name in enumerate(names):
        (args.work / name).mkdir(exist_ok=True)
        command = [name, "--data", data, "--out", args.work / name, "--steps", args.steps, "--minutes", args.minutes, *extra]
        variables = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        if torch.cuda.is_available():
            # The first member has a GPU to itself, if there are several.
            variables["CUDA_VISIBLE_DEVICES"] = str(0 if place == 0 or gpus == 1 else 1 + (place - 1) % (gpus - 1))
        trainers[name] = _start("train", command, args.work / name / "output.txt", variables)
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in trainers.values()])
    failed = [name for name, process in trainers.items() if process.wait()]
    (data / "stop").touch()
    for process in makers:
        process.wait()
    (args.work / "done").write_text(json.dumps({"failed": failed}) + "\n")
    print("trained", ", ".join(name for name in names if name not in failed), "- failed:", ", ".join(failed) or "none")  # noqa: T201
    return int(bool(failed))


def _start(module: str, command: list[object], output: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", f"training.canary.{module}", *map(str, command)], stdout=file,
                                stderr=subprocess.STDOUT, env={**os.environ, **variables})


def collect(args: argparse.Namespace) -> int:
    """Waits for the end of the training, then packs one archive for each member. Prints the last line of each log."""
    until = time.monotonic() + args.wait
    while not (args.work / "done").exists() and time.monotonic() < until:
        time.sleep(1)
    args.collect.mkdir(parents=True, exist_ok=True)
    for name in args.members.split(","):
        folder = args.work / name
        log = folder / "log.jsonl"
        tail = (log if log.exists() else folder / "output.txt").read_text()[-1500:] if folder.exists() else "not started"
        print(name, "->", tail.strip().splitlines()[-1] if tail.strip() else "nothing yet")  # noqa: T201
        with tarfile.open(args.collect / f"{name}.tar.gz", "w:gz") as tar:
            for part in PACKED:
                if (folder / part).exists():
                    tar.add(folder / part, arcname=f"{name}/{part}")
    done = (args.work / "done").exists()
    print("all done" if done else "still training")  # noqa: T201
    return 0


def smoke(args: argparse.Namespace) -> int:
    """Twenty steps of each member named, on the CPU, with everything that comes before and after."""
    with tempfile.TemporaryDirectory() as folder:
        args.work, args.steps, args.workers, args.tokens = Path(folder), 20, 1, 8e6
        status = train(args, ["--prompts", "4", "--rows", "0.1", "--device", "cpu"])
        args.collect = Path(folder) / "out"
        collect(args)
        for name in args.members.split(","):
            print((args.work / name / "output.txt").read_text()[-3000:])  # noqa: T201
        return status


if __name__ == "__main__":
    sys.exit(main())
