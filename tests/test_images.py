"""Images on their way to the model: decoding, the uint8 transform, which matches transformers' own, augmentation."""

import contextlib
import io
import itertools
import math
import struct
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from helpers.pictures import captioned, file_of, picture
from helpers.processors import clip_processor, siglip2_processor, siglip_processor
from PIL import Image, ImageOps, PngImagePlugin
from torch.utils.data import DataLoader
from transformers.image_transforms import convert_to_rgb

from hf_infcl.data import ContrastiveCollator, ImageTextDataset
from hf_infcl.data import images as decoding
from hf_infcl.data.images import decode_rgb, to_rgb, transparency
from hf_infcl.data.pairs import augment
from hf_infcl.data.streams import ImageTextStream
from hf_infcl.data.transforms import ImageTransform

# Opaque, half transparent and fully transparent pixels of many colours.
TRANSPARENT = np.random.default_rng(0).integers(0, 256, (20, 24, 4), dtype=np.uint8)
TRANSPARENT[:8, :, 3], TRANSPARENT[8:12, :, 3] = 0, 255


def pattern(height: int, width: int) -> np.ndarray:
    y, x, channel = np.mgrid[:height, :width, :3]
    return ((x * 7 + y * 13 + channel * 83 + x * y // 3) % 256).astype(np.uint8)


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, which JPEG preserves."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.normal(0, 10, smooth.shape)).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options) -> bytes:
    return file_of(image, "JPEG", **{"quality": 90, **options})


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


class TestDecoding:
    def rgb(self, image: Image.Image, tmp_path: Path, name: str) -> np.ndarray:
        image.save(tmp_path / name)
        dataset = ImageTextDataset(Dataset.from_dict({"image": [str(tmp_path / name)], "caption": ["a"]}))
        decoded = dataset[0]["image"]
        assert decoded.dtype == np.uint8
        assert decoded.shape == (image.height, image.width, 3)
        return decoded

    def test_paths_bytes_and_formatted_datasets(self, tmp_path):
        picture(3).save(tmp_path / "3.png")
        for value in (str(tmp_path / "3.png"), (tmp_path / "3.png").read_bytes(), picture(3)):
            rows = Dataset.from_dict({"image": [value], "caption": ["a"]})
            for dataset in (rows, rows.with_format("numpy")):
                assert np.array_equal(ImageTextDataset(dataset)[0]["image"], np.asarray(picture(3)))

    def test_grey(self, tmp_path):
        grey = np.array([[0, 100, 255]], np.uint8)
        assert self.rgb(Image.fromarray(grey), tmp_path, "grey.png").tolist() == [[[v] * 3 for v in (0, 100, 255)]]

    @pytest.mark.parametrize("name", ["grey16.png", "grey16.tif"])
    def test_16_bit_grey_is_scaled_not_clipped(self, tmp_path, name):
        grey = np.array([[0, 256, 0x8000, 0xFFFF]], np.uint16)
        assert self.rgb(Image.fromarray(grey), tmp_path, name)[0, :, 0].tolist() == [0, 1, 128, 255]

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("mode", sorted({*Image.MODES} - {"La"} - {m for m in Image.MODES if m[0] in "FI"}))
    def test_every_mode_is_what_the_installed_processor_makes_of_it(self, mode):
        """To the bit, in fp32, for PIL images of this mode and for files that hold it."""
        image, processor = Image.fromarray(TRANSPARENT), clip_processor().image_processor
        if mode == "LAB":
            image = Image.merge("LAB", image.split()[:3])
        elif mode != "RGBA":
            image = image.convert({"PA": "LA", "RGBa": "RGBA"}.get(mode, "RGB")).convert(mode)

        def of(pixels: Image.Image | np.ndarray) -> torch.Tensor:
            return processor(pixels, return_tensors="pt")["pixel_values"]

        assert torch.equal(of(to_rgb(image)), of(image))
        for form in ("PNG", "TIFF", "GIF", "WEBP"):
            with contextlib.suppress(OSError, ValueError, KeyError):  # it cannot hold this mode
                file = file_of(image, form)
                assert torch.equal(of(decode_rgb(file)), of(Image.open(io.BytesIO(file)))), form

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
    def test_a_colour_that_is_transparent_is_what_the_installed_processor_makes_of_it(self, mode):
        image = Image.fromarray(TRANSPARENT[..., :3]).convert(mode)
        clear = 0 if mode == "1" else image.getpixel((1, 1))
        file = file_of(image, "PNG", transparency=clear if mode != "P" else bytes([0, 100, 255] * 85))
        opened = Image.open(io.BytesIO(file))
        assert "transparency" in opened.info
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = convert_to_rgb(opened, return_numpy=True)
        assert np.array_equal(decode_rgb(file), expected)
        assert not np.array_equal(decode_rgb(file_of(image, "PNG")), expected)

    def test_a_pointer_of_git_lfs_is_named(self):
        with pytest.raises(ValueError, match="it is a pointer of Git LFS in place of the image: run `git lfs pull`"):
            decode_rgb(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")

    def test_16_bit_grey_with_a_transparent_value(self):
        grey = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.uint16))
        assert decode_rgb(file_of(grey, "PNG", transparency=0x8000))[0, :, 0].tolist() == [0, 255, 255]

    def test_the_release_decides_what_becomes_of_transparency(self, monkeypatch):
        assert transparency().startswith("laid on white")
        file = file_of(Image.fromarray(TRANSPARENT), "PNG")
        monkeypatch.setattr("transformers.image_transforms.convert_to_rgb", lambda image: image.convert("RGB"))
        assert np.array_equal(decode_rgb(file), TRANSPARENT[..., :3])
        assert transparency.__wrapped__().startswith("dropped")

    def test_32_bit_integers_have_no_known_range(self):
        file = file_of(Image.fromarray(np.full((2, 2), 70_000, np.int32)), "TIFF")
        with pytest.raises(ValueError, match="its pixels are 32-bit integers, whose range is not known"):
            decode_rgb(file)

    def test_grey_of_a_pgm_with_16_bits(self):
        assert decode_rgb(b"P5 2 1 65535\n\x80\x00\xff\xff")[0, :, 0].tolist() == [128, 255]

    @pytest.mark.parametrize("what", ["text", "compressed text", "profile", "a wrong checksum"])
    def test_what_is_not_pixels_does_not_decide(self, what):
        info, image = PngImagePlugin.PngInfo(), picture(3)
        if "text" in what:
            for number in range(70 if what == "text" else 1):
                info.add_itxt(str(number), "a" * 2_000_000, zip="compressed" in what)
        file = file_of(image, "PNG", pnginfo=info, icc_profile=bytes(2_000_000) if what == "profile" else None)
        bad = struct.pack(">I", 2) + b"tEXtab" + bytes(4)
        if what == "a wrong checksum":
            file = file[:33] + bad + file[33:]
        with pytest.raises((ValueError, OSError, SyntaxError)):
            Image.open(io.BytesIO(file)).load()
        assert np.array_equal(decode_rgb(file), np.asarray(image))

    @pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
    def test_every_orientation_is_that_of_pil(self, form):
        for orientation in range(10):
            file = file_of(photograph(16, 32), form, exif=oriented(orientation))
            expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))
            assert np.array_equal(decode_rgb(file), expected), orientation

    @pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
    def test_a_photo_is_turned_although_its_other_tags_cannot_be_written(self, form):
        """Cameras and editors write tags of other types than the standard's, which PIL reads and does not write."""
        turned = 0x0112, 3, 1, struct.pack("<HH", 6, 0)
        odd = [
            (tag, kind, 4 if kind in (2, 7) else 1, value)
            for tag in (0x0100, 0x010F, 0x011A, 0x0132, 0x8769, 0x8825, 0x9286)
            for kind, value in ((2, b"\xff\xfe\0\0"), (5, bytes(4)), (7, b"abcd"), (9, b"\xff" * 4), (11, b"\0\0\x80?"))
        ]
        for tag in odd:
            tags = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in sorted([turned, tag]))
            exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
            assert decode_rgb(file_of(Image.new("RGB", (4, 2)), form, exif=exif)).shape == (4, 2, 3), tag


