#!/usr/bin/env python3
"""The same as `infcl evaluate`, for launchers that take a file: accelerate launch scripts/eval.py --help"""

from hf_infcl.cli import main

if __name__ == "__main__":
    main("evaluate")
