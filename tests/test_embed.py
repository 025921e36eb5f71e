"""`infcl embed`: embeddings and keys of tables and shards, on several processes, resumed, in both formats."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from helpers import models
from helpers.demo import infcl, mistake
from helpers.pictures import captioned, picture
from helpers.processors import END, clip_processor
from helpers.shards import pair, png, write_tar
from helpers.trainers import trainer_for
from safetensors import safe_open

from hf_infcl import ContrastiveCollator, ImageTextStream
from hf_infcl.cli.embeddings import make_source, table_source
from hf_infcl.data import sources, store
from hf_infcl.data.sets import SetSpec
from hf_infcl.data.sources import ShardSource
from hf_infcl.data.store import Store, of_caption
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.options.commands import ColumnOptions, DataOptions
from hf_infcl.quality.embedding import begin, embed
from hf_infcl.quality.teachers import StoredEmbeddings

CAPTIONS = [["a"], ["b c", "d e f"], [], ["g"], ["h", "i", "j"], ["k l"], ["m n o p q r s t u"]] * 3


def table(**columns: Any) -> datasets.Dataset:
    return captioned(CAPTIONS, (20, 24), **columns)


def embedded(source: Any, folder: Path, seed: int = 0, max_length: int | None = None, **options: Any) -> dict[str, int]:
    model, collator = models.clip(seed=seed, end=END).eval(), ContrastiveCollator(clip_processor(), max_length)
    form = {"format": "parquet"} | {name: options.pop(name) for name in ("format", "half") if name in options}
    trainer = trainer_for(folder, model, data_collator=collator, per_device_eval_batch_size=4, **options)
    return embed(source, folder, trainer.context, **form)


def read(folder: Path, kind: str) -> tuple[list[str], list[str] | None, np.ndarray]:
    """All keys, captions and embeddings of a folder."""
    keys, captions, vectors = [], [], []
    for path in sorted(folder.glob(f"{kind}-*")):
        if path.suffix == ".npy":
            beside = json.loads(path.with_suffix(".json").read_text())
            keys += beside["names"]
            captions += beside.get("captions", [])
            vectors.append(np.load(path))
        elif path.suffix == ".parquet":
            part = pq.read_table(path)
            keys += part["key"].to_pylist()
            captions += part["caption"].to_pylist() if kind == "texts" else []
            vectors.append(np.stack(part["embedding"].to_numpy()))
        elif path.suffix == ".safetensors":
            with safe_open(path, "np") as part:
                keys += json.loads(part.metadata()["keys"])
                captions += json.loads(part.metadata().get("captions", "[]"))
                vectors.append(part.get_tensor("embeddings"))
    return keys, captions if kind == "texts" else None, np.concatenate(vectors)


def expected(rows: range) -> tuple[np.ndarray, np.ndarray]:
    encoder, collator = DualEncoder(models.clip(end=END).eval()), ContrastiveCollator(clip_processor())
    with torch.no_grad():
        images = [encoder.encode_images(collator([{"image": picture(n, (20, 24))}])) for n in rows]
        texts = [encoder.encode_texts(collator.tokenize([caption])) for n in rows for caption in CAPTIONS[n]]
    return torch.cat(images).numpy(), torch.cat(texts).numpy()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sources, "ROWS_OF_PART", 8)


@pytest.mark.parametrize("form", ["npy", "parquet", "safetensors"])
def test_every_image_and_caption_of_a_table_once_in_order(tmp_path, form):
    source = table_source(table(), "image", "caption", None, str(tmp_path))
    counts = embedded(source, tmp_path, format=form, dataloader_num_workers=1)
    images, texts = expected(range(21))
    assert counts == {"images": 21, "texts": len(texts), "skipped": 0}
    assert len(list(tmp_path.glob(f"*-of-00003.{form}"))) == 6
    keys, _, vectors = read(tmp_path, "images")
    assert keys == [str(row) for row in range(21)]
    np.testing.assert_allclose(vectors, images, atol=1e-6)
    keys, captions, vectors = read(tmp_path, "texts")
    assert list(zip(keys, captions, strict=True)) == [(str(n), c) for n in range(21) for c in CAPTIONS[n]]
    np.testing.assert_allclose(vectors, texts, atol=1e-6)


def test_embeddings_in_bf16_are_of_length_1_and_near_those_in_fp32(tmp_path):
    embedded(table_source(table(), "image", "caption", None, "x"), tmp_path, bf16=True)
    for kind, wanted in zip(("images", "texts"), expected(range(21)), strict=True):
        _, _, vectors = read(tmp_path, kind)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert (vectors * wanted).sum(1).min() > 0.999
        assert np.abs(vectors - wanted).max() > 1e-5, "computed in bf16"


def test_a_second_run_computes_what_is_missing_and_another_model_needs_another_folder(tmp_path):
    source = table_source(table(id=[f"n{row}" for row in range(21)]), "image", "caption", "id", "x")
    embedded(source, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "texts-00001-of-00003.parquet").unlink()
    (tmp_path / "_7.images-00001-of-00003.parquet").write_bytes(b"half")
    assert embedded(source, tmp_path)["images"] == 8
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert read(tmp_path, "images")[0][9] == "n9"
    for other in {"seed": 1}, {"max_length": 4}:
        with pytest.raises(
            ValueError,
            match=r"holds other embeddings \((weights|preprocessing max).* was .*Choose another --output_dir",
        ):
            embedded(source, tmp_path, **other)
    for content in ("", "[]", "{}"):
        (tmp_path / "embeddings.json").write_text(content)
        with pytest.raises(ValueError, match=r"embeddings\.json is damaged: .*\. Delete .*, or embed into another"):
            embedded(source, tmp_path)
    images = table_source(table().remove_columns("caption"), "image", "caption", None, "x")
    for max_length in (None, 4):  # which decides nothing about images
        embedded(images, tmp_path / "images", max_length=max_length)


def test_what_differs_within_the_data_is_named(tmp_path):
    record = {"fingerprint": "a", "data": {"rows": 5}, "kinds": ["texts"], "model": "m", "parts": 1, "weights": "w"}
    begin(tmp_path, record)
    with pytest.raises(ValueError, match=r"\(data texts was None and is 'c'\)"):
        begin(tmp_path, {**record, "fingerprint": "b", "data": {"rows": 5, "texts": "c"}})
    begin(tmp_path, record)


def test_embeddings_are_found_by_their_keys_and_the_first_dimensions_are_another_folder(tmp_path, monkeypatch):
    source = table_source(table(), "image", "caption", None, "x")
    embedded(source, tmp_path, format="npy")
    images, texts = expected(range(21))
    assert embedded(source, tmp_path, format="npy") == {"images": 0, "texts": 0, "skipped": 0}, "all are there"
    stored = StoredEmbeddings(tmp_path)
    keys = [of_caption(str(n), c) for n in range(21) for c in CAPTIONS[n]]
    found, known = stored.find("texts", [*keys, of_caption("1", "a")])
    np.testing.assert_allclose(found[:-1], texts, atol=1e-6)
    assert (known.tolist(), len(stored.stores["images"]), stored.width) == ([True] * len(keys) + [False], 21, 12)
    assert stored.find("images", [])[0].shape == (0, 12)
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256))  # which do not hold them
        large = StoredEmbeddings(tmp_path)
        np.testing.assert_allclose(large.find("texts", keys)[0], texts, atol=1e-6)
    mappings = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/texts-00001-of-00003.npy")[1:]
    flags = [mapping.split("VmFlags:")[1].splitlines()[0].split() for mapping in mappings]
    assert sorted("rr" in of_one for of_one in flags) == [False, True], "only what does not fit is read at random"
    monkeypatch.setattr(store, "_MOST_OPEN", 2)
    few = Store(tmp_path, "texts", 3)
    for _ in range(2):
        np.testing.assert_allclose(few.find(keys[::-1])[0][::-1], texts, atol=1e-6)
    assert len(few._open) <= 2
    with pytest.raises(ValueError, match=r"holds other embeddings \(dims was None and is 4\)"):
        embedded(source, tmp_path, format="npy", dims=4)
    embedded(source, tmp_path / "cut", format="npy", half=True, dims=4)
    cut = read(tmp_path / "cut", "images")[2]
    assert (cut.shape, cut.dtype) == ((21, 4), np.float16)
    wanted = images[:, :4] / np.linalg.norm(images[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, wanted, atol=1e-3)
    with pytest.raises(ValueError, match="half_precision is for the format npy, got parquet"):
        embedded(source, tmp_path / "half", half=True)


def test_a_missing_image_is_a_bad_row(tmp_path):
    images = [str(tmp_path / f"{name}.png") for name in ("there", "lost")]
    Path(images[0]).write_bytes(png(3))
    rows = datasets.Dataset.from_dict({"image": images})
    with pytest.raises(ValueError, match=r"Row 1 of the dataset .* is bad: .*lost.png': FileNotFoundError"):
        embedded(table_source(rows, "image", None, None, str(tmp_path)), tmp_path / "out")
    skipping = table_source(rows, "image", None, None, str(tmp_path), skips=True)
    assert embedded(skipping, tmp_path / "out") == {"images": 1, "texts": 0, "skipped": 1}


def _by_processes(rank: int, world_size: int, folder: str) -> str:
    sources.ROWS_OF_PART = 8
    embedded(table_source(table(), "image", "caption", None, folder), Path(folder, "both"))
    broken = table().cast_column("image", datasets.Image(decode=False)).to_list()
    broken[9]["image"] = {"bytes": b"no image", "path": None}
    features = datasets.Features(image=datasets.Image(), caption=datasets.Sequence(datasets.Value("string")))
    bad = datasets.Dataset.from_list(broken, features=features)
    try:
        embedded(table_source(bad, "image", "caption", None, folder), Path(folder, "bad"))
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    counts = embedded(table_source(bad, "image", "caption", None, folder, skips=True), Path(folder, "skip"))
    return f"{message} {counts}"


def test_processes_share_the_parts_and_a_failure_and_a_bad_row_may_be_left_out(ranks, tmp_path):
    first, second = ranks.run(_by_processes, 2, str(tmp_path))
    embedded(table_source(table(), "image", "caption", None, ""), tmp_path / "one")
    for kind in ("images", "texts"):
        (keys, _, vectors), (same_keys, _, same) = read(tmp_path / "one", kind), read(tmp_path / "both", kind)
        assert keys == same_keys
        np.testing.assert_array_equal(vectors, same)
    assert second.startswith("BadSampleError: Row 9 of the dataset")
    assert first.startswith("OtherRankFailedError")
    assert first.endswith("{'images': 20, 'texts': 27, 'skipped': 1}")
    assert "9" not in read(tmp_path / "skip", "images")[0]


def test_shards_are_parts_and_their_samples_keep_their_order(tmp_path):
    letters = "abcdefghijklmnopq"
    for shard, numbers in enumerate((range(9), range(9, 17))):
        members = [member for n in numbers for member in pair(n, caption=[letters[n], f"{letters[n]} a"])]
        write_tar(tmp_path / f"shards/{shard}.tar", members)
    broken = [("x.png", b"no image"), ("x.json", b'{"caption": ["a"]}')]
    write_tar(tmp_path / "shards/2.tar", [*broken, *pair(0, caption=["a"])])
    stream = ImageTextStream(str(tmp_path / "shards/*.tar"), on_bad_sample="skip")
    counts = embedded(ShardSource(stream), tmp_path / "out", dataloader_num_workers=2)
    assert counts == {"images": 18, "texts": 35, "skipped": 1}
    keys, _, vectors = read(tmp_path / "out", "images")
    assert keys == [*(f"{n // 9}/{n:06d}" for n in range(17)), "2/000000"]
    assert len(np.unique(vectors[:17], axis=0)) == 17
    _, captions, _ = read(tmp_path / "out", "texts")
    assert captions[:3] == ["a", "a a", "b"]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("parts", [("images",), ("texts",), ("images", "texts")])
def test_shards_without_captions_or_without_images_are_embedded_as_the_same_table(tmp_path, kind, parts):
    """One caption is missing, which is no fault of its image."""
    letters = [*"abc", None]
    for split in ("train", "test"):
        if kind == "tar":
            files = [file for n, letter in enumerate(letters) for file in pair(n, text=letter, id=n)]
            wanted = {"images": "png", "texts": "json"}
            only = [file for file in files if any(file[0].endswith(wanted[part]) for part in parts)]
            write_tar(tmp_path / f"shards/{split}.tar", only)
        else:
            columns = {"images": {"jpg": [png(n) for n in range(4)]}, "texts": {"title": letters}}
            chosen = {name: values for part in parts for name, values in columns[part].items()}
            (tmp_path / "shards").mkdir(exist_ok=True)
            pq.write_table(pyarrow.table({**chosen, "id": range(4)}), tmp_path / f"shards/{split}.parquet")
    spec = SetSpec.read("data", str(tmp_path / "shards"))
    embeddings, found = [], []
    for streaming in (False, True):
        source = make_source(spec, DataOptions([], streaming=streaming), ColumnOptions(), None, [])
        found.append((source.kinds, embedded(source, tmp_path / str(streaming))))
        embeddings.append([read(tmp_path / str(streaming), part)[1:] for part in parts])
    images, texts = 4 * ("images" in parts), 3 * ("texts" in parts)
    assert found == [(parts, {"images": images, "texts": texts, "skipped": 0})] * 2
    for (captions, vectors), (same_captions, same) in zip(*embeddings, strict=True):
        assert captions == same_captions
        np.testing.assert_allclose(vectors, same, atol=1e-6)
    for option in ("image_column", "caption_column"):
        with pytest.raises(ValueError, match=f"no column 'nope', which --{option} names. Its columns are"):
            make_source(spec, DataOptions([], streaming=True), ColumnOptions(**{option: "nope"}), None, [option])
    if "images" not in parts:
        with pytest.raises(ValueError, match="no column 'image', which --image_column names"):
            make_source(spec, DataOptions([], streaming=True), ColumnOptions(), None, ["image_column"])


def test_the_command_embeds_a_folder_of_images_and_a_table_of_texts(demo, small, tmp_path, capsys):
    """The fixture `small` creates the folder of pairs."""
    words = [demo / "clip-init", tmp_path / "pairs", "--output_dir", tmp_path / "out", "--use_cpu", "--split", "test"]
    infcl("embed", *words)
    assert "12 images and 48 texts were embedded. All embeddings are in" in capsys.readouterr().out
    keys, _, images = read(tmp_path / "out", "images")
    assert keys == sorted(f"test/{path.name}" for path in (tmp_path / "pairs/test").glob("*.png"))
    assert np.linalg.norm(images, axis=1) == pytest.approx(1)
    for split in ("train", "test"):
        (tmp_path / f"pairs/{split}/metadata.jsonl").unlink()
    infcl("embed", *words[:3], tmp_path / "plain", *words[4:])
    assert "12 images and 0 texts" in capsys.readouterr().out
    np.testing.assert_array_equal(read(tmp_path / "plain", "images")[2], images)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/train.csv").write_text("name,text\none,a digit\ntwo,a circle\n")
    (tmp_path / "of_a_training.yaml").write_text("dataset: which/is/not/embedded\n")
    queries = ["embed", tmp_path / "of_a_training.yaml", demo / "clip-init", tmp_path / "texts"]
    queries += ["--output_dir", tmp_path / "q", "--use_cpu"]
    infcl(*queries, "--key_column", "name")
    assert read(tmp_path / "q", "texts")[:2] == (["one", "two"], ["a digit", "a circle"])
    shutil.rmtree(tmp_path / "q")
    for more, message in (
        (["--caption_column", "title"], "no column 'title', which --caption_column names"),
        (["--key_column", "id"], "no column 'id', which --key_column names"),
        (["--streaming", "--key_column", "name"], "the keys of a stream are the names of its samples"),
    ):
        assert message in mistake(capsys, *queries, *more)
    with pytest.raises(ValueError, match="neither images nor captions"):
        table_source(datasets.Dataset.from_dict({"number": [1]}), "image", "caption", None, "")


@pytest.mark.parametrize("kind", ["table", "stream"])
def test_one_command_embeds_what_a_training_will_read(demo, small, tmp_path, capsys, kind):
    """New and old pairs of the training's file, whose other options are the student's."""
    options: dict[str, Any] = {"model": demo / "clip-init", "dataset": tmp_path / "pairs", "max_text_tokens": 5}
    if kind == "stream":
        images = sorted((tmp_path / "pairs/train").glob("*.png"))
        files = [(f"{image.stem}.{end}", image.read_bytes()) for image in images for end in ("png", "txt")]
        write_tar(tmp_path / "0.tar", [(n, b"a digit" if n.endswith("txt") else data) for n, data in files])
        options |= {"dataset": tmp_path / "0.tar", "streaming": True, "samples_per_epoch": 16}
    old = {"replay_dataset": f"{tmp_path / 'pairs'}?split=test", "replay_share": 0.25}
    options |= {**old, "augmentation": "crop", "use_cpu": True, "report_to": "none"}
    options |= {"per_device_train_batch_size": 8, "max_steps": 2, "save_strategy": "no", "image_size": 32}
    options |= {"teacher_embeddings": tmp_path / "teacher", "output_dir": tmp_path / "out", "learning_rate": 1e-3}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in options.items()}))
    infcl("embed", file, demo / "clip-init")
    printed = capsys.readouterr().out
    assert "Embeds the images and texts of --dataset.\nEmbeds the images and texts of --replay_dataset_1.\n" in printed
    assert f"`infcl train --teacher_embeddings {tmp_path / 'teacher'}` reads them." in printed
    parts = [StoredEmbeddings(tmp_path / "teacher" / name) for name in ("dataset", "replay_dataset_1")]
    assert [(len(part.stores["images"]), [*part.stores]) for part in parts] == [
        (26, ["images", "texts"]),
        (12, ["images", "texts"]),
    ]
    infcl("embed", demo / "clip-init", tmp_path / "pairs", "--output_dir", tmp_path / "alone", "--use_cpu")
    images, stored = (read(tmp_path / name, "images")[2] for name in ("alone", "teacher/dataset"))
    np.testing.assert_allclose(stored, images, atol=1e-6)  # as they are, at the size of the teacher
    infcl("train", file)
    card = (tmp_path / "out/README.md").read_text()
    assert "whose embeddings were stored" in card
    if kind == "table":  # what the plain command has written is the same
        alone = ["--teacher_embeddings", tmp_path / "alone", "--teacher_missing", "contrastive"]
        infcl("train", file, *alone, "--output_dir", tmp_path / "out2")
    capsys.readouterr()
    line = mistake(capsys, "check", file, "--teacher_embeddings", tmp_path / "teacher/dataset")
    assert "no stored embedding of the teacher: 12 of the 12 rows of --replay_dataset" in line
    for words, message in (
        ([demo / "clip-init"], "Name the data to embed"),
        ([demo / "clip-init", "--dataset", tmp_path / "pairs"], "Name the folder for the embeddings with --output_dir"),
        (
            [file, demo / "clip-init", "--key_column", "name"],
            "exclude each other: a training finds pairs by row or sample",
        ),
    ):
        assert message in mistake(capsys, "embed", *words)
