"""Conversion between OpenCLIP and transformers: embeddings, weights, processors, folders, refusals, the command."""

import copy
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.demo import mistake
from helpers.open_clip_models import (
    CASES,
    CLIP,
    COMPLETED,
    config,
    folder_of,
    inputs,
    know_the_small_tower,
    load_processor,
    recorded,
    same_weights,
    tensors,
)
from helpers.processors import tokenizer
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_infcl import cli
from hf_infcl.models import open_clip_inputs as tokenizing
from hf_infcl.models import pretrained as folders
from hf_infcl.models.open_clip import convert, from_open_clip, load_open_clip, to_open_clip
from hf_infcl.models.open_clip_inputs import image_processor, preprocess_config
from hf_infcl.models.open_clip_names import mlp_ratio


@pytest.fixture(autouse=True)
def small_tower(monkeypatch):
    know_the_small_tower(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_embeddings_scale_and_bias_are_those_of_open_clip(case):
    model, notes = from_open_clip(tensors(case), config(case))
    pixels, ids = inputs()
    with torch.no_grad():
        output = model(pixel_values=pixels, input_ids=ids)
    torch.testing.assert_close(output.image_embeds, torch.tensor(recorded()[case]["images"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(output.text_embeds, torch.tensor(recorded()[case]["texts"]), atol=1e-6, rtol=0)
    assert model.logit_scale.item() == torch.tensor(10.0).log().item()
    if case.startswith("SigLIP"):
        assert model.logit_bias.item() == tensors(case)["logit_bias"].item()
    assert bool(notes) == (case in COMPLETED)
    of_case = {"MetaCLIP 2": "MetaClip2", "SigLIP": "Siglip"}.get(case.split(" w")[0], "CLIP")
    assert type(model).__name__.startswith(of_case)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_every_bit_is_kept(case):
    model, _ = from_open_clip(tensors(case), config(case))
    back, back_config = to_open_clip(model, load_processor(case))
    given = {name.removeprefix("text.") if case == "custom text" else name: t for name, t in tensors(case).items()}
    if case not in COMPLETED:
        assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in given.items()}
        assert all(torch.equal(back[name], given[name]) for name in given)
    again, _ = from_open_clip(back, back_config)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert back_config["preprocess_cfg"] == {"resize_mode": "shortest", **config(case)["preprocess_cfg"]}


def test_half_precision_is_kept():
    model, _ = from_open_clip({name: tensor.half() for name, tensor in tensors("CLIP").items()}, config("CLIP"))
    assert model.dtype == torch.float16


def test_mlp_ratios_give_back_the_width():
    for width, hidden in ((1664, 8192), (1152, 4304), (1408, 6144), (768, 3151), (512, 1001)):
        assert int(width * mlp_ratio(hidden, width)) == hidden


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"multimodal_cfg": {}}, "CoCa"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3]}}, "modified ResNet"),
        ({"vision_cfg": {"timm_model_name": "convnext_base"}}, "ConvNeXt"),
        ({"vision_cfg": {"timm_model_name": "eva02_base_patch16_clip_224"}}, "EVA"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "roberta-base"),
        ({"vision_cfg": {"no_ln_pre": True}}, "no_ln_pre=True"),
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg has pool_type='avg', .* only None or 'tok'"),
        ({"vision_cfg": {"image_size": [16, 24]}}, r"\(16, 24\) pixels is not square"),
        ({"text_cfg": {"no_causal_mask": True}}, "text_cfg has no_causal_mask=True"),
        ({"text_cfg": {"proj_bias": True}}, "text_cfg has proj_bias=True"),
        ({"text_cfg": {"act_kwargs": {"approximate": "none"}, "norm_kwargs": {"bias": False}}}, "norm_kwargs"),
        ({"text_cfg": {"act_kwargs": {"inplace": True}}}, "act_kwargs"),
        ({"vision_cfg": {"windows": 4}}, "windows=4"),
    ],
)
def test_a_tower_without_counterpart_is_refused_by_name_and_with_a_remedy(change, words):
    fields = copy.deepcopy(CLIP)
    for key, value in change.items():
        fields[key] = fields.get(key, {}) | value
    with pytest.raises(ValueError, match=rf"(?s){words}.*OpenCLIP itself, or start from"):
        from_open_clip(tensors("CLIP"), fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logit_scale": torch.tensor(10.0)}, r"logit_scale is \[10.0\], and the logarithm"),
        ({"logit_scale": torch.tensor(float("nan"))}, "logit_scale is"),
        ({"logit_scale": None}, "no logit_scale"),
        ({"visual.proj": None}, "lacks tensors that its config implies: visual.proj"),
        ({"visual.ln_mid.weight": torch.ones(3)}, "does not imply: visual.ln_mid.weight"),
        ({"positional_embedding": torch.ones(16, 24)}, r"shape torch.Size\(\[16, 24\]\) .* is torch.Size\(\[8, 24\]\)"),
        ({"logit_bias": torch.zeros(())}, "logit_bias, which transformers' CLIPModel"),
        ({"epoch": 3}, "values such as 'epoch'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, words):
    given = {name: tensor for name, tensor in (tensors("CLIP") | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=words):
        from_open_clip(given, CLIP)


def test_a_config_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no vision_cfg and no text_cfg"):
        from_open_clip(tensors("CLIP"), {"embed_dim": 3})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 20}, "28 tokens and the text tower 20"),
        ({"vocab_size": 256}, "28 tokens and the text tower 256"),
        ({"hf_tokenizer_name": ""}, "not the one of OpenAI's CLIP"),
        ({"tokenizer_kwargs": {"strip_sep_token": True}}, "strip_sep_token"),
        ({"tokenizer_kwargs": {"clean": "none"}}, "clean='none'"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        tokenizing.prepared(tokenizer(), config("CLIP")["model_cfg"]["text_cfg"] | change)


@pytest.mark.parametrize("case", ["CLIP", "SigLIP"])
def test_the_saved_tokenizer_cleans_as_open_clip_and_cuts_at_the_model_s_length(case, tmp_path):
    folder = folder_of(case, tmp_path / "theirs")
    convert(folder, tmp_path / "ours")
    saved = transformers.AutoProcessor.from_pretrained(tmp_path / "ours").tokenizer
    assert saved.model_max_length == 8
    plain = tokenizer()
    if case == "SigLIP":
        assert saved("  A_B,  c. ")["input_ids"] == plain("a b c")["input_ids"]
        assert saved.model_input_names == ["input_ids"]
    else:
        assert saved(" a   b ")["input_ids"] == plain("a b")["input_ids"]
    assert len(saved("a b c d e f g h i j", truncation=True)["input_ids"]) == 8
    assert tokenizing.cleaning(saved) == {"CLIP": "whitespace", "SigLIP": "canonicalize"}[case]


def test_texts_are_cut_at_the_tokenizer_s_limit_in_both_libraries_unless_another_is_given(tmp_path):
    text = {"vocab_size": 28, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 1}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    towers = {"text_config": {**text, "max_position_embeddings": 12}, "vision_config": vision}
    model = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=16))
    model.save_pretrained(tmp_path / "ours")
    processor = load_processor("CLIP")  # its tokenizer states 8
    processor.save_pretrained(tmp_path / "ours")
    words = "b c d e f g h i j k l m n"
    for tokens, length in ((None, 8), (12, 12), (9, 9)):
        said = convert(tmp_path / "ours", tmp_path / str(tokens), to="open_clip", max_text_tokens=tokens)
        left_out = f"Texts are cut at {length} tokens, as here: the other {12 - length} of the model's 12 positions"
        assert any(left_out in sentence for sentence in said) == (length < 12)
        theirs, of_theirs = load_open_clip(tmp_path / str(tokens))
        assert theirs.config.text_config.max_position_embeddings == length
        assert of_theirs.tokenizer.model_max_length == length
        ids = of_theirs.tokenizer(words, truncation=True, return_tensors="pt")["input_ids"]
        assert ids.shape == (1, length)
        with torch.no_grad():
            both = [one.eval().get_text_features(input_ids=ids).pooler_output for one in (theirs, model)]
        torch.testing.assert_close(*both, atol=1e-6, rtol=0)
    for wrong in (0, 13):
        with pytest.raises(ValueError, match="--max_text_tokens must be from 1 to the 12 positions"):
            convert(tmp_path / "ours", tmp_path / "wrong", to="open_clip", max_text_tokens=wrong)
    with pytest.raises(ValueError, match="--max_text_tokens is for --to open_clip"):
        convert(tmp_path / "8", tmp_path / "wrong", max_text_tokens=8)


