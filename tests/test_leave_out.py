"""`leave_out` finds pairs that do not belong together, on any number of processes and after resumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import models
from helpers.concepts import Concepts, linear
from helpers.shards import numbered, write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import FullPrecision, parameters, trained, trainer_for
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.card.facts import training_settings
from hf_infcl.card.pictures import plot_curves
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.quality import selection
from hf_infcl.quality.selection import BORDER, BORDER_OF_MANY, NO_KEY, RESTED, WithoutNoisyPairs, mean_of_trained
from hf_infcl.step.extensions import PairSelection, StepObserver
from hf_infcl.step.grad_cache import Features
from hf_infcl.step.window import Window

LEARNS = {
    **{"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2, "max_steps": 48, "learning_rate": 1e-2},
    **{"objective": "softmax", "lr_scheduler_type": "constant", "log_level": "error"},
}


def trainer(folder: Any, data: Any, **options: Any) -> InfCLTrainer:
    return trainer_for(folder, linear(), data, **{**LEARNS, **options})


def selection_of(made: InfCLTrainer) -> WithoutNoisyPairs:
    (found,) = [one for one in made.window_step.extensions if isinstance(one, WithoutNoisyPairs)]
    return found


def left_out(made: InfCLTrainer) -> list[float]:
    return [entry["left_out"] for entry in made.state.log_history if "left_out" in entry]


# ---- What it finds ----


def test_clean_pairs_are_trained_to_the_bit_as_without_it(tmp_path):
    made = [trainer(tmp_path, Concepts(), **option) for option in ({}, {"leave_out": "noisy"})]
    for one in made:
        one.train()
    assert torch.equal(*map(parameters, made))
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in made]
    assert losses[0] == losses[1]
    assert selection_of(made[1]).averages.mean_visits == 12
    assert set(left_out(made[1])) == {0.0}
    assert not left_out(made[0])


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A training in which 30% of the captions are swapped, that saved in step 30."""
    saves = {"save_strategy": "steps", "save_steps": 30}
    return trained(trainer(tmp_path_factory.mktemp("noisy"), Concepts(wrong=0.3), leave_out="noisy", **saves))


def test_swapped_captions_are_found_and_the_others_are_learned_better(noisy, tmp_path):
    data, selection = Concepts(wrong=0.3), selection_of(noisy)
    fast = selection.averages._averages[0]
    found = fast < selection.border * mean_of_trained(fast.double(), selection.border)
    assert torch.equal(selection.left_out(), found), "as the ledger says; all rows were seen often enough"
    assert found[data.is_wrong].float().mean() > 0.9
    assert found[~data.is_wrong].float().mean() < 0.1
    assert left_out(noisy)[0] == 0
    assert 0.2 < left_out(noisy)[-1] < 0.4
    plain = trained(trainer(tmp_path, Concepts(wrong=0.3)))
    held_out = Concepts(seed=2).batch()
    hits = []
    for one in (noisy, plain):
        with torch.no_grad():
            images, texts = DualEncoder(one.model.eval()).embed(one.model, held_out)
        hits.append(((images @ texts.T).argmax(1) == torch.arange(512)).float().mean())
    assert hits[0] > hits[1] + 0.01


class Classes(models.Pairs):
    """Images of a few classes, whose one caption each has; a tenth has another class's caption and id."""

    def __init__(self, sizes: list[float]) -> None:
        super().__init__(192)
        generator = torch.Generator().manual_seed(1)
        pictures = torch.randn(len(sizes), *self.images.shape[1:], generator=generator)
        label = torch.multinomial(torch.tensor(sizes).float(), 192, True, generator=generator)
        self.images = pictures[label] + 0.6 * torch.randn(self.images.shape, generator=generator)
        self.is_wrong = torch.arange(192) % 10 == 0
        self.ids = (label + self.is_wrong) % len(sizes)
        self.tokens = torch.randint(2, 40, (len(sizes), 5), generator=generator)[self.ids]
        self.mask = torch.ones_like(self.tokens)


