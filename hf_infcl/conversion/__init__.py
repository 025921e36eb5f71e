"""Models of OpenCLIP as models of transformers, and back; models of transformers for sentence-transformers."""

from .inputs import repaired
from .models import compare_formats, convert, load_open_clip, save_open_clip
from .names import from_open_clip, to_open_clip
from .towers import open_clip_config

__all__ = [
    "compare_formats",
    "convert",
    "from_open_clip",
    "load_open_clip",
    "open_clip_config",
    "repaired",
    "save_open_clip",
    "to_open_clip",
]