def test_image_processors_that_open_clip_has_not_are_refused():
    fine = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    for wrong, words in (
        ({"resample": Image.Resampling.NEAREST}, "resample=0"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"size": {"shortest_edge": 18}}, "'shortest_edge': 18"),
        ({"do_center_crop": False}, "crop_size=None, and .*'height': 16"),
    ):
        with pytest.raises(ValueError, match=words):
            preprocess_config(transformers.CLIPImageProcessorPil(**fine | wrong), 16)
    with pytest.raises(ValueError, match="longest"):
        image_processor({"resize_mode": "longest"}, 16)
    with pytest.raises(ValueError, match="nearest"):
        image_processor({"interpolation": "nearest"}, 16)


def test_what_open_clip_cannot_build_is_refused():
    with pytest.raises(ValueError, match="it is of the type blip"):
        to_open_clip(SimpleNamespace(config=transformers.BlipConfig()), None)
    model, _ = from_open_clip(tensors("CLIP"), CLIP)
    longer = load_processor("CLIP")
    longer.tokenizer.add_tokens(["word"])
    longer.tokenizer.eos_token = "word"
    with pytest.raises(ValueError, match="29 tokens and the text tower 28"):
        to_open_clip(model, longer)
    model.config.text_config.hidden_act = "quick_gelu"
    with pytest.raises(ValueError, match="quick_gelu and gelu"):
        to_open_clip(model, load_processor("CLIP"))
    model, _ = from_open_clip(tensors("SigLIP"), config("SigLIP"))
    model.config.vision_config.hidden_act = "gelu_pytorch_tanh"
    with pytest.raises(ValueError, match="has gelu_pytorch_tanh, and timm's vit_small_patch8_siglip_16 gelu"):
        to_open_clip(model, load_processor("SigLIP"))
    model.config.vision_config.num_attention_heads = 4
    with pytest.raises(ValueError, match="num_attention_heads 4"):
        to_open_clip(model, load_processor("SigLIP"))


