"""The ledger of pairs: scores, probabilities, its files, and the commands that use it."""

import itertools
import json
import math
import tempfile
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from helpers import models
from helpers.concepts import Concepts, linear
from helpers.demo import infcl, mistake
from helpers.pictures import write_folder
from helpers.processors import END, clip_processor
from helpers.shards import number_of, numbered, write_tars
from helpers.streams import stream_of
from helpers.trainers import trainer_for
from PIL import Image

from hf_infcl import ImageTextDataset, InfCLTrainingArguments
from hf_infcl.cli.datasets import training_set
from hf_infcl.cli.embeddings import score_pairs
from hf_infcl.loss.pair_scores import pair_scores
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.options.commands import ColumnOptions, DataOptions
from hf_infcl.quality.ledger import (
    CERTAIN,
    LEDGER_FILE,
    SHEET_FILE,
    Ledger,
    draw_suspicious,
    ledger_lines,
    letters_of,
    probability_wrong,
    rows_kept,
    small_jpeg,
    stream_kept,
    words_of_excluded,
    write_ledger_and_sheet,
)
from hf_infcl.shards.layout import sample_key

ROWS, WRONG = 160, [3, 40, 41, 77, 120]


# ---- Probabilities ----


def test_probabilities_count_the_pairs_below_0():
    generator = np.random.default_rng(0)
    for share in (0.0, 0.1, 0.5):
        count = int(20_000 * share)
        scores = np.concatenate((generator.normal(0, 1, count), generator.normal(5, 0.7, 20_000 - count)))
        wrong = probability_wrong(scores)
        assert wrong.sum() / 20_000 == pytest.approx(share, abs=0.01)
        is_wrong = np.arange(20_000) < count
        for low, high in ((0.01, 0.5), (0.5, 0.9), (0.9, 1.1)):
            among = (wrong >= low) & (wrong < high)
            if among.sum() > 100:
                assert is_wrong[among].mean() == pytest.approx(wrong[among].mean(), abs=0.1)
        assert (np.diff(wrong[scores.argsort()]) <= 0).all()
    assert probability_wrong(np.array([-1.0, 5.0, 0.0])).tolist() == [1, 0, 1]
    assert len(probability_wrong(np.array([]))) == 0


# ---- Scores ----


def concepts() -> Concepts:
    """Pairs of which a few have the captions of others."""
    data = Concepts(ROWS)
    data.tokens[WRONG] = data.tokens[WRONG].roll(1, 0)
    return data


def collate(items: Any) -> dict[str, torch.Tensor]:
    return concepts().batch([number_of(item) for item in items])


