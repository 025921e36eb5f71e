"""What a command prints of its training and its evaluations."""

import argparse
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from hf_infcl.card.telling import ProgressPrinter, make_rows, table_lines
from hf_infcl.cli import launched
from hf_infcl.cli.commands import PARSERS
from hf_infcl.cli.launched import fit_workers, warn_once

PAIRS = {
    **{"loss": 2.5, "image_retrieval_recall@1": 0.25, "text_retrieval_recall@1": 0.5, "text_retrieval_recall@5": 0.75},
    **{
        "image_retrieval_recall@1_low": 0.2,
        "image_retrieval_recall@1_high": 0.3,
        "image_retrieval_recall@1_ceiling": 0.9,
    },
    **{"score_change_low": 0.05, "score_change_high": 0.2},
}
BEFORE = {"loss": 3.0, "image_retrieval_recall@1": 0.2, "text_retrieval_recall@1": 0.3}


def named(metrics: dict[str, float], key: str = "pairs") -> dict[str, float]:
    return {f"eval_{key}_{name}": value for name, value in metrics.items()}


def test_a_table_has_all_metrics_the_score_and_what_has_changed():
    classes = named({"acc1": 0.4, "score_change_low": -0.1, "score_change_high": 0.1, "acc5": 1.0}, "zero_shot")
    before = named(BEFORE) | named({"acc1": 0.375}, "zero_shot")
    rows = make_rows(named(PAIRS) | classes, ["pairs", "zero_shot"], before)
    assert rows == [
        ("pairs", "loss", "2.500", "", "3.000", "-0.500"),
        ("pairs", "image_retrieval_recall@1", "25.00%", "[20.00, 30.00]", "20.00%", "+5.00"),
        ("pairs", "text_retrieval_recall@1", "50.00%", "", "30.00%", "+20.00"),
        ("pairs", "text_retrieval_recall@5", "75.00%", "", "", ""),
        ("pairs", "mean recall@1", "37.50%", "", "25.00%", "+12.50 [+5.00, +20.00]"),
        ("zero_shot", "acc1", "40.00%", "", "37.50%", "+2.50 [-10.00, +10.00] within noise"),
        ("zero_shot", "acc5", "100.00%", "", "", ""),
    ]
    lines = table_lines(rows)
    assert [line.split()[0] for line in lines[:2] + lines[5:]] == ["set", "pairs", "mean", "zero_shot", "acc5"]
    assert len({line.index("%") for line in lines[1:] if "%" in line}) == 1, "numbers stand below each other"


def test_a_table_has_no_empty_columns():
    assert make_rows(named(PAIRS), ["pair"]) == []
    assert table_lines(make_rows(named({"loss": 1.0}), ["pairs"]))[0].split() == ["set", "metric", "value"]
    assert table_lines(make_rows(named({"loss": 1.0}, "set"), ["set"]))[1].split() == ["set", "loss", "1.000"]


class Bar(ProgressCallback):
    """Trainer's bar would print dicts."""


@pytest.mark.parametrize("printer", [PrinterCallback, Bar])
def test_logs_are_lines_of_what_is_new(printer, capsys):
    handler = CallbackHandler([DefaultFlowCallback(), printer()], None, None, None, None)
    trainer = SimpleNamespace(
        callback_handler=handler,
        remove_callback=handler.remove_callback,
        add_callback=handler.add_callback,
        eval_dataset={"pairs": [], "zero_shot": []},
        steps_trained=10,
        optimization=SimpleNamespace(table_lines_groups="the groups"),
    )
    ProgressPrinter(trainer)
    state = TrainerState(max_steps=10, is_world_process_zero=True)
    args: Any = SimpleNamespace(metric_for_best_model=None)

    def log(step: int, **logs: Any) -> list[str]:
        state.global_step = step
        state.log_history.append({**logs, "step": step})
        capsys.readouterr()
        handler.on_log(args, state, SimpleNamespace(), logs)
        return capsys.readouterr().out.splitlines()

    assert log(0, **named(BEFORE))[:2] == ["Before the training:", "set        metric                      value"]
    first = log(1, loss=2.0, learning_rate=1e-3, global_batch_size=4096, samples_seen=4096, epoch=0.1)
    assert first == ["step 1 of 10: loss 2, lr 0.001, global_batch_size 4,096"]
    assert log(2, loss=2.0, learning_rate=1e-4, global_batch_size=4096, epoch=0.2) == [
        "step 2 of 10: loss 2, lr 0.0001"
    ]
    after = log(2, **named(PAIRS))
    assert after[0] == "After step 2:"
    assert [line.split()[:2] for line in after[2:]] == [["pairs", "loss"], ["mean", "recall@1"]]
    assert after[-1].endswith("25.00%  +12.50 [+5.00, +20.00]")
    (more,) = log(2, **named({"acc1": 0.5}, "zero_shot"))
    assert more.split() == ["zero_shot", "acc1", "50.00%"]
    saved = log(2, **named(PAIRS)), log(2, **named({"acc1": 0.5}, "zero_shot"))
    assert [len(lines) for lines in saved] == [6, 1]
    assert saved[0][0] == "With the weights that are saved:"
    args.metric_for_best_model = "eval_pairs_text_retrieval_recall@5"
    deciding = log(3, **named(PAIRS))
    assert [line.split()[0] for line in deciding[2:]] == ["pairs", "text_retrieval_recall@5", "mean"]
    assert log(10, train_runtime=61.0, train_loss=1.5) == ["The training took 61 s; its mean loss was 1.5."]
    trainer.steps_trained = 4
    since = ["The training took 61 s since step 6; its mean loss since step 6 was 1.5."]
    assert log(10, train_runtime=61.0, train_loss=1.5) == since, "after it was resumed"
    state.is_world_process_zero = False
    assert log(10, loss=1.0) == []