@pytest.mark.parametrize(("sizes", "batch"), [([1, 1, 1], 32), ([1, 1, 1, 1], 32), ([90, 7, 3], 32), ([1, 1, 1], 4)])
def test_wrong_labels_among_few_classes_are_found_and_right_ones_stay(tmp_path, sizes, batch):
    data = Classes(sizes)
    passes = 16 if batch > 4 else 8  # of more steps
    steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
    steps["max_steps"] = 192 * passes // batch
    selection = selection_of(trained(trainer(tmp_path, data, leave_out="noisy", **steps)))
    found = selection.left_out()
    assert found[data.is_wrong].float().mean() > 0.75
    assert found[~data.is_wrong].float().mean() < 0.05


def test_it_stops_before_it_leaves_most_pairs_out(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(selection.logger, "warning", said.append)
    keys, scores = torch.arange(100)[None], torch.full((1, 100), 4.0).double()
    scores[0, :20] = -1
    one = WithoutNoisyPairs(100)
    for _ in range(4):
        stays = one._stays(keys, scores)
    assert int((~stays).sum()) == 20
    scores[0, 99] = 3000  # moves the border above all others
    assert bool(one._stays(keys, scores).all())
    assert said == [
        "The rule of leave_out stops, because it would leave out 99% of the pairs. All are trained from now on."
    ]
    again = WithoutNoisyPairs(100)
    again.load_state_dict(one.state_dict())
    for each in (one, again):
        assert bool(each._stays(keys, scores).all())
        assert not each.left_out().any()
        assert each.card["pairs left out"].startswith("none, because it would leave out 99% of the pairs")
    one.close()
    assert len(said) == 1


# ---- Decisions ----


def window_of(keys: Tensor, new: int | None = None) -> Window:
    batch = {"pixel_values": torch.zeros(len(keys), 1), "input_ids": torch.zeros(len(keys), 1), "pair_keys": keys}
    batch |= {} if new is None else {"new_images": new}
    return Window([batch])


def drawn(window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and features of a global batch of 24 of 48 pairs, of which every third does not belong together."""
    generator = torch.Generator().manual_seed(window)
    keys = torch.randperm(48, generator=generator)[:24]
    images = F.normalize(torch.randn(48, 8, generator=torch.Generator().manual_seed(99)), dim=1)
    wrong = torch.arange(0, 48, 3)
    texts = images.clone()
    texts[wrong] = texts[wrong].roll(1, 0)
    noise = 0.1 * torch.randn(2, 24, 8, generator=generator)
    features = (F.normalize(one[keys] + more, dim=1) for one, more in zip((images, texts), noise, strict=True))
    return keys, *features


def decisions(rank: int, world_size: int, windows: int = 16) -> list[list[int]]:
    """The keys that each window leaves out on this process."""
    selection, each = WithoutNoisyPairs(48), 24 // world_size
    found = []
    for number in range(windows):
        keys, images, texts = (part[rank * each : (rank + 1) * each] for part in drawn(number))
        stays = selection.select(window_of(keys), (images, texts), torch.tensor(1.0), None)
        found.append([] if stays is None else keys[~stays].tolist())
    return found


def test_decisions_are_the_same_on_any_number_of_processes(ranks):
    (alone,) = ranks.run(decisions, 1)
    first = next(number for number, keys in enumerate(alone) if keys)
    assert 3 < first < 12, "after three visits on average"
    assert {key % 3 for keys in alone for key in keys} == {0}
    assert sum(map(len, alone[first:])) > 4 * len(alone[first:])
    for world_size in (2, 3):
        by_rank = ranks.run(decisions, world_size)
        for number, keys in enumerate(alone):
            assert sorted(key for found in by_rank for key in found[number]) == sorted(keys)


def test_old_pairs_of_a_replay_are_neither_counted_nor_left_out():
    selection, left = WithoutNoisyPairs(48), []
    for number in range(16):
        keys, *features = drawn(number)
        stays = selection.select(window_of(keys, new=12), tuple(features), torch.tensor(1.0), None)
        assert stays is None or bool(stays[12:].all())
        left.append(0 if stays is None else int((~stays).sum()))
    assert sum(left) > 10
    assert int(selection.averages.visits.sum()) == 16 * 12
    assert selection.logs() == {"left_out": round(sum(left) / (16 * 12), 4)}


def test_m_and_the_border_are_those_of_the_rule():
    averages = torch.tensor([5.0, 4.0, 3.0, 2.9, 1.0, -1.0, 0.2]).double()
    m = mean_of_trained(averages, 0.6)
    assert m == pytest.approx((5 + 4 + 3 + 2.9) / 4)
    assert m == pytest.approx(float(averages[averages >= 0.6 * m].mean()))
    for share, border in ((0.0, None), (0.005, None), (0.02, BORDER), (0.099, BORDER), (0.1, BORDER_OF_MANY)):
        selection = WithoutNoisyPairs(1000)
        scores = torch.full((1000,), 4.0).double()
        scores[: int(1000 * share)] = -1
        for visit in range(3):
            assert selection.border is None
            stays = selection._stays(torch.arange(1000)[None], scores[None])
            assert bool(stays.all()) == (visit < 2 or border is None)
        assert selection.border == border


def begun(rows: int = 40) -> WithoutNoisyPairs:
    """Every fifth pair looks wrong; three epochs are over, in the last of which the selection has begun."""
    selection, scores = WithoutNoisyPairs(rows), torch.full((rows,), 4.0).double()
    scores[::5] = -1
    for epoch in range(3):
        assert not len(selection.skipped_rows(epoch))
        selection._stays(torch.arange(rows)[None], scores[None])
    assert selection.border == BORDER_OF_MANY
    return selection


def test_epochs_pass_over_what_is_left_out_and_what_rests():
    selection, rows = begun(), torch.arange(40)
    wrong = rows % 5 == 0
    for epoch in range(3, 7):
        skipped_rows = selection.skipped_rows(epoch)
        part = rows % 4 == epoch % 4
        assert torch.equal(skipped_rows, wrong ^ part)
        assert torch.equal(selection.skipped_rows(epoch), skipped_rows), "it goes on"
        again = WithoutNoisyPairs(40)
        again.load_state_dict(selection.state_dict())
        assert torch.equal(again.skipped_rows(epoch), skipped_rows), "it resumes"
        keys = rows[~skipped_rows][None]
        stays = selection._stays(keys, torch.where(wrong[keys], -1.0, 4.0).double())
        assert torch.equal(stays, ~wrong[keys])


def test_only_scores_of_pairs_that_were_not_trained_count():
    selection = begun()
    fast = selection.averages.fast

    def visit(epoch: int, key: int, score: float) -> float:
        before = float(fast[key])
        keys = torch.tensor([[1, 2, 3, 4, 6, key]])
        scores = torch.tensor([[4.0] * 5 + [score]]).double()
        selection.skipped_rows(epoch)
        selection._stays(keys, scores)
        return (float(fast[key]) - before) / (score - before)

    assert visit(3, 7, 0.0) == 0, "it was trained in the epoch before"
    assert visit(4, 7, 0.0) == 0
    assert visit(6, 7, 3.0) == pytest.approx(RESTED[0]), "it has rested"
    assert visit(6, 7, 0.0) == 0, "and was trained since"
    assert visit(6, 5, 0.0) == pytest.approx(RESTED[0]), "it was left out since the epoch 2"
    assert visit(6, 5, 0.0) == pytest.approx(RESTED[0])
    selection.averages.visits[30] = 1
    assert visit(7, 30, 0.0) == pytest.approx(0.5), "the first visits all count alike"


def test_it_does_not_begin_while_pairs_are_learned():
    """Right pairs that are new to a model leave the scores below 0 with each visit; wrong ones stay."""
    for stays, begins in ((0.3, False), (0.8, True)):
        selection: Any = WithoutNoisyPairs(48)
        for quarter in range(4, 24):
            below = 0.9 * stays ** (quarter / 4)
            selection.averages = SimpleNamespace(mean_visits=quarter / 4, share_below_zero=below)
            if selection.border is None and below > 0.01:
                selection._begin(3.0)
                assert (selection.border is not None) == (begins and quarter >= 12)
        assert begins or "falls fast" in selection.waits_for


def test_what_is_never_left_out():
    def stays(keys: list[int], scores: list[float]) -> list[list[bool]]:
        selection = WithoutNoisyPairs(100)
        warm = torch.tensor([4.0] * 50 + [-1.0] * 50).double()
        for _ in range(3):
            selection._stays(torch.arange(100)[None], warm[None])
        selection.averages.visits[7] = 1
        return selection._stays(torch.tensor(keys), torch.tensor(scores).double()).tolist()

    assert stays([[0, 60], [1, 61]], [[4, -1], [4, -1]]) == [[True, False], [True, False]]
    assert stays([[0, 1], [60, 61]], [[4, 4], [-1, -0.9]]) == [[True, True], [False, True]], "one stays on a process"
    assert stays([[0, 60], [NO_KEY, 61]], [[4, -1], [-3, -1]]) == [[True, False], [True, True]], "an old pair is none"
    assert stays([[0, NO_KEY], [7, 60]], [[4, -3], [-9, -1]]) == [[True, True], [True, False]], "seen only twice"
    assert stays([[0, 60], [1, 61]], [[4, torch.nan], [4, -1]])[0] == [True, True], "a window that is skipped"


# ---- Keys ----


class Seen(StepObserver):
    """Notes the key and the tokens of each pair that is trained."""

    name = "seen"

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, bool, str]]] = []

    def after_first_pass(self, window: Window, features: Features) -> None:
        tokens, old = torch.cat([batch["input_ids"] for batch in window.batches]), window.replayed()
        old = torch.zeros(len(tokens), dtype=torch.bool) if old is None else old
        rows = zip(window.pair_keys().tolist(), old.tolist(), map(str, tokens.tolist()), strict=True)
        self.steps.append(list(rows))


def rank_seen(rank: int, world_size: int, folder: str, kind: str, steps: int) -> list[tuple[int, bool, str]]:
    options: dict[str, Any] = {"gradient_accumulation_steps": 4 // world_size, "max_steps": steps}
    data: Any = models.Pairs(40)
    seen = Seen()
    if kind == "wrapped":
        data = ConcatDataset([Subset(data, range(30)), models.Pairs(20, seed=7)])
    elif kind == "replay":
        data = numbered(range(40))
        options |= {"replay_dataset": stream_of(folder), "data_collator": collate}
    trainer_for(folder, data=data, leave_out="noisy", extensions=[seen], **options).train()
    return [row for step in seen.steps for row in step]


@pytest.mark.parametrize("kind", ["table", "wrapped", "replay"])
def test_each_pair_has_one_key_wherever_it_is_read(ranks, tmp_path, kind):
    write_tars(tmp_path / "shards", [10] * 4)
    folder = str(tmp_path / "shards")
    rows = [row for world_size in (1, 2) for one in ranks.run(rank_seen, world_size, folder, kind, 7) for row in one]
    new = [(key, tokens) for key, old, tokens in rows if not old]
    assert len(new) > 100
    assert len({key for key, _ in new}) == len({tokens for _, tokens in new}) == len(set(new)) > 30
    assert min(key for key, _ in new) >= 0
    if kind == "table":
        assert all(str(models.Pairs(40).tokens[key].tolist()) == tokens for key, tokens in new)


def test_a_row_that_replaces_a_bad_one_has_no_key():
    from hf_infcl.data.store import KeyedRows
    from hf_infcl.shards.layout import sample_key

    rows = KeyedRows([{"skipped": 0}, {"skipped": 2}, {}], [2, 0, 1])
    assert [item.key for item in rows.__getitems__([0, 1, 2])] == [2, 0, NO_KEY]
    assert rows.__getitems__([2, 1])[0].key == NO_KEY
    assert sample_key("0/00001.tar", "000007") == 8573465787132824520, "stable"
    assert min(sample_key("a", str(number)) for number in range(100)) >= 0


# ---- Resumes ----


def continued(folder: Any, whole: InfCLTrainer, **options: Any) -> InfCLTrainer:
    """A training that goes on from the checkpoint of another one."""
    checkpoint = str(Path(whole.args.output_dir, "checkpoint-30"))
    made = trained(trainer(folder, Concepts(wrong=0.3), leave_out="noisy", **options), resume=checkpoint)
    assert made.steps_trained == 18
    return made


def test_a_resumed_training_goes_on_to_the_bit(noisy, tmp_path):
    assert 0 < left_out(noisy)[29] < 1, "it had begun"
    made = continued(tmp_path, noisy)
    assert torch.equal(parameters(made), parameters(noisy))
    for one, other in zip(selection_of(made).averages.slow(), selection_of(noisy).averages.slow(), strict=True):
        assert torch.equal(one, other)
    assert left_out(made)[-1] == left_out(noisy)[-1]


def rank_continued(rank: int, world_size: int, checkpoint: str, output: str) -> tuple[Tensor, list[float], Tensor]:
    options = {"leave_out": "noisy", "gradient_accumulation_steps": 2 // world_size}
    made = trained(trainer(output, Concepts(wrong=0.3), **options), resume=checkpoint)
    return parameters(made), left_out(made), selection_of(made).averages.slow()[1]


def test_workers_that_read_ahead_read_the_same_rows(noisy, tmp_path):
    made = continued(tmp_path, noisy, dataloader_num_workers=2, dataloader_prefetch_factor=4)
    assert torch.equal(parameters(made), parameters(noisy))


def test_two_processes_go_on_with_the_same_decisions(ranks, noisy, tmp_path):
    found = ranks.run(rank_continued, 2, f"{noisy.args.output_dir}/checkpoint-30", str(tmp_path))
    assert torch.equal(found[0][2], found[1][2])
    moved = parameters(noisy) - torch.nn.utils.parameters_to_vector(linear().parameters())
    assert (found[0][0] - parameters(noisy)).norm() < 1e-2 * moved.norm()
    assert found[0][1] == left_out(noisy)


def rank_trained(rank: int, world_size: int, output: str) -> tuple[Tensor, list[float]]:
    steps = {"gradient_accumulation_steps": 2 // world_size}
    made = trained(trainer(output, Concepts(wrong=0.3), leave_out="noisy", callbacks=[FullPrecision()], **steps))
    return parameters(made).cpu(), left_out(made)


def test_two_processes_train_as_one(ranks, tmp_path, backend):
    ((one, shares),) = ranks.run(rank_trained, 1, str(tmp_path / "one"), backend=backend)
    assert 0.2 < shares[-1] < 0.4
    begin = next(step for step, share in enumerate(shares) if share)
    moved = one - torch.nn.utils.parameters_to_vector(linear().parameters()).detach()
    for found, others in ranks.run(rank_trained, 2, str(tmp_path / "two"), backend=backend):
        assert others[: begin + 4] == shares[: begin + 4]
        assert others == pytest.approx(shares, abs=0.02), "of averages at the border the rounding may decide"
        assert (found - one).norm() < 1e-2 * moved.norm()


def test_another_selection_is_a_change_of_the_run(noisy, tmp_path):
    made = trainer(tmp_path, Concepts(wrong=0.3))
    with pytest.raises(ValueError, match="leave_out was 'noisy' and is None"):
        made.train(resume_from_checkpoint=str(Path(noisy.args.output_dir, "checkpoint-30")))


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": "0.2"}, r"leave_out must be 'noisy', got '0.2'\. .* `infcl score`, .* `--exclude "),
        ({"leave_out": "clean"}, "leave_out must be 'noisy', got 'clean'"),
        (
            {"leave_out": "noisy", "contrastive_weight": 0.0},
            "leave_out=noisy and contrastive_weight=0 exclude each other: it switches off",
        ),
    ],
)
def test_selections_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        InfCLTrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_a_training_too_short_for_it_is_told_before_it_begins(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(selection.logger, "warning", said.append)
    trainer_for(tmp_path, data=models.Pairs(16), leave_out="noisy", max_steps=5).train()
    before, after = said
    assert (
        "leave_out will leave nothing out: this training sees each pair 2.5 times, and the rule begins after 3"
        in before
    )
    assert after.startswith("leave_out has left nothing out: each pair was seen 2.5 times, and the rule begins after 3")
    said.clear()
    trainer_for(tmp_path, data=models.Pairs(16), leave_out="noisy", max_steps=6).train()
    assert not any("will leave" in words for words in said)


@pytest.mark.parametrize("kind", ["stream", "replayed stream", "another stream"])
def test_a_stream_is_refused(tmp_path, kind):
    write_tars(tmp_path / "shards", [10] * 4)
    data: Any = models.Stream(40) if kind == "another stream" else stream_of(str(tmp_path / "shards"))
    old = {"replay_dataset": models.Pairs(40)} if kind == "replayed stream" else {}
    with pytest.raises(ValueError, match=r"which a stream does not have\. Score .* `infcl score`, .* \(`--exclude`\)"):
        trainer_for(tmp_path, data=data, leave_out="noisy", **old)


class Nothing(PairSelection):
    name = "nothing"

    def select(
        self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None
    ) -> Tensor | None:
        return torch.zeros(len(features[0]), dtype=torch.bool)


def test_a_window_of_which_nothing_is_left(tmp_path):
    made = trainer(tmp_path, Concepts(), extensions=[Nothing()], max_steps=1)
    with pytest.raises(ValueError, match=r"None of the 128 pairs .* the selection \(nothing\) has left them all out"):
        made.train()


# ---- What is told ----


def test_the_curves_and_the_card_say_what_was_left_out(noisy, tmp_path):
    history = noisy.state.log_history
    plot_curves(history, tmp_path / "with.png")
    plot_curves([{k: v for k, v in entry.items() if k != "left_out"} for entry in history], tmp_path / "without.png")
    heights = [Image.open(tmp_path / f"{name}.png").size[1] for name in ("with", "without")]
    assert heights[0] > 1.5 * heights[1], "a panel more"
    share = sum(left_out(noisy)) / len(left_out(noisy))
    assert training_settings(noisy)["pairs left out"] == (
        f"those that did not seem to belong together, {share:.1%} of those seen"
    )


def test_the_share_on_the_card_is_that_of_the_whole_training(noisy):
    selection, again = selection_of(noisy), WithoutNoisyPairs(512)
    again.load_state_dict(selection.state_dict())
    assert again.card == selection.card == {"pairs left out": training_settings(noisy)["pairs left out"]}


def test_the_card_says_what_the_rule_waits_for():
    selection, keys = WithoutNoisyPairs(2), torch.tensor([[0, 1]])
    for scores, reason in (
        ([1.0, 1.0], "each pair was seen 1.0 times, and the rule begins after 3"),
        ([1.0, 1.0], "each pair was seen 2.0 times, and the rule begins after 3"),
        ([1.0, 1.0], "pairs that are learned score 1.0 on average, and the rule begins at 2"),
        ([100.0, 100.0], "0.0% of the pairs score below 0, and the rule begins at 1%"),
    ):
        assert bool(selection._stays(keys, torch.tensor([scores], dtype=torch.float64)).all())
        assert selection.card == {"pairs left out": f"none, because {reason}"}
    selection._stays(keys, torch.tensor([[100.0, -1000.0]], dtype=torch.float64))
    assert "none" not in selection.card["pairs left out"], "it has begun"