def collate_with_ids(ids: list[int]) -> Any:
    return lambda items: collate(items) | {"pair_ids": torch.tensor([ids[number_of(item)] for item in items])}


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a model that knows what belongs together."""
    batch = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "max_steps": 50}
    options = {**batch, "learning_rate": 1e-2, "objective": "softmax"}
    model = linear()
    trainer_for(tmp_path_factory.mktemp("x"), model, Concepts(512, seed=5), **options).train()
    return model.state_dict()


def encoder_of(weights: dict[str, torch.Tensor]) -> DualEncoder:
    model = linear()
    model.load_state_dict(weights)
    return DualEncoder(model.eval())


def scored(
    dataset: Any, weights: dict[str, torch.Tensor], window: int = 64, **options: Any
) -> tuple[Ledger, dict[int, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_eval_batch_size": 16, "data_collator": collate, **options}
        trainer = trainer_for(folder, encoder_of(weights).model, **options)
    return score_pairs(trainer, dataset, window)


def rank_scored(
    rank: int, world_size: int, weights: dict[str, torch.Tensor], shards: str = ""
) -> tuple[Ledger, dict[int, bytes]]:
    return scored(stream_of(shards, lanes=None) if shards else numbered(range(ROWS)), weights)


def test_a_window_of_all_pairs_has_their_scores(learned):
    ledger, pictures = scored(numbered(range(ROWS)), learned, window=ROWS)
    encoder = encoder_of(learned)
    with torch.no_grad():
        images, texts = encoder.embed(encoder.model, concepts().batch())
    assert ledger.key.tolist() == list(range(ROWS))
    assert ledger.caption == [f"caption {number}" for number in range(ROWS)]
    np.testing.assert_allclose(ledger.score, pair_scores(images, texts), atol=1e-4)
    assert sorted(ledger.most_suspicious(5)) == WRONG
    assert len(pictures) == 64
    assert set(WRONG) <= set(pictures)


def test_windows_on_processes_hold_each_pair_once(ranks, learned):
    for world_size in (1, 2):
        for ledger, pictures in ranks.run(rank_scored, world_size, learned):
            assert ledger.key.tolist() == list(range(ROWS))
            assert sorted(ledger.most_suspicious(5)) == WRONG
            assert set(WRONG) <= set(pictures)


def test_a_sample_that_another_process_has_scored_is_not_scored_again(ranks, learned, tmp_path):
    """A process with fewer samples goes on to the next pass, in which it gets other shards."""
    write_tars(tmp_path, [100, 20, 20, 20])
    for ledger, _ in ranks.run(rank_scored, 2, learned, str(tmp_path)):
        assert len(ledger) == len(set(ledger.key.tolist())) == ROWS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_of_a_stream_is_scored_once(learned, tmp_path, num_workers):
    sizes = [100, 20, 20, 20]  # one of two workers has more
    write_tars(tmp_path, sizes)
    ledger, _ = scored(stream_of(tmp_path, lanes=None), learned, dataloader_num_workers=num_workers)
    shards = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    names = {sample_key(f"0/{shards[n]:05d}.tar", f"{n:06d}"): n for n in range(ROWS)}
    assert sorted(ledger.key.tolist()) == sorted(names)
    assert sorted(names[ledger.key[place]] for place in ledger.most_suspicious(5)) == WRONG
    # ---- The names by which a person finds the samples ----
    ledger.write(tmp_path / "ledger.parquet")
    written = pq.read_table(tmp_path / "ledger.parquet").to_pydict()
    for key, name in zip(written["key"], written["sample"], strict=True):
        assert name == f"0/{shards[names[key]]:05d}.tar {names[key]:06d}"


def test_a_repeat_from_the_next_pass_is_not_among_the_others(learned, tmp_path):
    """Twenty samples in batches of 16: the rest of the second batch is from the next pass."""
    write_tars(tmp_path, [20])
    ledger, _ = scored(stream_of(tmp_path, lanes=None), learned)
    table, _ = scored(numbered(range(20)), learned)
    assert len(ledger) == 20
    np.testing.assert_allclose(np.sort(ledger.score), np.sort(table.score), atol=1e-4)


def test_pairs_without_others_have_no_score(learned, tmp_path, caplog):
    """The windows of a stream that is ordered by class."""
    write_tars(tmp_path, [96, 64])
    with_ids = {"data_collator": collate_with_ids([0] * 64 + [1] * 32 + [2] * 64)}
    ledger, _ = scored(stream_of(tmp_path, lanes=1, shuffle_buffer=1, open_shards=1), learned, window=64, **with_ids)
    assert len(ledger) == ROWS - 64
    assert "64 of 160 pairs have no score, because all pairs of their window have one pair id" in caplog.text
    one_class = {"data_collator": collate_with_ids([0] * ROWS)}
    with pytest.raises(ValueError, match="160 of 160 pairs have no score, because all pairs of their window have one"):
        scored(numbered(range(ROWS)), learned, **one_class)


def test_scores_that_are_not_finite_make_no_ledger(learned):
    """No pair would look wrong in it."""
    broken = {**learned, "pixels.weight": torch.full_like(learned["pixels.weight"], torch.nan)}
    with pytest.raises(ValueError, match=f"The scores of {ROWS} of {ROWS} pairs are not finite, because embeddings"):
        scored(numbered(range(ROWS)), broken)


def test_one_pair_cannot_be_compared(learned):
    with pytest.raises(ValueError, match="fewer than two pairs"):
        scored(numbered(range(1)), learned)


# ---- Files ----


def small() -> Ledger:
    scores = np.array([4.0, -1.0, 3.0, 5.0])
    return Ledger("data", np.array([5, 2, 9, 7]), scores, ["five", "two", "nine", "seven"])


def test_a_ledger_is_a_table(tmp_path):
    small().write(tmp_path / "ledger.parquet")
    columns = pq.read_table(tmp_path / "ledger.parquet").to_pydict()
    assert columns["key"] == [2, 5, 7, 9]
    assert columns["caption"] == ["two", "five", "seven", "nine"]
    assert columns["p_wrong"] == [1, 0, 0, 0]
    assert set(columns["content"]) == {"data"}
    assert np.flatnonzero(small().p_wrong >= CERTAIN).tolist() == [0]
    assert [*columns] == ["key", "score", "p_wrong", "caption", "content"], "a table's pair is its row"
    for keys in ([1, 0], []):  # without captions, and without pairs
        ledger = Ledger("data", np.array(keys, np.int64), np.zeros(len(keys)))
        write_ledger_and_sheet(ledger, {}, tmp_path)
        assert [*pandas.read_parquet(tmp_path / LEDGER_FILE)] == [*columns]


def test_files_that_are_no_ledgers(tmp_path):
    with pytest.raises(ValueError, match="There is no ledger"):
        words_of_excluded(f"{tmp_path}/missing.parquet:0.5")
    pq.write_table(pyarrow.table({"key": [1]}), tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    for name in ("other", "text"):
        with pytest.raises(ValueError, match="is not a ledger that `infcl score` has written"):
            words_of_excluded(f"{tmp_path}/{name}.parquet:0.5")


def test_a_copy_that_a_person_has_edited_excludes_what_he_judged(tmp_path):
    data, path, edited = numbered(range(10)), tmp_path / "ledger.parquet", tmp_path / "edited.parquet"
    Ledger(data.content_fingerprint(), np.arange(10), np.full(10, 5.0)).write(path)
    frame = pandas.read_parquet(path)
    frame.loc[[2, 7], "p_wrong"] = 1.0
    frame.to_parquet(edited)
    assert rows_kept(data, f"{edited}:0.5").tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert rows_kept(data, f"{edited}:1").tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    with pytest.raises(ValueError, match="is of other data"):
        rows_kept(numbered(range(11)), f"{edited}:0.5")
    for part, cause in ((frame.drop(columns="content"), "content"), (frame[:0], "it has no rows")):
        part.to_parquet(edited)
        advice = "An edited copy has to be a parquet file that keeps the ledger's columns"
        with pytest.raises(ValueError, match=f"{cause}.*{advice}"):
            rows_kept(data, f"{edited}:0.5")


def test_excluding(tmp_path):
    data, path = numbered(range(10)), tmp_path / "ledger.parquet"
    scores = np.array([1, -1, 1, 1, 1, -2, 1, 1, 1, 1.0])
    Ledger(data.content_fingerprint(), np.arange(10), scores).write(path)
    assert rows_kept(data, f"{path}:0.9").tolist() == [0, 2, 3, 4, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"The ledger .* is of other data"):
        rows_kept(numbered(range(11)), f"{path}:0.9")
    assert rows_kept(data, f"{path}:10%").tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9], "the lowest score"
    assert rows_kept(data, f"{path}:29%").tolist() == rows_kept(data, f"{path}:0.9").tolist()
    for number in ("0", "1.5", "x", "0%", "101%", "%"):
        with pytest.raises(ValueError, match="exclude must be a ledger and the least probability"):
            rows_kept(data, f"{path}:{number}")
    for asked in (str(path), ":0.9"):
        with pytest.raises(ValueError, match="exclude must be a ledger and the least probability"):
            rows_kept(data, asked)
    more = numbered(range(50))
    Ledger(more.content_fingerprint(), np.arange(50), np.arange(50.0)).write(path)
    assert rows_kept(more, f"{path}:58%").tolist() == list(range(29, 50)), "although 0.58 * 50 is less than 29"
    Ledger(data.content_fingerprint(), np.arange(10), -np.ones(10)).write(path)
    assert words_of_excluded(f"{path}:20%") == ("2 of 10, the 20% with the lowest scores", "ledger.parquet")
    for asked in ("0.9", "100%"):
        with pytest.raises(ValueError, match="excludes all 10 pairs"):
            rows_kept(data, f"{path}:{asked}")


def test_a_ledger_is_of_its_captions_whatever_else_is_read(tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [b"png"] * 10, "caption": [*"abcdefghij"], "wrong": [*"bcdefghija"], "id": [*range(10)]}
    )
    plain = ImageTextDataset(table)
    more = ImageTextDataset(table, negative_caption_column="wrong", pair_id_column="id")
    for written, read in ((plain, more), (more, plain)):
        Ledger(written.key_fingerprint(), np.arange(10), np.arange(10.0)).write(tmp_path / "ledger.parquet")
        assert rows_kept(read, f"{tmp_path}/ledger.parquet:20%").tolist() == list(range(2, 10))
    Ledger(more.content_fingerprint(), np.arange(10), np.arange(10.0)).write(tmp_path / "ledger.parquet")
    assert len(rows_kept(more, f"{tmp_path}/ledger.parquet:20%")) == 8, "it is of an earlier version"


@pytest.mark.parametrize(
    ("column", "value", "asked", "message"),
    [
        ("score", math.nan, "20%", "its column score does not hold a number in every row"),
        ("score", "low", "20%", "its column score does not hold a number in every row"),
        ("p_wrong", None, "0.5", "its column p_wrong does not hold a number in every row"),
        ("key", 10, "20%", r"leaves out rows 10 to 10, but the table has 10 rows"),
        ("key", -1, "20%", r"leaves out rows -1 to -1, but the table has 10 rows"),
    ],
)
def test_a_copy_with_other_values_than_a_ledger_s_is_refused(tmp_path, column, value, asked, message):
    data, path = numbered(range(10)), tmp_path / "ledger.parquet"
    Ledger(data.content_fingerprint(), np.arange(10), -np.arange(10.0)).write(path)
    pandas.read_parquet(path).assign(**{column: [value] * 10}).to_parquet(path)
    with pytest.raises(ValueError, match=message):
        rows_kept(data, f"{path}:{asked}")


def test_excluding_from_a_stream(tmp_path):
    write_tars(tmp_path / "shards", [15, 15, 10])
    stream, path = stream_of(tmp_path / "shards", lanes=2, samples_per_epoch=40), tmp_path / "ledger.parquet"
    names = {sample_key(f"0/{n // 15:05d}.tar", f"{n:06d}"): n for n in range(40)}
    scores = np.array([-1.0 if n % 5 == 2 or n < 3 else 5.0 for n in names.values()])
    Ledger(stream.content_fingerprint(), np.array([*names]), scores).write(path)
    kept = stream_kept(stream, f"{path}:0.9")
    left = {n for n in range(40) if n % 5 == 2 or n < 3}

    def numbers(batches: Any, count: int) -> list[int]:
        found = []
        for items, tag in itertools.islice(batches, count):
            found += [number_of(item) for item in items]
            batches.consume(tag)
        return found

    whole = numbers(kept.batches(5), 12)
    assert set(whole) == set(range(40)) - left, "two passes and a bit have every other sample"
    # ---- From a checkpoint, in other processes ----
    begun = kept.batches(5)
    first = numbers(begun, 4)
    shares = [kept.batches(5, rank=rank, world_size=2, states=[begun.state()]) for rank in range(2)]
    rest = [numbers(share, 4) for share in shares]
    steps = zip(*[[part[i : i + 5] for i in range(0, 20, 5)] for part in rest], strict=True)
    assert first + [n for step in steps for part in step for n in part] == whole
    with pytest.raises(ValueError, match="its order has changed: sources was"):
        stream.batches(5, states=[begun.state()])
    # ---- What is told ----
    assert "without 10 samples" in kept.content_fingerprint()
    with pytest.raises(ValueError, match=r"The ledger .* is of other data"):
        stream_kept(kept, f"{path}:0.9")
    Ledger(stream.content_fingerprint(), np.array([*names]), -np.ones(40)).write(path)
    with pytest.raises(ValueError, match="excludes all 40 pairs"):
        stream_kept(stream, f"{path}:0.9")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not a ledger"):
        stream_kept(stream, f"{tmp_path / 'text.parquet'}:0.9")


def test_the_sheet_shows_pictures_and_captions(tmp_path):
    red = np.zeros((20, 40, 3), np.uint8)
    red[..., 0] = 255
    sheet = np.asarray(draw_suspicious(small(), {2: small_jpeg(red)}))
    assert (abs(sheet[10:60, 10:120].astype(int) - [254, 0, 0]) < 9).all(), "the first pair has the lowest score"
    assert (sheet[140:, :260] < 250).any(), "its captions"


def test_wide_letters_stay_in_their_cell():
    ledger = Ledger("data", np.arange(2), np.array([1.0, 2.0]), ["W" * 36, ""], ["W" * 18, ""])
    sheet = np.asarray(draw_suspicious(ledger, {}))
    assert (sheet[:, 250:260] < 250).any(), "as far as its right end"
    assert (sheet[:, 260:268] == 255).all()


def test_pictures_have_letters_with_accents():
    pytest.importorskip("matplotlib")
    letters = letters_of(12)
    assert len({bytes(letters.getmask(one)) for one in "uüßжω"}) == 5, "no box in place of any"


# ---- Commands ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights, and 96 pictures with captions."""
    place = tmp_path_factory.mktemp("score")
    captions = [f"{'abcd'[row % 4]} {'abcd'[row // 4 % 4]}" for row in range(96)]
    write_folder(place / "pictures", captions, (16, 16), column="text")
    clip_processor().save_pretrained(place / "model")
    models.clip(end=END).save_pretrained(place / "model")
    return place