def turned_at_the_end_of_its_header(encoded: bytes) -> bytes:
    """A JPEG with EXIF data right before its pixels, where few programs write them."""
    at, exif = encoded.index(b"\xff\xda"), oriented(6).tobytes()
    return encoded[:at] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + encoded[at:]


def without_app_segments(encoded: bytes) -> bytes:
    """A JPEG without JFIF's segment, which comes first."""
    return encoded[:2] + encoded[4 + struct.unpack(">H", encoded[4:6])[0] :]


JPEGS = {
    "4:4:4": (jpeg(photograph(37, 53), subsampling=0), True),
    "4:2:2": (jpeg(photograph(37, 53), subsampling=1), True),
    "4:2:0": (jpeg(photograph(37, 53), subsampling=2), True),
    "progressive": (jpeg(photograph(64, 80), progressive=True), True),
    "grey": (jpeg(photograph(37, 53).convert("L")), True),
    "upright by EXIF": (jpeg(photograph(37, 53), exif=oriented(1)), True),
    "with a comment": (jpeg(photograph(37, 53), comment="a" * 300), True),
    "with a profile of its colours": (jpeg(photograph(37, 53), icc_profile=bytes(200)), True),
    "without JFIF": (without_app_segments(jpeg(photograph(37, 53))), True),
    "as RGB": (jpeg(photograph(37, 53), keep_rgb=True), True),
    "bytes behind its end": (jpeg(photograph(37, 53)) + b"trailing", True),
    "turned by EXIF": (jpeg(photograph(37, 53), exif=oriented(6)), False),
    "turned by EXIF behind its size": (turned_at_the_end_of_its_header(jpeg(photograph(37, 53))), False),
    "CMYK": (jpeg(photograph(37, 53).convert("CMYK")), False),
}


