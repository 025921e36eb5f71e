#!/usr/bin/env python3
"""Measures this package and others on GPUs. Each benchmark appends rows to a CSV and draws its plot.

    python scripts/benchmark.py loss --batch-sizes 4096 16384 65536 --dims 512 1024 --objectives softmax sigmoid
    torchrun --nproc-per-node 4 scripts/benchmark.py ring

`benchmark.py <name> --help` explains what a benchmark measures and how.
"""

import argparse
import importlib
import sys

BENCHMARKS = {
    "loss": "time, memory and error of the loss on one GPU",
    "ring": "time of the loss across GPUs, beside that without communication",
    "memory": "memory of the loss across GPUs",
    "step": "time and memory of a training step of a CLIP",
    "optimizer": "time and memory of a step of Muon and AdamW",
    "evaluation": "a zero-shot evaluation beside a pure forward",
    "data": "images per second and core, decoded and read from shards",
    "embedders": "a step of ExactContrastiveLoss beside sentence-transformers' cached loss",
    "tables": "the tables of the Inf-CL paper, from the rows of the others",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:10} {what}" for name, what in BENCHMARKS.items()),
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    name = parser.parse_args(sys.argv[1:2]).benchmark
    common = importlib.import_module("benchmarks.common")
    common.run_benchmark(importlib.import_module(f"benchmarks.{name}"), sys.argv[2:])


if __name__ == "__main__":
    main()