PLAIN = ["--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true"]


def test_scores_under_bf16_are_products_in_fp32(folder, tmp_path):
    scores = []
    for name, precision in (("fp32", []), ("bf16", ["--bf16"])):
        words = ["--output_dir", tmp_path / name, "--window", 48, *precision, *PLAIN]
        infcl("score", folder / "model", folder / "pictures", *words)
        scores.append(pandas.read_parquet(tmp_path / name / LEDGER_FILE).score)
    assert np.corrcoef(scores)[0, 1] > 0.99, "what bf16 rounds are the embeddings"


def test_only_the_shards_of_a_folder_that_were_trained_are_known(folder, capsys, tmp_path):
    write_tars(tmp_path / "shards", [24] * 4)
    shards, model = [f"{tmp_path}/shards/0000{numbers}.tar" for numbers in ("{0..1}", "{2..3}")], tmp_path / "model"
    batch = ["--per_device_train_batch_size", 8, "--max_steps", 2, "--save_strategy", "no", "--streaming", *PLAIN]
    infcl("train", "--model", folder / "model", "--dataset", shards[0], "--output_dir", model, *batch)
    for data, learned in zip(shards, (True, False), strict=True):
        capsys.readouterr()
        infcl("score", model, data, "--streaming", "--output_dir", tmp_path / "scores", *PLAIN)
        printed = capsys.readouterr().out
        assert ("This model was trained on these pairs, as its record says" in printed) == learned
        assert ("A model that was trained on these pairs may know wrong ones" in printed) != learned


