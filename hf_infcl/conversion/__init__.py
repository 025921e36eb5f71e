"""Models of OpenCLIP as models of transformers, and back; models of transformers for sentence-transformers."""

from .converting import compare_formats, convert, load_open_clip, save_open_clip
from .incoming import from_open_clip
from .outgoing import open_clip_config, to_open_clip
from .tokenizing import repaired

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
