"""Averages of the weights before and after a fine-tuning, the choice of one, and the command `infcl average`."""

import contextlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers import models
from helpers.demo import infcl, infcl_launched, mistake
from helpers.processes import launched
from torch import Tensor, nn

from hf_infcl.evaluation.metrics import score
from hf_infcl.quality.averages import ALPHAS, Measured, chosen, halves, interpolated, measured_at
from hf_infcl.trainer import model_files

State = dict[str, Tensor]


def bits(state: Any) -> dict[str, bytes]:
    """The bytes of each tensor, in which -0.0 and 0.0 differ."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


# ---- Weights ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ends_of_the_line_are_the_start_and_the_end_to_the_bit(dtype):
    start, end = (models.clip(seed=seed).to(dtype).state_dict() for seed in (0, 1))
    start["logit_scale"] = torch.tensor(-0.0, dtype=dtype)
    assert bits(interpolated(start, end, 0)) == bits(start)
    assert bits(interpolated(start, end, 1)) == bits(end)


def test_on_the_line_every_change_is_scaled_alike():
    start, end = models.clip(seed=0).state_dict(), models.clip(seed=1).state_dict()
    between = interpolated(start, end, 0.3)
    for name, tensor in between.items():
        expected = start[name].double() + 0.3 * (end[name].double() - start[name].double())
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if not torch.equal(between[name], start[name])}
    assert len(changed) > 10


def test_changes_are_rounded_once_and_frozen_weights_not_at_all():
    start = {"a": torch.tensor([1.0, 256.0]).bfloat16(), "frozen": torch.tensor([0.1, float("inf"), -0.0])}
    end = {"a": torch.tensor([2.0, 260.0]).bfloat16(), "frozen": start["frozen"].clone()}
    between = interpolated(start, end, 0.1)
    assert between["a"].tolist() == torch.tensor([1.1, 256.4]).bfloat16().tolist()
    assert bits({"f": between["frozen"]}) == bits({"f": start["frozen"]})


def test_statistics_of_batch_norms_move_and_their_counters_do_not():
    start, end = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    end(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    states = [{f"norm.{name}": value for name, value in norm.state_dict().items()} for norm in (start, end)]
    half = interpolated(states[0], states[1], 0.5)
    assert half["norm.running_mean"].tolist() == pytest.approx([0.1, 0.2])  # of 0 and a tenth of the means 2 and 4
    assert half["norm.num_batches_tracked"] == 1
    assert interpolated(states[0], states[1], 0)["norm.num_batches_tracked"] == 0


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_an_alpha_outside_of_both_ends_is_refused(alpha):
    with pytest.raises(ValueError, match=f"from 0, the weights of the start, to 1, those of the end, got {alpha}"):
        interpolated({}, {}, alpha)


def test_other_models_are_refused():
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"a has the shape \(2, 3\) at the start and \(3, 2\) at the end"):
        interpolated(state, {**state, "a": torch.zeros(3, 2)}, 0.5)
    with pytest.raises(ValueError, match="1 weight without a counterpart, such as c of the end"):
        interpolated(state, {**state, "c": torch.zeros(1)}, 0.5)


# ---- The choice ----


def measured(*rows: tuple[float, float, float]) -> list[Measured]:
    return [Measured(alpha, gained, {"g": kept}, {"g": 0.0}) for alpha, gained, kept in rows]


def test_the_greatest_gain_within_the_tolerance_is_chosen_and_equal_gains_go_to_the_start():
    rows = measured((0, 0.1, 0.5), (0.1, 0.2, 0.6), (0.2, 0.3, 0.49), (0.3, 0.3, 0.5), (0.4, 0.9, 0.489), (1, 1, 0))
    assert chosen(rows, 0.01).alpha == 0.2, "0.49 loses exactly one point"
    assert chosen(rows, 0).alpha == 0.3
    assert chosen(rows, 0.02).alpha == 0.4
    assert chosen(rows, 1).alpha == 1
    two = [Measured(one.alpha, one.gained, {**one.validation, "h": 1 - one.alpha}, one.rest) for one in rows]
    assert chosen(two, 0.1).alpha == 0.1, "each guard has to be kept"
    assert chosen(two, 0.01).alpha == 0


def test_among_gains_that_noise_may_explain_the_loss_chooses():
    """A recall@1 of captions that repeat is greatest by chance; the loss knows their pair ids."""
    gains, losses = (0.10, 0.13, 0.12, 0.16, 0.11, 0.07), (3.0, 2.6, 2.2, 2.4, 2.3, 1.0)
    rows = [
        Measured(n / 5, gain, {"g": 0.5}, {}, gain - 0.05, loss)
        for n, (gain, loss) in enumerate(zip(gains, losses, strict=True))
    ]
    assert chosen(rows, 0.01).alpha == 0.4, "1.0 has the lowest loss, but gains too little"
    assert chosen([replace(one, validation={"g": 0.4}) if one.alpha == 0.4 else one for one in rows], 0.01).alpha == 0.8
    assert chosen([replace(one, gained_low=one.gained) for one in rows], 0.01).alpha == 0.6, "no gain is as great"
    assert chosen([replace(one, loss=None) for one in rows], 0.01).alpha == 0.6, "classes have no loss"
    assert chosen([replace(one, gained_low=None) for one in rows], 0.01).alpha == 0.6


def test_what_is_measured_of_an_average():
    names = ("image_retrieval_recall@1", "text_retrieval_recall@1")
    metrics = {f"eval_pairs_{name}{end}": v for name in names for end, v in (("", 0.4), ("_low", 0.3))}
    metrics |= {"eval_pairs_loss": 2.0, "eval_classes_acc1": 0.8, "eval_classes_acc1_low": 0.6}
    metrics |= {"eval_g_validation_acc1": 0.1, "eval_g_rest_acc1": 0.2, "eval_labels_mean_average_precision": 0.5}
    one = measured_at(0.5, metrics, ["pairs", "classes"], ["g"])
    assert (one.gained, one.gained_low, one.loss) == (pytest.approx(0.6), pytest.approx(0.45), 2.0)
    assert (one.validation, one.rest) == ({"g": 0.1}, {"g": 0.2})
    assert measured_at(0.5, metrics, ["classes", "labels"], ["g"]).gained_low is None
    one = measured_at(0.5, metrics, ["classes"], [])
    assert (one.gained_low, one.loss) == (0.6, None)
    one = measured_at(0.5, {k: v for k, v in metrics.items() if not k.endswith("_low")}, ["classes"], ["g"])
    assert one.gained_low is None


def test_scores_are_the_recall_of_both_directions_or_the_accuracy():
    metrics = {"eval_a_image_retrieval_recall@1": 0.2, "eval_a_text_retrieval_recall@1": 0.4, "eval_b_acc1": 0.7}
    assert score(metrics, "eval_a_") == pytest.approx(0.3)
    assert score(metrics, "eval_b_") == 0.7
    with pytest.raises(ValueError, match="Neither recall@1 nor acc1 was measured with the prefix 'eval_c_'"):
        score(metrics, "eval_c_")


def test_the_halves_of_a_guard_are_random_disjoint_and_always_the_same():
    rows = datasets.Dataset.from_dict({"row": list(range(101))})
    first, second = (half["row"][:] for half in halves(rows))
    assert (len(first), len(second)) == (51, 50)
    assert sorted(first + second) == list(range(101))
    assert 15 < sum(row < 51 for row in first) < 36, "not the first rows, and not every second one"
    assert first != list(range(0, 101, 2))
    assert [half["row"][:] for half in halves(rows)] == [first, second]
    with pytest.raises(ValueError, match=r"it has 1 row\. Give at least 2"):
        halves(rows.select([0]))


# ---- The command ----


def add_processor(folder: Path) -> None:
    from helpers.processors import clip_processor

    clip_processor().save_pretrained(folder)


@pytest.fixture(scope="module")
def tuned(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with start/, a small CLIP trained on the digits old/, 0 to 4, and end/, fine-tuned on new/, 5 to 9."""
    folder = tmp_path_factory.mktemp("average")
    for name, labels in (("old", range(5)), ("new", range(5, 10))):
        for split, count in (("train", 100), ("test", 60)):
            (folder / name / split).mkdir(parents=True)
            lines = (demo / f"digits/{split}/metadata.jsonl").read_text().splitlines()
            lines = [line for line in lines if json.loads(line)["label"] in labels][:count]
            (folder / name / split / "metadata.jsonl").write_text("\n".join(lines))
            for row in map(json.loads, lines):
                places = [folder / name / split]
                if split == "test":
                    places.append(folder / f"{name}_classes/test" / str(row["label"]))
                    places[-1].mkdir(parents=True, exist_ok=True)
                for place in places:
                    shutil.copy(demo / f"digits/{split}" / row["file_name"], place)
    start = demo / "clip-init"
    for result, data in (("start", "old"), ("end", "new")):
        words = ["train", "--model", start, "--dataset", folder / data, "--output_dir", folder / result]
        words += ["--pair_id_column", "label", "--per_device_train_batch_size", 50, "--check_samples", 0]
        words += ["--max_steps", 40 if data == "old" else 15]
        infcl(*words, "--learning_rate", 2e-3, "--use_cpu", "--report_to", "none", "--save_strategy", "no")
        start = folder / result
    return folder