def test_score_check_and_exclude(folder, capsys, caplog, tmp_path):
    data, out = folder / "pictures", tmp_path / "out"
    infcl("score", folder / "model", data, "--output_dir", out, "--window", 48, *PLAIN)
    assert "do not mean anything yet: to this model most of the 96 pairs look" in (printed := capsys.readouterr().out)
    assert "--exclude" not in printed, "its weights are random"
    assert Image.open(out / SHEET_FILE).size[0] == 1040
    ledger = pandas.read_parquet(out / LEDGER_FILE)
    assert ledger.key.tolist() == list(range(96))
    assert ledger.caption[5] == "b b"
    assert sorted(ledger["sample"]) == sorted(path.name for path in data.rglob("*.png"))
    assert "left_out" not in ledger, "nothing was trained"
    # ---- As a model would find that knows the pairs ----
    scores = np.where(np.arange(96) % 16 == 3, -1.0, 5.0)
    Ledger(ledger.content[0], ledger.key.to_numpy(), scores, ledger.caption).write(out / LEDGER_FILE)
    batch = ["--per_device_train_batch_size", 8, "--max_steps", 2, "--logging_steps", 1, "--save_strategy", "no"]
    words = ["--model", folder / "model", "--dataset", data, *batch, *PLAIN, "--leave_out", "noisy"]
    infcl("train", *words, "--output_dir", tmp_path / "run", "--exclude", f"{out / LEDGER_FILE}:0.9")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| pairs left out | none, because each pair was seen" in card
    assert f"| pairs excluded before | 6 of 96, wrong with a probability of at least 0.9 by `{LEDGER_FILE}` |" in card
    printed = capsys.readouterr()
    assert caplog.text.count("leave_out has left nothing out: each pair was seen") == 1
    assert "--exclude" not in printed.out
    assert printed.err.count(f"Excluded by {out / LEDGER_FILE}:0.9: 6 of 96 pairs.\n") == 1
    of_run = pandas.read_parquet(tmp_path / "run" / LEDGER_FILE)
    assert len(of_run) == 16, "those of two steps"
    assert of_run.key.max() < 90
    assert not of_run.left_out.any()
    captions = [ledger.caption[row] for row in np.flatnonzero(np.arange(96) % 16 != 3)]
    assert of_run.caption.tolist() == [captions[row] for row in of_run.key]
    assert Image.open(tmp_path / "run" / SHEET_FILE).size == (1040, 4 * 216), "all 16"
    words += ["--output_dir", tmp_path / "other", "--exclude", f"{tmp_path / 'run' / LEDGER_FILE}:0.9"]
    assert "is of other data" in mistake(capsys, "train", *words)
    # ---- Embeddings of the whole set serve the rest of it ----
    infcl("embed", folder / "model", "--dataset", data, "--output_dir", tmp_path / "teacher", *PLAIN)
    words = ["--model", folder / "model", "--dataset", data, *batch, *PLAIN, "--output_dir", tmp_path / "taught"]
    words += ["--teacher_embeddings", tmp_path / "teacher", "--exclude", f"{out / LEDGER_FILE}:0.9"]
    infcl("train", *words)
    logs = json.loads((tmp_path / "taught" / "trainer_state.json").read_text())["log_history"]
    assert logs[0]["teacher_loss"] == pytest.approx(0, abs=1e-4), "the start is its own teacher, pair by pair"