@pytest.fixture(params=["PIL", "simplejpeg"])
def fast(request, monkeypatch) -> Counter:
    """Runs with and without the extra `fast`; counts the images decoded by simplejpeg."""
    counts: Counter = Counter()
    if request.param == "PIL":
        monkeypatch.setattr(decoding, "simplejpeg", None)
        return counts
    simplejpeg = pytest.importorskip("simplejpeg")

    class Counting:
        @staticmethod
        def decode_jpeg(*args, **options):
            pixels = simplejpeg.decode_jpeg(*args, **options)
            counts["decoded"] += 1
            return pixels

    monkeypatch.setattr(decoding, "simplejpeg", Counting)
    return counts


class TestFastDecoding:
    @pytest.mark.parametrize("kind", JPEGS)
    def test_pixels_are_those_of_pil(self, kind, fast, request):
        encoded, by_simplejpeg = JPEGS[kind]
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB"))
        assert np.array_equal(decode_rgb(encoded), expected)
        assert fast["decoded"] == (by_simplejpeg and "simplejpeg" in request.node.name)

    def test_a_plain_file_is_decoded_without_pil(self, monkeypatch):
        pytest.importorskip("simplejpeg")
        plain = ("4:4:4", "4:2:2", "4:2:0", "progressive", "grey", "with a comment", "without JFIF")
        large = jpeg(Image.new("RGB", (64, 80)))
        with monkeypatch.context() as patch:
            patch.setattr(Image, "open", lambda file: pytest.fail("PIL opens it"))
            for kind in plain:
                decode_rgb(JPEGS[kind][0])
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 80 - 1)
        with pytest.warns(Image.DecompressionBombWarning):
            decode_rgb(large)

    def test_broken_files_are_told_as_by_pil(self, monkeypatch):
        pytest.importorskip("simplejpeg")
        encoded = jpeg(photograph(64, 80))
        sized = encoded.index(b"\xff\xc0")
        cut = [encoded[:length] for length in (0, 2, 3, 11, 30, sized + 1, sized + 9, sized + 12, 900)]
        told: list[list[tuple[type, str]]] = []
        for library in (decoding.simplejpeg, None):
            monkeypatch.setattr(decoding, "simplejpeg", library)
            told.append([])
            for broken in (*cut, encoded[:2] + encoded[20:60], encoded[:2] + bytes(500)):
                with pytest.raises(Exception, match=r"\w") as error:
                    decode_rgb(broken)
                told[-1].append((error.type, str(error.value)))
        assert told[0] == told[1]

    @pytest.mark.usefixtures("fast")
    def test_reduced_size_only_where_asked_for(self):
        large, encoded = photograph(161, 323), jpeg(photograph(161, 323))
        assert decode_rgb(encoded).shape == (161, 323, 3)
        assert decode_rgb(encoded, min_side=81).shape == (161, 323, 3)  # at half size row 81 is only a remainder
        halved, eighth = decode_rgb(encoded, min_side=80), decode_rgb(encoded, min_side=1)
        assert halved.shape == (81, 162, 3)
        assert eighth.shape == (21, 41, 3)
        image = Image.open(io.BytesIO(encoded))
        image.draft(None, (80, 80))
        assert np.array_equal(halved, np.asarray(image))
        assert decode_rgb(file_of(large), min_side=10).shape == (161, 323, 3)

    def test_a_data_set_asks_for_it(self):
        rows = Dataset.from_dict({"image": [jpeg(photograph(64, 96))], "caption": ["a"]})
        assert ImageTextDataset(rows)[0]["image"].shape == (64, 96, 3)
        assert ImageTextDataset(rows, min_side=16)[0]["image"].shape == (16, 24, 3)


