"""Processors of small models: images of 16 × 16 pixels, and words of one letter."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

LENGTH = 8
END = 1  # the token that ends texts


def tokenizer(**options) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of one-letter words, a to z, which ends texts with </s>."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<pad>"}
    options = {"model_max_length": LENGTH, **options}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def clip_processor(**options) -> transformers.CLIPProcessor:
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    return transformers.CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer(**options))


def siglip_processor() -> transformers.SiglipProcessor:
    image_processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return transformers.SiglipProcessor(image_processor=image_processor, tokenizer=tokenizer())


def siglip2_processor() -> transformers.Siglip2Processor:
    image_processor = transformers.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16)
    return transformers.Siglip2Processor(image_processor=image_processor, tokenizer=tokenizer())