@pytest.mark.parametrize("case", ["CLIP", "SigLIP", "MetaCLIP 2"])
def test_the_command_converts_there_and_back_and_both_formats_share_a_folder(case, tmp_path, capsys):
    folder = str(folder_of(case, tmp_path / "theirs"))
    cli.main("convert", [folder, str(tmp_path / "ours")])
    model = transformers.AutoModel.from_pretrained(tmp_path / "ours")
    expected, _ = from_open_clip(tensors(case), config(case))
    assert same_weights(model, expected)
    module = json.loads((tmp_path / "ours/sentence_bert_config.json").read_text())
    length = config(case)["model_cfg"]["text_cfg"]["context_length"]
    assert module["processing_kwargs"]["text"]["max_length"] == length
    assert module["processing_kwargs"]["text"]["padding"] == ("max_length" if case == "SigLIP" else True)
    printed = capsys.readouterr().out
    assert f"{type(model).__name__} and its processor were written to {tmp_path / 'ours'}." in printed
    cli.main("convert", [str(tmp_path / "ours"), str(tmp_path / "ours"), "--to", "open_clip", "--repository", "me/it"])
    both, _ = load_open_clip(tmp_path / "ours")
    assert same_weights(both, model)
    assert same_weights(transformers.AutoModel.from_pretrained(tmp_path / "ours"), model)
    written = json.loads((tmp_path / "ours/open_clip_config.json").read_text())
    assert written["model_cfg"]["text_cfg"]["hf_tokenizer_name"] == "me/it"
    assert "holds a model already (config.json)" in mistake(capsys, "convert", folder, tmp_path / "ours")
    other = shutil.copytree(folder, tmp_path / "other")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    for source, format in ((folder, "transformers"), (tmp_path / "ours", "open_clip")):
        line = mistake(capsys, "convert", source, other, "--to", format)
        assert "holds a model already (open_clip_config.json)" in line
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before, "the files of another model"


def test_a_checkpoint_of_the_training_needs_the_name_of_its_model(tmp_path, capsys):
    saved = {"epoch": 2, "name": "run", "state_dict": {f"module.{n}": t for n, t in tensors("CLIP").items()}}
    path = tmp_path / "epoch_2.pt"
    torch.save(saved, path)
    assert "need --open_clip_model beside them" in mistake(capsys, "convert", path, tmp_path / "ours")
    named = str(folder_of("CLIP", tmp_path / "theirs") / folders.CONFIG)
    found, of_found, _ = folders.read(path, named)
    expected, _ = from_open_clip(tensors("CLIP"), CLIP)
    assert same_weights(from_open_clip(found, of_found)[0], expected)
    tokenizer().save_pretrained(tmp_path / "letters")
    words = [str(path), str(tmp_path / "ours"), "--tokenizer", str(tmp_path / "letters")]
    cli.main("convert", [*words, "--open_clip_model", named])
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "ours")
    assert processor.tokenizer("a b")["input_ids"] == tokenizer()("a b")["input_ids"]
    line = mistake(capsys, "convert", words[0], tmp_path / "other", *words[2:], "--to", "open_clip")
    assert "--tokenizer is for a source of OpenCLIP" in line