def clip_images(**options) -> transformers.CLIPImageProcessorPil:
    return transformers.CLIPImageProcessorPil(**options)


class TestTransform:
    """The truth is transformers' torchvision backend. CI lacks it, so some of its values are recorded here."""

    def test_shorter_side_and_center_crop(self):
        processor = clip_images(size={"shortest_edge": 5}, crop_size={"height": 4, "width": 4})
        transform = ImageTransform.of(processor)
        pixels = transform(pattern(12, 17))
        assert pixels.tolist() == [
            [[32, 50, 67, 85], [64, 84, 104, 123], [99, 121, 142, 163], [133, 157, 180, 210]],
            [[115, 133, 150, 168], [147, 167, 188, 215], [182, 209, 227, 172], [224, 211, 97, 23]],
            [[200, 227, 229, 150], [227, 161, 62, 27], [63, 22, 45, 73], [37, 66, 90, 114]],
        ]
        normalised = ("0x1.f568fcp-1", "0x1.62705p+0", "0x1.a79832p+0", "0x1.a892p-1")
        assert transform.normalise(pixels[None])[0, 1, 2].tolist() == [float.fromhex(value) for value in normalised]

    def test_height_and_width(self):
        processor = clip_images(size={"height": 3, "width": 4}, do_center_crop=False, resample=2)
        assert ImageTransform.of(processor)(pattern(12, 17)).tolist() == [
            [[40, 69, 102, 131], [89, 123, 161, 186], [138, 177, 194, 111]],
            [[123, 152, 184, 196], [172, 194, 152, 88], [201, 118, 60, 86]],
            [[201, 184, 103, 49], [127, 66, 73, 105], [52, 87, 130, 169]],
        ]
        processor = clip_images(size={"height": 20, "width": 18}, do_center_crop=False)
        assert ImageTransform.of(processor)(pattern(12, 17)).sum() == 137245

    @pytest.mark.parametrize(
        "processor",
        [
            clip_images(),
            clip_images(
                size={"shortest_edge": 256}, crop_size={"height": 224, "width": 200}, image_std=(0.2, 0.3, 0.4)
            ),
            clip_images(size={"height": 64, "width": 96}, crop_size={"height": 32, "width": 48}),
            transformers.SiglipImageProcessorPil(),
            transformers.SiglipImageProcessorPil(size={"height": 96, "width": 64}, rescale_factor=1 / 128),
            transformers.ViTImageProcessorPil(),  # CLIPSeg and towers of vision-text-dual-encoder
            transformers.BitImageProcessorPil(),  # DINOv2
            transformers.BlipImageProcessorPil(),
            transformers.ChineseCLIPImageProcessorPil(),
            transformers.OwlViTImageProcessorPil(size={"height": 100, "width": 100}),
        ],
        ids=lambda processor: type(processor).__name__,
    )
    @pytest.mark.filterwarnings("error")  # such as the warning about a read-only array from PIL
    @pytest.mark.parametrize("size", [(375, 500), (500, 375), (224, 224), (223, 301)])
    def test_within_some_grey_levels_of_the_pil_backend(self, processor, size):
        image = photograph(*size)
        transform = ImageTransform.of(processor)
        values = transform.normalise(transform(np.asarray(image))[None])
        expected = processor(images=[image], return_tensors="pt")["pixel_values"]
        assert values.dtype == expected.dtype
        assert values.shape == expected.shape
        levels = (values - expected).abs() * transform.std
        assert levels.max() < 3.01
        assert levels.mean() < 0.3

    @pytest.mark.parametrize(
        "processor",
        [
            transformers.Siglip2ImageProcessorPil(),
            transformers.EfficientNetImageProcessorPil(),  # ALIGN
            clip_images(do_pad=True),
            clip_images(resample=1),
            clip_images(do_center_crop=False),
            clip_images(size={"shortest_edge": 200}),
            clip_images(size={"shortest_edge": 224, "longest_edge": 300}),
            clip_images(do_normalize=False),
            clip_images(do_rescale=False),
            clip_images(do_resize=False),
            type("Own", (transformers.CLIPImageProcessorPil,), {"resize": lambda self, image, **options: image})(),
            object(),
        ],
        ids=lambda processor: type(processor).__name__,
    )
    def test_what_does_something_else_has_no_transform(self, processor):
        assert ImageTransform.of(processor) is None

    @pytest.mark.parametrize("resample", [2, 3])
    def test_the_layout_in_memory_changes_no_pixel(self, resample):
        """torch has code of its own for images whose channels come last, and which the transform relies on."""
        random, mode = Random(0), {2: "bilinear", 3: "bicubic"}[resample]
        for number in range(60):
            size, wanted = (tuple(random.randint(1, 300) for _ in range(2)) for _ in range(2))
            image = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
            processor = clip_images(size=dict(zip(("height", "width"), wanted, strict=True)), do_center_crop=False)
            processor.resample = resample
            pixels = ImageTransform.of(processor)(image)
            planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()[None]
            assert torch.equal(pixels, F.interpolate(planes, wanted, mode=mode, antialias=True)[0]), (size, wanted)
            if size != wanted:
                assert pixels.stride(0) == 1, "the layout is the one that is fast"

    def test_a_crop_is_resized_as_a_whole(self):
        transform = ImageTransform.of(clip_images(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}))
        whole = ImageTransform.of(clip_images(size={"height": 16, "width": 16}, do_center_crop=False))
        assert torch.equal(transform(pattern(30, 40), cropped=True), whole(pattern(30, 40)))
        assert not torch.equal(transform(pattern(30, 40)), whole(pattern(30, 40)))