def test_what_two_ledgers_leave_has_the_numbers_of_the_whole_table(folder, tmp_path):
    args = InfCLTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    asked: list[str] = []
    for name, keys in (("first", [3, 10]), ("second", [0, 9])):  # rows of what was left before
        found = training_set(DataOptions([str(folder / "pictures")], exclude=asked), ColumnOptions(), args)
        scores = np.where(np.isin(np.arange(len(found)), keys), -1.0, 5.0)
        Ledger(found.content_fingerprint(), np.arange(len(found)), scores).write(tmp_path / f"{name}.parquet")
        asked = [*asked, f"{tmp_path / name}.parquet:0.9"]
    found = training_set(DataOptions([str(folder / "pictures")], exclude=asked), ColumnOptions(), args)
    assert found.numbers.tolist() == sorted({*range(96)} - {3, 10, 0, 11})
    for row in (0, 8, 91):
        assert found.table[row]["text"] == found.whole.table[int(found.numbers[row])]["text"]


def test_a_ledger_without_wrong_pairs_advises_to_exclude_none(tmp_path):
    for scores, told in (
        (np.full(50, 5.0), f"None of 50 pairs seems wrong. The score of each is in {tmp_path / LEDGER_FILE}."),
        (np.array([-1.0] + [5.0] * 49), "1 of 50 pairs does not seem to belong together, 1 of them with a probability"),
    ):
        (line, *_) = ledger_lines(Ledger("data", np.arange(50), scores), tmp_path)
        assert told in line
        assert ("--exclude" in line) == (scores.min() < 0)
