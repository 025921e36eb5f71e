"""Loads a model of either format and converts one into the other, with the files for sentence-transformers."""

import html
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from ..files.hub import asks_hub_once
from ..files.text import describe_cause
from ..files.whole import give_usual_modes
from . import pretrained
from .model_types import Pooling, SameEmbeddings, pads_texts
from .open_clip_inputs import clip_tokenizer, image_processor, prepared
from .open_clip_names import clean, from_open_clip, to_open_clip, transformers_config

# The files of sentence-transformers: its modules, the options of the first one, and those of all.
SENTENCE_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def write_sentence_files(
    folder: str | Path,
    model_type: str,
    processor: transformers.ProcessorMixin,
    *,
    max_length: int,
    padding: str,
    matryoshka_dims: Sequence[int] | None = None,
) -> None:
    """Writes three small files beside a model and its processor, which transformers does not read.

    Without them, sentence-transformers does not normalise the embeddings, and pads the captions of SigLIP, whose
    embeddings depend on the padding, to the longest of a batch.

    Args:
        model_type: of the model's config.
        max_length: tokens per caption.
        padding: "max_length" if all captions are padded to it, "longest" if to the longest of a batch.
        matryoshka_dims: where the embeddings may be cut; the values for ``SentenceTransformer(..., truncate_dim=...)``.
    """
    tokenizer, images = processor.tokenizer, processor.image_processor
    # Releases before 5.4 have only this module for images, and no place for options.
    legacy = model_type == "clip" and tokenizer.model_max_length <= max_length
    package, output = "sentence_transformers.models", {"method_output_name": "pooler_output"}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.{'CLIPModel' if legacy else 'Transformer'}"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{package}.Normalize"},
    ]
    text = {
        "padding": padding if padding == "max_length" else True,
        "max_length": max_length,
        "truncation": True,
        "return_attention_mask": "attention_mask" in tokenizer.model_input_names,
    }
    # The processor of SigLIP 2 for variable patches passes its own values to its image processor.
    image = {name: getattr(images, name) for name in ("patch_size", "max_num_patches") if hasattr(images, name)}
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": {kind: {"method": f"get_{kind}_features", **output} for kind in ("text", "image")},
        "module_output_name": "sentence_embedding",
        "processing_kwargs": {"text": text, "image": image} if image else {"text": text},
    }
    whole: dict[str, object] = {"similarity_fn_name": "cosine", "prompts": {}}
    if matryoshka_dims:
        whole["matryoshka_dims"] = list(matryoshka_dims)
    for name, content in zip(SENTENCE_FILES, (modules, transformer, whole), strict=True):
        Path(folder, name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


logger = logging.get_logger(__name__)

UNREPAIRED = (
    "Captions are read as they are, while OpenCLIP first repairs broken encodings and unescapes HTML: "
    "hf_infcl.models.open_clip.repaired does the same."
)
ENOUGH = 0.9999  # the least cosine of two embeddings of fixed inputs
_ROWS = 4


# ---- Loading ----


class Loaded(NamedTuple):
    """A model and its processor, and sentences about the conversion of a model in OpenCLIP's format."""

    model: Any
    processor: Any
    conversion: Sequence[str] = ()


@asks_hub_once
def load(
    checkpoint: str,
    open_clip_model: str | None = None,
    *,
    merges: bool = True,
    new_weights: Sequence[str] = (),
    seed: int = 0,
    tokenizer: str | None = None,
) -> Loaded:
    """Loads the model and the processor. The model is in fp32 for the optimizer, whatever dtype its checkpoint has.

    Args:
        checkpoint: a folder or a Hub id, also of OpenCLIP or of adapters, or a .pt of OpenCLIP's training.
        open_clip_model: see `load_open_clip`.
        merges, new_weights, seed, tokenizer: see `pretrained.load_model`.

    Raises:
        ValueError: they cannot be loaded, or weights are missing.
    """
    if not pretrained.is_of_open_clip(checkpoint, open_clip_model):
        options: Any = {"merges": merges, "new_weights": new_weights, "seed": seed, "tokenizer": tokenizer}
        return Loaded(*pretrained.load_model(checkpoint, dtype=torch.float32, **options))
    if new_weights:
        raise ValueError(f"--new_weights is for models in transformers' format, and {checkpoint!r} is not. Omit it.")
    loaded = _loaded(checkpoint, open_clip_model, tokenizer)
    return loaded._replace(model=loaded.model.float())


@asks_hub_once
def load_readers(
    checkpoint: str, open_clip_model: str | None = None, tokenizer: str | None = None
) -> tuple[transformers.PretrainedConfig, Any]:
    """The config of a dual encoder and its processor; takes and raises what `load` does, and needs no weights."""
    if not pretrained.is_of_open_clip(checkpoint, open_clip_model):
        return pretrained.load_readers(checkpoint, tokenizer)
    stated, folder = pretrained.read_config(checkpoint, open_clip_model)
    config = transformers_config(stated)
    return config, _processor(config, stated, folder, tokenizer)


@asks_hub_once
def load_open_clip(
    source: str | Path, *, open_clip_model: str | None = None, tokenizer: str | None = None
) -> tuple[Any, Any]:
    """Loads a model of OpenCLIP as a model and a processor of transformers.

    Where OpenCLIP is installed, the embeddings of fixed inputs are compared with its own. The logger says what differs.

    Args:
        source: a folder with open_clip_config.json and weights, a Hub repository that holds these, or a file.
        open_clip_model: for a file, OpenCLIP's name of the model, such as "ViT-B-32", or a JSON file with its config.
        tokenizer: the folder or the Hub id of the tokenizer; by default the one beside the weights or that the config
            names, or CLIP's.

    Raises:
        ValueError: transformers has no such model, the source does not hold a complete one, or the embeddings differ.
    """
    model, processor, conversion = _loaded(source, open_clip_model, tokenizer)
    for sentence in conversion:
        logger.info(sentence)
    return model, processor


def _loaded(source: str | Path, open_clip_model: str | None, tokenizer: str | None) -> Loaded:
    tensors, config, folder = pretrained.read(source, open_clip_model)
    model, notes = from_open_clip(tensors, config)
    pretrained.check_finite(str(source), model.state_dict())
    processor = _processor(model.config, config, folder, tokenizer)
    if not config.get("preprocess_cfg"):
        notes.append(
            "The config says nothing about the preparation of images, so it is OpenCLIP's default: bicubic, the "
            "shortest edge, a centre crop, OpenAI's mean and standard deviation."
        )
    return Loaded(model, processor, (*notes, UNREPAIRED, _compared(model, tensors, config)))


def _processor(config: Any, stated: dict[str, Any], folder: Path | None, tokenizer: str | None) -> Any:
    """The processor that OpenCLIP's config states, whose tokens the config of transformers then names."""
    siglip = config.model_type == "siglip"
    images = image_processor(stated.get("preprocess_cfg") or {}, config.vision_config.image_size)
    text = stated["model_cfg"]["text_cfg"]
    words: Any = prepared(_tokenizer(text, folder, tokenizer), text)
    for name in ("bos", "pad", "eos") if siglip else ("bos", "pad"):  # of CLIP only eos has an effect, and is set
        setattr(config.text_config, f"{name}_token_id", getattr(words, f"{name}_token_id"))
    kind = transformers.SiglipProcessor if siglip else transformers.CLIPProcessor
    return kind(image_processor=images, tokenizer=words)


def _tokenizer(text: dict[str, Any], folder: Path | None, named: str | None) -> Any:
    """The tokenizer of this name, or the one beside the weights, or the one that the config names, or CLIP's."""
    is_beside = folder and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if named or is_beside:
        return pretrained.named_tokenizer(named or str(folder))
    name = text.get("hf_tokenizer_name")
    try:
        return pretrained.named_tokenizer(name) if name else clip_tokenizer()
    except ValueError as error:
        raise ValueError(f"{error} Without the Hub, name a local tokenizer: --tokenizer FOLDER.") from error


def repaired(caption: str, *, lower: bool = True) -> str:
    """A caption as OpenCLIP changes it before its tokenizer: repaired by ftfy, and unescaped from HTML.

    A training and an evaluation in this package read captions as they are. Captions that contain curly quotes, HTML
    entities, broken encodings or a Greek final sigma get OpenCLIP's tokens if this function has been applied to them.

    Args:
        lower: whether to write it in lower case, as CLIP's tokenizer does. False for tokenizers that keep capitals.

    Raises:
        ModuleNotFoundError: ftfy is not installed.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return text.lower() if lower else text


# ---- Converting ----


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
        raise ValueError(
            f"to must be transformers or open_clip, got {to!r}. scripts/AFTER_TRAINING.md exports the towers to ONNX "
            "and says how other libraries read the model."
        )
    own, other = (pretrained.CONFIG, CONFIG_NAME) if to == "open_clip" else (CONFIG_NAME, pretrained.CONFIG)
    # Adapters beside a whole model would be added to it. Another model of the other format would lose its tokenizer,
    # whose files both formats share.
    is_beside = Path(source).resolve() == Path(target).resolve()
    for file in (own, ADAPTER_CONFIG_NAME, *(() if is_beside else (other,))):
        if (Path(target) / file).exists():
            raise ValueError(f"{str(target)!r} holds a model already ({file}). Name another folder, or delete it.")
    if to == "transformers":
        if max_text_tokens is not None:
            raise ValueError("--max_text_tokens is for --to open_clip. OpenCLIP's own models state their length.")
        return list(_to_transformers(source, target, open_clip_model, tokenizer))
    for option, value in (("open_clip_model", open_clip_model), ("tokenizer", tokenizer)):
        if value is not None:
            raise ValueError(f"--{option} is for a source of OpenCLIP; with --to open_clip, the source is the other.")
    return list(_to_open_clip(source, target, repository, max_text_tokens))


def _to_transformers(
    source: str | Path, target: str | Path, open_clip_model: str | None, tokenizer: str | None
) -> Iterator[str]:
    base = pretrained.base_of_adapters(str(source))
    loaded = Loaded(*pretrained.load_model(str(source))) if base else _loaded(source, open_clip_model, tokenizer)
    model, processor, conversion = loaded
    yield from conversion
    if base is None:
        check_ends(model, processor.tokenizer)
    model.save_pretrained(target)
    give_usual_modes(target)
    processor.save_pretrained(target)
    if base is None:
        kind, length = model.config.model_type, processor.tokenizer.model_max_length
        padding = "max_length" if pads_texts(model.config) else "longest"
        write_sentence_files(target, kind, processor, max_length=length, padding=padding)
    else:
        for name in SENTENCE_FILES:  # which a training writes beside adapters as well
            if Path(source, name).is_file():
                shutil.copy(Path(source, name), target)
        yield f"The adapters were merged into {base}."
    yield f"{type(model).__name__} and its processor were written to {target}."


def _to_open_clip(
    source: str | Path, target: str | Path, repository: str, max_text_tokens: int | None
) -> Iterator[str]:
    model, processor = pretrained.load_model(str(source))
    if max_text_tokens is not None:
        processor.tokenizer.model_max_length = max_text_tokens
    tensors, config = to_open_clip(model, processor, repository=repository)
    check_ends(model, processor.tokenizer)
    positions = model.config.text_config.max_position_embeddings
    if max_text_tokens is not None and not 0 < max_text_tokens <= positions:
        raise ValueError(f"--max_text_tokens must be from 1 to the {positions} positions, got {max_text_tokens}.")
    length = config["model_cfg"]["text_cfg"]["context_length"]
    if length < positions:
        yield (
            f"Texts are cut at {length} tokens, as here: the other {positions - length} of the model's {positions} "
            f"positions are left out. For longer texts, pass --max_text_tokens {positions}."
        )
    yield _compared(model, tensors, config)
    pretrained.write(target, tensors, config, processor.tokenizer)
    yield f"The model of OpenCLIP was written to {target}; load it as 'local-dir:{target}'."


def save_open_clip(folder: str | Path, model: transformers.PreTrainedModel, processor: Any, **options: Any) -> None:
    """Writes a model of transformers in OpenCLIP's format; see `to_open_clip` for the other arguments."""
    pretrained.write(folder, *to_open_clip(model, processor, **options), processor.tokenizer)


# ---- Comparing ----


def compare_formats(folder: str | Path) -> str:
    """Says how much the embeddings of a folder's models in both formats differ; raises ValueError if it is too much."""
    model, _ = pretrained.load_model(str(folder))
    return _compared(model, *pretrained.read(folder)[:2])


def _compared(model: Any, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    try:
        import open_clip  # noqa: F401
    except (ImportError, RuntimeError) as error:  # the second if its torchvision is of another torch
        return f"The embeddings were not compared with OpenCLIP's, which cannot be imported: {describe_cause(error)}."
    cosine, largest = differences(model, tensors, config)
    if not cosine >= ENOUGH:
        raise ValueError(
            f"The embeddings of fixed inputs differ from OpenCLIP's: the least cosine is {cosine:.6f}, and "
            f"{ENOUGH} is expected. Please report the config of this model."
        )
    return (
        f"The embeddings of fixed inputs were compared with OpenCLIP's own: the least cosine is {cosine:.7f}, the "
        f"largest difference {largest:.0e}."
    )


@torch.no_grad()
def differences(model: Any, tensors: dict[str, Any], config: dict[str, Any]) -> tuple[float, float]:
    """The least cosine of embeddings of a model of transformers and of OpenCLIP's, and the largest difference.

    The embeddings are of length 1, of fixed inputs in fp32; the difference is that of an entry. OpenCLIP's model is
    that of the state dict ``tensors`` and the OpenCLIP config.

    Raises:
        ModuleNotFoundError: OpenCLIP is not installed.
    """
    import open_clip

    weights = {name: tensor.float() for name, tensor in clean(tensors).items()}
    fields = {key: value for key, value in config["model_cfg"].items() if key != "custom_text"}
    fields["vision_cfg"] = fields["vision_cfg"] | {"timm_model_pretrained": False}
    custom = any(name.startswith("text.") for name in weights)
    theirs = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**fields).eval()
    theirs.load_state_dict(weights)
    pixels, ids = _fixed_inputs(model.config, fields["text_cfg"].get("context_length"))
    dtype = model.dtype
    ours = model.float()(pixel_values=pixels, input_ids=ids)
    model.to(dtype)
    one = torch.cat([ours.image_embeds, ours.text_embeds])
    other = torch.cat([theirs.encode_image(pixels, normalize=True), theirs.encode_text(ids, normalize=True)])
    return (one * other).sum(-1).min().item(), (one - other).abs().max().item()


def _fixed_inputs(config: Any, length: int | None) -> tuple[Tensor, Tensor]:
    """Pixels [4, 3, S, S] and token ids [4, L], always the same for a model's config; L is the ``length``, if given.

    Captions of CLIP end at different positions; those of SigLIP fill their length.
    """
    text, side = config.text_config, config.vision_config.image_size
    drawn, length = torch.Generator().manual_seed(0), length or text.max_position_embeddings
    pixels = torch.randn(_ROWS, 3, side, side, generator=drawn)
    ids = torch.randint(3, text.vocab_size - 1, (_ROWS, length), generator=drawn)
    if pooling := Pooling.of_config(text):
        end = text.vocab_size - 1 if pooling.at_largest else text.eos_token_id
        ids[ids == end] = end - 1
        for row, tokens in enumerate(ids):
            tokens[length - 1 - row :] = 0
            tokens[length - 1 - row] = end
    return pixels, ids


def check_ends(model: Any, tokenizer: Any) -> None:
    """Raises a ValueError if two different words get one embedding, alone or behind a token that was added."""
    pooling, named = Pooling.of_config(model.config.text_config), tokenizer.special_tokens_map.values()
    added = {index: token for token, index in tokenizer.get_added_vocab().items() if token not in named}
    for begin in ("", *[f"{added[index]} " for index in sorted(added)[-1:]]):
        same_embeddings = SameEmbeddings(pooling)
        for word in "ab":
            same_embeddings.check(torch.tensor([tokenizer(f"{begin}{word}", truncation=True)["input_ids"]]))
