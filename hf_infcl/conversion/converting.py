"""Reads a model in one library's format, and writes it in the other's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from ..hub import asks_hub_once
from ..readable import give_usual_modes
from .comparison import ENOUGH, differences
from .ends import check_ends
from .folders import CONFIG, read, write
from .incoming import from_open_clip
from .outgoing import to_open_clip
from .preprocessing import image_processor
from .pretrained import base_of_adapters, check_finite, load_pretrained
from .sentence_transformers import SENTENCE_FILES, write_sentence_files
from .tokenizing import UNREPAIRED, prepared

logger = logging.get_logger(__name__)


@asks_hub_once
def load_open_clip(
    source: str | Path,
    *,
    open_clip_model: str | None = None,
    tokenizer: str | None = None,
    tell: Callable[[str], object] = logger.info,
) -> tuple[Any, Any]:
    """Loads a model of OpenCLIP as a model and a processor of transformers.

    Where OpenCLIP is installed, the embeddings of fixed inputs are compared with its own.

    Args:
        source: a folder with open_clip_config.json and weights, a Hub repository that holds these, or a file.
        open_clip_model: for a file, OpenCLIP's name of the model, such as "ViT-B-32", or a JSON file with its config.
        tokenizer: the folder or the Hub id of the tokenizer; by default the one beside the weights or that the config
            names, or CLIP's.
        tell: receives sentences about what differs and about the comparison.

    Raises:
        ValueError: transformers has no such model, the source does not hold a complete one, or the embeddings differ.
    """
    model, processor, sentences = _incoming(source, open_clip_model, tokenizer)
    for sentence in sentences:
        tell(sentence)
    return model, processor


@asks_hub_once
def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "transformers",
    open_clip_model: str | None = None,
    repository: str = ".",
    max_text_tokens: int | None = None,
    tokenizer: str | None = None,
) -> list[str]:
    """Writes a model of OpenCLIP in transformers' format, or the other way round, with its processor.

    Adapters of peft are merged into their model, and written in either format.

    Where OpenCLIP is installed, the embeddings of fixed inputs are compared with its own before anything is written.

    Args:
        source: what `load_open_clip` takes, or adapters; with to="open_clip", a folder or a Hub repository of
            transformers, or adapters.
        target: the folder to write. It may be the source, which then holds both formats.
        to: "transformers" or "open_clip".
        open_clip_model: as in `load_open_clip`.
        repository: as in `to_open_clip`.
        max_text_tokens: with to="open_clip", the tokens at which OpenCLIP cuts texts; by default the tokenizer's limit.
        tokenizer: as in `load_open_clip`.

    Returns:
        Sentences about what was written and compared.

    Raises:
        ValueError: there is no counterpart, the source is incomplete, the target holds such a model or another one, or
            the embeddings differ.
    """
    if to not in ("transformers", "open_clip"):
        raise ValueError(f"to must be 'transformers' or 'open_clip', got {to!r}.")
    forbidden = [CONFIG, CONFIG_NAME] if to == "open_clip" else [CONFIG_NAME, CONFIG]
    if Path(source).resolve() == Path(target).resolve():
        forbidden.pop()  # another model's would lose its tokenizer, whose files both formats share
    for file in (*forbidden, ADAPTER_CONFIG_NAME):  # adapters beside a whole model would be added to it
        if (Path(target) / file).exists():
            raise ValueError(
                f"{str(target)!r} holds a model already ({file}). Name another folder, or delete this one."
            )
    if to == "transformers":
        if max_text_tokens is not None:
            raise ValueError("--max_text_tokens is for --to open_clip. OpenCLIP's own models state their length.")
        return list(_to_transformers(source, target, open_clip_model, tokenizer))
    for option, value in (("open_clip_model", open_clip_model), ("tokenizer", tokenizer)):
        if value is not None:
            raise ValueError(f"--{option} is for a source of OpenCLIP; with --to open_clip, the source is the other.")
    return list(_to_open_clip(source, target, repository, max_text_tokens))


def _incoming(source: str | Path, open_clip_model: str | None, named: str | None) -> tuple[Any, Any, Iterator[str]]:
    checkpoint = read(source, open_clip_model)
    model, notes = from_open_clip(checkpoint.tensors, checkpoint.config)
    check_finite(str(source), model.state_dict())
    text = checkpoint.config["model_cfg"]["text_cfg"]
    images = image_processor(checkpoint.config.get("preprocess_cfg") or {}, model.config.vision_config.image_size)
    tokenizer = prepared(checkpoint.tokenizer(named), text)
    kind = transformers.SiglipProcessor if model.config.model_type == "siglip" else transformers.CLIPProcessor
    for name in ("bos", "eos", "pad"):  # of which only CLIP's eos has an effect, which is set already
        token = getattr(tokenizer, f"{name}_token_id")
        if name != "eos" or model.config.model_type == "siglip":
            setattr(model.config.text_config, f"{name}_token_id", token)
    if not checkpoint.config.get("preprocess_cfg"):
        notes.append(
            "The config says nothing about the preparation of images, so it is OpenCLIP's default: bicubic, the "
            "shortest edge, a centre crop, OpenAI's mean and standard deviation."
        )

    def sentences() -> Iterator[str]:
        yield from notes
        yield UNREPAIRED
        yield _compared(model, checkpoint.tensors, checkpoint.config)

    return model, kind(image_processor=images, tokenizer=tokenizer), sentences()


def _to_transformers(
    source: str | Path, target: str | Path, open_clip_model: str | None, tokenizer: str | None
) -> Iterator[str]:
    if (base := base_of_adapters(str(source))) is not None:
        yield from _merged(source, target, base)
        return
    model, processor, sentences = _incoming(source, open_clip_model, tokenizer)
    check_ends(model, processor.tokenizer)
    yield from sentences
    model.save_pretrained(target)
    give_usual_modes(target)
    processor.save_pretrained(target)
    padding = "max_length" if model.config.model_type == "siglip" else "longest"
    length = processor.tokenizer.model_max_length
    write_sentence_files(target, model.config.model_type, processor, max_length=length, padding=padding)
    yield f"{type(model).__name__} and its processor were written to {target}."


def _merged(adapters: str | Path, target: str | Path, base: str) -> Iterator[str]:
    model, processor = load_pretrained(str(adapters))
    model.save_pretrained(target)
    give_usual_modes(target)
    processor.save_pretrained(target)
    for name in SENTENCE_FILES:  # which a training writes beside adapters as well
        if Path(adapters, name).is_file():
            shutil.copy(Path(adapters, name), target)
    yield f"The adapters were merged into {base}. {type(model).__name__} and its processor were written to {target}."


def _to_open_clip(
    source: str | Path, target: str | Path, repository: str, max_text_tokens: int | None
) -> Iterator[str]:
    model, processor = load_pretrained(str(source))
    if max_text_tokens is not None:
        processor.tokenizer.model_max_length = max_text_tokens
    tensors, config = to_open_clip(model, processor, repository=repository)
    check_ends(model, processor.tokenizer)
    positions = model.config.text_config.max_position_embeddings
    if max_text_tokens is not None and not 0 < max_text_tokens <= positions:
        raise ValueError(
            f"--max_text_tokens must be from 1 to the {positions} positions of the model, got {max_text_tokens}."
        )
    length = config["model_cfg"]["text_cfg"]["context_length"]
    if length < positions:
        yield (
            f"Texts are cut at {length} tokens, as here: the other {positions - length} of the model's {positions} "
            f"positions are left out. For longer texts, pass --max_text_tokens {positions}."
        )
    yield _compared(model, tensors, config)
    write(target, tensors, config, processor.tokenizer)
    yield f"The model of OpenCLIP was written to {target}; load it as 'local-dir:{target}'."


def save_open_clip(
    folder: str | Path,
    model: PreTrainedModel,
    processor: Any,
    *,
    repository: str = ".",
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a model of transformers in OpenCLIP's format; see `to_open_clip` for the arguments."""
    tensors, config = to_open_clip(model, processor, repository=repository, state_dict=state_dict)
    write(folder, tensors, config, processor.tokenizer)


def compare_formats(folder: str | Path) -> str:
    """Compares the two models of a folder that holds both formats, and says how much their embeddings differ.

    Raises:
        ValueError: the embeddings differ.
    """
    model, _ = load_pretrained(str(folder))
    saved = read(folder)
    return _compared(model, saved.tensors, saved.config)


def _compared(model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    try:
        import open_clip  # noqa: F401
    except (ImportError, RuntimeError) as error:  # the second if its torchvision is of another torch
        return f"The embeddings were not compared with OpenCLIP's, which cannot be imported: {error}."
    difference = differences(model, tensors, config)
    if not difference.cosine >= ENOUGH:
        raise ValueError(
            f"The embeddings of fixed inputs differ from OpenCLIP's: the least cosine is {difference.cosine:.6f}, and "
            f"{ENOUGH} is expected. Please report the config of this model."
        )
    return (
        "The embeddings of fixed inputs were compared with OpenCLIP's own: the least cosine is "
        f"{difference.cosine:.7f}, the largest difference {difference.largest:.0e}."
    )