class TestCollatedImages:
    ITEMS = [{"image": np.asarray(photograph(20 + row, 30)), "caption": ["a"]} for row in range(3)]  # noqa: RUF012

    def test_uint8_is_a_quarter_and_normalises_to_the_same(self):
        values = ContrastiveCollator(clip_processor())(self.ITEMS)["pixel_values"]
        collator = ContrastiveCollator(clip_processor(), uint8=True)
        pixels = collator(self.ITEMS)["pixel_values"]
        assert (values.dtype, pixels.dtype) == (torch.float32, torch.uint8)
        assert values.nbytes == 4 * pixels.nbytes
        assert pixels.is_contiguous()
        assert torch.equal(collator.normalise(pixels), values)
        assert torch.equal(collator.normalise(values), values), "what is normalised already stays as it is"

    def test_pil_images_are_taken_like_arrays(self):
        pictures = [item | {"image": Image.fromarray(item["image"])} for item in self.ITEMS]
        collator = ContrastiveCollator(clip_processor())
        assert torch.equal(collator(pictures)["pixel_values"], collator(self.ITEMS)["pixel_values"])

    def test_other_images_are_left_to_the_processor(self):
        tensors = [item | {"image": torch.tensor(item["image"]).permute(2, 0, 1)} for item in self.ITEMS]
        collator = ContrastiveCollator(clip_processor(), uint8=True)
        values = collator(tensors)["pixel_values"]
        assert values.dtype == torch.float32
        levels = (values - collator.normalise(collator(self.ITEMS)["pixel_values"])).abs() * 255 * 0.28
        assert levels.max() < 2.01

    @pytest.mark.filterwarnings("error")
    def test_a_processor_that_does_more_runs_itself_with_one_notice(self, caplog):
        collator = ContrastiveCollator(siglip2_processor(), uint8=True)
        batch, _ = collator(self.ITEMS), collator(self.ITEMS)
        expected = siglip2_processor().image_processor(
            images=[Image.fromarray(item["image"]) for item in self.ITEMS], return_tensors="pt"
        )
        assert all(torch.equal(batch[name], value) for name, value in expected.items())
        assert [record.getMessage()[:24] for record in caplog.records] == ["Siglip2ImageProcessorPil"]
        assert collator.image_backend == "Siglip2ImageProcessorPil, pil backend"

    def test_the_fast_path_gives_no_notice(self, caplog):
        for processor in (clip_processor(), siglip_processor()):
            assert "torchvision" in ContrastiveCollator(processor).image_backend
        assert not caplog.records


