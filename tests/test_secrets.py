"""No file, log line, request or tracker holds a token, or the user, password or query of a URL."""

import base64
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.demo import infcl
from helpers.hub import hub_for_this_process
from helpers.servers import serving
from helpers.shards import write_tar
from huggingface_hub.errors import HFValidationError
from transformers import TrainerCallback

from hf_infcl import ImageTextStream, load_pairs
from hf_infcl.card import Evaluation, Source
from hf_infcl.cli import train
from hf_infcl.files.text import Url, without_secrets
from hf_infcl.options.commands import DataOptions
from hf_infcl.shards import opening
from hf_infcl.trainer.checkpoints import cause

TOKEN = "hf_" + "s3cr3t" * 6
USER, PASSWORD, KEY = "somebody", "hunter2", "AKIA/SE+CR=ET"
SECRETS = (TOKEN, USER, PASSWORD, KEY)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@host:80/a/{0..3}.tar", "http://***@host:80/a/{0..3}.tar"),
        ("s3://K:S/E+C=T@bucket/shards/", "s3://***@bucket/shards/"),
        ("s3://KEY@bucket/x", "s3://***@bucket/x"),
        ("http://u:p@ss@host/a@b", "http://***@b"),
        ("https://host/a.tar?X-Amz-Signature=1&b", "https://host/a.tar?***"),
        ("simplecache::https://u:p@host/a.tar", "simplecache::https://***@host/a.tar"),
        ('see "ftp://u:p@h/x", then http://u:it\'s@h', 'see "ftp://***@h/x", then http://***@h'),
        # These have no secrets.
        ("hf://datasets/me/data@main/{0..9}.tar", "hf://datasets/me/data@main/{0..9}.tar"),
        ("http://host:8080/v@1/a.tar", "http://host:8080/v@1/a.tar"),
        ("shards/{0..3}.tar", "shards/{0..3}.tar"),
        ("file:///data/shards, me@home, a?b and /x:y@z", "file:///data/shards, me@home, a?b and /x:y@z"),
    ],
)
def test_only_the_secrets_of_a_url_are_hidden(text, shown):
    assert without_secrets(text) == shown
    assert repr(Url(text)) == repr(shown)
    assert str(pickle.loads(pickle.dumps(Url(text)))) == text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (f"http://{USER}:{PASSWORD}@host/{{0..3}}.tar", "{0..3}.tar"),
        (f"http://{USER}:{PASSWORD}@host/data/{{0..3}}.tar", "data"),
        (f"s3://{USER}:{KEY}@bucket/shards/", "shards"),
        (f"s3://{USER}:{KEY}@bucket/", "bucket"),
        (f"s3://{USER}:{KEY}@bucket", "bucket"),
        (f"https://host/shards/0.tar?signature={KEY}", "shards"),
        (f"simplecache::https://{USER}:{PASSWORD}@host/shards/*.parquet", "shards"),
        ("file:///data/of/somebody/shards", "shards"),
        ("hf://buckets/me/mine/x.tar", "mine"),
        ("/data/of/somebody/shards/{0..3}.tar", "shards"),
        ("../gone/shards", "shards"),
        ("gone/more/{0..3}.tar", "more"),
    ],
)
def test_only_the_last_folder_of_a_url_is_published(source, name):
    (told,) = train.describe_sources(DataOptions([source]))
    assert (told.dataset, told.on_hub, told.license) == (name, False, None)


def test_urls_and_names_that_are_no_hub_ids_are_refused_for_the_card():
    with pytest.raises(ValueError, match=r"'s3://\*\*\*@bucket/x' is a URL, of which a card should only .* 'x'\."):
        Source(f"s3://{USER}:{KEY}@bucket/x", False)
    with pytest.raises(ValueError, match="is not the id of a dataset on the Hub") as error:
        Evaluation("data/of/mine", True, "test", 1, "pairs")
    assert isinstance(error.value.__cause__, HFValidationError), "which says what is wrong with the name"