@pytest.mark.parametrize("needed", ["openai/clip-vit-base-patch32", "no/tokenizer"])
def test_a_checkpoint_of_the_training_offline_needs_a_local_tokenizer(needed, tmp_path, monkeypatch, capsys):
    """CLIP's own, which OpenCLIP's package has, and one of the Hub that the config names."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "open_clip.tokenizer", None)
    stated = config("CLIP")
    stated["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = needed if needed == "no/tokenizer" else None
    (tmp_path / "config.json").write_text(json.dumps(stated))
    torch.save({"state_dict": tensors("CLIP")}, tmp_path / "epoch_2.pt")
    named = ["--open_clip_model", tmp_path / "config.json"]
    line = mistake(capsys, "convert", tmp_path / "epoch_2.pt", tmp_path / "ours", *named)
    assert needed in line
    assert line.endswith("Without the Hub, name a local tokenizer: --tokenizer FOLDER.")
    named += ["--tokenizer", tmp_path / "no"]
    line = mistake(capsys, "convert", tmp_path / "epoch_2.pt", tmp_path / "ours", *named)
    assert line.endswith("no' to load a tokenizer from."), "the advice would be to do what was done"


def test_sources_that_hold_no_model_are_told_as_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "program.pt").write_bytes(b"no tensors")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / folders.CONFIG).write_text(json.dumps(config("CLIP")))
    for source, name, words in (
        ("empty", None, "no open_clip_config.json"),
        ("", None, "no weights, such as open_clip_model.safetensors"),
        ("", "ViT-B-32", "is for a file of weights"),
        ("program.pt", str(tmp_path / folders.CONFIG), "cannot be read as a file of tensors"),
        ("list.pt", str(tmp_path / folders.CONFIG), "holds a list"),
    ):
        with pytest.raises(ValueError, match=words):
            folders.read(tmp_path / source, name)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ValueError, match="pip install open_clip_torch"):
        folders.read(tmp_path / "list.pt", "ViT-B-32")


@pytest.mark.parametrize("source", ["/no/folder", "./folder", "outputs/no/clip", "no_such.pt", "outputs/clip"])
def test_a_path_that_does_not_exist_is_told_as_one(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)  # where no demo has made a folder outputs
    of_files = [["--open_clip_model", "ViT-B-32"]] if source.endswith(".pt") else []
    for more in [[], ["--to", "open_clip"], *of_files]:
        with pytest.raises(SystemExit):
            cli.main("convert", [source, str(tmp_path / "ours"), *more])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"There is no {'file' if source.endswith('.pt') else 'folder'} {source!r}" in line
        hub = "no model of this name was downloaded" if source in ("outputs/clip", "no_such.pt") else "is not the id of"
        hub = "to load a model from" if source.startswith(("/", ".")) else hub
        assert ("Check the path" if "--open_clip_model" in more else hub) in line
        assert not (tmp_path / "ours").exists()


def test_a_hub_repository_is_read_like_a_folder(tmp_path, monkeypatch):
    folder = folder_of("CLIP", tmp_path)
    asked = []
    monkeypatch.setattr(folders, "snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    monkeypatch.setattr(folders, "hf_hub_download", lambda name, file: asked.append((name, file)))
    found, _, read = folders.read("hf-hub:laion/model")
    assert asked == ["laion/model", ("laion/model", "open_clip_model.safetensors")]
    assert read == folder
    assert found.keys() == tensors("CLIP").keys()


def test_weights_that_are_not_finite_are_not_converted(tmp_path, capsys):
    folder = folder_of("CLIP", tmp_path / "theirs")
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    weights["text_projection"][0, 0] = torch.nan
    save_file(weights, file)
    line = mistake(capsys, "convert", folder, tmp_path / "ours")
    assert f"{str(folder)!r} holds weights that are NaN or infinite: text_projection.weight (1 of" in line
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("case", ["CLIP", "SigLIP"])
def test_embeddings_that_differ_are_not_written(case, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace())
    monkeypatch.setattr("hf_infcl.models.open_clip.differences", lambda *_: (0.99, 0.1))
    line = mistake(capsys, "convert", folder_of(case, tmp_path / "theirs"), tmp_path / "ours")
    assert "the least cosine is 0.990000" in line
    assert not (tmp_path / "ours").exists()
