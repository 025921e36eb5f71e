"""The blocks of the page "After the training", run in their order on the result of a small training."""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.demo import SCRIPTS, infcl
from transformers import AutoProcessor

from hf_infcl.models.open_clip import write_sentence_files

PAGE = (SCRIPTS / "AFTER_TRAINING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", PAGE, flags=re.DOTALL)
OPTIONAL = ("faiss", "onnxruntime")  # packages of blocks that run only where these are installed


@pytest.fixture(scope="module")
def page(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the blocks have defined, after those that need no optional package."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(demo / "clip-init", folder / "outputs/clip")
    processor = AutoProcessor.from_pretrained(folder / "outputs/clip")
    length = processor.tokenizer.model_max_length
    write_sentence_files(folder / "outputs/clip", "clip", processor, max_length=length, padding="longest")
    shutil.copytree(demo / "digits/test", folder / "my/images/train")
    shutil.copy(next((demo / "digits/test").glob("*.png")), folder / "picture.png")
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, block in BLOCKS:
            if language == "bash":
                infcl(*shlex.split(block)[1:], *(["--use_cpu"] if "infcl embed" in block else []))
            elif not any(f"import {package}" in block for package in OPTIONAL):
                exec(block, names)
        yield names


def test_the_blocks_give_the_same_cosines(page):
    assert page["table"].num_rows == len(page["collection"]["key"]) > 100
    np.testing.assert_allclose(np.linalg.norm(page["collection"]["embedding"], axis=1), 1, rtol=1e-6)
    expected = (page["outputs"].text_embeds @ page["outputs"].image_embeds.T).detach()
    torch.testing.assert_close(page["similarities"], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(page["image_embeddings"], page["outputs"].image_embeds, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.as_tensor(page["same"]), page["short"], rtol=0, atol=1e-6)
    assert page["short"].shape == (1, 32) < page["image_embeddings"].shape
    assert Path("outputs/open_clip/open_clip_config.json").is_file()


@pytest.mark.parametrize("package", OPTIONAL)
def test_blocks_with_optional_packages(page, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (block,) = (block for _, block in BLOCKS if f"import {package}" in block)
    names = page if package == "faiss" else {}  # that of ONNX runs by itself
    exec(block, names)
    page |= names
    texts = page["outputs"].text_embeds.numpy()
    if package == "faiss":
        cosines = texts @ page["collection"]["embedding"].T
        np.testing.assert_allclose(page["cosines"], -np.sort(-cosines, axis=1)[:, :5], atol=1e-6)
    else:
        np.testing.assert_allclose(page["embeddings"], texts, atol=1e-6)
        images = page["onnxruntime"].InferenceSession("outputs/image.onnx")
        pixels = page["inputs"]["pixel_values"].numpy()  # another batch size than that of the export
        expected = page["outputs"].image_embeds.numpy()
        np.testing.assert_allclose(images.run(None, {"pixel_values": pixels})[0], expected, atol=1e-6)