def test_messages_hide_the_secrets_of_a_source():
    url = f"s3://{USER}:{KEY}@bucket/shards"
    for source in (f"{url}/{{3..0}}.tar", f"{url}/{{3}}.tar", f"{url}/{{0,1}}.zip", [f"{url}/0.tar"] * 2):
        with pytest.raises(ValueError, match=r"s3://\*\*\*@bucket") as error:
            ImageTextStream(source, weights=[1.0] if isinstance(source, list) else None)
        assert KEY not in str(error.value)
    with pytest.raises(ValueError, match=r"'s3://\*\*\*@bucket/shards' is a URL") as error:
        load_pairs(url, split="train")
    assert KEY not in str(error.value)
    refused = OSError("403 Forbidden for https://lfs.example/file?X-Amz-Signature=hunter2")
    assert cause(refused) == "OSError: 403 Forbidden for https://lfs.example/file?***"
    moved = [f"http://{USER}:{password}@{host}/0.tar" for password, host in (("a", "x"), ("b", "y"))]
    assert opening.shard_names(moved) == ["***@x/0.tar", "***@y/0.tar"], "a new password is no new order"


class Tracker(TrainerCallback):
    """Receives all that the trackers of `transformers` send."""

    received: list[str] = []  # noqa: RUF012

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        told = args.to_json_string(), args.to_sanitized_dict(), args.to_dict(), args, repr(args), model.config
        self.received += map(str, told)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.received.append(json.dumps(logs))


def write_shards(demo: Path, folder: Path) -> None:
    rows = [json.loads(line) for line in (demo / "digits/train/metadata.jsonl").read_text().splitlines()[:24]]
    for shard in range(2):
        members = []
        for number, row in enumerate(rows[12 * shard : 12 * shard + 12]):
            image = (demo / "digits/train" / row["file_name"]).read_bytes()
            members += [(f"{number}.png", image), (f"{number}.txt", row["caption"][0].encode())]
        write_tar(folder / f"{shard}.tar", members)


def test_a_run_tells_no_secret_anywhere(small, demo, tmp_path, monkeypatch, capfd, caplog):
    caplog.set_level(logging.DEBUG, "hf_infcl")
    monkeypatch.setattr(opening, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Tracker])
    monkeypatch.setattr(Tracker, "received", [])
    write_shards(demo, tmp_path / "served")
    where = small.index("--dataset")
    with (
        hub_for_this_process(monkeypatch, tmp_path / "cache") as hub,
        serving(tmp_path / "served") as (address, dropped),
    ):
        source = f"{address.replace('://', f'://{USER}:{PASSWORD}@')}/{{0..1}}.tar"
        words = [*small[:where], "--dataset", source, *small[where + 2 :], "--streaming", "--max_steps", 2]
        words += [
            "--push_to_hub",
            "--hub_model_id",
            "me/mine",
            "--hub_token",
            TOKEN,
            "--hub_strategy",
            "all_checkpoints",
        ]
        dropped += [False, False, True]
        infcl(*words, "--save_steps", 1, "--hub_always_push")
        printed = "".join(capfd.readouterr())
        assert "It is tried again" in printed + caplog.text
        for mistake in (source.replace("..1", "..2"), f"{source}?token={KEY}"):  # a shard is missing; no such format
            with pytest.raises(SystemExit):
                infcl(*[mistake if word == source else word for word in words], "--overwrite_output_dir")
        files = {path: data for trees in hub.commits.values() for tree in trees for path, data in tree.items()}
        assert {"README.md", "training_record.json", "checkpoint-1/trainer_state.json"} <= files.keys()
    files |= {str(path): path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    printed += "".join(capfd.readouterr())
    texts = [printed, caplog.text, *Tracker.received]
    assert len(Tracker.received) > 5
    for secret in SECRETS:
        forms = [secret.encode(), base64.b64encode(secret.encode()).rstrip(b"=")]
        assert not [text for text in texts if secret in text]
        assert not [path for path, data in files.items() if any(form in data for form in forms)]
        assert not [body for body in hub.bodies if any(form in body for form in forms)]