class TestAugmentation:
    def boxes(self, augmentation: str, height: int, width: int, count: int = 400) -> list[tuple[int, int]]:
        image = np.zeros((height, width, 3), np.uint8)
        return [augment(image, augmentation, str(seed))["image"].shape[:2] for seed in range(count)]

    def test_none_leaves_the_image_alone(self):
        image = pattern(5, 7)
        assert augment(image, "none", str(0))["image"] is image

    @pytest.mark.parametrize("size", [(300, 300), (375, 500), (500, 375)])
    def test_crops_have_nine_tenths_of_the_area_or_more(self, size):
        boxes = self.boxes("crop", *size)
        area = size[0] * size[1]
        shares = [height * width / area for height, width in boxes]
        assert 0.895 < min(shares) < 0.91
        assert 0.97 < max(shares) <= 1
        assert all(0.74 < width / height < 1.35 for height, width in boxes)
        assert len(set(boxes)) > 50

    def test_an_image_far_from_the_ratios_gives_its_center(self):
        assert set(self.boxes("crop", 30, 3000, 20)) == {(30, 40)}
        assert set(self.boxes("crop", 3000, 30, 20)) == {(40, 30)}
        image = pattern(30, 3000)
        assert np.array_equal(augment(image, "crop", str(0))["image"], image[:, 1480:1520])
        assert set(self.boxes("crop", 1, 1, 3)) == {(1, 1)}

    def test_crops_lie_anywhere_and_half_are_reflected(self):
        image = pattern(40, 40)
        views = np.lib.stride_tricks.sliding_window_view
        reflected, corners = 0, set()
        for seed in range(200):
            crop = augment(image, "crop", str(seed))["image"]
            both = augment(image, "flip_crop", str(seed))["image"]
            assert both.flags.c_contiguous
            reflected += np.array_equal(both, crop[:, ::-1])
            assert np.array_equal(both, crop) or np.array_equal(both, crop[:, ::-1])
            places = np.argwhere((views(image, crop.shape)[:, :, 0] == crop).all((2, 3, 4)))
            assert len(places) >= 1
            corners.add(tuple(places[0]))
        assert 70 < reflected < 130
        assert len(corners) > 5

    def test_depends_on_seed_epoch_and_row_alone(self):
        rows = captioned(["a"] * 6, (40, 50))

        def crops(seed: int, epoch: int, workers: int) -> list[bytes]:
            dataset = ImageTextDataset(rows, augmentation="flip_crop", seed=seed)
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            return [np.asarray(item["image"]).tobytes() for item in loader]

        first = crops(seed=1, epoch=2, workers=0)
        torch.manual_seed(9)
        assert crops(seed=1, epoch=2, workers=2) == first
        assert crops(seed=1, epoch=3, workers=0) != first
        assert crops(seed=2, epoch=2, workers=0) != first

    def test_streams_do_likewise(self, tmp_path):
        rows = {"image": [jpeg(photograph(40, 50, row)) for row in range(6)], "caption": ["a"] * 6}
        Dataset.from_dict(rows).to_parquet(tmp_path / "shard.parquet")

        def crops(**options) -> list[bytes]:
            stream = ImageTextStream(str(tmp_path / "shard.parquet"), **options)
            return [item["image"].tobytes() for item in itertools.islice(stream, 12)]

        first = crops(augmentation="flip_crop", seed=1)
        assert crops(augmentation="flip_crop", seed=1) == first
        assert len(set(first)) > 6, "the second pass has other crops"
        assert len(set(crops())) == 6
        assert len(crops(min_side=20)[0]) == 20 * 25 * 3
        with pytest.raises(ValueError, match="augmentation must be one of none"):
            crops(augmentation="flip")

    @pytest.mark.parametrize("build", [clip_processor, siglip_processor, siglip2_processor])
    def test_every_processor_takes_augmented_images(self, build):
        rows = captioned(["a"] * 3, (40, 50))
        plain, cropped = (
            ContrastiveCollator(build())(list(ImageTextDataset(rows, augmentation=augmentation)))["pixel_values"]
            for augmentation in ("none", "crop")
        )
        assert plain.shape == cropped.shape
        assert not torch.equal(plain, cropped)

    def test_a_function_gets_the_picture_and_the_sample_s_generator(self):
        rows = captioned(["a"] * 3, (40, 50))

        def turn(image: Image.Image, random: Random) -> Image.Image:
            return image.rotate(90 * random.randrange(1, 4), expand=True)

        items = list(ImageTextDataset(rows, augmentation=turn))
        again = list(ImageTextDataset(rows, augmentation=turn))
        for row, (item, same) in enumerate(zip(items, again, strict=True)):
            assert item["image"] == same["image"]
            assert any(item["image"] == picture(row, (40, 50)).rotate(90 * k, expand=True) for k in (1, 2, 3))
        assert ContrastiveCollator(clip_processor())(items)["pixel_values"].shape == (3, 3, 16, 16)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"augmentation": "flip"}, "must be one of none, crop, flip_crop, or a function .* got 'flip'"),
            (
                {"augmentation": "crop", "all_captions": True},
                "uses images unchanged, but augmentation is 'crop'",
            ),
            ({"min_side": 0}, "min_side must be at least 1 pixel, got 0"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        rows = captioned(["a"])
        with pytest.raises(ValueError, match=message):
            ImageTextDataset(rows, **options)


def test_the_ratio_of_crops_is_drawn_evenly_in_its_logarithm():
    image = np.zeros((400, 400, 3), np.uint8)
    ratios = []
    for seed in range(600):
        height, width = augment(image, "crop", str(seed))["image"].shape[:2]
        ratios.append(math.log(width / height))
    assert abs(np.mean(ratios)) < 0.01, "as often wide as high"
