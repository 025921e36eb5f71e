"""Random texts of many kinds, for comparisons of tokenizers."""

import html
import random
import unicodedata

WORDS = (
    *("a", "photo", "of", "the", "cat", "dog", "two", "red", "birds", "on", "mat", "street"),
    *("1950", "oil-painting", "café", "naïve", "Zürich", "São", "Łódź", "señor"),
)
SCRIPTS = ["ευλογημένος", "ΟΔΥΣΣΕΥΣ", "привет мир", "漢字かな交じり", "سلام", "שלום", "नमस्ते", "สวัสดี", "한국어"]
QUOTES = ["“quoted”", "it’s", "‘so’", "ﬁne ﬂow", "ＦＵＬＬ　ｗｉｄｔｈ", "…", "—"]
CONTROLS = ["\u200b", "\ufeff", "\x07", "\x1b[31m", "\u202e", "\x00", "\u00ad"]
SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<start_of_text>", "<end_of_text>"]
EMOJI = ["🙂", "👩‍👩‍👧", "🇩🇪", "☃", "™", "→", "½"]


def _with(parts: list[str], draw: random.Random) -> str:
    words = draw.choices(WORDS, k=draw.randint(1, 8))
    for _ in range(draw.randint(1, 3)):
        words.insert(draw.randint(0, len(words)), draw.choice(parts))
    return " ".join(words)


def _escaped(draw: random.Random) -> str:
    text = html.escape(f'{draw.choice(WORDS)} "{draw.choice(WORDS)}" & {draw.choice(WORDS)}\'s <b>')
    return html.escape(text) if draw.random() < 0.3 else text


def _mojibake(draw: random.Random) -> str:
    return _with(["café", "naïve", "señor", "it’s", "“so”"], draw).encode().decode("cp1252", "replace")


def _printable(draw: random.Random) -> str:
    return "".join(chr(draw.randint(33, 126)) for _ in range(20)).replace("&", "").replace("<", "")


def _unicode(draw: random.Random) -> str:
    """Of Unicode 3.2, since libraries differ in what they know of later characters."""
    known = unicodedata.ucd_3_2_0
    drawn = (chr(draw.randint(33, 0xFFFF)) for _ in range(40))
    return "".join(character for character in drawn if known.category(character) not in ("Cn", "Cs", "Co"))


KINDS = {
    "captions": lambda draw: " ".join(draw.choices(WORDS[:12], k=draw.randint(1, 12))).capitalize() + ".",
    "printable ASCII": _printable,
    "accents": lambda draw: _with(["café", "Ünïcödé", "Łódź"], draw),
    "decomposed accents": lambda draw: unicodedata.normalize("NFD", _with(["café", "Ünïcödé", "naïve"], draw)),
    "emoji": lambda draw: _with(EMOJI, draw),
    "long": lambda draw: " ".join(draw.choices(WORDS, k=120)),
    "other scripts": lambda draw: _with(SCRIPTS, draw),
    "HTML": _escaped,
    "quotes": lambda draw: _with(QUOTES, draw),
    "mojibake": _mojibake,
    "control characters": lambda draw: _with(CONTROLS, draw),
    "random Unicode": _unicode,
    "special tokens": lambda draw: _with(SPECIAL, draw),
}
# Without what OpenCLIP repairs first.
PLAIN = {"captions", "printable ASCII", "accents", "decomposed accents", "emoji", "long"}


def drawn(each: int, seed: int = 0) -> list[tuple[str, str]]:
    """(kind, text) of each kind."""
    draw = random.Random(seed)
    return [(kind, make(draw)) for kind, make in KINDS.items() for _ in range(each)]