def test_only_the_first_process_warns_of_what_all_meet(monkeypatch, capfd):
    record = logging.LogRecord("hf_infcl.trainer.optimization", logging.WARNING, "", 0, "all", None, None)
    of_one = logging.LogRecord("hf_infcl.shards.opening", logging.WARNING, "", 0, "one", None, None)
    wrong = logging.LogRecord("hf_infcl.trainer.optimization", logging.ERROR, "", 0, "wrong", None, None)
    others = logging.LogRecord("accelerate", logging.WARNING, "", 0, "others", None, None)
    for rank, told in (("0", ["all", "one", "wrong", "others"]), ("1", ["one", "wrong", "others"])):
        handler = logging.StreamHandler()
        monkeypatch.setattr(logging, "lastResort", handler)
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings():
            warn_once()
            warnings.warn("of Python", stacklevel=1) if rank == "1" else None
        for one in (record, of_one, wrong, others):
            handler.handle(one)
        assert capfd.readouterr().err.split() == told


def test_the_default_config_of_siglip_is_no_news(monkeypatch, caplog):
    """transformers makes one for each SigLIP, to leave out what is as in it."""
    logger = logging.getLogger("transformers.configuration_utils")
    monkeypatch.setattr(logger, "filters", [])
    text = "Model config: bos_token_id must be `None` or an integer within the vocabulary (between 0 and %d), got %d."
    warn_once()
    for ids in ((31999, 49406), (31999, 49407), (31999, 32000), (999, 49406)):
        logger.warning(text, *ids)
    assert [record.args for record in caplog.records] == [(31999, 32000), (999, 49406)]


def test_too_many_workers_are_told_once(monkeypatch, capfd):
    monkeypatch.setattr(logging, "lastResort", None)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(launched, "cores", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # which torch asks
    for rank, processes, workers, told in (
        ("0", "1", 3, ""),
        ("0", "1", 4, "dataloader_num_workers=4 are more than the 3 cores"),
        ("0", "2", 2, "dataloader_num_workers=2 × 2 processes are more than the 3 cores"),
        ("1", "2", 2, ""),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        options = argparse.Namespace(dataloader_num_workers=workers)
        with warnings.catch_warnings(record=True) as of_torch:
            warnings.simplefilter("always")
            warn_once()
            fit_workers(options)
            DataLoader([1], num_workers=workers)
        assert not of_torch
        said = capfd.readouterr().err
        assert (told in said) if told else not said
        assert said.count("\n") == bool(told)
        assert options.dataloader_num_workers == workers, "as typed"


@pytest.mark.parametrize("value", ["abc", "0", "-1", ""])
def test_a_number_of_processes_that_is_none_is_told(monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE must be the number of processes .*, got '{value}'"):
        fit_workers(argparse.Namespace(dataloader_num_workers=2))


@pytest.mark.parametrize(
    ("processes", "streaming", "used", "told"),
    [
        ("1", False, 3, "Workers that load data: 3 instead of the 8 of lora.yaml, for the 3 cores here."),
        ("2", False, 1, "Workers that load data: 1 for each process instead of the 8 of lora.yaml, for the 3 cores"),
        ("4", False, 1, "Workers that load data: 1 for each process instead of the 8 of lora.yaml, for the 3 cores"),
        ("1", True, 8, "dataloader_num_workers=8 are more than the 3 cores"),
    ],
)
def test_the_workers_of_a_recipe_fit_the_machine(monkeypatch, capfd, processes, streaming, used, told):
    monkeypatch.setattr(launched, "cores", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    words = ["--recipe", "lora", *(["--streaming"] if streaming else [])]
    reader = PARSERS["train"]()
    options = reader.read(words)
    fit_workers(options, reader.file_of("dataloader_num_workers"))
    assert options.dataloader_num_workers == used
    said = capfd.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    options = (typing := PARSERS["train"]()).read([*words, "--dataloader_num_workers", "8"])
    fit_workers(options, typing.file_of("dataloader_num_workers"))
    assert options.dataloader_num_workers == 8
    assert "Pass " in capfd.readouterr().err
