"""What `infcl` adds to the training: its commands, plans, checks, embeddings, scores, benchmarks and model cards."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def described(default: Any, help: str) -> Any:
    """The field of an option that belongs to a command alone, of which only the help has to be known."""
    return field(default=default, metadata={"help": help})
