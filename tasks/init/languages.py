"""Guesses the language of texts from the script of their letters, and for Latin letters from a few frequent words."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

WORDS = {
    "English": "the and of is that you for with this are what have",
    "German": "der die und ist nicht das ein sie mit für auf wie",
    "French": "les des est une pour dans que vous avec pas qui sur",
    "Spanish": "el los que una por para con las como es del más",
    "Italian": "il che di per una sono non gli della con più come",
    "Portuguese": "que não uma para com os do da em você são mais",
    "Dutch": "het een van niet dat voor met zijn op aan ook maar",
}
SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "DEVANAGARI": "Hindi"}
LETTERS = 400  # at the start of a text, which decide its script
MINIMUM_SHARE = 0.02  # of the texts; rarer languages are not listed


def languages(texts: Iterable[str]) -> dict[str, float]:
    """The share of texts in each recognized language, the most frequent first."""
    counts = Counter(filter(None, map(language, texts)))
    return {name: share for name, n in counts.most_common() if (share := n / counts.total()) >= MINIMUM_SHARE}


def language(text: str) -> str | None:
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in text[:LETTERS] if letter.isalpha())
    if not scripts:
        return None
    script = scripts.most_common(1)[0][0]
    if script == "CJK" and (scripts["HIRAGANA"] or scripts["KATAKANA"]):
        return "Japanese"
    if script != "LATIN":
        return SCRIPTS.get(script, script.capitalize())
    words = Counter(re.findall(r"\w+", text.lower()))
    hits = {name: sum(words[word] for word in frequent.split()) for name, frequent in WORDS.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else None