def command(tuned: Path, out: Path, *words: Any) -> list[Any]:
    place = ["average", tuned / "start", tuned / "end", "--output_dir", out]
    return [*place, "--use_cpu", "--report_to", "none", "--per_device_eval_batch_size", 60, *words]


def with_sets(tuned: Path) -> list[Any]:
    gains = ["--zero_shot_dataset", tuned / "new_classes", "--eval_dataset", tuned / "new", "--pair_id_column", "label"]
    return [*gains, "--guard_dataset", tuned / "old_classes", "--templates", "the number {}", "a handwritten {}"]


@pytest.fixture(scope="module")
def auto(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the results and the output of an average that was chosen."""
    out, printed = tmp_path_factory.mktemp("auto") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed):
        infcl(*command(tuned, out, *with_sets(tuned), "--alpha", "auto", "--guard_tolerance", 0.05))
    return out, json.loads((out / "average_results.json").read_text()), printed.getvalue()


def test_auto_measures_all_averages_chooses_one_and_saves_it(tuned, auto):
    out, results, printed = auto
    assert [one["alpha"] for one in results["measured"]] == list(ALPHAS)
    best = chosen([Measured(**one) for one in results["measured"]], 0.05)
    assert results["alpha"] == best.alpha
    start, end = results["measured"][0], results["measured"][-1]
    assert end["gained"] > start["gained"], "the training has taught something"
    assert end["rest"]["guard1_old_classes"] < start["rest"]["guard1_old_classes"], "and something was forgotten"
    assert list(start["validation"]) == ["guard1_old_classes"]
    assert [one["validation"] for one in results["measured"]] != [one["rest"] for one in results["measured"]]
    assert str(tuned) not in json.dumps(results)
    states = [transformers.CLIPModel.from_pretrained(tuned / name).state_dict() for name in ("start", "end")]
    saved = transformers.CLIPModel.from_pretrained(out).state_dict()
    assert bits(saved) == bits(interpolated(*states, best.alpha))
    assert transformers.AutoProcessor.from_pretrained(out).tokenizer.vocab_size > 0
    assert "A random half of the rows of each guard" in printed
    assert f"The average at alpha {best.alpha:g} is in {out}." in printed
    assert not (out / "README.md").exists()


def test_an_average_measures_what_evaluate_measures_of_it(tuned, auto, tmp_path):
    out, results, _ = auto
    sets = [word for word in with_sets(tuned) if word not in ("--guard_dataset", tuned / "old_classes")]
    infcl("evaluate", "--model", out, *sets, "--use_cpu", "--output_dir", tmp_path, "--report_to", "none")
    metrics = json.loads((tmp_path / "eval_results.json").read_text())
    (gained,) = [one["gained"] for one in results["measured"] if one["alpha"] == results["alpha"]]
    both = score(metrics, "eval_pairs_"), score(metrics, "eval_zero_shot_")
    assert gained == pytest.approx(sum(both) / 2, abs=1e-9)


def test_a_training_saves_the_average_that_the_command_finds_of_its_ends(tuned, tmp_path, capsys, monkeypatch):
    """Also after a kill before the results were written; and card and output tell what was gained and what it cost."""
    monkeypatch.setattr(model_files, "ALPHAS", (0.0, 0.2, 0.4, 1.0))
    out, again = tmp_path / "out", tmp_path / "again"
    options = [*with_sets(tuned), "--use_cpu", "--report_to", "none", "--per_device_eval_batch_size", 60]
    options += ["--guard_tolerance", 0.05]
    words = ["train", "--model", tuned / "start", "--dataset", tuned / "new", "--output_dir", out, "--max_steps", 6]
    words += ["--per_device_train_batch_size", 50, "--learning_rate", 2e-3, "--average_with_start", "auto", *options]
    words += ["--save_steps", 6, "--check_samples", 0]  # only the end counts here
    infcl(*words)
    printed = capsys.readouterr().out
    results = json.loads((out / "average_results.json").read_text())
    infcl("average", tuned / "start", out / "checkpoint-6", "--alpha", "auto", "--output_dir", again, *options)
    expected = json.loads((again / "average_results.json").read_text())
    assert results == expected
    assert 0 < results["alpha"] < 1, "the test has something to average"
    saved, end = (bits(transformers.CLIPModel.from_pretrained(f).state_dict()) for f in (out, out / "checkpoint-6"))
    assert saved == bits(transformers.CLIPModel.from_pretrained(again).state_dict()) != end
    (chosen_one,) = [one for one in results["measured"] if one["alpha"] == results["alpha"]]
    before, after = results["measured"][0]["rest"]["guard1_old_classes"], chosen_one["rest"]["guard1_old_classes"]
    row = rf"{100 * before:.2f}% +{100 * after:.2f}% +\{100 * (after - before):+.2f}  guard"
    assert re.search(row, printed)
    card = (out / "README.md").read_text()
    assert f"| `old_classes`, split test | guard | {before:.4f} | {after:.4f} | {after - before:+.4f} |" in card
    assert f"at α = {results['alpha']:g}" in card
    measured = json.loads((out / "eval_results.json").read_text())
    assert sum(score(measured, f"eval_{name}_") for name in ("pairs", "zero_shot")) / 2 == pytest.approx(
        chosen_one["gained"]
    )
    card_of_facts = tmp_path / "copied"
    shutil.copytree(out, card_of_facts, ignore=shutil.ignore_patterns("checkpoint-*"))
    infcl("card", card_of_facts)
    assert (card_of_facts / "README.md").read_text() == card
    for name in ("trainer_state.json", "eval_results.json", "average_results.json", "model.safetensors"):
        (out / name).unlink()
    infcl(*words, "--resume_from_checkpoint", "auto")
    assert json.loads((out / "average_results.json").read_text()) == expected
    assert bits(transformers.CLIPModel.from_pretrained(out).state_dict()) == saved


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--average_with_start most", "--average_with_start must be 'auto' or a number from 0"),
        ("--average_with_start 1.5", "--average_with_start must be 'auto' or a number from 0"),
        ("--average_with_start auto --eval_dataset d", "--guard_dataset for the other, or a number"),
        ("--average_with_start auto --guard_dataset d", "--average_with_start auto weighs what was gained"),
        ("--average_with_start 0.5 --save_strategy no", "which only a checkpoint then keeps"),
        ("--average_with_start 0.5 --guard_tolerance 2", "guard_tolerance must be a number from 0 to 1"),
    ],
)
def test_an_average_that_the_end_could_not_find_is_refused_at_the_start(demo, tmp_path, capsys, words, complaint):
    place = ["train", "--model", demo / "clip-init", "--dataset", demo / "digits", "--output_dir", tmp_path / "out"]
    assert complaint in mistake(capsys, *place, "--use_cpu", *words.split(), code=2), "an option is wrong"
    assert not (tmp_path / "out").exists()


def test_without_sets_the_average_is_only_saved(tuned, tmp_path, capsys):
    for alpha, source in ((0, "start"), (1, "end")):
        infcl(*command(tuned, tmp_path / source, "--alpha", alpha))
        saved, given = (
            transformers.CLIPModel.from_pretrained(f).state_dict() for f in (tmp_path / source, tuned / source)
        )
        assert bits(saved) == bits(given)
        assert not (tmp_path / source / "average_results.json").exists()
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("This model was not trained: ") == (alpha == 0)


def test_a_training_whose_average_is_the_start_ends_and_begins_its_card_with_that(tuned, tmp_path, capsys):
    words = ["train", "--model", tuned / "start", "--dataset", tuned / "new", "--output_dir", tmp_path]
    words += ["--max_steps", 1, "--per_device_train_batch_size", 4, "--use_cpu", "--report_to", "none"]
    infcl(*words, "--average_with_start", 0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "This model was not trained: its weights are those before the training, as was asked for (α = 0)."
    first, _, second, *_ = (tmp_path / "README.md").read_text().partition(f"# {tmp_path.name}\n\n")[2].splitlines()
    assert first == last
    assert second.startswith("It is a `CLIPModel`.")


def test_two_processes_measure_and_save_what_one_does(tuned, auto, tmp_path):
    out = tmp_path / "out"
    code, printed = launched(infcl_launched, *command(tuned, out, *with_sets(tuned), "--alpha", auto[1]["alpha"]))
    assert code == 0, printed
    results = json.loads((out / "average_results.json").read_text())
    assert results["measured"] == [one for one in auto[1]["measured"] if one["alpha"] in (0, auto[1]["alpha"], 1)]
    saved, expected = (transformers.CLIPModel.from_pretrained(f).state_dict() for f in (out, auto[0]))
    assert bits(saved) == bits(expected)


def test_batch_norms_are_told(tmp_path, capsys):
    for seed, name in enumerate(("start", "end")):
        torch.manual_seed(seed)
        models.align().save_pretrained(tmp_path / name)
        add_processor(tmp_path / name)
    infcl("average", tmp_path / "start", tmp_path / "end", "--output_dir", tmp_path / "out", "--use_cpu")
    assert "batch norms were averaged like the weights" in capsys.readouterr().out


BOTH = "average DEMO/clip-init DEMO/clip-init"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("average DEMO/no-start DEMO/clip-init", "There is no folder"),
        ("average DEMO/clip-init DEMO/no-end", "There is no folder"),
        ("average DEMO/clip-init OTHER", "Start and end are not the same model"),
        (f"{BOTH} --alpha 1.5", "--alpha must be 'auto' or a number from 0 (the start)"),
        (f"{BOTH} --alpha most", "--alpha must be 'auto' or a number from 0 (the start) to 1"),
        (f"{BOTH} --alpha auto", "--guard_dataset for the other, or a number as --alpha"),
        (f"{BOTH} --guard_tolerance 3", "guard_tolerance must be a number from 0 to 1"),
        (f"{BOTH} --output_dir DEMO/clip-init", "already holds a model"),
        (f"{BOTH} --output_dir NOTES/README.md", "Nothing can be written to output_dir"),
        (f"{BOTH} --output_dir=", "--output_dir is empty. Name the folder"),
        (f"{BOTH} --eval_dataset d --eval_pictures 3", "eval_pictures=3 is not supported: they are those of one model"),
        ("average DEMO/clip-init", "the following arguments are required: END"),
    ],
)
def test_what_is_wrong_with_an_average_is_one_line(demo, tmp_path, capsys, words, complaint):
    models.clip().save_pretrained(tmp_path / "other")
    add_processor(tmp_path / "other")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/README.md").write_text("My notes.")
    for name, place in {"DEMO": demo, "OTHER": tmp_path / "other", "NOTES": tmp_path / "notes"}.items():
        words = words.replace(name, str(place))
    first, *given = words.split()
    assert complaint in mistake(capsys, first, "--use_cpu", "--output_dir", tmp_path / "out", *given)
    assert [file.name for file in (tmp_path / "notes").iterdir()] == ["README.md"]
    assert (tmp_path / "notes/README.md").read_text() == "My notes."
